"""Rows as benchmarks: `nox -s bench`, `nox -s bench -- --executor gpu --backend ptx --where hd=128`.

On a device, a benchmark is the device time of one row at one temperature of the L2, taken by turns with the other
backends of the same case. Without a device, it is one round of the VM and the judge on this host: do not compare that
time with a device's. `extra_info` has what counts there: the VM's counters and the compiler figures.

A wrong row has no time: its benchmark fails. It is skipped if there is no such kernel or machine.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from conformance.bench.device_clock import report_samples
from megamoe.bench.run import BenchRun, Outcome
from megamoe.contract import Case, Row, Temperature
from megamoe.records.lines import Timing

pytestmark = pytest.mark.filterwarnings(
    "ignore:Benchmark fixture was not used:pytest_benchmark.logger.PytestBenchmarkWarning"
)


def test_row(
    benchmark: BenchmarkFixture, bench_run: BenchRun, case: Case, row: Row, temperature: Temperature | None
) -> None:
    """The time of `row`, and all facts about it."""
    outcome = bench_run.outcome(row)
    timing = next((one for one in outcome.timings if one.temperature == temperature), None)
    said = timing or outcome.record
    if said.status == "unsupported":
        pytest.skip(said.sentence)
    if said.status != "passed":
        pytest.fail(f"{said.status}: {said.sentence}", pytrace=False)
    benchmark.group = f"{row.case} {row.target} {temperature or 'host'}"
    benchmark.params = {**row._asdict(), "temperature": temperature}
    benchmark.extra_info.update(facts_of(outcome, timing))
    samples = [us / 1e6 for us in timing.samples_us] if timing else [outcome.record.judge_host_seconds or 1e-4]
    report_samples(benchmark, samples)


def facts_of(outcome: Outcome, timing: Timing | None) -> dict[str, object]:
    """`extra_info` of one row."""
    record = outcome.record
    found: dict[str, object] = {
        "clock": "device" if timing else "host",
        **record.row._asdict(),
        "counters": dict(record.counters),
        "metrics": dict(record.metrics),
        "ptx_sha256": record.program_sha256,
        "software": dict(outcome.software),
    }
    for figures in outcome.figures:
        found[figures.assembler] = {"cubin_sha256": figures.cubin_sha256, "kernels": _plain(figures.kernels)}
    if timing:
        keep = {
            "temperature",
            "method",
            "launches_per_sample",
            "discarded",
            "stopped_by",
            "floor_us",
            "floor_by",
            "rounds",
        }
        found |= timing.model_dump(include=keep)
    return found


def _plain(kernels: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    return {name: dict(figures) for name, figures in kernels.items()}
