"""Times a call between two events on a stream that is kept busy, so that no host launch latency is measured.

Cold: read a buffer of more than twice the L2, then start event, call, end event. triton.testing.do_bench times the same
region in an equally full queue (conformance/gpu/on_device.py compares the two), but it writes the buffer: the dirty
lines then drain to memory inside the region. A stopwatch with flush="dirty" does the same.
Hot: run the call once, then the requested number of times between the events, as one CUDA graph if the call can be
captured.
"""

from __future__ import annotations

import math
import time
from functools import cache
from typing import TYPE_CHECKING, Final, Literal

from backends.gpu.driver import faults_of_others, lost_to
from megamoe.contract import DeviceLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from megamoe.contract import Flush, PreparedCall, Temperature

FLUSH_BYTES: Final = 256 << 20
"""do_bench writes this much and a clean flush reads it. The buffer is larger if the L2 is larger than half of it."""
WARM_UP: Final = 3
MAX_FLUSHES: Final = 2000
HOST_MARGIN: Final = 2.0
"""Device work queued before a row of samples, as a multiple of the time that the host needs to enqueue the samples. A
device at the end of its queue is up to a microsecond faster per launch; one that waits for its host is slower without
limit."""
CHEAP_ENQUEUE: Final = 1 / 2
"""A cold sample may spend this share of a flush's time in a call's host side; a costlier call replays a graph."""
LOOK_AHEAD: Final = 3
"""Flushes and calls enqueued after the last sample of a row, so that its queue does not run dry."""


@cache
def flush_buffer() -> torch.Tensor:
    """The buffer that is read or written to evict everything else from the L2: int32, zeros, one per process."""
    import torch

    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return torch.zeros(max(FLUSH_BYTES, 2 * l2) // 4, dtype=torch.int32, device="cuda")


def flushing(flush: Flush) -> Callable[[], object]:
    """A function that empties the L2."""
    buffer = flush_buffer()
    return buffer.amax if flush == "clean" else buffer.zero_


class DeviceStopwatch:
    """Times one prepared call. The constructor warms up and captures the first graph.

    `method` is "events" if the call cannot be captured: its host side then runs in every sample, after enough flushes
    to hide it. `cold_by_graph` says whether a cold sample replays a graph of one launch instead of enqueueing the call;
    None decides by the call's host time. On an H200 the medians of fa3's cold times in ten processes lay between 13 and
    67 us when it was enqueued (results/records, A/A runs), because its host side takes as long as a flush.
    """

    def __init__(self, call: PreparedCall, cold_by_graph: bool | None = None, flush: Flush = "clean") -> None:
        self._call = call
        self.flush: Flush = flush
        self._empty_l2 = flushing(flush)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._replay_host_us: dict[int, float] = {}
        self._enqueue_host_us = _host_us(call.enqueue)
        self._flush_host_us = _host_us(self._empty_l2)
        start, end = _region(self._empty_l2)
        end.synchronize()
        self._flush_us = max(1e3 * start.elapsed_time(end), 1.0)
        dear = self._enqueue_host_us > CHEAP_ENQUEUE * self._flush_us
        self._cold_by_graph = dear if cold_by_graph is None else cold_by_graph
        self.method: Literal["graph", "events"] = "graph" if self._captured(1) else "events"

    def sample(self, temperature: Temperature, launches: int) -> float:
        """Microseconds per launch, as the contract says. Raises DeviceLostError if the device reports a fault."""
        return self.samples(temperature, launches, 1)[0]

    def samples(self, temperature: Temperature, launches: int, count: int) -> list[float]:
        """`count` samples in a row, enqueued together with more work after the last: a device whose queue runs dry is
        up to a microsecond faster per launch than a busy one. Raises DeviceLostError as `sample` does."""
        launches = 1 if temperature == "cold" else launches
        with faults_of_others("timing the call"):
            before = self._once if temperature == "hot" else None
            timed, host_us = self._timed(temperature, launches)
            host_us += self._flush_host_us + (self._once_host_us if before else 0.0)
            self._flush(math.ceil(HOST_MARGIN * (count + LOOK_AHEAD) * host_us / self._flush_us))
            regions: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
            for _ in range(count):
                self._flush(1)
                if before is not None:
                    before()
                regions.append(_region(timed))
            for _ in range(LOOK_AHEAD):
                self._flush(1)
                timed()
            regions[-1][1].synchronize()
            return [1e3 * start.elapsed_time(end) / launches for start, end in regions]

    def _flush(self, times: int) -> None:
        for _ in range(min(max(times, 1), MAX_FLUSHES)):
            self._empty_l2()

    def _timed(self, temperature: Temperature, launches: int) -> tuple[Callable[[], object], float]:
        """The function to run between the events, and the microseconds that the host needs to enqueue it."""
        by_graph = self.method == "graph" and (temperature == "hot" or self._cold_by_graph)
        if by_graph:
            return self._graph(launches).replay, self._replay_host_us[launches]
        return lambda: self._repeat(launches), self._enqueue_host_us * launches

    def _once(self) -> None:
        """One untimed call, so that the L2 holds what the next call finds there."""
        (self._graphs[1].replay if self.method == "graph" else self._call.enqueue)()

    @property
    def _once_host_us(self) -> float:
        return self._replay_host_us[1] if self.method == "graph" else self._enqueue_host_us

    def _repeat(self, launches: int) -> None:
        for _ in range(launches):
            self._call.enqueue()

    def _graph(self, launches: int) -> torch.cuda.CUDAGraph:
        if launches not in self._graphs and not self._captured(launches):
            raise RuntimeError(
                f"a graph of {launches} launches cannot be captured, although one of a single launch can"
            )
        return self._graphs[launches]

    def _captured(self, launches: int) -> bool:
        """Captures and keeps a graph of this many launches; False if the call cannot be captured."""
        import torch

        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._repeat(launches)
            host_us = _host_us(graph.replay)
        except Exception:
            # Libraries do things that a capture refuses: time such a call without a graph. A device fault is no
            # refusal.
            fault = lost_to()
            if fault is not None:
                raise DeviceLostError(f"the device reports {fault} while a graph of the call was replayed") from None
            return False
        self._graphs[launches], self._replay_host_us[launches] = graph, host_us
        return True


def _region(timed: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Enqueues start event, `timed`, end event."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    timed()
    end.record()
    return start, end


def _host_us(enqueue: Callable[[], object]) -> float:
    """Microseconds that the host needs to enqueue a call, after warm-up calls have built their caches."""
    import torch

    for _ in range(WARM_UP):
        enqueue()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(WARM_UP):
        enqueue()
    host_us = (time.perf_counter() - began) / WARM_UP * 1e6
    torch.cuda.synchronize()
    return host_us
