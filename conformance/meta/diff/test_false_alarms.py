"""The measurement of false alarms, on ten simulated repetitions of a benchmark, one of them slower."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conformance import ROOT
from conformance.bench.false_alarms import main
from conformance.fakes.results import header, record, timing, write

ROWS, RUNS = 40, 10
RECORDS = ROOT / "results" / "records"


def repetitions(folder: Path, odd_one: float = 1.0) -> Path:
    """Runs of one program on a device with noise between samples, between rounds and between processes.

    The last run takes `odd_one` times as long as it should.
    """
    random = np.random.default_rng(11)
    for run in range(RUNS):
        name = f"run-{run}"
        lines = []
        for row in range(ROWS):
            process, rounds = 0.003 * random.standard_normal(), 0.004 * random.standard_normal((8, 1))
            noise = 0.01 * np.abs(random.standard_t(3, (8, 10)))
            times = 5.0 * (row + 1) * (1 + process + rounds + noise) * (odd_one if run == RUNS - 1 else 1.0)
            lines.append(timing(times, case=f"fmha:hd=64,t=1,s_k={row + 1}", run=name))
        write(folder / f"{run:02d}.jsonl", header(name), *lines)
    return folder


def test_repetitions_of_one_program_keep_the_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = tmp_path / "summary.json"
    status = main([str(repetitions(tmp_path / "runs")), "--json", str(summary)])
    out = capsys.readouterr().out
    assert status == 0, out
    found = json.loads(summary.read_text())
    assert found["all_pairs"]["pairs"] == 45
    assert found["all_pairs"]["rows"] == 45 * ROWS
    assert found["consecutive_pairs"]["pairs"] == 9
    assert found["all_pairs"]["false_alarms"] <= 0.01
    assert found["device"]["name"] == "NVIDIA H200"
    assert len(found["widest"]) == ROWS
    assert found["all_pairs_by_temperature"]["cold"]["rows"] == 45 * ROWS
    assert found["planted_slowdowns"]["20%"]["cold"] == {"SLOWER": 1.0}, "what is planted must be seen"


def test_a_run_that_was_slower_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main([str(repetitions(tmp_path / "runs", odd_one=1.08))])
    out = capsys.readouterr().out
    assert status == 1
    assert "SLOWER 00.jsonl -> 09.jsonl" in out
    assert "NOT kept" in out


def test_what_cannot_be_measured_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "need at least 2" in capsys.readouterr().err
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", record())
    assert main([str(tmp_path)]) == 2
    assert "share no time" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["aa", "aa-later", "aa-busy-host"])
def test_the_committed_repetitions_keep_the_bar(tmp_path: Path, folder: str) -> None:
    """Ten sessions on an H200, each in its own processes; the tracked summary is what the command prints today."""
    summary = tmp_path / "summary.json"
    status = main([str(RECORDS / folder), "--json", str(summary)])
    found = json.loads(summary.read_text())
    committed = json.loads((RECORDS / folder / "false-alarms.json").read_text("utf-8"))
    assert len(found["files"]) == RUNS
    for name in (name for name in found if "pairs" in name or "planted" in name):
        assert found[name] == committed[name], "renew it: python -m conformance.bench.false_alarms FOLDER --json FILE"
    assert status == 0, f"more than 1 % are false alarms: {found['all_pairs']}"
    assert found["all_pairs_at_default_threshold"]["false_alarms"] <= 0.01, "nor may the thresholds of specs hide them"
