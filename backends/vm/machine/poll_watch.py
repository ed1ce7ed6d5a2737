"""Tells which warps poll memory in vain: in one place they have read the same bytes twice, and these have not changed.

A random schedule seldom picks such warps, because in a chain of CTAs that wait for each other hardly anyone can move.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backends.vm.memory.pieces import read_pieces

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Look:
    """A strong access of `size` bytes at `offsets` of a memory, of which it has read `values`."""

    data: Bytes
    offsets: Addresses
    size: int
    values: bytes

    @property
    def still_holds(self) -> bool:
        """Whether the same access would read the same."""
        if self.offsets.size == 1:
            return self.data[(at := int(self.offsets[0])) : at + self.size].tobytes() == self.values
        return read_pieces(self.data, self.offsets, self.size).tobytes() == self.values

    def equals(self, other: Look) -> bool:
        """Whether two accesses read the same values in the same place."""
        same = self.data is other.data and self.values == other.values
        return same and self.offsets.tobytes() == other.offsets.tobytes()


@dataclass(slots=True)
class PollWatch:
    """What a warp has polled: `known` by basic block, since it last saw something new or did something that others can
    notice. `seen`: in the running block. `repeats`: the last block that polls has read what it read before. `events`:
    the engine's count up to which it knows whether the warp has `acted` since then. `vain_at`: the
    count at which it was found to poll in vain."""

    known: dict[int, list[Look]] = field(default_factory=dict[int, list[Look]])
    seen: list[Look] = field(default_factory=list[Look])
    repeats: bool = False
    events: int = 0
    acted: bool = False
    vain_at: int = -1

    def begin(self, events: int) -> None:
        """A turn of the warp begins: what has happened in between was done by others."""
        self.events = events

    def end(self, events: int) -> None:
        """The turn ends."""
        self.acted |= events != self.events

    def note(self, data: Bytes, offsets: Addresses, values: Bytes) -> None:
        """A strong access has read `values` [n, size] at `offsets` [n] of `data`."""
        self.seen.append(Look(data, offsets, values.shape[1], values.tobytes()))

    def after(self, block: int | None, events: int) -> None:
        """The warp has run `block`, which polls; None: another one."""
        if block is None:
            self.seen.clear()
            return
        self.end(events)
        if self.acted:
            self.known.clear()
        seen, self.seen = self.seen, list[Look]()
        self.events, self.acted = events, False
        known = self.known.get(block)
        self.vain_at = -1
        self.repeats = known is not None and len(known) == len(seen) > 0 and all(map(Look.equals, seen, known))
        if known is not None and not self.repeats:
            self.known.clear()
        self.known[block] = seen

    def in_vain(self, events: int) -> bool:
        """Whether another round would read the same. `events`: the engine's count; while it stays, memory does."""
        if self.vain_at == events:
            return True
        vain = (
            self.repeats and not self.acted and all(look.still_holds for looks in self.known.values() for look in looks)
        )
        self.vain_at = events if vain else -1
        return vain
