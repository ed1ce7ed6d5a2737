"""Hand known times to pytest-benchmark: a clock that we set, in its `pedantic` mode.

pytest-benchmark reads its timer once before and once after each round; between the two we advance the clock by one
sample. The timer of a fixture is private (`_timer`): conformance/meta/bench/test_device_clock.py checks the pinned
version against these assumptions.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_benchmark.fixture import BenchmarkFixture


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
