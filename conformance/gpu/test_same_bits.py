"""Rows on a device against the machine: what counts as the same, and an H200's record."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance import ROOT
from conformance.gpu.same_bits import (
    BACKENDS,
    Digests,
    Left,
    compared,
    digests_of,
    left_by,
    main,
    program_of,
    rows_of,
)
from megamoe.contract import Program, ScalarArg
from megamoe.spec.load import load_specs

RECORDS = ROOT / "results" / "records"
KEY = ("nvfp4_moe:hidden=128,intermediate=128,num_experts=4,tokens=10,topk=2,weight=before,stage=combine", "ptx")


@pytest.mark.parametrize("op", ["fmha", "nvfp4_moe"])
def test_an_h200_has_the_machines_bits_in_every_row_that_was_compared(op: str) -> None:
    """A row added to the profile later may be missing from the record: running it takes an H200."""
    lines = json.loads((RECORDS / f"h200-{op.removeprefix('nvfp4_')}-agreement.json").read_text("utf-8"))
    found = {(line["case"], line["backend"]) for line in lines}
    assert len(found) == len(lines), "a row is there twice"
    assert {backend for _, backend in found} == set(BACKENDS), "a backend was not compared"
    wrong = [line for line in lines if "differing" not in line or any(line["differing"].values())]
    assert not wrong, f"README.md of the records says that no bit differs: {wrong[:2]}"
    assert all(all(line["elements"].values()) for line in lines), "a row compared nothing"
    said = f"all {len(lines)} rows"
    assert said in " ".join((ROOT / "docs" / "gpu.md").read_text("utf-8").split()), f"docs/gpu.md does not say {said!r}"


def test_some_cases_of_a_profile_can_be_asked_alone(tmp_path: Path) -> None:
    file = tmp_path / "left"
    words = ["--op", "nvfp4_moe", "--case", KEY[0], "--case", "nvfp4_moe:hidden=7", "--backend", "ptx"]
    assert main(["run", str(file), *words]) == 0
    assert list(pickle.loads(file.read_bytes())) == [KEY], "another row ran, or this one did not"


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
        compared({KEY: replace(left, program=Digests("0"))}, {KEY: left})
    with pytest.raises(ValueError, match="with other grids or arguments"):
        compared({KEY: replace(left, program=replace(left.program, launches="0"))}, {KEY: left})
    untold = compared({KEY: replace(left, program=replace(left.program, launches=""))}, {KEY: left})[0]
    assert "launches_sha256" not in untold, "one side does not tell what it launched, and the line does"


def test_a_program_with_another_grid_scalar_or_workspace_is_another_program() -> None:
    built = program_of(load_specs()["nvfp4_moe"], KEY)
    assert built is not None, f"{KEY} has no program"
    program, digests = built
    assert isinstance(program, Program), f"{KEY} is a {type(program).__name__}"
    assert digests.same(digests_of(program)), "a program is not the same as itself"
    first, *others = program.launches
    x, y, z = first.grid
    changed = {
        "grid": replace(program, launches=(replace(first, grid=(x + 1, y, z)), *others)),
        "scalar": replace(program, launches=(replace(first, args=(*first.args, ScalarArg("u32", 7))), *others)),
        "workspace": replace(program, scratch={**program.scratch, "more": 16}),
    }
    for what, other in changed.items():
        found = digests_of(other)
        assert found.text == digests.text, f"the text has no {what}"
        assert not found.same(digests), f"another {what} counts as the same program"
    assert Digests(digests.text).same(digests), "a record that does not tell of launches is compared by text"


def test_the_command_takes_parts_and_counts_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Uses the last row of a profile, as it has the least work."""
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
    old = {name: value for name, value in line.items() if name != "launches_sha256"}
    record.write_text(json.dumps([old]), "utf-8")
    assert main(["run", here, *part, *known]) == 0
    assert "1 lines" in (said := capsys.readouterr().out), f"nobody says that a line tells nothing of launches: {said}"
    assert not pickle.loads(Path(here).read_bytes()), "a row of a record that tells of text alone ran again"
    for what, other in (
        ("of another program", line | {"program_sha256": "0"}),
        ("of other launches", line | {"launches_sha256": "0"}),
        ("that differs", line | {"differing": dict.fromkeys(line["differing"], 1)}),
    ):
        record.write_text(json.dumps([other]), "utf-8")
        assert main(["run", here, *part, *known]) == 0
        assert list(pickle.loads(Path(here).read_bytes())) == [rows[-1]], f"a row {what} counts as known"


def test_a_record_keeps_no_line_of_a_program_or_a_case_of_the_past(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody has run such a row anew, so no new line replaces the old one."""
    left = left_by(KEY, "vm")
    assert left is not None, f"{KEY} has no program"
    line = compared({KEY: left}, {KEY: left})[0]
    gone = str(line["case"]).replace("tokens=10", "tokens=11")
    old, new, nothing = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "nothing"
    nothing.write_bytes(pickle.dumps({}))
    old.write_text(json.dumps([line, line | {"backend": "cutedsl"}, line | {"case": gone}]), "utf-8")
    sides = ["--device", str(nothing), "--machine", str(nothing)]
    assert main(["compare", str(new), *sides, "--known", str(old)]) == 0
    assert json.loads(new.read_text("utf-8")) == [line], "a line stands for a program or a case that is not today's"
    assert f"2 lines of {old} are of other programs" in capsys.readouterr().out, "it does not say what it left out"


@pytest.mark.parametrize("part", ["0/8", "9/8", "1", "1/0", "a/b", "-1/8", ""])
def test_a_part_that_is_none_is_refused(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "left"), "--op", "fmha", f"--part={part}"])
    assert "argument --part: " in capsys.readouterr().err, f"nobody says what part {part!r} should be"
