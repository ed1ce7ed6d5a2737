"""The state of the CUDA runtime that a host function sees during one call, and the launches that it has made."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.vm.host.device import Device
from backends.vm.host.host_error import HostError
from backends.vm.load import LoadedModule
from backends.vm.machine.machine import Machine
from backends.vm.machine.special import Dim3
from backends.vm.memory.global_memory import Buffer

SUCCESS, INVALID_VALUE, UNKNOWN = 0, 1, 999
FIRST_KERNEL, KERNEL_STEP = 0xF000_0000, 16
LIBRARY = 0xC0DE_0000
DEFAULT_STREAMS = (0, 1, 2)
GIVEN_STREAM = 0x57_0000
ALLOCATION_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch as the host function asked for it; sizes in threads, CTAs and bytes, `attributes` by CUDA's number."""

    entry: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem: int
    stream: int
    attributes: dict[int, tuple[int, ...]]
    params: tuple[bytes, ...]


class Runtime:
    """One call's worth of CUDA runtime: kernels by handle, allocations, streams, events, and what has gone wrong.

    `last_in`: the stream of the latest launch, None once something else has waited for that launch to end.
    """

    def __init__(self, machine: Machine, module: LoadedModule, target: str) -> None:
        self.machine = machine
        self.module = module
        self.device = Device(target)
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
        """A handle for a stream or event that no other object of this call has."""
        self._next_handle += KERNEL_STEP
        return self._next_handle

    def kernel_handle(self, entry: str) -> int:
        """The handle of an entry of the module; LaunchError if the PTX lacks it."""
        self.module.entry(entry)
        if entry not in self._kernels:
            self._kernels.append(entry)
        return FIRST_KERNEL + KERNEL_STEP * self._kernels.index(entry)

    def kernel_name(self, handle: int) -> str:
        """The entry behind a handle; HostError for a number that was never handed out."""
        index, rest = divmod(handle - FIRST_KERNEL, KERNEL_STEP)
        if rest or not 0 <= index < len(self._kernels):
            raise HostError(f"the host function uses {handle:#x} as a kernel, which no cudaLibraryGetKernel returned")
        return self._kernels[index]

    def check_stream(self, handle: int, what: str) -> None:
        """HostError unless `handle` is a stream of this call."""
        if handle not in self.streams:
            raise HostError(f"{what} names the stream {handle:#x}, which was neither passed nor created")

    def allocate(self, size: int) -> int:
        """Fresh memory of `size` bytes, all 0xFF, at its real address and on the machine's map."""
        data = aligned_memory(size)
        address = int(data.ctypes.data)
        name = f"allocation {len(self._allocations)} of the host function"
        self._allocations[address] = self.machine.memory.add(name, data, base=address)
        return address

    def free(self, address: int) -> None:
        """Give back what `allocate` returned; HostError for any other address."""
        if address == 0:
            return
        if address not in self._allocations:
            raise HostError(f"the host function frees {address:#x}, which it has not allocated or has freed before")
        self.machine.memory.remove(self._allocations.pop(address))
        self.last_in = None

    def leaked(self) -> str | None:
        """A sentence on memory that the call allocated and did not free; None if there is none."""
        sizes = [str(buffer.data.size) for buffer in self._allocations.values()]
        return (
            f"the host function returned without freeing {' and '.join(sizes)} bytes that it allocated"
            if sizes
            else None
        )


def aligned_memory(size: int) -> npt.NDArray[np.uint8]:
    """`size` bytes, all 0xFF, at a multiple of ALLOCATION_ALIGNMENT."""
    raw = np.full(size + ALLOCATION_ALIGNMENT, 0xFF, np.uint8)
    start = -raw.ctypes.data % ALLOCATION_ALIGNMENT
    return raw[start : start + size]


def put_u64(address: int, value: int) -> None:
    """Write an 8-byte result to where the host function wants it."""
    ctypes.c_uint64.from_address(address).value = value


def put_s32(address: int, value: int) -> None:
    """Write a 4-byte result."""
    ctypes.c_int32.from_address(address).value = value
