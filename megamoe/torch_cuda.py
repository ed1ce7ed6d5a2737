"""torch.cuda without a GPU: tensors requested on "cuda" lie on the host, and streams, events and properties exist.

    with megamoe.torch_cuda.on_host("sm_100a"):
        x = torch.randn(64, device="cuda")

For code that allocates, synchronises and queries properties around its kernels; megamoe's pytest plugin runs test
suites in it. Work is done immediately, in call order, which every correct use of streams permits. A graph's captured
work is done at replay. Nothing measures time: Event.elapsed_time is refused. A tensor reports `is_cuda` as true, while
its `device` stays the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from megamoe.contract.backend import UnsupportedError
from megamoe.contract.program import TARGETS
from megamoe.given.unwritten import hand_out
from megamoe.vm import begin_capture, capturing, end_capture, host_waited, submit

_NAMES = {"sm_90a": "megamoe vm, sm_90a", "sm_100a": "megamoe vm, sm_100a"}
MEMORY = 64 << 30
"""The device's memory size in bytes, which kernels use to size their workspaces."""


class HostStream:
    """A stream whose work is always complete. Its handle is that of CUDA's default stream."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device_type = 1

    def __init__(self, device: object = None, priority: int = 0, **options: object) -> None:
        self.device, self.priority = torch.device("cpu"), priority

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *error: object) -> None: ...

    def query(self) -> bool:
        """Returns True: all work is complete."""
        return True

    def synchronize(self) -> None:
        """Returns at once: nothing is outstanding."""
        host_waited()

    def wait_event(self, event: object) -> None:
        """Returns at once: the event has already happened."""
        host_waited()

    def wait_stream(self, stream: object) -> None:
        """Returns at once: the stream's work is complete."""
        host_waited()

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Returns an event that has already happened."""
        return event or HostEvent()


class HostEvent:
    """An event that happens as soon as it is recorded."""

    cuda_event = 0
    """The handle, for launches that signal an event. As in torch, it is 0 until the first record."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None: ...

    def record(self, stream: object = None) -> None:
        """Records the event, which happens at once."""
        self.cuda_event = self.cuda_event or next(_HANDLES)

    def wait(self, stream: object = None) -> None:
        """Returns at once: the event has happened."""
        host_waited()

    def synchronize(self) -> None:
        """Returns at once: the event has happened."""
        host_waited()

    def query(self) -> bool:
        """Returns True: the event has happened."""
        return True

    def elapsed_time(self, other: object) -> float:
        """Raises UnsupportedError: the machine has no clock."""
        raise UnsupportedError("the machine has no clock, so that no time passes between two events")


_HANDLES = count(16, 16)


class HostGraph:
    """A graph (torch.cuda.CUDAGraph): launches and torch's own work, repeated at each replay."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._work = list[Callable[[], object]]()

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """Work submitted from here on waits for the replay."""
        begin_capture(self._work.append)

    def capture_end(self) -> None:
        """Work submitted from here on is done immediately."""
        end_capture(self._work.append)

    def replay(self) -> None:
        """Does all captured work, in order."""
        for work in self._work:
            work()

    def reset(self) -> None:
        """Drops what was captured."""
        self._work.clear()

    def pool(self) -> tuple[int, int]:
        """A handle of the memory pool that a CUDA graph would have."""
        return 0, id(self)


@contextmanager
def captured(cuda_graph: HostGraph, *asked: object, **options: object) -> Iterator[None]:
    """Stands in for torch.cuda.graph."""
    cuda_graph.capture_begin()
    try:
        yield
    finally:
        cuda_graph.capture_end()


def _into_graph(func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A torch call during a capture. One that writes to a tensor waits for the replay; one that makes a tensor runs now
    and again at each replay."""
    name = getattr(func, "__name__", "")
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or named.get("out") is not None:
        submit(partial(func, *args, **named))
        return named.get("out", args[0])
    made = func(*args, **named)
    if isinstance(made, torch.Tensor) and not (args and made is args[0]) and made._base is None:
        submit(lambda: made.copy_(func(*args, **named)))
    return made


class HostGenerator(torch.Generator):
    """A host generator, whatever device is named."""

    def __new__(cls, device: object = None) -> HostGenerator:
        """Ignores `device`."""
        return super().__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]


class _CudaIsHost(TorchFunctionMode):
    """Replaces the device "cuda" by the CPU in every torch call."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory") and args:
            return args[0]
        if name in _WAITING:
            host_waited()
        if name == "__get__" and func == torch.Tensor.is_cuda.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return True
        named = {key: _host_device(value) for key, value in (kwargs or {}).items() if key != "pin_memory"}
        given = tuple(map(_host_device, args))
        made = _into_graph(func, given, named) if capturing() else func(*given, **named)
        # A tensor that is returned as it was passed in keeps its allocation, and autograd may keep it.
        if type(made) is torch.Tensor and name in _ALLOCATING and not any(made is one for one in given):
            _align(made)
        if type(made) is torch.Tensor and name in _EMPTY and "out" not in named:
            _hand_out(made)
        return made


_WAITING = {
    "__bool__", "__float__", "__index__", "__int__", "allclose", "cpu", "equal", "is_nonzero", "item", "numpy",
    "tolist",
}  # fmt: skip
"""Torch's functions for which the host waits for the device."""
_EMPTY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Torch's functions that leave a tensor without values."""
_ALLOCATING = {
    "arange", "as_tensor", "clone", "contiguous", "eye", "full", "full_like", "linspace", "new_full", "new_ones",
    "new_tensor", "new_zeros", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "tensor", "to", "zeros", "zeros_like", *_EMPTY,
}  # fmt: skip
ALIGNMENT = 256
"""Alignment of each allocation in bytes: cudaMalloc's minimum. Host code that makes tensor maps requires it."""


def _align(tensor: torch.Tensor) -> None:
    """Moves a tensor that has an allocation to itself to one aligned as on a device."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor._base is not None:
        return
    storage = tensor.untyped_storage()
    size, offset = storage.nbytes(), tensor.storage_offset()
    if not size or offset or tensor.data_ptr() % ALIGNMENT == 0 or type(tensor) is not torch.Tensor:
        return
    room = np.empty(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    home = torch.frombuffer(room[start : start + size], dtype=torch.uint8)
    home.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    with torch.no_grad():
        tensor.set_(home.untyped_storage(), 0, tensor.shape, tensor.stride())


def _hand_out(tensor: torch.Tensor) -> None:
    """Fills the allocation of a tensor without values so that kernels are noticed that read it before it is written."""
    if tensor.layout is torch.strided and tensor.device.type == "cpu":
        storage = tensor.untyped_storage()
        hand_out(storage.data_ptr(), storage.nbytes())


def _host_device(value: Any) -> Any:
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


@contextmanager
def on_host(target: str = "sm_100a", sm_count: int = 4) -> Iterator[None]:
    """torch.cuda of one GPU of `target` with `sm_count` SMs, backed by host memory.

    Raises UnsupportedError for a target without a machine.
    """
    if target not in TARGETS:
        raise UnsupportedError(f"there is no machine for the target {target!r}; there is {' and '.join(TARGETS)}")
    own_default = torch.set_default_device
    with ExitStack() as stack:
        for name, value in _answers(target, sm_count).items():
            stack.enter_context(patch.object(torch.cuda, name, value, create=True))
        stack.enter_context(patch.object(torch, "Generator", HostGenerator))
        stack.enter_context(patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(patch.object(torch, "set_default_device", lambda device: own_default(_host_device(device))))
        stack.enter_context(_CudaIsHost())
        yield


def _answers(target: str, sm_count: int) -> dict[str, Any]:
    """The replacements for the names in torch.cuda."""
    capability = divmod(int(target.strip("sm_a")), 10)
    properties = SimpleNamespace(
        name=_NAMES[target], major=capability[0], minor=capability[1], total_memory=MEMORY,
        multi_processor_count=sm_count, warp_size=32, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152, shared_memory_per_block_optin=232_448,
        shared_memory_per_multiprocessor=233_472, L2_cache_size=50 << 20, gcnArchName="", is_integrated=0,
        is_multi_gpu_board=0,
    )  # fmt: skip
    stream = HostStream()

    def entered(*asked: object, **options: object) -> AbstractContextManager[None]:
        return nullcontext()

    def same(value: object) -> Callable[..., Any]:
        return lambda *asked, **options: value

    return {
        "is_available": same(True),
        "is_initialized": same(True),
        "init": same(None),
        "device_count": same(1),
        "current_device": same(0),
        "set_device": same(None),
        "device": entered,
        "get_device_capability": same(capability),
        "get_device_name": same(properties.name),
        "get_device_properties": same(properties),
        "get_arch_list": same([target]),
        "is_bf16_supported": same(True),
        "synchronize": lambda *asked: host_waited(),
        "empty_cache": same(None),
        "ipc_collect": same(None),
        # Not torch.manual_seed, because it calls these two.
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "get_rng_state": lambda *asked: torch.get_rng_state(),
        "set_rng_state": lambda state, *asked: torch.set_rng_state(state),
        "memory_allocated": same(0),
        "max_memory_allocated": same(0),
        "memory_reserved": same(0),
        "reset_peak_memory_stats": same(None),
        "mem_get_info": same((MEMORY, MEMORY)),
        "current_stream": same(stream),
        "default_stream": same(stream),
        "stream": entered,
        "Stream": HostStream,
        "ExternalStream": HostStream,
        "Event": HostEvent,
        "CUDAGraph": HostGraph,
        "graph": captured,
        "graph_pool_handle": same((0, 0)),
        "is_current_stream_capturing": capturing,
    }
