"""The CUDA runtime that a host function sees: its device, its state during one call, and the symbols that it answers.

The device has the attributes of a B200 (sm_100a) or an H200 (sm_90a), numbered as in cudaDeviceAttr (CUDA runtime
API). Values common to both come from facts.md 0.1 and the CUDA programming guide's table of compute capabilities 9.0
and 10.0. By default the device has as many SMs as the full product.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Concatenate, Final, ParamSpec

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault, LaunchError
from backends.vm.host.abi import HostError
from backends.vm.host.object_file import PROCESS_SYMBOLS, bind_symbols
from backends.vm.load import LoadedModule
from backends.vm.machine.machine import Machine
from backends.vm.machine.special import SM_CTAS, SM_THREADS, Dim3, LaunchShape, ctas_of_sm
from backends.vm.memory.global_memory import Buffer
from backends.vm.memory.shared import MAX_DYNAMIC, RESERVED, SM_SHARED

_COMMON: Final[Mapping[int, int]] = {
    1: 1024,  # MaxThreadsPerBlock
    2: 1024,  # MaxBlockDimX
    3: 1024,  # MaxBlockDimY
    4: 64,  # MaxBlockDimZ
    5: 2**31 - 1,  # MaxGridDimX
    6: 65535,  # MaxGridDimY
    7: 65535,  # MaxGridDimZ
    8: 49152,  # MaxSharedMemoryPerBlock
    9: 65536,  # TotalConstantMemory
    10: 32,  # WarpSize
    12: 65536,  # MaxRegistersPerBlock
    19: 0,  # CanMapHostMemory of an integrated device: Integrated
    31: 1,  # ConcurrentKernels
    39: SM_THREADS,  # MaxThreadsPerMultiProcessor
    41: 1,  # UnifiedAddressing
    81: SM_SHARED,  # MaxSharedMemoryPerMultiprocessor
    82: 65536,  # MaxRegistersPerMultiprocessor
    83: 1,  # ManagedMemory
    95: 1,  # CooperativeLaunch
    97: MAX_DYNAMIC,  # MaxSharedMemoryPerBlockOptin
    106: SM_CTAS,  # MaxBlocksPerMultiprocessor
    111: RESERVED,  # ReservedSharedMemoryPerBlock
    115: 1,  # MemoryPoolsSupported
    120: 1,  # ClusterLaunch
}
_SM_COUNT: Final = 16
_BY_TARGET: Final[Mapping[str, Mapping[int, int]]] = {
    "sm_90a": {_SM_COUNT: 132, 38: 62_914_560, 75: 9, 76: 0},  # MultiProcessorCount, L2CacheSize, ComputeCapability
    "sm_100a": {_SM_COUNT: 148, 38: 132_644_864, 75: 10, 76: 0},
}


class HostedDevice:
    """One GPU of `target` with `sm_count` SMs (None: as many as the full product)."""

    def __init__(self, target: str, sm_count: int | None = None) -> None:
        if target not in _BY_TARGET:
            raise HostError(f"there is no device of target {target!r}; known are {', '.join(_BY_TARGET)}")
        self.target = target
        self._attributes = {**_COMMON, **_BY_TARGET[target]}
        if sm_count is not None:
            self._attributes[_SM_COUNT] = sm_count

    def attribute(self, number: int) -> int:
        """The value of cudaDeviceAttr `number`. HostError for one that this device does not have."""
        if number not in self._attributes:
            raise HostError(f"the host function asks for device attribute {number} (cudaDeviceAttr), unknown to the VM")
        return self._attributes[number]

    def check_cooperative(self, entry: str, shape: LaunchShape, static_smem: int) -> None:
        """LaunchError for a cooperative launch of more CTAs than fit on the device at once."""
        room = ctas_of_sm(shape.threads, static_smem + shape.dynamic_smem) * self.attribute(_SM_COUNT)
        ctas = shape.grid[0] * shape.grid[1] * shape.grid[2]
        if ctas > room:
            raise LaunchError(
                f"{entry}: a cooperative launch of {ctas} CTAs, of which only {room} fit on the device at once",
                COOPERATIVE_TOO_LARGE,
            )


# The state of the CUDA runtime during one call of a host function, and the launches that the call has made.


SUCCESS, INVALID_VALUE, COOPERATIVE_TOO_LARGE, UNKNOWN = 0, 1, 720, 999
FIRST_KERNEL, KERNEL_STEP = 0xF000_0000, 16
LIBRARY = 0xC0DE_0000
DEFAULT_STREAMS = (0, 1, 2)
GIVEN_STREAM = 0x57_0000
ALLOCATION_ALIGNMENT = 512
PROCESS_END = 1 << 48
"""No x86-64 or AArch64 process has memory at this address or above."""


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch as requested. Sizes are in threads, CTAs and bytes; `attributes` by cudaLaunchAttributeID."""

    entry: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem: int
    stream: int
    attributes: dict[int, tuple[int, ...]]
    params: tuple[bytes, ...]


class Runtime:
    """The CUDA runtime during one call: kernels by handle, allocations, streams, events, and errors.

    `last_in`: the stream of the latest launch, None once later work has waited for that launch to end.
    """

    def __init__(self, machine: Machine, module: LoadedModule, target: str, sm_count: int | None = None) -> None:
        self.machine = machine
        self.module = module
        self.device = HostedDevice(target, sm_count)
        self.launches: list[LaunchRecord] = []
        self.streams: set[int] = {*DEFAULT_STREAMS, GIVEN_STREAM}
        self.events: set[int] = set()
        self.broken: BaseException | None = None
        self.refusal: str | None = None
        self.dynamic_smem_limit: dict[str, int] = {}
        self.large_clusters: set[str] = set()
        self.last_in: int | None = None
        self._kernels: list[str] = []
        self._allocations: dict[int, Buffer] = {}
        self._next_handle = GIVEN_STREAM

    def new_handle(self) -> int:
        """A handle for a stream or event, unique within this call."""
        self._next_handle += KERNEL_STEP
        return self._next_handle

    def kernel_handle(self, entry: str) -> int:
        """The handle of an entry of the module. LaunchError if the PTX lacks it."""
        self.module.entry(entry)
        if entry not in self._kernels:
            self._kernels.append(entry)
        return FIRST_KERNEL + KERNEL_STEP * self._kernels.index(entry)

    def kernel_name(self, handle: int) -> str:
        """The entry of a handle. HostError for a number that was never handed out."""
        index, rest = divmod(handle - FIRST_KERNEL, KERNEL_STEP)
        if rest or not 0 <= index < len(self._kernels):
            raise HostError(f"the host function uses {handle:#x} as a kernel, which no cudaLibraryGetKernel returned")
        return self._kernels[index]

    def check_stream(self, handle: int, what: str) -> None:
        """HostError unless `handle` is a stream of this call."""
        if handle not in self.streams:
            raise HostError(f"{what} names the stream {handle:#x}, which was neither passed nor created")

    def allocate(self, size: int) -> int:
        """Allocates `size` bytes, filled with 0xFF, and maps them on the machine at their real address."""
        data = aligned_memory(size)
        address = int(data.ctypes.data)
        name = f"allocation {len(self._allocations)} of the host function"
        self._allocations[address] = self.machine.memory.add(name, data, base=address)
        return address

    def free(self, address: int) -> None:
        """Frees what `allocate` returned. HostError for any other address."""
        if address == 0:
            return
        if address not in self._allocations:
            raise HostError(f"the host function frees {address:#x}, which it has not allocated or has freed before")
        self.machine.memory.remove(self._allocations.pop(address))
        self.last_in = None

    def leaked(self) -> str | None:
        """A sentence about memory that the call allocated and did not free, None if it freed everything."""
        sizes = [str(buffer.data.size) for buffer in self._allocations.values()]
        return (
            f"the host function returned without freeing {' and '.join(sizes)} bytes that it allocated"
            if sizes
            else None
        )


def aligned_memory(size: int) -> npt.NDArray[np.uint8]:
    """`size` bytes of 0xFF, aligned to ALLOCATION_ALIGNMENT."""
    raw = np.full(size + ALLOCATION_ALIGNMENT, 0xFF, np.uint8)
    start = -raw.ctypes.data % ALLOCATION_ALIGNMENT
    return raw[start : start + size]


def put_u64(address: int, value: int) -> None:
    """Write an 8-byte result to the host function's memory."""
    ctypes.c_uint64.from_address(address).value = value


def put_s32(address: int, value: int) -> None:
    """Write a 4-byte result to the host function's memory."""
    ctypes.c_int32.from_address(address).value = value


# The runtime symbols that a host object may leave undefined. Each is bound to one C callback per process.
# A callback finds the Runtime of the call in progress on its thread. An exception must not unwind through compiled
# frames: Runtime.broken keeps it, the host function gets an error code, and the caller raises it afterwards.


POINTER, SIZE, INT, UINT, STRING = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p
CType = type[ctypes.c_uint64 | ctypes.c_size_t | ctypes.c_int | ctypes.c_uint | ctypes.c_char_p]
P = ParamSpec("P")
Answer = Callable[Concatenate[Runtime, P], int | None]


@dataclass(frozen=True, slots=True)
class RuntimeSymbol:
    """A C function: result and argument types, and the Python function that answers it (None means success)."""

    name: str
    result: CType | None
    arguments: tuple[CType, ...]
    answer: Callable[..., int | None]


SYMBOLS: dict[str, RuntimeSymbol] = {}
_calls = threading.local()


def answers(name: str, *arguments: CType, result: CType | None = INT) -> Callable[[Answer[P]], Answer[P]]:
    """Register the decorated function(runtime, *arguments) as the implementation of the C symbol `name`."""

    def register(answer: Answer[P]) -> Answer[P]:
        SYMBOLS[name] = RuntimeSymbol(name, result, arguments, answer)
        return answer

    return register


@contextmanager
def answering(runtime: Runtime) -> Iterator[None]:
    """Let `runtime` answer the runtime calls of compiled code on this thread."""
    before: Runtime | None = getattr(_calls, "runtime", None)
    _calls.runtime = runtime
    try:
        yield
    finally:
        _calls.runtime = before


@cache
def bind_runtime() -> tuple[object, ...]:
    """Bind every symbol, once per process. The callbacks stay alive because linked code may call them at any time."""
    callbacks = {symbol.name: _callback(symbol) for symbol in SYMBOLS.values()}
    library = ctypes.CDLL(None)
    functions = {**callbacks, **{name: getattr(library, name) for name in sorted(PROCESS_SYMBOLS)}}
    bind_symbols((name, ctypes.cast(call, ctypes.c_void_p).value or 0) for name, call in functions.items())
    return tuple(functions.values())


def _callback(symbol: RuntimeSymbol) -> ctypes._CFunctionType:  # pyright: ignore[reportPrivateUsage]
    failure = None if symbol.result is None else 0 if symbol.result is POINTER else UNKNOWN

    def call(*values: int | bytes | None) -> int | None:
        runtime: Runtime | None = getattr(_calls, "runtime", None)
        if runtime is None or runtime.broken is not None:
            return failure
        try:
            answer = symbol.answer(runtime, *values)
        except BaseException as error:
            if isinstance(error, Fault) and not error.where:
                error.kernel, error.where = error.kernel or symbol.name, "host function"
            runtime.broken = error
            return failure
        return None if symbol.result is None else answer or 0

    return ctypes.CFUNCTYPE(symbol.result, *symbol.arguments)(call)
