"""Rows on a device against the machine: what counts as the same, and the record of an H200."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance import ROOT
from conformance.gpu.same_bits import BACKENDS, Left, compared, left_by, main, rows_of

RECORDS = ROOT / "results" / "records"
KEY = ("nvfp4_moe:hidden=128,intermediate=128,num_experts=4,tokens=10,topk=2,weight=before,stage=combine", "ptx")


@pytest.mark.parametrize("op", ["fmha", "nvfp4_moe"])
def test_an_h200_has_the_machines_bits_in_every_row_that_was_compared(op: str) -> None:
    """A row that came to the profile since need not be in the record: it takes an H200."""
    lines = json.loads((RECORDS / f"h200-{op.removeprefix('nvfp4_')}-agreement.json").read_text("utf-8"))
    found = {(line["case"], line["backend"]) for line in lines}
    assert len(found) == len(lines), "a row is there twice"
    assert {backend for _, backend in found} == set(BACKENDS), "a backend was not compared"
    wrong = [line for line in lines if "differing" not in line or any(line["differing"].values())]
    assert not wrong, f"README.md of the records says that no bit differs: {wrong[:2]}"
    assert all(all(line["elements"].values()) for line in lines), "a row compared nothing"
    said = f"all {len(lines)} rows"
    assert said in " ".join((ROOT / "docs" / "gpu.md").read_text("utf-8").split()), f"docs/gpu.md does not say {said!r}"


def test_one_bit_that_differs_is_seen_and_so_is_another_program(tmp_path: Path) -> None:
    left = left_by(KEY, "vm")
    assert left is not None, f"{KEY} has no program"
    assert not left.fault, left.fault
    assert compared({KEY: left}, {KEY: left})[0]["differing"] == {"y": 0}, "a run differs from itself"
    flipped = {name: tensor.clone() for name, tensor in left.outputs.items()}
    flipped["y"].view(torch.int16)[3, 5] ^= 1
    assert compared({KEY: replace(left, outputs=flipped)}, {KEY: left})[0]["differing"] == {"y": 1}
    lost = compared({KEY: Left(left.program, {}, "DeviceError: lost")}, {KEY: left})[0]
    assert "differing" not in lost, "a row that failed on the device counts as the same"
    assert lost["device"] == "DeviceError: lost", f"{lost} does not say what became of the row"
    with pytest.raises(ValueError, match="the device ran the program 0"):
        compared({KEY: replace(left, program="0")}, {KEY: left})


def test_the_command_takes_parts_and_counts_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last row of a profile has the least work."""
    rows = rows_of("nvfp4_moe", "smoke", ["ptx"])
    part = ["--op", "nvfp4_moe", "--profile", "smoke", "--backend", "ptx", "--part", f"{len(rows)}/{len(rows)}"]
    here, record = str(tmp_path / "here"), tmp_path / "record.json"
    assert main(["run", here, *part]) == 0
    assert main(["compare", str(record), "--device", here, "--machine", here]) == 0
    assert "1 rows, 0 differ; the device ran 1, the machine 1" in capsys.readouterr().out
    (line,) = json.loads(record.read_text("utf-8"))
    assert (line["case"], line["backend"]) == rows[-1], "another row ran"
    known = ["--known", str(record)]
    assert main(["run", here, *part, *known]) == 0
    assert main(["compare", str(record), "--device", here, "--machine", here, *known]) == 0
    assert "1 rows, 0 differ; the device ran 0" in capsys.readouterr().out, "a known row of the same program ran again"
    record.write_text(json.dumps([line | {"program_sha256": "0"}]), "utf-8")
    assert main(["run", here, *part, *known]) == 0
    assert list(pickle.loads(Path(here).read_bytes())) == [rows[-1]], "a row of another program counts as known"
