"""The cost of gating and of comparing 10,000 rows, beside the bars of issue 5: `nox -s bench -- gate`.

Each command runs in a fresh process, as for a user and in CI. The time includes start-up and reading: two files to
compare; spec, records, baseline (counters and compiler figures of every row) and the JUnit file for the gate.
`extra_info` holds the bar, the bytes read and the processor time, which other processes do not change. No test asserts
a time.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from conformance.fakes import instant, results
from conformance.fakes.results import header, record, timing
from megamoe.contract import Row
from megamoe.gate.baseline import Baseline, rebuilt, write_baseline
from megamoe.records.lines import BASELINE_RUN, AnyLine, Figures, Record
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, owed_rows

HERE = Path(__file__).resolve().parent
ROWS = 10_000
BAR_SECONDS = 2
BACKEND = f"{instant.__name__}:READY"
KINDS = ("alu", "barrier", "control", "convert", "fence", "float", "mbarrier", "memory", "mma", "move", "tma", "warp")
COUNTERS = {f"instructions_{kind}": 1234 for kind in KINDS} | {"useful_flops": 10**9, "minimum_bytes": 10**7}


def _timed(benchmark: BenchmarkFixture, command: Sequence[str], read: Sequence[Path]) -> None:
    """Runs `megamoe` with `command` three times. It reads the files `read` and must succeed."""
    spent: list[float] = []

    def run() -> int:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "megamoe", *command], cwd=HERE, stdout=subprocess.DEVNULL, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return done.returncode

    assert benchmark.pedantic(run, rounds=3, iterations=1) == 0, f"{command[0]} failed: there is nothing to time"
    benchmark.extra_info["rows"] = ROWS
    benchmark.extra_info["bar_seconds"] = BAR_SECONDS
    benchmark.extra_info["bytes_read"] = sum(file.stat().st_size for file in read)
    benchmark.extra_info["least_processor_seconds"] = round(min(spent), 2)


def _write(path: Path, lines: Iterator[AnyLine] | Sequence[AnyLine]) -> None:
    path.write_text("".join(f"{line.model_dump_json()}\n" for line in lines), encoding="utf-8")


def _gated(rows: Sequence[Row]) -> list[Record | Figures]:
    return [line for row in rows for line in (results.judged(row, COUNTERS), results.compiled(row))]


def test_gate(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Issue 5: 10,000 rows in at most 2 s."""
    folder = tmp_path / "specs"
    folder.mkdir()
    selection = Selection(backends=(BACKEND,))
    rows = owed_rows(load_specs(instant.write_spec(folder)), selection)
    assert len(rows) == ROWS
    head = results.gated(ROWS).model_copy(update={"selection": asdict(selection)})
    records, baseline = tmp_path / "run.jsonl", tmp_path / "baseline.jsonl"
    _write(records, [head, *_gated(rows)])
    write_baseline(rebuilt(Baseline(baseline), _gated(rows), {BASELINE_RUN: head}, ()))
    command = ["gate", str(records), "--specs", str(folder), "--baseline", str(baseline)]
    _timed(benchmark, [*command, "--junit", str(tmp_path / "gate.xml")], [records, baseline])


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
        _write(file, lines(file.stem))
    _timed(benchmark, ["compare", *map(str, files)], files)
