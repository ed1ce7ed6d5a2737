"""A simulated device under torch's names: work in one stream takes known time, and so does the host that hands it over.

Time is in microseconds. A stream does its work in order, each piece no sooner than the host has enqueued it: what a
stopwatch must not measure is the host's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from backends.gpu import stopwatch

EVENT_HOST_US, REPLAY_HOST_US, FLUSH_HOST_US, FLUSH_US = 2.0, 8.0, 4.0, 80.0


@dataclass
class Timeline:
    """`host` and `device`: how far each has come. `capturing`: the graph that takes the work instead of the stream."""

    host: float = 0.0
    device: float = 0.0
    flushes: int = 0
    capturing: list[float] | None = None
    l2_holds: str | None = None

    def enqueue(self, host_us: float, device_us: float) -> None:
        """Work of `device_us` that the host needs `host_us` to hand over."""
        self.host += host_us
        if self.capturing is not None:
            self.capturing.append(device_us)
            return
        self.device = max(self.device, self.host) + device_us

    def synchronize(self) -> None:
        """The host waits."""
        self.host = max(self.host, self.device)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Puts this device where the stopwatch looks for torch's."""
        import torch

        patch.setattr(torch.cuda, "Event", lambda enable_timing: _Event(self))
        patch.setattr(torch.cuda, "CUDAGraph", lambda: _Graph(self))
        patch.setattr(torch.cuda, "graph", self._capture)
        patch.setattr(torch.cuda, "synchronize", self.synchronize)
        patch.setattr(stopwatch, "flush_buffer", lambda: _Flush(self))
        patch.setattr(stopwatch, "lost_to", lambda: None)
        patch.setattr(stopwatch.time, "perf_counter", lambda: self.host / 1e6)

    @contextmanager
    def _capture(self, graph: _Graph) -> Iterator[None]:
        self.capturing = graph.work
        try:
            yield
        finally:
            self.capturing = None


@dataclass
class _Event:
    line: Timeline
    at: float = 0.0

    def record(self) -> None:
        self.line.enqueue(EVENT_HOST_US, 0.0)
        self.at = self.line.device

    def synchronize(self) -> None:
        self.line.host = max(self.line.host, self.at)

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) / 1e3


@dataclass
class _Graph:
    line: Timeline
    work: list[float] = field(default_factory=list[float])

    def replay(self) -> None:
        self.line.enqueue(REPLAY_HOST_US, sum(self.work))


@dataclass
class _Flush:
    line: Timeline

    def zero_(self) -> None:
        self.line.flushes += 1
        self.line.enqueue(FLUSH_HOST_US, FLUSH_US)


@dataclass
class SimulatedCall:
    """`host_us` to enqueue, `device_us` to run; `refuses` to be captured, if it does, with an exception."""

    line: Timeline
    device_us: float
    host_us: float = 5.0
    refuses: Callable[[], Any] | None = None

    def enqueue(self) -> None:
        """Hands the work over."""
        if self.line.capturing is not None and self.refuses is not None:
            self.refuses()
        self.line.enqueue(self.host_us, self.device_us)

    def collect(self) -> None:
        """Nothing to bring anywhere."""
