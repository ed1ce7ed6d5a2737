"""Global memory: buffers between unmapped gaps, the windows of generic addresses, and the heap of kernels."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault, counted, report
from backends.vm.memory.access_code import MemoryWords, places_change
from backends.vm.memory.definedness import DEFINED, HIDDEN, Mask, Origin, Sources
from backends.vm.memory.pieces import read_pieces
from backends.vm.numpy_calls import count_nonzero

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]

SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
PARAM_WINDOW = 3 << 56
WINDOW_SHIFT = 56
FIRST_ADDRESS = 0x7F40_0000_0000
GAP = 1 << 20
"""Unmapped bytes between buffers that the machine places itself, so that an overrun hits no other buffer."""
NULL_BYTES = 1 << 16
"""Addresses below this come from a null pointer."""
FAR = 1 << 40
"""An address at this many bytes from every buffer was computed from none of theirs, so a message states it. Others are
told by their buffer, because it lies elsewhere in each run."""

HEAP_BYTES = 8 << 20
"""Size of the kernels' heap, unless the host asks for another (CUDA programming guide, heap memory allocation)."""


@dataclass(slots=True, eq=False)
class Buffer:
    """A named range of global memory; `data` is the host's own memory, uint8 [size].

    `state` uint8 [size] is the state of each byte (NEVER, DEFINED, HIDDEN). None: all bytes are defined. `scratch`: a
    workspace, whose contents nobody reads after a launch. `place`: the last one made for machine code.
    """

    name: str
    base: int
    data: Bytes
    writable: bool = True
    state: npt.NDArray[np.uint8] | None = None
    scratch: bool = False
    sources: Sources = field(default_factory=Sources)
    place: MemoryWords | None = None

    @property
    def end(self) -> int:
        """The first address after the buffer."""
        return self.base + self.data.size

    def forget(self, *, scratch: bool) -> None:
        """Mark all bytes as never written: the buffer is a workspace (`scratch`) or an output."""
        places_change()
        self.state = np.zeros(self.data.size, np.uint8)
        self.scratch = scratch

    def missing(self, offsets: Addresses, size: int) -> Mask | None:
        """Which of `size` bytes at each of `offsets` [n] are undefined, bool [n, size]. None if none are."""
        if self.state is None:
            return None
        defined = read_pieces(self.state, offsets, size) == DEFINED
        return None if count_nonzero(defined) == defined.size else ~defined

    def origin_of(self, offset: int, line: int) -> Origin:
        """The origin of the undefined byte at `offset`, which PTX `line` reads."""
        known = self.sources.by_unit.get(offset >> 2) if self.state is not None and self.state[offset] else None
        if known is None:
            known = Origin("uninitialised-global", f"byte {offset} of `{self.name}`, which was not yet written: it is "
                           "an output or a workspace, and holds nothing until the kernel stores it")  # fmt: skip
        return known.read_at(line)

    def check_defined(self, offsets: Addresses, size: int, access: str) -> None:
        """Report a Fault if `access`, which depends on `size` bytes at each of `offsets` [n], finds one undefined."""
        missing = self.missing(offsets, size)
        if missing is not None:
            lane, byte = np.argwhere(missing)[0].tolist()
            at = int(offsets[lane]) + byte
            report(self.origin_of(at, 0).fault(f"{access} depends on byte {at} of `{self.name}`", lane=lane))

    def write(self, offsets: Addresses, values: Bytes) -> bool:
        """Write uint8 [n, size] at `offsets` [n]. Returns whether a byte has changed, or has become defined."""
        index = offsets[:, None] + np.arange(values.shape[1])
        changed = self.data[index].tobytes() != values.tobytes()
        self.data[index] = values
        if self.state is not None:
            changed = changed or bool((self.state[index] != DEFINED).any())
            self.state[index] = DEFINED
        return changed

    def mark_written(self, offsets: Addresses, size: int) -> None:
        """Mark `size` bytes at each of `offsets` [n] as defined."""
        if self.state is not None:
            self.state[offsets[:, None] + np.arange(size)] = DEFINED

    def undefine(self, offsets: Addresses, missing: Mask, origin: Origin) -> None:
        """Mark the bytes `missing` [n, size] at `offsets` [n] undefined: a value of `origin` was stored there."""
        if self.state is None:
            places_change()
            self.state = np.ones(self.data.size, np.uint8)
        at = (offsets[:, None] + np.arange(missing.shape[1]))[missing]
        self.state[at] = HIDDEN
        self.sources.note(at >> 2, origin)

    def outcome(self) -> Iterator[Fault]:
        """The faults at the end of a launch: one per PTX line that stored an undefined value that the host can see."""
        if self.scratch or self.state is None or not self.sources.by_unit:
            return
        left = np.zeros(-(-self.state.size // 4) * 4, np.bool_)
        np.equal(self.state, HIDDEN, out=left[: self.state.size])
        known = self.sources.by_unit
        units = np.fromiter(known, np.int64, len(known))
        found: dict[int, tuple[int, Origin]] = {}
        for unit in np.sort(units[left.view(np.uint32)[units] != 0]).tolist():
            origin = known[unit]
            if origin.stored not in found:
                found[origin.stored] = 4 * unit + int(left[4 * unit :][:4].argmax()), origin
        if not found and count_nonzero(left):
            found[0] = int(left.argmax()), self.origin_of(int(left.argmax()), 0)
        for stored, (at, origin) in found.items():
            what = f"byte {at} of `{self.name}`, which PTX line {stored} stored, is part of the result"
            fault = origin.fault(what)
            fault.line, fault.where = stored, origin.by
            yield fault


def check_alignment(addresses: Addresses, size: int, access: str, memory: GlobalMemory | None = None) -> None:
    """Raise Fault unless every address is a multiple of the access `size` in bytes (PTX ISA 6.4.1).

    `memory`: where the addresses lie, None if not in global memory.
    """
    if size > 1 and count_nonzero(addresses & (size - 1)):
        lane = int(np.flatnonzero(addresses & (size - 1))[0])
        address = int(addresses[lane])
        spot, told = ("", address) if memory is None else (memory.spot(address), None)
        raise Fault("misaligned", f"{access} of {size} bytes at an address that is not a multiple of {size}{spot}",
                    lane=lane, address=told)  # fmt: skip


class GlobalMemory:
    """Buffers by address. An access outside of every buffer is a fault that names the nearest one.

    `loaded_by_map`: the buffer that tensor loads have read, by the base address of their map.
    """

    def __init__(self) -> None:
        self.loaded_by_map: dict[int, Buffer] = {}
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

    @property
    def buffers(self) -> Sequence[Buffer]:
        """The mapped buffers, by address."""
        return self._buffers

    def place_above(self, address: int) -> None:
        """Place new buffers from `address` on, clear of those mapped at real addresses."""
        self._next = max(self._next, address)

    def remove(self, buffer: Buffer) -> None:
        """Unmap a buffer."""
        places_change()
        index = self._buffers.index(buffer)
        del self._bases[index], self._buffers[index]
        self.loaded_by_map.clear()

    def find(self, address: int, size: int, access: str, lane: int | None = None) -> Buffer:
        """The buffer that holds bytes address .. address + size - 1. `lane`: the lane of the warp that asks for it."""
        index = bisect.bisect(self._bases, address) - 1
        if index >= 0 and address + size <= self._buffers[index].end:
            return self._buffers[index]
        where = f"outside of every buffer{self.nearest(address, size)}"
        raise Fault("out-of-bounds", f"{access} of {counted(size, 'byte')} is {where}", lane=lane)

    def nearest(self, address: int, size: int = 1) -> str:
        """The end of a sentence about `size` bytes that no buffer holds: names the buffer that holds the first of them,
        or the nearest."""
        if address < NULL_BYTES:
            behind = f"{address:#x} is {counted(address, 'byte')} behind a null pointer"
            return f"; {behind}" if address else "; a null pointer"
        if (first := self.holding(address)) is not None:
            held, past = counted(first.data.size, "byte"), counted(address + size - first.end, "byte")
            return f"; it begins at byte {address - first.base} of `{first.name}` ({held}) and runs {past} past its end"

        def gap(buffer: Buffer) -> int:
            return min(abs(address - buffer.base), abs(address - buffer.end))

        near = min(self._buffers, key=gap, default=None)
        if near is None or gap(near) >= FAR:
            return f"; the address is {address:#x}"
        side = "after the end" if address >= near.end else "before the start"
        sizes = counted(near.data.size, "byte"), counted(gap(near), "byte")
        return f"; the nearest is `{near.name}` ({sizes[0]}), {sizes[1]} {side}"

    def outcome(self) -> Iterator[Fault]:
        """The faults at the end of a launch for undefined values where the host can see them."""
        for buffer in self._buffers:
            yield from buffer.outcome()

    def holding(self, address: int) -> Buffer | None:
        """The buffer that contains `address`, or None."""
        index = bisect.bisect(self._bases, address) - 1
        return self._buffers[index] if index >= 0 and address < self._buffers[index].end else None

    def spot(self, address: int) -> str:
        """The end " (byte 6 of `x`)" of a sentence about `address`, which may be in no buffer."""
        buffer = self.holding(address)
        if buffer is None:
            return f" ({self.nearest(address).removeprefix('; ')})"
        return f" (byte {address - buffer.base} of `{buffer.name}`)"

    def find_span(self, addresses: Addresses, size: int, access: str, *, writing: bool = False) -> Buffer:
        """The one buffer that holds `size` bytes at every address (a tensor lies in one allocation)."""
        low, high = int(addresses.min()), int(addresses.max())
        buffer = self.find(low, size, access)
        if high + size > buffer.end:
            self.find(int(addresses[addresses + size > buffer.end].min()), size, f"{access} beyond `{buffer.name}`")
            raise Fault("out-of-bounds", f"{access} runs from `{buffer.name}` into another buffer")
        if writing and not buffer.writable:
            raise Fault("read-only", f"{access} into `{buffer.name}`, which is an input of the kernel"
                        f"{self.spot(low)}")  # fmt: skip
        return buffer

    def load(self, addresses: Addresses, size: int) -> Bytes:
        """Bytes at each address: uint8 [n, size]. Lanes may lie in different buffers."""
        buffer, offsets = self.locate(addresses, size, "load")
        if buffer is None:
            return np.stack([self.load(addresses[i : i + 1], size)[0] for i in range(addresses.size)])
        buffer.check_defined(offsets, size, "this load")
        return read_pieces(buffer.data, offsets, size)

    def store(self, addresses: Addresses, values: Bytes) -> bool:
        """Write uint8 [n, size] at each address; where lanes collide the highest lane wins. Returns whether a byte has
        changed, or has become defined."""
        buffer, offsets = self.locate(addresses, values.shape[1], "store")
        if buffer is None:
            changed = False
            for lane in range(addresses.size):
                try:
                    changed |= self.store(addresses[lane : lane + 1], values[lane : lane + 1])
                except Fault as fault:
                    fault.lane = lane
                    raise
            return changed
        self.check_writable(buffer, addresses)
        return buffer.write(offsets, values)

    def check_writable(self, buffer: Buffer, addresses: Addresses) -> None:
        """Raise Fault if the kernel must not write `buffer`, where `addresses` lie."""
        if not buffer.writable:
            raise Fault("read-only", f"store to `{buffer.name}`, which is an input of the kernel"
                        f"{self.spot(int(addresses[0]))}", lane=0)  # fmt: skip

    def locate(self, addresses: Addresses, size: int, access: str) -> tuple[Buffer | None, Addresses]:
        """The buffer that holds `size` bytes at every address, and the offsets in it.

        Returns None and the addresses if they lie in several buffers. Raises Fault if one lies in none, or is not
        aligned to `size`.
        """
        check_alignment(addresses, size, access, self)
        if addresses.size == 1:
            low = high = int(addresses[0])
        else:
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


class DeviceHeap:
    """Memory that kernels allocate by malloc and free: lasts as long as the global memory, undefined until written.

    An address is never reused, so that a use after free hits no buffer.
    """

    def __init__(self, memory: GlobalMemory) -> None:
        self._memory = memory
        self._held: dict[int, Buffer] = {}
        self._left = HEAP_BYTES

    def allocate(self, size: int, name: str) -> int:
        """The address of `size` fresh bytes; 0 for no bytes, or if the heap has too few left."""
        if not 0 < size <= self._left:
            return 0
        self._left -= size
        buffer = self._memory.add(name, np.zeros(size, np.uint8))
        buffer.forget(scratch=True)
        self._held[buffer.base] = buffer
        return buffer.base

    def free(self, address: int) -> bool:
        """Free what `allocate` returned; 0 is allowed and frees nothing. False for any other address."""
        if not address:
            return True
        buffer = self._held.pop(address, None)
        if buffer is None:
            return False
        self._left += buffer.data.size
        self._memory.remove(buffer)
        return True
