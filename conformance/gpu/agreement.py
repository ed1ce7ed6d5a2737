"""The stopwatch against triton.testing.do_bench, interleaved, on kernels from 5 microseconds to 5 milliseconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from backends.gpu.executor import EXECUTOR
from backends.gpu.stopwatch import DeviceStopwatch
from megamoe.backend import PythonProgram, RunOptions

REPETITIONS = 3
SAMPLED_MS = 150.0
LEAST, MOST = 20, 400


@dataclass(frozen=True)
class TorchCall:
    """A torch operation on tensors of its own."""

    operation: Callable[[], object]

    def enqueue(self) -> None:
        """Launches it."""
        self.operation()

    def collect(self) -> None:
        """Nothing to bring anywhere."""


def copy(mebibytes: int) -> Callable[[], object]:
    """A copy of so much on the device."""
    source = torch.ones(mebibytes << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def product(size: int) -> Callable[[], object]:
    """A bf16 matrix product on random data."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


KERNELS: Mapping[str, Callable[[], Callable[[], object]]] = {
    "copy 2 MiB": lambda: copy(2),
    "copy 64 MiB": lambda: copy(64),
    "matmul 4096": lambda: product(4096),
    "matmul 8192": lambda: product(8192),
    "copy 8 GiB": lambda: copy(8192),
}


@contextmanager
def stopwatch(operation: Callable[[], object], cold_by_graph: bool) -> Iterator[DeviceStopwatch]:
    """A stopwatch of the executor's for a torch operation."""
    program = PythonProgram("sm_90a", lambda _: TorchCall(operation), {})
    with EXECUTOR.bind(program, {}, RunOptions()) as call:
        yield DeviceStopwatch(call, cold_by_graph)


def compared(operation: Callable[[], object]) -> dict[str, list[float]]:
    """Medians in microseconds, one a repetition, by way of measuring; the ways take turns."""
    # Torch for CUDA brings triton; where there is no device, nobody gets here.
    from triton.testing import do_bench, do_bench_cudagraph  # pyright: ignore[reportMissingImports]

    medians: dict[str, list[float]] = {}
    with stopwatch(operation, False) as events, stopwatch(operation, True) as graph:
        once = events.sample("cold", 1)
        samples = int(min(max(SAMPLED_MS * 1e3 / once, LEAST), MOST))
        launches = int(min(max(2000 / once, 1), 100))
        ways: dict[str, Callable[[], float]] = {
            "cold": lambda: statistics.median(events.sample("cold", 1) for _ in range(samples)),
            "cold, graph": lambda: statistics.median(graph.sample("cold", 1) for _ in range(samples)),
            "do_bench": lambda: 1e3 * float(do_bench(operation, return_mode="median")),
            "hot": lambda: statistics.median(events.sample("hot", launches) for _ in range(LEAST)),
            "do_bench_cudagraph": lambda: 1e3 * float(do_bench_cudagraph(operation, return_mode="median")),
        }
        for _ in range(REPETITIONS):
            for name, way in ways.items():
                medians.setdefault(name, []).append(way())
    return medians
