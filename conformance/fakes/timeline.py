"""A simulated device under torch's names: known times for the work of one stream, and for the host that enqueues it.

Time is in microseconds. A stream works in order, and starts each piece after the host has enqueued it. A stopwatch must
not measure the host's time.
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
    """`host`, `device`: the current time of each. `capturing`: the graph that captures work instead of the stream."""

    host: float = 0.0
    device: float = 0.0
    flushes: int = 0
    capturing: list[float] | None = None
    l2_holds: str | None = None

    def enqueue(self, host_us: float, device_us: float) -> None:
        """Enqueues work of `device_us`; the host spends `host_us` on it."""
        self.host += host_us
        if self.capturing is not None:
            self.capturing.append(device_us)
            return
        self.device = max(self.device, self.host) + device_us

    def synchronize(self) -> None:
        """Makes the host wait for the device."""
        self.host = max(self.host, self.device)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Puts this device where the stopwatch looks for torch's."""
        import torch

        patch.setattr(torch.cuda, "Event", lambda enable_timing: _Event(self))
        patch.setattr(torch.cuda, "CUDAGraph", lambda: _Graph(self))
        patch.setattr(torch.cuda, "graph", self._capture)
        patch.setattr(torch.cuda, "synchronize", self.synchronize)
        patch.setattr(stopwatch, "flush_buffer", lambda: FlushedBuffer(self))
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
class FlushedBuffer:
    """The buffer that is read (`amax`) or written (`zero_`) to empty the L2."""

    line: Timeline

    def amax(self) -> None:
        """Reads all of it."""
        self.line.flushes += 1
        self.line.enqueue(FLUSH_HOST_US, FLUSH_US)

    def zero_(self) -> None:
        """Writes all of it."""
        self.line.flushes += 1
        self.line.enqueue(FLUSH_HOST_US, FLUSH_US)


@dataclass
class SimulatedCall:
    """Takes `host_us` to enqueue and `device_us` to run. `refuses`: exception on capture, None to allow it."""

    line: Timeline
    device_us: float
    host_us: float = 5.0
    refuses: Callable[[], Any] | None = None

    def enqueue(self) -> None:
        """Enqueues the work."""
        if self.line.capturing is not None and self.refuses is not None:
            self.refuses()
        self.line.enqueue(self.host_us, self.device_us)

    def collect(self) -> None:
        """Does nothing: there is no output."""
