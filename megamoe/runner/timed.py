"""Requests to a runner that times programs: it keeps buffers mapped, and calls bound to them.

The judge owns the buffers and checks them between requests. All samples of one turn are one request, so that only the
clock is read between two samples. Each function takes a Frame and returns one.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from megamoe.contract import (
    AnyProgram,
    PreparedCall,
    RunOptions,
    Stopwatch,
    TimedExecutor,
    UnsupportedError,
    load_executor,
)
from megamoe.runner.requests import block_on_device, built_call, tensor_in
from megamoe.runner.wire import Frame, decoded

if TYPE_CHECKING:
    import torch

FACTS: Final = f"{__name__}:facts"
THROTTLED: Final = f"{__name__}:throttled"
BARE_READ: Final = f"{__name__}:bare_read"
OPEN: Final = f"{__name__}:open_buffers"
BIND: Final = f"{__name__}:bind"
LAUNCH: Final = f"{__name__}:launch"
STOPWATCH: Final = f"{__name__}:stopwatch"
SAMPLES: Final = f"{__name__}:samples"
COLLECT: Final = f"{__name__}:collect"
CLOSE: Final = f"{__name__}:close"


@dataclass(slots=True)
class _Opened:
    """The buffers of one case, and the calls bound to them, by backend name."""

    executor: TimedExecutor
    tensors: Mapping[str, torch.Tensor]
    bindings: ExitStack = field(default_factory=ExitStack)
    calls: dict[str, PreparedCall] = field(default_factory=dict[str, PreparedCall])
    watches: dict[str, Stopwatch] = field(default_factory=dict[str, Stopwatch])


_OPENED: list[_Opened] = []


def _executor(request: Frame) -> TimedExecutor:
    name: str = request.told["executor"]
    executor = load_executor(name)
    if not isinstance(executor, TimedExecutor):
        raise UnsupportedError(f"executor {name} keeps no time of its own")
    return executor


def facts(request: Frame) -> Frame:
    """`executor` -> its device, in the form of DeviceFacts."""
    return Frame({"facts": _executor(request).facts().model_dump(mode="json")})


def throttled(request: Frame) -> Frame:
    """`executor` -> why the device is slower than at the last request, or None."""
    why = _executor(request).throttled()
    return Frame({"why": None if why is None else str(why)})


def bare_read(request: Frame) -> Frame:
    """`executor`, `size` in bytes -> microseconds to read that many bytes, or None."""
    us = _executor(request).bare_read_us(request.told["size"])
    return Frame({"us": None if us is None else float(us)})


def open_buffers(request: Frame) -> Frame:
    """`executor`, `tensors`, and the memory or a device's `handle`: maps the buffers, replacing earlier ones."""
    import torch

    close(request)
    if request.memory is not None:
        block = torch.frombuffer(mmap.mmap(request.memory, 0), dtype=torch.uint8)
    else:
        block = block_on_device(request.told["handle"])
    tensors = {one["name"]: tensor_in(block, one) for one in request.told["tensors"]}
    _OPENED.append(_Opened(_executor(request), tensors))
    return Frame({})


def bind(request: Frame) -> Frame:
    """`name`, `outputs`, and a program or the `number` of a Python call: binds it to the buffers."""
    opened, told = _OPENED[-1], request.told
    program: AnyProgram = built_call(told["number"]) if "number" in told else decoded(request)
    options = RunOptions(outputs=tuple(told["outputs"]))
    opened.calls[told["name"]] = opened.bindings.enter_context(opened.executor.bind(program, opened.tensors, options))
    return Frame({})


def launch(request: Frame) -> Frame:
    """`name`: launches it once and waits for its results."""
    _OPENED[-1].calls[request.told["name"]].enqueue()
    return collect(request)


def stopwatch(request: Frame) -> Frame:
    """`name` -> `method`, `flush`: captures what later requests replay."""
    opened, name = _OPENED[-1], request.told["name"]
    made = opened.bindings.enter_context(opened.executor.stopwatch(opened.calls[name]))
    opened.watches[name] = made
    _wait(opened)
    return Frame({"method": str(made.method), "flush": str(made.flush)})


def samples(request: Frame) -> Frame:
    """`name`, `temperature`, `launches`, `count` (0: a single sample) -> microseconds of each sample."""
    told = request.told
    watch = _OPENED[-1].watches[told["name"]]
    if told["count"]:
        taken = [*watch.samples(told["temperature"], told["launches"], told["count"])]
    else:
        taken = [watch.sample(told["temperature"], told["launches"])]
    return Frame({"samples_us": [float(one) for one in taken]})


def collect(request: Frame) -> Frame:
    """`name`: writes its results to their buffers, and waits for that."""
    _OPENED[-1].calls[request.told["name"]].collect()
    _wait(_OPENED[-1])
    return Frame({})


def close(request: Frame) -> Frame:
    """Releases the buffers and the calls bound to them."""
    while _OPENED:
        _OPENED.pop().bindings.close()
    return Frame({})


def _wait(opened: _Opened) -> None:
    import torch

    if torch.device(opened.executor.device).type == "cuda":
        # The judge reads from another process, on its own stream.
        torch.cuda.synchronize()
