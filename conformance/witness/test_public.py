"""The committed record of public kernels agrees with its cases, its table and argued.yaml; a small checkout runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.kernels.mutants.unmutated import OTHERS, Watch
from conformance.witness import public
from conformance.witness.__main__ import absent, main
from conformance.witness.public import MAIN, Checkout, Counted, PublicCase, blank, cases
from conformance.witness.public_record import ARGUED, DOORS, RECORD, TABLE, PublicRow, read_rows, table
from megamoe.findings import read_suppressions

ROWS = read_rows(RECORD.read_text("utf-8"))
RENEW = "renew it: nox -s witness -- --sources DIR"
MAX_OVERHEAD_MS = 5
HERE = Checkout("someone/kernels", "0" * 40, "numpy")


def test_the_table_of_public_kernels_is_that_of_the_record() -> None:
    assert TABLE.read_text("utf-8") == table(ROWS), RENEW


def test_a_door_costs_little() -> None:
    costs = json.loads(DOORS.read_text("utf-8"))
    assert set(costs) == {"CUDA/PTX", "Triton", "CuTeDSL"}, "python -m conformance.witness --doors"
    late = {door: one for door, one in costs.items() if one["median_ms"] > MAX_OVERHEAD_MS}
    assert not late, f"the bar is {MAX_OVERHEAD_MS} ms beside the launch of the machine"


def test_every_public_case_has_a_row() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names), "two cases have one name"
    assert [row.name for row in ROWS] == names, RENEW


def test_a_public_row_says_what_its_status_promises() -> None:
    for row in ROWS:
        if row.status == "ok":
            assert row.launches, f"{row.name}: right without a launch"
            assert not row.errors, f"{row.name}: right, and yet {row.errors}"
        else:
            assert row.reason, f"{row.name} is {row.status} without a reason"
        if row.status in ("argued", "defect"):
            assert row.errors, f"{row.name}: something is argued, and nothing was found"
        if row.status != "not_run":
            assert row.source, f"{row.name}: it ran, and its file has no digest"


def test_what_is_argued_was_found() -> None:
    found = {one for row in ROWS for one in row.errors} | {one for line in Watch(OTHERS).results for one in line.argued}
    for entry in read_suppressions(ARGUED):
        assert any(one.startswith(f"{entry.rule} at ") and f"{entry.place}:" in one for one in found), (
            f"{entry.where}: nothing in the record is a {entry.rule} at {entry.place}"
        )


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("raise AssertionError('the sum is 3')", "wrong", "the sum is 3"),
        ("raise KeyError('x')", "unsupported", "KeyError at program.py line 1"),
        ("import sys; sys.exit(3)", "unsupported", "SystemExit"),
        ("import nobody_has_this", "not_run", "nobody_has_this"),
        ("pass", "unsupported", "it launched no kernel"),
    ],
)
def test_what_a_program_does_has_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, status: str, said: str
) -> None:
    monkeypatch.setattr(public, "_open_doors", lambda case, device: None)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "program.py").write_text(text)
    case = PublicCase("Programs", HERE, "program.py", "sm_90a", MAIN, {"options": "--size 3"})
    row = public.judged(case, str(tmp_path))
    assert (row.status, said in row.reason) == (status, True), f"{row.status}: {row.reason}"
    assert str(tmp_path) not in row.reason, "a row names a folder of this machine"


def test_a_schedule_is_tried_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def examined(chosen: Iterable[PublicCase], sources: Path, schedule: str) -> Iterator[PublicRow]:
        asked.append(schedule)
        for case in chosen:
            yield replace(blank(case, None), status="argued", reason="", errors=("race",))
            yield replace(blank(case, None), status="ok", reason="")
            yield blank(case, None)

    case = PublicCase("Programs", HERE, "program.py", "sm_90a", MAIN, {"options": ""})
    monkeypatch.setattr(public, "examined", examined)
    monkeypatch.setattr(public, "cases", lambda: (case, replace(case, family="Others")))
    monkeypatch.setattr(public, "RECORD", tmp_path / "public.jsonl")
    assert main(["--sources", str(tmp_path), "--only", "Programs", "--schedule", "random:3"]) == 0
    assert asked == ["random:3"]
    assert "1 of 2 cases that ran are right and without a finding" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "a record was written"
    assert main(["--schedule", "sometimes"]) == 2
    assert "no schedule is called 'sometimes'" in capsys.readouterr().out


def test_a_case_runs_under_its_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noted(Counted):
        def __init__(self, target: str, **options: Any) -> None:
            names.append(options["schedule"])
            super().__init__(target, **options)

    names: list[str] = []
    monkeypatch.setattr(public, "Counted", Noted)
    monkeypatch.setattr(public, "_open_doors", lambda case, device: None)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "program.py").write_text("pass")
    case = PublicCase("Programs", HERE, "program.py", "sm_90a", MAIN, {"options": ""})
    public.judged(case, str(tmp_path), "random:3")
    assert names == ["random:3"]


def test_what_is_not_there_is_not_run(tmp_path: Path) -> None:
    case = PublicCase("Programs", HERE, "program.py", "sm_90a", MAIN, {"options": ""})
    assert blank(case, tmp_path).reason == "no checkout of someone/kernels is there"
    (tmp_path / "someone+kernels").mkdir()
    assert blank(case, tmp_path).reason == "the checkout has no program.py"
    (tmp_path / "someone+kernels" / "program.py").write_text("pass")
    assert not blank(case, tmp_path).reason
    elsewhere = replace(case, checkout=replace(HERE, distribution="nobody-has-this"))
    assert "nobody-has-this" in blank(elsewhere, tmp_path).reason


def test_a_script_is_cut_where_it_runs() -> None:
    text = "import math\nsize = 3\ndef f(x):\n    return x\ny = f(size)\nprint(y)\n"
    text += "class C: ...\ng = C.__name__\nz = f(1)\n"
    kept = {type(one).__name__ for one in public._definitions(text).body}
    assert kept == {"Import", "Assign", "FunctionDef", "ClassDef"}
    names: dict[str, object] = {}
    exec(compile(public._definitions(text), "script", "exec"), names)
    assert {"math", "size", "f", "C", "g"} <= set(names), "a definition is lost"
    assert not {"y", "z"} & set(names), "something ran"


def test_packages_that_are_not_installed_are_named() -> None:
    assert absent(["torch", "no-such-wheel", "numpy", "no-such-wheel"]) == ["no-such-wheel"]
