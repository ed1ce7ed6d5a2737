"""The cost of comparing 10,000 rows, beside the bar of issue 5: `nox -s bench -- compare`.

The command runs in a fresh process, as for a user, so the time includes start-up and reading both files. `extra_info`
holds the bar, the bytes read and the processor time, which other processes do not change. No test asserts a time.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from conformance.fakes.results import header, record, timing
from megamoe.records.lines import AnyLine

ROWS = 10_000
BAR_SECONDS = 2
KINDS = ("alu", "barrier", "control", "convert", "fence", "float", "mbarrier", "memory", "mma", "move", "tma", "warp")
COUNTERS = {f"instructions_{kind}": 1234 for kind in KINDS} | {"useful_flops": 10**9, "minimum_bytes": 10**7}


def _verdicts(run: str) -> Iterator[AnyLine]:
    yield header(run)
    for i in range(ROWS):
        yield record("passed", COUNTERS, case=_case(i), run=run)


def _timings(run: str) -> Iterator[AnyLine]:
    """10 rounds of 10 samples each."""
    random = np.random.default_rng(sum(run.encode()))
    yield header(run)
    for i in range(ROWS):
        yield timing(10 + 0.1 * random.standard_normal((10, 10)), case=_case(i), run=run)


def _case(i: int) -> str:
    return f"fmha:hd=64,t={i % 128 + 1},s_k={i // 128 + 1}"


@pytest.mark.parametrize("lines", [_verdicts, _timings], ids=["verdicts", "timings"])
def test_compare(benchmark: BenchmarkFixture, tmp_path: Path, lines: Callable[[str], Iterator[AnyLine]]) -> None:
    """Issue 5: 10,000 rows in at most 2 s."""
    files = [tmp_path / f"{run}.jsonl" for run in ("before", "after")]
    for file in files:
        file.write_text("".join(f"{line.model_dump_json()}\n" for line in lines(file.stem)), encoding="utf-8")
    spent = [0.0]

    def compare() -> int:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "megamoe", "compare", *map(str, files)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return done.returncode

    assert benchmark.pedantic(compare, rounds=3, iterations=1) == 0, "the comparison failed: nothing to time"
    benchmark.extra_info["rows"] = ROWS
    benchmark.extra_info["bar_seconds"] = BAR_SECONDS
    benchmark.extra_info["bytes_read"] = sum(file.stat().st_size for file in files)
    benchmark.extra_info["least_processor_seconds"] = round(min(spent[1:]), 2)
