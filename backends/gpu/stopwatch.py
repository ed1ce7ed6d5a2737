"""Device time between two events on a stream that is kept busy, so that no launch latency of the host is in it.

Cold: a buffer of more than twice the L2 is written, then comes start event, call, end event. That is the region that
triton.testing.do_bench times, and the two agree (conformance/gpu/on_device.py holds them against each other).
Hot: the call runs once, then as often as asked between the events, as one CUDA graph where it can be captured.
"""

from __future__ import annotations

import math
import time
from functools import cache
from typing import TYPE_CHECKING, Final, Literal

from backends.gpu.driver import faults_of_others, lost_to
from megamoe.device import DeviceLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from megamoe.backend import PreparedCall
    from megamoe.record import Temperature

FLUSH_BYTES: Final = 256 << 20
"""What do_bench writes; more where the L2 is larger than half of it."""
WARM_UP: Final = 3
MOST_FLUSHES: Final = 2000


@cache
def flush_buffer() -> torch.Tensor:
    """The buffer whose writing empties the L2 of everything else: int32, one a process."""
    import torch

    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return torch.empty(max(FLUSH_BYTES, 2 * l2) // 4, dtype=torch.int32, device="cuda")


class DeviceStopwatch:
    """Times one prepared call. Warm-up and the first capture are done when it is made.

    `method` is "events" where the call refuses to be captured (its host side then runs in every sample, behind enough
    flushes to hide it). `cold_by_graph`: whether a cold sample replays a graph of one launch instead of enqueueing.
    `busy`: whether a flush follows each sample, so that the device has work until the next one is handed over: one that
    idles between samples runs at clocks that it does not keep, and is several per cent faster on short kernels.
    """

    def __init__(self, call: PreparedCall, cold_by_graph: bool = False, busy: bool = True) -> None:
        import torch

        self._call = call
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._cold_by_graph, self._busy = cold_by_graph, busy
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host_us = self._warmed_up()
        flush_buffer().zero_()
        flush_us = self._region(0, flush_buffer().zero_)
        # Twice the host's time: a host that is interrupted once must not show up in a sample.
        self._flushes_a_launch = 2 * host_us / max(flush_us, 1.0)
        self.method: Literal["graph", "events"] = "graph" if self._captured(1) else "events"

    def sample(self, temperature: Temperature, launches: int) -> float:
        """Microseconds a launch, as the contract says. DeviceLostError if the device reports a fault."""
        with faults_of_others("timing the call"):
            if temperature == "cold":
                single = self._graph(1).replay if self._cold_by_graph and self.method == "graph" else self._call.enqueue
                return self._region(1, single)
            return self._hot(launches)

    def _hot(self, launches: int) -> float:
        if self.method == "graph":
            once, many, host_launches = self._graph(1).replay, self._graph(launches).replay, 2
        else:
            once, many, host_launches = self._call.enqueue, lambda: self._repeat(launches), launches + 1
        return self._region(host_launches, many, once) / launches

    def _repeat(self, launches: int) -> None:
        for _ in range(launches):
            self._call.enqueue()

    def _region(
        self, host_launches: int, timed: Callable[[], object], before: Callable[[], object] | None = None
    ) -> float:
        """Microseconds from the end of the flush (and of `before`) to the end of `timed`."""
        flushes = math.ceil(self._flushes_a_launch * host_launches) if host_launches else 1
        for _ in range(min(max(flushes, 1), MOST_FLUSHES)):
            flush_buffer().zero_()
        if before is not None:
            before()
        self._start.record()
        timed()
        self._end.record()
        if self._busy:
            flush_buffer().zero_()
        self._end.synchronize()
        return 1e3 * self._start.elapsed_time(self._end)

    def _warmed_up(self) -> float:
        """Microseconds that the host takes to enqueue the call, after the first calls have made what they keep."""
        import torch

        for _ in range(WARM_UP):
            self._call.enqueue()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(WARM_UP):
            self._call.enqueue()
        host_us = (time.perf_counter() - began) / WARM_UP * 1e6
        torch.cuda.synchronize()
        return host_us

    def _graph(self, launches: int) -> torch.cuda.CUDAGraph:
        if launches not in self._graphs and not self._captured(launches):
            raise RuntimeError(
                f"a graph of {launches} launches cannot be captured, although one of a single launch can"
            )
        return self._graphs[launches]

    def _captured(self, launches: int) -> bool:
        """Whether a graph of so many launches could be captured; it is kept then."""
        import torch

        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._repeat(launches)
            graph.replay()
            torch.cuda.synchronize()
        except Exception:
            # Whatever a library does that a capture refuses: the call is timed without a graph. A fault is no refusal.
            fault = lost_to()
            if fault is not None:
                raise DeviceLostError(f"the device reports {fault} while a graph of the call was replayed") from None
            return False
        self._graphs[launches] = graph
        return True
