"""Rows as benchmarks: `nox -s bench`, `nox -s bench -- --executor gpu --backend ptx --where hd=128`.

On a device, a benchmark is the device time of one row with a cold or a hot L2, measured by turns with the other
backends of the same case. Without a device, it is one round of the VM and the judge on this host: do not compare that
time with a device's. `extra_info` then has the useful numbers: the VM's counters and the compiler figures.

A wrong row has no time: its benchmark fails. It is skipped if there is no such kernel or machine.

pytest-benchmark gets the known times through a clock that we set, in its `pedantic` mode. It reads its timer once
before and once after each round; between the two we advance the clock by one sample. The timer of a fixture is private
(`_timer`): conformance/meta/bench/test_device_clock.py checks the pinned version against these assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from megamoe.bench.run import BenchRun, Outcome
from megamoe.contract import Case, Row, Temperature
from megamoe.records.lines import Timing


class DeviceClock:
    """A monotonic clock in seconds. It stands still until it is advanced."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """The time now, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock forwards. ValueError for a step that is not positive."""
        if not seconds > 0.0:
            raise ValueError(f"a clock moves forwards: {seconds} s is no step")
        self._now += seconds


def report_samples(benchmark: BenchmarkFixture, samples_s: Sequence[float]) -> None:
    """Makes the rounds of `benchmark` take `samples_s`, in this order.

    Small steps are added to a growing sum, so a round is off by at most one part in 1e9.
    """
    clock = DeviceClock()
    benchmark._timer = clock  # pyright: ignore[reportAttributeAccessIssue]
    left = iter(samples_s)
    benchmark.pedantic(lambda: clock.advance(next(left)), rounds=len(samples_s), iterations=1)


pytestmark = pytest.mark.filterwarnings(
    "ignore:Benchmark fixture was not used:pytest_benchmark.logger.PytestBenchmarkWarning"
)


def test_row(
    benchmark: BenchmarkFixture, bench_run: BenchRun, case: Case, row: Row, temperature: Temperature | None
) -> None:
    """Reports the time of `row` and its facts."""
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
