"""Flat memories: global buffers between unmapped gaps, constant and parameter space, and per-thread local memory."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]

SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
PARAM_WINDOW = 3 << 56
WINDOW_SHIFT = 56
FIRST_ADDRESS = 0x7F40_0000_0000
GAP = 1 << 20
"""Unmapped bytes between buffers that the machine places itself: an overrun meets nothing."""


@dataclass(slots=True, eq=False)
class Buffer:
    """A named stretch of global memory; `data` is the host's own memory, uint8 [size].

    `written` says of each byte whether anything has been stored there. None: all of it holds what the host put there.
    """

    name: str
    base: int
    data: Bytes
    writable: bool = True
    written: npt.NDArray[np.bool_] | None = None

    @property
    def end(self) -> int:
        """The first address after the buffer."""
        return self.base + self.data.size

    def undefine(self) -> None:
        """From now on its bytes mean nothing until they are written: it is an output or a workspace."""
        self.written = np.zeros(self.data.size, np.bool_)

    def check_written(self, offsets: Addresses, size: int, access: str, *, by_lane: bool = True) -> None:
        """Fault if one of `size` bytes at each of `offsets` [n] was never written."""
        if self.written is None:
            return
        whole = self.written[offsets[:, None] + np.arange(size)]
        if np.count_nonzero(whole) < whole.size:
            lane, byte = np.argwhere(~whole)[0].tolist()
            at = int(offsets[lane]) + byte
            raise Fault("uninitialised-global", f"{access} takes byte {at} of `{self.name}`, which was never written: "
                        "it is an output or a workspace, and holds nothing until the kernel stores it",
                        lane=lane if by_lane else None, address=self.base + at)  # fmt: skip

    def mark_written(self, offsets: Addresses, size: int) -> None:
        """`size` bytes at each of `offsets` [n] have been written."""
        if self.written is not None:
            self.written[offsets[:, None] + np.arange(size)] = True


def check_alignment(addresses: Addresses, size: int, access: str) -> None:
    """Fault unless every address is a multiple of the access `size` in bytes (PTX ISA 6.4.1)."""
    if size > 1 and np.count_nonzero(addresses & (size - 1)):
        lane = int(np.flatnonzero(addresses & (size - 1))[0])
        raise Fault("misaligned", f"{access} of {size} bytes at an address that is not a multiple of {size}", lane=lane,
                    address=int(addresses[lane]))  # fmt: skip


class GlobalMemory:
    """Buffers by address. An access outside of every buffer is a fault that names the nearest one."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._buffers: list[Buffer] = []
        self._next = FIRST_ADDRESS

    def add(self, name: str, data: Bytes, base: int | None = None, *, writable: bool = True) -> Buffer:
        """Map `data` (uint8, contiguous, not copied) at `base`, or at a fresh 1 MiB-aligned address."""
        if base is None:
            base = self._next
            self._next += (data.size + 2 * GAP - 1) // GAP * GAP
        buffer = Buffer(name, base, data, writable)
        index = bisect.bisect(self._bases, base)
        self._bases.insert(index, base)
        self._buffers.insert(index, buffer)
        return buffer

    def place_above(self, address: int) -> None:
        """Place buffers from `address` on, clear of those mapped at real addresses."""
        self._next = max(self._next, address)

    def remove(self, buffer: Buffer) -> None:
        """Unmap a buffer."""
        index = self._buffers.index(buffer)
        del self._bases[index], self._buffers[index]

    def find(self, address: int, size: int, access: str) -> Buffer:
        """The buffer that holds bytes address .. address + size - 1."""
        index = bisect.bisect(self._bases, address) - 1
        if index >= 0 and address + size <= self._buffers[index].end:
            return self._buffers[index]
        raise Fault("out-of-bounds", f"{access} of {size} bytes is outside of every buffer{self._nearest(address)}",
                    address=address)  # fmt: skip

    def _nearest(self, address: int) -> str:
        if not self._buffers:
            return ""

        def gap(buffer: Buffer) -> int:
            return min(abs(address - buffer.base), abs(address - buffer.end))

        near = min(self._buffers, key=gap)
        side = "after the end" if address >= near.end - 16 else "before the start"
        return f"; the nearest is `{near.name}` ({near.data.size} bytes), {gap(near)} bytes {side}"

    def holding(self, address: int) -> Buffer | None:
        """The buffer that `address` lies in, or None."""
        index = bisect.bisect(self._bases, address) - 1
        return self._buffers[index] if index >= 0 and address < self._buffers[index].end else None

    def find_span(self, addresses: Addresses, size: int, access: str, *, writing: bool = False) -> Buffer:
        """The one buffer that holds `size` bytes at every address (a tensor lies in one allocation)."""
        low, high = int(addresses.min()), int(addresses.max())
        buffer = self.find(low, size, access)
        if high + size > buffer.end:
            self.find(int(addresses[addresses + size > buffer.end].min()), size, f"{access} beyond `{buffer.name}`")
            raise Fault("out-of-bounds", f"{access} runs from `{buffer.name}` into another buffer", address=high)
        if writing and not buffer.writable:
            raise Fault("read-only", f"{access} into `{buffer.name}`, which is an input of the kernel", address=low)
        return buffer

    def load(self, addresses: Addresses, size: int) -> Bytes:
        """Bytes at each address: uint8 [n, size]. Lanes may lie in different buffers."""
        buffer, offsets = self.locate(addresses, size, "load")
        if buffer is None:
            return np.stack([self.load(addresses[i : i + 1], size)[0] for i in range(addresses.size)])
        buffer.check_written(offsets, size, "this load")
        return buffer.data[offsets[:, None] + np.arange(size)]

    def store(self, addresses: Addresses, values: Bytes) -> None:
        """Write uint8 [n, size] at each address; where lanes collide the highest lane wins."""
        size = values.shape[1]
        buffer, offsets = self.locate(addresses, size, "store")
        if buffer is None:
            for lane in range(addresses.size):
                try:
                    self.store(addresses[lane : lane + 1], values[lane : lane + 1])
                except Fault as fault:
                    fault.lane = lane
                    raise
            return
        if not buffer.writable:
            raise Fault("read-only", f"store to `{buffer.name}`, which is an input of the kernel", lane=0,
                        address=int(addresses[0]))  # fmt: skip
        buffer.data[offsets[:, None] + np.arange(size)] = values
        buffer.mark_written(offsets, size)

    def locate(self, addresses: Addresses, size: int, access: str) -> tuple[Buffer | None, Addresses]:
        """The buffer that holds `size` bytes at every address, and offsets in it.

        None and the addresses if they lie in several buffers. Fault if one lies in none, or is not aligned to `size`.
        """
        check_alignment(addresses, size, access)
        low, high = int(addresses.min()), int(addresses.max())
        index = bisect.bisect(self._bases, low) - 1
        if index >= 0 and high + size <= self._buffers[index].end:
            return self._buffers[index], addresses - self._bases[index]
        for lane, address in enumerate(addresses.tolist()):
            try:
                self.find(address, size, access)
            except Fault as fault:
                fault.lane = lane
                raise
        return None, addresses
