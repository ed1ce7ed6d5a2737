"""The cost of the gate over 10,000 rows, beside the bar of issue 5: `nox -s bench -- gate`.

The command runs in a fresh process, as in CI. The time includes start-up, spec, records, baseline (counters and
compiler figures of every row) and the JUnit file. `extra_info` holds the bar, the bytes read and the processor time,
which other processes do not change. No test asserts a time.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

from conformance.fakes import instant, results
from megamoe.contract import Row
from megamoe.gate.baseline import Baseline, rebuilt, write_baseline
from megamoe.records.lines import BASELINE_RUN, AnyLine, Figures, Record
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, owed_rows

HERE = Path(__file__).resolve().parent
BAR_SECONDS = 2
BACKEND = f"{instant.__name__}:READY"
KINDS = ("alu", "barrier", "control", "convert", "fence", "float", "mbarrier", "memory", "mma", "move", "tma", "warp")
COUNTERS = {f"instructions_{kind}": 1234 for kind in KINDS} | {"useful_flops": 10**9, "minimum_bytes": 10**7}


def _lines(rows: list[Row]) -> list[Record | Figures]:
    return [line for row in rows for line in (results.judged(row, COUNTERS), results.compiled(row))]


def test_gate(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Issue 5: 10,000 rows in at most 2 s."""
    folder = tmp_path / "specs"
    folder.mkdir()
    selection = Selection(backends=(BACKEND,))
    rows = owed_rows(load_specs(instant.write_spec(folder)), selection)
    header = results.gated(len(rows)).model_copy(update={"selection": asdict(selection)})
    lines: list[AnyLine] = [header, *_lines(rows)]
    records, baseline = tmp_path / "run.jsonl", tmp_path / "baseline.jsonl"
    records.write_text("".join(f"{line.model_dump_json()}\n" for line in lines), encoding="utf-8")
    write_baseline(rebuilt(Baseline(baseline), _lines(rows), {BASELINE_RUN: header}, ()))
    command = [sys.executable, "-m", "megamoe", "gate", str(records), "--specs", str(folder)]
    command += ["--baseline", str(baseline), "--junit", str(tmp_path / "gate.xml")]
    spent = [0.0]

    def gate() -> int:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=HERE, stdout=subprocess.DEVNULL, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return done.returncode

    assert benchmark.pedantic(gate, rounds=3, iterations=1) == 0, "the gate is closed: it found more than rows to count"
    benchmark.extra_info["rows"] = len(rows)
    benchmark.extra_info["bar_seconds"] = BAR_SECONDS
    benchmark.extra_info["bytes_read"] = records.stat().st_size + baseline.stat().st_size
    benchmark.extra_info["least_processor_seconds"] = round(min(spent[1:]), 2)
