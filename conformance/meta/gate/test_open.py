"""An open gate says how much it held against which baseline; a closed one does not say that it is open."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.fakes.gate_lines import (
    COUNTERS,
    KERNEL,
    NEIGHBOUR,
    ROW,
    baseline,
    figures,
    header,
    record,
)
from megamoe.cli.main import main
from megamoe.gate.baseline import VM_BASELINE, Baseline
from megamoe.gate.verdict import Finding, judge_run, open_line
from megamoe.records.files import RecordWriter
from megamoe.records.lines import Figures, Record

GOOD = (record(ROW), figures(ROW), record(NEIGHBOUR), figures(NEIGHBOUR))
OWED = ["--case", ROW.case, "--case", NEIGHBOUR.case, "--backend", "ptx", "--target", "sm_100a"]
GATE = ["gate", "run.jsonl", *OWED, "--baseline", "base.jsonl"]
ACCEPT = ["accept", "--from", "run.jsonl", "--baseline", "base.jsonl", "--reason", "first", "--all-of", "*"]
ALL = f"2 rows, {2 * len(COUNTERS)} counters and {2 * len(KERNEL)} compiler figures"


def _said(held: Baseline | None, *lines: Record | Figures, finding: Finding | None = None) -> str:
    records = [line for line in lines if isinstance(line, Record)]
    programs = [line for line in lines if isinstance(line, Figures)]
    verdict = judge_run([ROW, NEIGHBOUR], records).with_findings([finding] if finding else [])
    return open_line(verdict, held, records, programs)


def test_it_counts_what_was_compared() -> None:
    held = baseline(*GOOD)
    assert _said(held, *GOOD) == f"the gate is open: {ALL} are as in baseline.jsonl"
    assert _said(held, *GOOD, *GOOD) == _said(held, *GOOD), "a line that is there twice counts once"
    one = f"1 row, {len(COUNTERS)} counters and {len(KERNEL)} compiler figures are as in baseline.jsonl"
    more = "; 1 row passed without a line there"
    assert _said(baseline(*GOOD[:2]), *GOOD) == f"the gate is open: {one}{more}", "what has no line was not compared"


def test_it_does_not_say_alike_of_what_differs_or_of_nothing() -> None:
    asked = Finding("renew", "better: fewer", ROW, closes=False)
    said = _said(baseline(*GOOD), *GOOD, finding=asked)
    assert said == f"the gate is open: {ALL} were held against baseline.jsonl, see what differs above"
    assert _said(None, *GOOD) == "the gate is open: 2 rows passed, held against no baseline"


def test_our_baseline_is_named_by_its_place_in_the_repository() -> None:
    assert _said(baseline(*GOOD, path=VM_BASELINE), *GOOD).endswith("are as in results/baselines/vm.jsonl")


def test_the_command_says_it_of_an_open_gate_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(*GOOD)
    assert main(ACCEPT) == 0
    capsys.readouterr()
    assert main(GATE) == 0
    assert f"the gate is open: {ALL} are as in base.jsonl\n" in capsys.readouterr().out
    _write(record(ROW, {**COUNTERS, "mma_flops": 8192}), *GOOD[1:])
    assert main(GATE) == 1
    assert "the gate is open" not in capsys.readouterr().out


def _write(*lines: Record | Figures) -> None:
    Path("run.jsonl").unlink(missing_ok=True)
    with RecordWriter(Path("run.jsonl")) as writer:
        for line in (header(), *lines):
            writer.append(line)
