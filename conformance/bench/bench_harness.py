"""The cost of the harness itself, beside the bars of issue 5: `nox -s bench -- harness`.

Collection of 10,000 rows is timed in a fresh process, with imports. The overhead of a row is everything but inputs,
references, build and execution: memory, hashes, comparison, record. A fake executor with its outputs ready replaces the
VM. `extra_info` has the bar and the processor time, which other processes do not change. No test asserts a time.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from conformance import ROOT
from conformance.fakes import instant
from megamoe.contract import Row
from megamoe.judge.judge import judge
from megamoe.judge.run import RunSettings, judged
from megamoe.records.files import RecordWriter
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, owed_rows

ROOM = instant.__name__
BAR_COLLECT_S = 3.0
BAR_ROW_MS = 10.0
CASES = (
    "fmha:hd=64,t=1,s_k=128",
    "fmha:hd=512,t=128,s_k=256",
    "fmha:hd=512,t=128,s_k=1024",
    "nvfp4_moe:hidden=256,intermediate=128,num_experts=8,tokens=30,topk=2,load=skewed",
    "nvfp4_moe:hidden=256,intermediate=128,num_experts=4,tokens=20,topk=2,stage=l1",
)


def _row(case: str) -> Row:
    return Row(case, f"{ROOM}:READY", "sm_100a", f"{instant.__name__}:INSTANT", "eager")


def _busy_ms(work: Callable[[], object], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times * 1e3


def test_collection_of_instant_rows(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """`pytest --collect-only conformance/bench/bench_rows.py` over 10,000 cases in at most 3 s."""
    write = ["--specs", str(instant.write_spec(tmp_path)), "--backend", f"{ROOM}:READY", "--executor", "vm"]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "conformance/bench/bench_rows.py", *write]

    def collect() -> str:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = benchmark.pedantic(collect, rounds=3, iterations=1)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "10000 tests collected" in said, said[-500:]
    busy = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 3
    benchmark.extra_info.update({"bar_seconds": BAR_COLLECT_S, "processor_seconds": round(busy, 2)})


def test_rows_of_instant_cases(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """From a spec file to the rows owed: every command pays this first."""
    folder = instant.write_spec(tmp_path)
    selection = Selection(backends=(f"{ROOM}:READY",))
    rows = benchmark.pedantic(lambda: owed_rows(load_specs(folder), selection), rounds=3, iterations=1)
    assert len(rows) == 10_000
    benchmark.extra_info["bar_seconds"] = BAR_COLLECT_S


@pytest.mark.parametrize("case", CASES)
def test_overhead_of_a_row(benchmark: BenchmarkFixture, case: str) -> None:
    """The judge around an execution that costs nothing, with inputs and references of the previous round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert judge(_row(case), "run").status == "passed"
        benchmark.extra_info["bar_ms"] = BAR_ROW_MS
        benchmark.extra_info["processor_ms"] = round(_busy_ms(lambda: judge(_row(case), "run"), 20), 2)
        benchmark.pedantic(judge, args=(_row(case), "run"), rounds=20, iterations=1)
    finally:
        torch.set_num_threads(threads)


def test_writing_a_record(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """One line, synced to disk."""
    record = judge(_row(CASES[0]), "run")
    with RecordWriter(tmp_path / "records.jsonl") as writer:
        benchmark.pedantic(writer.append, args=(record,), rounds=50, iterations=1)
    benchmark.extra_info["bar_ms"] = BAR_ROW_MS


def test_rows_through_a_worker(benchmark: BenchmarkFixture) -> None:
    """A hundred rows of one case through the pool, from the first record to the last, without worker start-up."""
    rows = [_row(CASES[0])._replace(schedule=f"random:{seed}") for seed in range(101)]

    def hundred() -> float:
        with closing(judged(rows, RunSettings("run"))) as records:
            assert next(records).status == "passed"
            began = time.perf_counter()
            assert sum(record.status == "passed" for record in records) == 100
            return (time.perf_counter() - began) / 100 * 1e3

    milliseconds = benchmark.pedantic(hundred, rounds=1, iterations=1)
    benchmark.extra_info.update({"bar_ms": BAR_ROW_MS, "ms_a_row": round(milliseconds, 2)})
