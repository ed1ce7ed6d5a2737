"""Backends side by side: distances between outputs, and the backend that stands alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conformance.fakes import backends as fake_backends
from megamoe.cli.main import main
from megamoe.contract import Row, Status
from megamoe.judge.side_by_side import agreements, leave_outputs
from megamoe.records.files import read_records
from megamoe.records.lines import Record, record_of

CASE = "fmha:hd=64,t=2,s_k=3"
FAKE = fake_backends.__name__


def _left(folder: Path, backend: str, status: Status, o: list[float]) -> Record:
    row = Row(CASE, backend, "sm_100a", "vm", "eager")
    leave_outputs(folder, row, {"o": torch.tensor(o, dtype=torch.bfloat16)})
    return record_of("run-1", row, status, "" if status == "passed" else "it is wrong")


def test_distances_are_those_of_the_outputs(tmp_path: Path) -> None:
    records = [
        _left(tmp_path, "a", "passed", [1.0, 2.0, 3.0, 4.0]),
        _left(tmp_path, "b", "passed", [1.0, 2.0, 3.5, 4.0]),
    ]
    (found,) = agreements("run-1", records, tmp_path)
    assert found.metrics == {"a~b.o.max": 0.5, "a~b.o.rms": 0.25, "a~b.o.unequal": 0.25}
    assert found.alone is None, "two backends that both pass do not stand alone"


def test_nan_in_one_is_unequal_and_in_both_is_not(tmp_path: Path) -> None:
    nan = float("nan")
    records = [_left(tmp_path, "a", "passed", [nan, nan]), _left(tmp_path, "b", "failed", [nan, 1.0])]
    (found,) = agreements("run-1", records, tmp_path)
    assert found.metrics["a~b.o.unequal"] == 0.5
    assert found.metrics["a~b.o.max"] == 0.0, "no element is finite in both"


@pytest.mark.parametrize(
    ("statuses", "alone"),
    [
        ({"a": "passed", "b": "failed"}, "b"),
        ({"a": "passed", "b": "passed", "c": "failed"}, "c"),
        ({"a": "failed", "b": "failed", "c": "passed"}, "c"),
        ({"a": "failed", "b": "failed"}, None),
    ],
)
def test_who_stands_alone(statuses: dict[str, Status], alone: str | None, tmp_path: Path) -> None:
    records = [_left(tmp_path, backend, status, [1.0]) for backend, status in statuses.items()]
    (found,) = agreements("run-1", records, tmp_path)
    assert found.alone == alone, f"of {statuses}"


def test_a_run_says_which_backend_stands_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(fake_backends.__file__).parent))
    options = ["--target", "sm_100a", "--executor", f"{FAKE}:EXECUTOR", "--schedule", "eager", "--jobs", "1"]
    backends = ["--backend", f"{FAKE}:WORKS", "--backend", f"{FAKE}:SCALES"]
    assert main(["run", "--case", CASE, *backends, *options, "--output", "r.jsonl"]) == 1
    assert f"{FAKE}:SCALES stands alone" in capsys.readouterr().out
    (agreement,) = read_records(Path("r.jsonl")).agreements
    assert agreement.alone == f"{FAKE}:SCALES"
    assert agreement.metrics[f"{FAKE}:SCALES~{FAKE}:WORKS.o.max"] > 0.0
