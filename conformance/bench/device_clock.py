"""How times that are known already reach pytest-benchmark: a clock that shows what we say, in its `pedantic` mode.

pytest-benchmark reads its timer once before and once after each round; between the two we move the clock by one
sample. The timer of a fixture is private (`_timer`): conformance/meta/bench/test_device_clock.py holds
the pinned version to what this file assumes.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_benchmark.fixture import BenchmarkFixture


class DeviceClock:
    """A monotonic clock in seconds that stands still unless it is moved."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """Now."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves it forwards. ValueError for a step that is not positive."""
        if not seconds > 0.0:
            raise ValueError(f"a clock moves forwards: {seconds} s is no step")
        self._now += seconds


def report_samples(benchmark: BenchmarkFixture, samples_s: Sequence[float]) -> None:
    """Makes `benchmark` believe that its rounds took `samples_s`, in this order.

    Small steps are added to a growing sum, so that a round is off by one part in 1e9 at most.
    """
    clock = DeviceClock()
    benchmark._timer = clock  # pyright: ignore[reportAttributeAccessIssue]
    left = iter(samples_s)
    benchmark.pedantic(lambda: clock.advance(next(left)), rounds=len(samples_s), iterations=1)
