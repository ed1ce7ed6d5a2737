"""Which rows a device has judged with today's programs: every way to lack one is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.fakes.results import header
from conformance.gpu.judged import built, lacking, main, newest
from conformance.gpu.same_bits import rows_of
from megamoe.contract import Row, Status
from megamoe.records.lines import Evidence, Record, record_of

ROWS = rows_of("nvfp4_moe", "smoke", ["ptx"])
KEY = ROWS[-1]
"""The row with the least work."""


def line(status: Status = "passed", program: str | None = "0" * 64, run: str = "late", executor: str = "gpu") -> Record:
    row = Row(KEY[0], KEY[1], "sm_90a", executor, "eager")
    return record_of(run, row, status, "" if status == "passed" else "wrong", Evidence(program_sha256=program))


def kept(folder: Path, *records: Record) -> Path:
    runs = {"early": "2026-11-22T00:00:00+00:00", "late": "2026-11-23T00:00:00+00:00"}
    headers = [header().model_copy(update={"run": run, "started": started}) for run, started in runs.items()]
    path = folder / "records.jsonl"
    path.write_text("".join(one.model_dump_json() + "\n" for one in (*headers, *records)), "utf-8")
    return path


@pytest.mark.parametrize(
    ("records", "program", "said"),
    [
        ([line()], "0" * 64, ""),
        ([line("unsupported", None)], None, ""),
        ([], "0" * 64, "no record"),
        ([line(executor="vm")], "0" * 64, "no record"),
        ([line()], "1" * 64, "passed with the program 0"),
        ([line("failed")], "0" * 64, "failed, where passed is right: wrong"),
        ([line("unsupported", None)], "0" * 64, "unsupported, where passed is right"),
        ([line(), line("failed", run="early")], "0" * 64, ""),
        ([line(run="early"), line("failed")], "0" * 64, "failed, where passed is right"),
    ],
)
def test_what_a_record_lacks_is_told(tmp_path: Path, records: list[Record], program: str | None, said: str) -> None:
    found = list(lacking({KEY: program}, newest([kept(tmp_path, *records)])))
    assert len(found) == bool(said), f"{found}, where {said or 'nothing'!r} is right"
    assert all(said in sentence for sentence in found), f"{found} do not say {said!r}"


def test_the_command_builds_todays_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = ["--op", "nvfp4_moe", "--profile", "smoke", "--backend", "ptx", "--part", f"{len(ROWS)}/{len(ROWS)}"]
    today = built(KEY)
    assert today, f"{KEY} has no program"
    assert main([str(kept(tmp_path, line(program=today))), *part]) == 0
    assert main([str(kept(tmp_path, line(program="1" * 64))), *part]) == 1
    assert f"today's is {today}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{folder}/nowhere.jsonl", "--op", "fmha"], "nowhere.jsonl"),
        (["{folder}/prose.jsonl", "--op", "fmha"], "prose.jsonl, line 1"),
        (["{folder}/records.jsonl", "--op", "softmax"], "there is no op 'softmax'"),
        (["{folder}/records.jsonl", "--op", "fmha", "--profile", "smok"], "--profile: 'smok' is no profile of fmha"),
        (["{folder}/records.jsonl", "--op", "fmha", "--backend", "ptxx"], "there is no backend 'ptxx'"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    kept(tmp_path, line())
    (tmp_path / "prose.jsonl").write_text("Once upon a time\n", "utf-8")
    assert main([one.format(folder=tmp_path) for one in arguments]) == 2
    assert said in capsys.readouterr().err
