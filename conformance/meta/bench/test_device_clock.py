"""The pinned pytest-benchmark takes the times that we give it, in order, one per round.

Its own commands can read the file of our session.
"""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from conformance import ROOT
from conformance.bench.bench_rows import DeviceClock, report_samples
from conformance.fakes import simulated_device
from conformance.fakes.commands import PYTEST, python
from megamoe.records.files import read_records

CASE = "fmha:hd=64,t=2,s_k=3"
ROOM = simulated_device.__name__


@pytest.mark.benchmark(disable_gc=False)
def test_a_benchmark_believes_the_samples_that_it_is_given(benchmark: BenchmarkFixture) -> None:
    samples = [5.152e-6, 4.992e-6, 5.0e-3, 5.056e-6] * 50
    report_samples(benchmark, samples)
    if benchmark.disabled:
        pytest.skip("pytest-benchmark is disabled: under xdist, say")
    assert benchmark.stats is not None
    assert benchmark.stats.stats.data == pytest.approx(samples, rel=1e-9), "in order, one a round"
    assert benchmark.stats.stats.rounds == len(samples)


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan")])
def test_a_clock_moves_forwards_only(step: float) -> None:
    with pytest.raises(ValueError, match="moves forwards"):
        DeviceClock().advance(step)


def bench(folder: Path, name: str, *options: str) -> CompletedProcess[str]:
    """Runs `pytest conformance/bench/bench_rows.py` in its own process, on simulated backends."""
    command = [*PYTEST, "-q", "-p", "no:xdist", "conformance/bench/bench_rows.py"]
    command += ["--benchmark-only"]
    command += ["--case", CASE, "--target", "sm_90a", "--executor", f"{ROOM}:EXECUTOR", "--rse", "0.05", *options]
    command += ["--output", str(folder / f"{name}.jsonl"), f"--benchmark-json={folder / name}.json"]
    where = {"PYTHONPATH": str(ROOT / "conformance" / "meta"), "PATH": "", "HOME": str(folder)}
    return python(*command, cwd=ROOT, env=where)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompletedProcess[str]]:
    """A session with two correct backends, a wrong one and one that declines."""
    folder = tmp_path_factory.mktemp("session")
    names = [part for name in ("WORKS", "SLOWER", "WRONG", "DECLINES") for part in ("--backend", f"{ROOM}:{name}")]
    return folder, bench(folder, "first", *names)


Session = tuple[Path, CompletedProcess[str]]


def test_a_wrong_row_fails_the_session_and_one_that_does_not_exist_is_skipped(session: Session) -> None:
    done = session[1]
    assert done.returncode == 1, done.stdout + done.stderr
    assert "4 passed" not in done.stdout or "2 failed" in done.stdout, done.stdout
    assert "tensor o: " in done.stdout, "the sentence of the failure is printed"
    assert "2 skipped" in done.stdout, done.stdout


def test_the_file_carries_device_software_and_times(session: Session) -> None:
    data = json.loads((session[0] / "first.json").read_text())
    assert data["machine_info"]["gpu"]["name"] == "Simulated H0"
    assert data["machine_info"]["gpu"]["driver"] == "580.0"
    assert "torch" in data["machine_info"]["software"]
    assert len(data["benchmarks"]) == 4, "two fine rows, cold and hot"
    timings = {(one.backend, one.temperature): one for one in read_records(session[0] / "first.jsonl").timings}
    for one in data["benchmarks"]:
        info = one["extra_info"]
        timing = timings[info["backend"], info["temperature"]]
        assert info["clock"] == "device"
        assert info["ptx_sha256"] == timing.program_sha256
        assert [1e6 * seconds for seconds in one["stats"]["data"]] == pytest.approx(timing.samples_us, rel=1e-6)


def test_the_commands_of_pytest_benchmark_read_it(session: Session) -> None:
    folder = session[0]
    compare = ("compare", str(folder / "first.json"), "--csv", str(folder / "t"))
    command = ["-m", "pytest_benchmark", *compare]
    done = python(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"{ROOM}:SLOWER" in done.stdout, done.stdout
    stored = folder / "stored" / "machine"
    stored.mkdir(parents=True)
    (stored / "0001_first.json").write_bytes((folder / "first.json").read_bytes())
    command = ["-m", "pytest_benchmark", "--storage", str(folder / "stored"), "list"]
    done = python(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "0001_first.json" in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_selection_of_nothing_is_a_sentence(tmp_path: Path) -> None:
    done = bench(tmp_path, "none", "--backend", "nobody")
    assert done.returncode in (2, 4), done.stdout + done.stderr
    assert "there is no backend 'nobody'" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "none.jsonl").exists(), "nothing was measured, so nothing is written"
