"""Requests to a runner: report what a backend or an executor can do, build a program, run one.

Each function takes a Frame and returns one. A Python call stays in the runner that built it, under a number. Every
other program leaves it as data, and a process that has not imported the backend runs it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, cast

from megamoe.contract import (
    AnyProgram,
    Borrowed,
    DeviceLostError,
    PythonProgram,
    RunOptions,
    Target,
    TimedExecutor,
    as_program,
    device_of,
    load_backend,
    load_executor,
)
from megamoe.contract.assembly import assembled
from megamoe.runner.child import telling
from megamoe.runner.wire import Frame, Json, case_of, decoded, encoded

if TYPE_CHECKING:
    import torch

BACKEND: Final = f"{__name__}:about_backend"
EXECUTOR: Final = f"{__name__}:about_executor"
BUILD: Final = f"{__name__}:build"
RUN: Final = f"{__name__}:run"
ASSEMBLE: Final = f"{__name__}:assemble"

_CALLS: dict[int, PythonProgram] = {}
"""Python calls built by this runner, by number."""


def about_backend(request: Frame) -> Frame:
    """`backend`, `ops` -> targets by op, the executors on which it owes rows (None: all), what is not installed."""
    backend = load_backend(request.told["backend"])
    targets = {op: [str(target) for target in backend.targets(op)] for op in request.told["ops"]}
    executors = getattr(backend, "executors", None)
    missing = backend.missing() if isinstance(backend, Borrowed) else None
    return Frame(
        {
            "targets": targets,
            "executors": None if executors is None else [str(name) for name in executors],
            "borrowed": isinstance(backend, Borrowed),
            "missing": None if missing is None else str(missing),
        }
    )


def about_executor(request: Frame) -> Frame:
    """`executor`, `targets` -> its device, its schedules (None: all), whether it has a clock, and why each target is
    unavailable."""
    executor = load_executor(request.told["executor"])
    schedules = getattr(executor, "schedules", None)
    asked: list[str] = request.told["targets"]
    return Frame(
        {
            "device": device_of(executor),
            "schedules": None if schedules is None else [str(name) for name in schedules],
            "timed": isinstance(executor, TimedExecutor),
            "unavailable": {target: _said(executor.unavailable(cast(Target, target))) for target in asked},
        }
    )


def _said(reason: object) -> str | None:
    return None if reason is None else str(reason)


def build(request: Frame) -> Frame:
    """`backend`, `case`, `target` -> the program as data, or the number, `software`, `prepares` of a Python call."""
    backend = load_backend(request.told["backend"])
    built = backend.build(case_of(request.told["case"]), request.told["target"])
    program = as_program(built, request.told["backend"])
    if isinstance(program, PythonProgram):
        _CALLS[len(_CALLS)] = program
        software = {str(name): str(version) for name, version in program.software.items()}
        prepares = [str(name) for name in program.prepares]
        return Frame({"number": len(_CALLS) - 1, "software": software, "prepares": prepares})
    return encoded(program)


def run(request: Frame) -> Frame:
    """`executor`, `options`, `tensors`, a program or the `number` of a call, and the memory or a device's `handle` ->
    counters, violation."""
    executor = load_executor(request.told["executor"])
    program: AnyProgram = built_call(request.told["number"]) if "number" in request.told else decoded(request)
    options = request.told["options"]
    with (
        _tensors_of(request, device_of(executor)) as tensors,
        telling(getattr(executor, "whereabouts", None)),
    ):
        execution = executor.run(
            program,
            tensors,
            RunOptions(
                schedule=options["schedule"],
                accumulate=options["accumulate"],
                step_budget=options["step_budget"],
                outputs=tuple(options["outputs"]),
            ),
        )
    violation = execution.violation
    return Frame(
        {
            "counters": {str(name): int(count) for name, count in execution.counters.items()},
            "violation": None if violation is None else str(violation),
            "spent": DeviceLostError.met is not None,
        }
    )


def assemble(request: Frame) -> Frame:
    """`target` and the PTX -> the result of every assembler. Assemblers are entry points, like backends."""
    found = assembled(request.parts[0].decode(), request.told["target"])
    return Frame({"assembled": [asdict(one) for one in found]})


def _tensors_of(request: Frame, device: str) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
    if request.memory is None:
        return tensors_on_device(request.told["handle"], request.told["tensors"])
    return tensors_in(request.memory, request.told["tensors"], device)


@contextmanager
def tensors_on_device(handle: Json, told: Sequence[Json]) -> Iterator[Mapping[str, torch.Tensor]]:
    """The tensors in a block that another process has on the device. They are released at the end."""
    import torch

    block = block_on_device(handle)
    tensors = {one["name"]: tensor_in(block, one) for one in told}
    del block
    try:
        yield tensors
        torch.cuda.synchronize()
    finally:
        tensors.clear()
        # The next program may be another process's, and large.
        torch.cuda.empty_cache()


def block_on_device(handle: Json) -> torch.Tensor:
    """Another process's block on the same device (megamoe.judge.arena.device_block made the handle)."""
    import torch

    torch.cuda.init()
    known = {name: bytes.fromhex(value) if isinstance(value, str) else value for name, value in handle.items()}
    order = ("device", "memory", "size", "offset", "counter", "counter_offset", "event", "wait")
    storage: Any = torch.UntypedStorage._new_shared_cuda(*(known[name] for name in order))
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{known['device']}").set_(storage)


@contextmanager
def tensors_in(memory: int, told: Sequence[Json], device: str) -> Iterator[Mapping[str, torch.Tensor]]:
    """The tensors in a block of shared memory. For another device they are copied there, and back at the end."""
    import torch

    with mmap.mmap(memory, 0) as shared:
        block = torch.frombuffer(shared, dtype=torch.uint8)
        there = block if torch.device(device).type == "cpu" else block.to(device)
        tensors = {one["name"]: tensor_in(there, one) for one in told}
        try:
            yield tensors
            if there is not block:
                block.copy_(there)
        finally:
            # A block that is still referenced cannot be unmapped. It is the runner's mapping, not the judge's.
            del block, there, tensors
            _release(shared)


def _release(shared: mmap.mmap) -> None:
    try:
        shared.close()
    except BufferError:
        return


def built_call(number: int) -> PythonProgram:
    """The Python call that this runner has built under `number`."""
    return _CALLS[number]


def tensor_in(block: torch.Tensor, told: Json) -> torch.Tensor:
    """The tensor of `block` (uint8) that `told` describes: its offset in bytes, dtype and shape."""
    import torch

    dtype: Any = getattr(torch, told["dtype"])
    size = torch.Size(told["shape"]).numel() * dtype.itemsize
    return block[told["offset"] : told["offset"] + size].view(dtype).view(told["shape"])
