"""The tracked baseline is complete, canonical and the same on every machine, and is written atomically."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance import ROOT
from conformance.fakes.results import COUNTERS, H200, KERNEL, NEIGHBOUR, ROW, compiled, gated, judged, timing
from conformance.kernels.laws.law import specs
from megamoe.contract import Row
from megamoe.gate.accept import Seen, take
from megamoe.gate.baseline import (
    BASELINES,
    VM_BASELINE,
    Baseline,
    baseline_for,
    read_baseline,
    rebuilt,
    sole_writer,
    write_baseline,
)
from megamoe.gate.expected import read_expected
from megamoe.judge.judge import judge
from megamoe.records.keys import Key
from megamoe.records.lines import Acceptance, Figures, Record, RecordError, RunHeader, Timing
from megamoe.spec.selection import Selection, SelectionError, owed_rows, parse_row

WHY = Acceptance(run="accept", row="*", reason="on purpose", accepted="2026-11-21T18:00:00+00:00", git_revision=None)
GPU_ROW = Row(ROW.case, "ptx", "sm_90a", "gpu", "eager")


def _seen(*lines: Record | Figures | Timing, run: RunHeader | None = None) -> Seen:
    found = run or gated()
    return Seen("run.jsonl", {found.run: found}, lines)


def _taken(before: Baseline, seen: Seen, *rows: Row, owed: tuple[Row, ...] = ()) -> Baseline:
    after, accepted = take(before, seen, rows, owed, WHY)
    assert accepted
    return after


def test_the_tracked_baseline_holds_what_the_smoke_profile_owes() -> None:
    expected = read_expected(ROOT / "conformance" / "expected.yaml")
    wanted = [row for row in owed_rows(specs(), Selection()) if not any(one.entry.matches(row) for one in expected)]
    held, owed = read_baseline(VM_BASELINE), set(wanted)
    assert set(held.records) == owed, "accept what is new, and what is gone: nox -s gate prints the command"
    programs = {key.program for key in held.figures}
    assert programs == {Key.of(row).program for row in owed}, "every program of the baseline has its compiler figures"


def test_the_tracked_baseline_is_what_accept_writes() -> None:
    held = read_baseline(VM_BASELINE)
    lines = [*held.records.values(), *held.figures.values()]
    again = rebuilt(held, lines, {}, ())
    assert list(again.lines) == list(held.lines), "somebody edited the file by hand: lines are sorted and settled"
    assert VM_BASELINE.read_text("utf-8") == "".join(f"{line.model_dump_json()}\n" for line in held.lines)


def test_every_line_says_why_it_is_there() -> None:
    held = read_baseline(VM_BASELINE)
    said = {line.row for line in held.acceptances if "row" in line.changes}
    assert {str(row) for row in held.records} <= said


def test_nothing_in_it_depends_on_the_run() -> None:
    other = gated(run="run-8").model_copy(update={"machine": "riscv", "platform": "Plan 9", "cpu_count": 3})
    line = judged(ROW).model_copy(update={"run": "run-8", "judge_host_seconds": 7.0, "metrics": {"o.rms": 9.0}})
    shuffled = line.model_copy(update={"counters": dict(reversed(COUNTERS.items())), "input_sha256": {}})
    first = _taken(Baseline(Path("b")), _seen(judged(ROW), compiled(ROW)), ROW)
    second = _taken(Baseline(Path("b")), _seen(shuffled, compiled(ROW), run=other), ROW)
    texts = [[line.model_dump_json() for line in one.lines] for one in (first, second)]
    assert texts[0] == texts[1]


def test_a_change_moves_the_lines_of_its_row_alone() -> None:
    both = (judged(ROW), compiled(ROW), judged(NEIGHBOUR), compiled(NEIGHBOUR))
    before = _taken(Baseline(Path("b")), _seen(*both), ROW, NEIGHBOUR)
    after = _taken(
        before, _seen(judged(ROW, {**COUNTERS, "mma_flops": 1}), compiled(ROW, {**KERNEL, "registers": 9})), ROW
    )
    assert after.records[NEIGHBOUR] == before.records[NEIGHBOUR]
    assert after.records[ROW].counters["mma_flops"] == 1
    assert after.acceptances[:-1] == before.acceptances
    assert after.acceptances[-1].changes == {"mma_flops": "4096 -> 1", "fmha.registers": "168 -> 9"}


def test_another_program_with_the_same_numbers_is_said_too() -> None:
    before = _taken(Baseline(Path("b")), _seen(judged(ROW)), ROW)
    after = _taken(before, _seen(judged(ROW, program="p2")), ROW)
    assert after.acceptances[-1].changes == {"program": "p1 -> p2"}


def test_figures_stay_while_a_row_of_their_program_does() -> None:
    lazy = ROW._replace(schedule="lazy")
    before = _taken(Baseline(Path("b")), _seen(judged(ROW), judged(lazy), compiled(ROW)), ROW, lazy)
    after = _taken(before, _seen(), lazy)
    assert (set(after.records), len(after.figures)) == ({ROW}, 1)
    assert not _taken(after, _seen(), ROW).figures


def test_a_row_that_is_owed_does_not_leave() -> None:
    before = _taken(Baseline(Path("b")), _seen(judged(ROW)), ROW)
    with pytest.raises(SelectionError, match=r"there is no record of .* run the gate first"):
        _taken(before, _seen(), ROW, owed=(ROW,))


def test_a_failure_is_not_accepted_behind_a_pass_of_the_same_run() -> None:
    failed = judged(ROW, status="failed")
    for lines in ((failed, judged(ROW)), (judged(ROW), failed)):
        with pytest.raises(SelectionError, match="is failed, and only what passed is accepted"):
            _taken(Baseline(Path("b")), _seen(*lines), ROW)
    earlier = failed.model_copy(update={"run": "run-6"})
    assert _taken(Baseline(Path("b")), _seen(earlier, judged(ROW)), ROW).records, "an earlier run was mended since"


def test_rows_are_read_as_they_are_printed() -> None:
    assert parse_row(str(ROW)) == ROW


def test_times_keep_the_run_and_the_device_that_took_them() -> None:
    run = gated(run="bench-1").model_copy(update={"device": H200})
    before = _taken(Baseline(Path("h")), _seen(timing((9.0, 10.0, 11.0), run="bench-1"), run=run), GPU_ROW)
    (line,) = before.timings.values()
    assert before.headers[line.run].device == H200
    later = gated(run="bench-2").model_copy(update={"device": H200})
    after = _taken(before, _seen(timing((8.0, 8.0, 8.0), run="bench-2"), run=later), GPU_ROW)
    assert set(after.headers) == {"bench-2"}, "a header of which no line is left goes"
    assert after.acceptances[-1].changes == {"cold median us": "10.000 -> 8.000"}
    assert baseline_for("gpu", run) == BASELINES / "h200.jsonl"
    assert baseline_for("vm", run) == VM_BASELINE
    with pytest.raises(RecordError, match="whose header describes no device; name a --baseline"):
        baseline_for("gpu", gated())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    wanted = _taken(Baseline(tmp_path / "b.jsonl"), _seen(judged(ROW), compiled(ROW)), ROW)
    write_baseline(wanted)
    found = read_baseline(wanted.path)
    assert list(found.lines) == list(wanted.lines)
    assert [path.name for path in tmp_path.iterdir()] == ["b.jsonl"]


def test_a_disk_that_refuses_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _taken(Baseline(tmp_path / "b.jsonl"), _seen(judged(ROW)), ROW)
    write_baseline(held)
    before = held.path.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RecordError, match=r"cannot write the baseline .*b\.jsonl: No space left on device"):
        write_baseline(_taken(held, _seen(judged(NEIGHBOUR)), NEIGHBOUR))
    assert held.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["b.jsonl"], "nothing half written stays"


def test_two_writers_at_once_are_one_too_many(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    with sole_writer(path), pytest.raises(RecordError, match="by another command; try again"), sole_writer(path):
        pytest.fail("both would read the same file, and the second would undo the first")
    with sole_writer(path):
        pass


# Each row branches on values: attention's running maximum, expert routing.
JUDGED = ("fmha:hd=64,t=4,s_k=128,heads=8,kv_heads=2", "nvfp4_moe:hidden=128,intermediate=128,num_experts=1,tokens=1")
ANOTHER_HOST = {
    "PYTHONHASHSEED": "2",
    "OPENBLAS_CORETYPE": "Prescott",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
}
THERE = """
import json
from megamoe.judge.judge import judge
from megamoe.records.lines import Row
records = [judge(Row(case, "ptx", "sm_100a", "vm", "eager"), "run-1") for case in {cases!r}]
print(json.dumps([[one.status, one.program_sha256, dict(one.counters)] for one in records]))
"""


def _on_another_host() -> object:
    settings = [f"{name}={value}" for name, value in ANOTHER_HOST.items()]
    command = ["env", *settings, sys.executable, "-c", THERE.format(cases=JUDGED)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_counters_do_not_depend_on_the_host() -> None:
    """With another hash order, BLAS kernel or vector instruction set, the counters are the same."""
    here = [judge(Row(case, "ptx", "sm_100a", "vm", "eager"), "run-1") for case in JUDGED]
    assert {one.status for one in here} == {"passed"}, [one.sentence for one in here]
    assert [[one.status, one.program_sha256, dict(one.counters)] for one in here] == _on_another_host()
