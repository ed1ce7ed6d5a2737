"""The stopwatch against triton.testing.do_bench, interleaved, on kernels from 5 microseconds to 5 milliseconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from backends.gpu.driver import clocks
from backends.gpu.executor import EXECUTOR
from backends.gpu.stopwatch import DeviceStopwatch
from megamoe.contract import PythonProgram, RunOptions

REPETITIONS = 5
SAMPLED_MS = 150.0
MIN_SAMPLES, MAX_SAMPLES, TURN = 20, 400, 10


@dataclass(frozen=True)
class TorchCall:
    """A torch operation on its own tensors."""

    operation: Callable[[], object]

    def enqueue(self) -> None:
        """Launches the operation."""
        self.operation()

    def collect(self) -> None:
        """Does nothing: there is no output."""


def copy(mebibytes: int) -> Callable[[], object]:
    """Returns a call that copies that many MiB on the device."""
    source = torch.ones(mebibytes << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def product(size: int) -> Callable[[], object]:
    """Returns a call of a bf16 matrix product on random data."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def addition(elements: int) -> Callable[[], object]:
    """Returns a call of c = a + b in f32."""
    a, b = (torch.randn(elements, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.add(a, b, out=out)


# matmul 4096 runs at the power cap: under any stopwatch its time depends on the clocks left by the kernels before it.
KERNELS: Mapping[str, Callable[[], Callable[[], object]]] = {
    "add 1 Mi": lambda: addition(1 << 20),
    "matmul 1024": lambda: product(1024),
    "add 16 Mi": lambda: addition(1 << 24),
    "matmul 4096": lambda: product(4096),
    "copy 512 MiB": lambda: copy(512),
    "matmul 8192": lambda: product(8192),
    "copy 8 GiB": lambda: copy(8192),
}


@contextmanager
def stopwatch(operation: Callable[[], object], cold_by_graph: bool | None = None) -> Iterator[DeviceStopwatch]:
    """A stopwatch for a torch operation; `cold_by_graph` is as for DeviceStopwatch."""
    program = PythonProgram("sm_90a", lambda _: TorchCall(operation), {})
    with EXECUTOR.bind(program, {}, RunOptions()) as call:
        yield DeviceStopwatch(call, cold_by_graph)


def _us(milliseconds: Any) -> float:
    return 1e3 * float(milliseconds)


def in_turns(watch: DeviceStopwatch, samples: int) -> list[float]:
    """Takes cold samples like a benchmark, TURN in a row."""
    return [sample for _ in range(0, samples, TURN) for sample in watch.samples("cold", 1, TURN)]


def compared(operation: Callable[[], object]) -> tuple[dict[str, list[float]], dict[str, list[int | None]]]:
    """Returns medians in microseconds and SM clocks in MHz, one a repetition, for each way of measuring, taken by
    turns."""
    from triton.testing import do_bench, do_bench_cudagraph  # pyright: ignore[reportMissingImports]

    medians: dict[str, list[float]] = {}
    mhz: dict[str, list[int | None]] = {}
    with stopwatch(operation) as watch, stopwatch(operation, cold_by_graph=True) as graph:
        once = watch.sample("cold", 1)
        samples = int(min(max(SAMPLED_MS * 1e3 / once, MIN_SAMPLES), MAX_SAMPLES))
        launches = int(min(max(2000 / once, 1), 100))
        ways: dict[str, Callable[[], float]] = {
            "cold": lambda: statistics.median(in_turns(watch, samples)),
            "do_bench": lambda: _us(do_bench(operation, return_mode="median")),
            "cold, graph": lambda: statistics.median(in_turns(graph, samples)),
            "cold, single": lambda: statistics.median(watch.sample("cold", 1) for _ in range(samples)),
            "cold, queued": lambda: statistics.median(watch.samples("cold", 1, samples)),
            "hot": lambda: statistics.median(watch.samples("hot", launches, MIN_SAMPLES)),
            "do_bench_cudagraph": lambda: _us(do_bench_cudagraph(operation, return_mode="median")),
        }
        for repetition in range(REPETITIONS):
            # Ways that are compared run directly after each other, in both orders.
            for name in list(ways) if repetition % 2 else reversed(ways):
                medians.setdefault(name, []).append(ways[name]())
                mhz.setdefault(name, []).append(clocks().sm_mhz)
    return medians, mhz
