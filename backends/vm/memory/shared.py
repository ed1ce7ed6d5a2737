"""Shared memory of one CTA: bytes, and for each byte or granule the state that silicon hides.

The state is whether a byte is defined (it is undefined until written, and while it holds an undefined value), for each
4-byte granule (or byte, see marks.py) who wrote last and who read last, and whether a bulk copy into a granule is in
flight.
Bits 31..24 of a 32-bit shared address hold the CTA's rank in its cluster. The first 0x400 bytes are reserved (measured
on an H200, facts.md 0.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from backends.vm.faults import UNORDERED, Fault, OtherAccess, at_line, counted, report
from backends.vm.memory import compiled_granules
from backends.vm.memory.access_code import BYTE_FIELDS, NO, NO_ROOM, MemoryWords
from backends.vm.memory.clocks import (
    EPOCH_MASK,
    Agents,
    Clock,
    Stamps,
    agent_of,
    unordered,
)
from backends.vm.memory.compiled_access import BANKS
from backends.vm.memory.compiled_granules import Deed
from backends.vm.memory.definedness import Mask, Missing, Origin, Sources
from backends.vm.memory.lane_acquires import LaneAcquires
from backends.vm.memory.marks import (
    COMPARED,
    EVERY_BYTE,
    GRANULE,
    LASTING,
    READ,
    WRITTEN,
    Cells,
    Divided,
    Marks,
    bytes_of,
)
from backends.vm.memory.pieces import read_pieces
from backends.vm.memory.strong_writes import Scopes, Strong, left_out, report_narrow
from backends.vm.numpy_calls import address_of, count_nonzero

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]
Granules = npt.NDArray[np.int64]

RESERVED = 0x400
RESERVED_USED = 288
"""Of the reserved bytes, those that the system's device code uses on an H200 (facts.md 0.1)."""
WHOLE = 0x01010101
"""Four defined bytes as one word of `defined`."""
MBARRIER = -1
"""The value of `in_flight` in the granules of a live mbarrier object."""
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
MAX_DYNAMIC = 232448
"""Bytes of dynamic shared memory that a CTA may have on sm_90 and sm_100 (facts.md 0.1)."""
SM_SHARED = 228 << 10
"""Bytes of shared memory that the CTAs of an SM have together, with the reserved ones (CUDA programming guide, compute
capabilities 9.0 and 10.0)."""


# Reused, because making arrays for readings is slow; most of them stay all but empty.
_SPARE_READINGS: dict[int, list[npt.NDArray[np.int32]]] = {}
_MAX_SIZES, _MAX_SPARE = 8, 32


def dynamic_offset(static_size: int, align: int) -> int:
    """Where dynamic shared memory begins, behind the reserved bytes and the static variables."""
    return -(-(RESERVED + static_size) // align) * align


class SharedMemory:
    """`size` bytes from offset 0, the reserved 0x400 included. Offsets below are addresses without rank bits.

    `writes` and `reads` mark the last writers and readers; `divided` says where they do so byte by byte. `readers`
    holds readers other than the last: by agent, int32 [3, granules], the epoch of its last such reading, the PTX line,
    and which bytes of the granule it has read then and another one since (bits). `many_readers` marks those granules.
    `unfenced_overwrites` counts bulk copies over what threads have read with no proxy fence in between. `allocs`: PTX
    lines of tcgen05.alloc, whose result word counts as such a read when a copy overwrites it. `copied`: PTX lines of
    cp.async whose threads have waited for them. `scopes`: of the last strong writes, by byte; None until one leaves
    other CTAs of the cluster out. `comparisons`: by byte and agent, epoch and PTX line of its last compare-and-swap
    there that failed. `first`: the first byte that the kernel may access; 0 for one that is `of_system`, whose
    reserved bytes have some value. `place`: this memory for compiled code; None when an observer wants every
    access.
    """

    def __init__(
        self, agents: Agents, static_size: int, dynamic_size: int, dynamic_align: int = 16, *, of_system: bool = False
    ) -> None:
        self.agents = agents
        self.first = 0 if of_system else RESERVED
        self.dynamic_offset = dynamic_offset(static_size, dynamic_align)
        self.dynamic_size = dynamic_size
        self.size = self.dynamic_offset + dynamic_size
        padded = -(-self.size // 16) * 16
        self.data: Bytes = np.zeros(padded, np.uint8)
        self.defined = np.zeros(padded, np.bool_)
        self.defined[self.first : RESERVED_USED] = True
        self.sources = Sources()
        self.in_flight = np.zeros(padded // 4, np.int32)
        self.divided = np.zeros(padded // 4, np.uint8)
        self.writes, self.reads = (
            Divided(bit, self.divided, Marks.of(padded // 4, GRANULE)) for bit in (WRITTEN, READ)
        )
        self.many_readers = np.zeros(padded // 4, np.bool_)
        self.readers: dict[int, npt.NDArray[np.int32]] = {}
        self._reader_words = np.zeros(1 + 2 * agents.count, np.int64)
        self.unfenced_overwrites = 0
        self.allocs: set[int] = set()
        self.copied: set[int] = set()
        self.scopes: Scopes | None = None
        self.comparisons: dict[int, dict[int, tuple[int, int]]] = {}
        self.place: MemoryWords | None = MemoryWords(
            self.first, self.size, self.data, self.defined, self.in_flight, self.divided, self.many_readers,
            agents.releases.partial, agents.reads.partial, agents.reads.last, self._reader_words, self.divided.size,
            *self.writes.granules.arrays, *self.reads.granules.arrays, *[None] * BYTE_FIELDS,
        )  # fmt: skip

    def check(self, offsets: Addresses, size: int, access: str) -> None:
        """Raise Fault unless every access of `size` bytes is inside this CTA's shared memory and aligned."""
        bad = (offsets < self.first) | (offsets + size > self.size) | (offsets & (size - 1) != 0)
        if count_nonzero(bad):
            lane = int(np.flatnonzero(bad)[0])
            at = int(offsets[lane])
            if at >= self.first and at + size <= self.size:
                raise Fault("misaligned", f"shared {access} of {size} bytes at an address that is not a multiple of "
                            f"{size}", lane=lane, address=at)  # fmt: skip
            room = counted(self.size - self.first, "byte")
            raise Fault("out-of-bounds", f"shared {access} of {counted(size, 'byte')}; this CTA has {room} from "
                        f"{self.first:#x} to {self.size:#x}", lane=lane, address=at)  # fmt: skip

    def check_region(self, offset: int, size: int, access: str) -> None:
        """Raise Fault unless `size` bytes at `offset` are inside and aligned to their size."""
        self.check(np.array([offset], np.int64), size, access)

    def load(
        self, offsets: Addresses, size: int, clock: Clock, stamp: int, *, strong: Strong | None = None,
        lanes: Addresses | None = None, meetings: int = 0,
    ) -> tuple[Bytes, Mask | None]:  # fmt: skip
        """Generic-proxy read of uint8 [n, size], and which of its bytes are undefined (None: none).

        Checks bulk copies in flight and races. A `strong` access (an atomic, volatile, relaxed and up) races only with
        strong writes of another CTA, where a scope leaves a thread out.
        `lanes` [n] of a warp that has met `meetings` times read; by default it does not matter which.
        """
        self.check(offsets, size, "load")
        index = offsets[:, None] + np.arange(size)
        granules = _granules(index)
        clash = self._check_idle(granules, "read")
        defined = self.defined[index]
        if strong is None:
            if not clash:
                self._check_writers(granules, clock, "read", index)
            self._note_readers(granules, clock, stamp, index, (lanes, meetings))
        elif strong.kind == "load" and self.agents.size > 1 and (strong.short or self.scopes is not None):
            self._check_scopes(granules, clock, strong, stamp, index)
        return self.data[index], None if count_nonzero(defined) == defined.size else ~defined

    def check_lanes(self, offsets: Addresses, size: int, lanes: Addresses, by: tuple[int, int], action: str) -> None:
        """Report what other lanes of a warp wrote since they last met, before `lanes` [n] access `offsets` [n].

        Each accesses `size` bytes. `by`: the warp's agent, and how often it has met.
        """
        if lanes.size != offsets.size:
            return  # ldmatrix, which gathers the lanes
        agent, meetings = by
        found = self._accessed(self.writes, offsets, size)
        if found is None:
            return  # an address that is a fault
        marks, cells = found
        foreign = marks.lanes.foreign(cells, lanes, meetings)
        if not count_nonzero(foreign):
            return
        foreign &= agent_of(marks.stamp[cells]) == agent
        for at, cell, line in list(_one_a_line(cells, foreign, marks.line)):
            lane, by_lane = int(lanes[at or 0]), int(marks.lanes.lane[cell])
            who = f"lane {by_lane} of the same warp" if by_lane >= 0 else "the warp"
            report(Fault("lanes-unordered", f"this {marks.name} is {action} lane {lane} after {who} wrote it at PTX "
                         f"line {line}, and the lanes have not met in between: bar.warp.sync is missing", lane=at,
                         address=marks.unit * cell, other=OtherAccess(who, "wrote", line)))  # fmt: skip

    def _accessed(self, marks: Divided, offsets: Addresses, size: int) -> tuple[Marks, Cells] | None:
        """The marks and cells of accesses of `size` bytes at `offsets`; None if an address is a fault."""
        if int(offsets.min()) < 0 or int(offsets.max()) + size > self.data.size:
            return None
        index = offsets[:, None] + np.arange(size)
        return marks.finest(_granules(index), index)

    def check_acquired(
        self, offsets: Addresses, size: int, lanes: Addresses, acquires: LaneAcquires, by: tuple[Clock, int], *,
        writes: bool,
    ) -> None:  # fmt: skip
        """Report accesses by `lanes` [n] at `offsets` [n] that only other lanes of their warp know to be in order.

        Each accesses `size` bytes. `by`: the warp's clock and agent; `acquires`: what only some of its lanes know.
        """
        action, (clock, agent) = "overwritten by" if writes else "read by", by
        for did, divided in (("wrote", self.writes), ("read", self.reads))[: 1 + writes]:
            found = self._accessed(divided, offsets, size)
            if found is None:
                return  # an address that is a fault
            marks, cells = found
            unknown = acquires.unknown_here(marks.stamp[cells], lanes, self.agents.serial, clock.seen, agent)
            for at, cell, line in list(_one_a_line(cells, unknown, marks.line)):
                lane, who = int(lanes[at or 0]), self.agents.name(agent_of(int(marks.stamp[cell])), line)
                report(Fault("lanes-unordered", f"this {marks.name} is {action} lane {lane} after {who} {did} it"
                             f"{at_line(line)}; what orders that is a wait or an acquire by other lanes, which the "
                             "lane has not met since: bar.warp.sync is missing behind it", lane=at,
                             address=marks.unit * cell, other=OtherAccess(who, did, line)))  # fmt: skip

    def take_over(self, granules: Granules, copies: Stamps, lanes: Addresses, stamp: int, meetings: int) -> None:
        """Record that `lanes` [n] have waited for their cp.async into granules [n], written with stamps `copies`.

        Only the waiting thread sees them then (PTX ISA 9.7.9.25.3.3), so from now on they are its own stores, made with
        `stamp` after `meetings` of its warp.
        """
        divided = (self.divided[granules] & WRITTEN) != 0
        for marks, here in ((self.writes.granules, ~divided), (self.writes.of_bytes, divided)):
            each = GRANULE // marks.unit
            cells = bytes_of(granules[here]) if each > 1 else granules[here]
            kept = marks.stamp[cells] == np.repeat(copies[here], each)
            cells = cells[kept]
            self.copied.update(np.unique(marks.line[cells]).tolist())
            marks.stamp[cells] = stamp
            marks.lanes.lane[cells], marks.lanes.met[cells] = np.repeat(lanes[here], each)[kept], meetings

    def note_lanes(self, offsets: Addresses, size: int, lanes: Addresses, meetings: int) -> None:
        """Record a store of `size` bytes at each of `offsets` by `lanes` [n] of a warp that has met `meetings` times.

        If the counts of lanes and offsets differ, all lanes stored together.
        """
        index = offsets[:, None] + np.arange(size)
        marks, cells = self.writes.finest(_granules(index), index)
        marks.lanes.note(cells, lanes if lanes.size == offsets.size else None, meetings)

    def undefine(self, offsets: Addresses, missing: Mask, origin: Origin) -> None:
        """Mark the bytes `missing` [n, size] at `offsets` [n] undefined: a value of `origin` was stored there."""
        at = (offsets[:, None] + np.arange(missing.shape[1]))[missing]
        self.defined[at] = False
        self.sources.note(at >> 2, origin)

    def origin_of(self, offset: int, line: int) -> Origin:
        """The origin of the undefined byte at `offset`, which PTX `line` reads."""
        known = self.sources.by_unit.get(offset >> 2)
        if known is None:
            known = Origin("uninitialised-shared", f"byte {offset:#x} of shared memory, which was not yet written")
        return known.read_at(line)

    def missing(self, offsets: Addresses, size: int) -> Missing | None:
        """The undefined bytes among `size` at each of `offsets` [n]."""
        hidden = read_pieces(self.defined.view(np.uint8), offsets, size) == 0
        if not count_nonzero(hidden):
            return None
        piece, byte = np.argwhere(hidden)[0].tolist()
        return Missing(hidden, self.origin_of(int(offsets[piece]) + byte, 0))

    def first_origin(self, granules: Granules, line: int) -> Origin:
        """The origin of the first undefined byte of some 4-byte granules, which PTX `line` reads."""
        granule = int(granules[self.defined.view(np.uint32)[granules] != WHOLE][0])
        return self.origin_of(4 * granule + int((~self.defined[4 * granule :][:4]).argmax()), line)

    def store(
        self, offsets: Addresses, values: Bytes, clock: Clock, stamp: int, line: int, *, strong: Strong | None = None
    ) -> bool:
        """Generic-proxy write of uint8 [n, size] at each offset. Where lanes collide the highest lane wins. Returns
        whether a byte has changed, or has become defined.

        A `strong` write (None: weak) races with weak reads, because both must be strong (PTX ISA 8.7.1). Of writes, it
        races with strong ones of another CTA where a scope leaves a thread out.
        """
        size = values.shape[1]
        self.check(offsets, size, "store")
        index = offsets[:, None] + np.arange(size)
        granules, before = _granules(index), self.data[index]
        if not self._check_idle(granules, "overwritten"):
            if strong is None:
                self._check_overwritten(granules, clock, before, values, index)
                self._check_comparers(granules, clock, index)
            elif self.agents.size > 1 and (strong.short or self.scopes is not None):
                same = (before == values).all(1)[:, None] & (not strong.atomic)
                self._check_scopes(granules, clock, strong, stamp, index, same)
            self._check_readers(granules, clock, index)
        changed = before.tobytes() != values.tobytes() or not self.defined[index].all()
        self.data[index] = values
        self.defined[index] = True
        if size < GRANULE:
            self._have_bytes()
            self.writes.divide(granules).note(index, stamp, line)
        else:
            self.divided[granules] &= LASTING
            self.writes.granules.note(granules, stamp, line)
        if strong and (strong.short or self.scopes is not None):
            self._note_scope(index, strong)
        return changed

    def note_comparison(self, offsets: Addresses, size: int, clock: Clock, stamp: int, strong: Strong) -> None:
        """Check and mark a compare-and-swap of `size` bytes at each of `offsets` that has loaded and failed.

        It is a `strong` read (PTX ISA 8.4), so of all that comes later it races only with weak writes.
        """
        index = offsets[:, None] + np.arange(size)
        granules = _granules(index)
        if self.agents.size > 1 and (strong.short or self.scopes is not None):
            self._check_scopes(granules, clock, strong, stamp, index)
        self._have_bytes()  # Machine code looks at marks of bytes where any bit of `divided` is set.
        comparison = stamp & EPOCH_MASK, self.agents.line()
        for byte in np.unique(index).tolist():
            self.comparisons.setdefault(byte, {})[agent_of(stamp)] = comparison
        self.divided[granules] |= COMPARED

    def _check_comparers(self, granules: Granules, clock: Clock, index: Cells | None = None) -> None:
        """Check that failed compare-and-swaps on `granules`, or on their bytes `index`, precede a weak overwrite."""
        if not self.comparisons:
            return
        cells = bytes_of(granules) if index is None else index
        compared = (self.divided[cells // GRANULE] & COMPARED) != 0
        told = set[int]()
        for where, byte in zip(np.argwhere(compared).tolist(), cells[compared].tolist(), strict=True):
            for agent, (epoch, line) in sorted(self.comparisons.get(byte, {}).items()):
                if epoch > clock.seen[agent] and line not in told:
                    told.add(line)
                    lane = where[0] if cells.ndim == 2 else None
                    self._collide(lane, self.writes.of_bytes, byte, "overwritten", (agent, "read", line))

    def _note_scope(self, index: Addresses, strong: Strong) -> None:
        """Record the scope of a strong write, if another CTA could be left out."""
        if self.scopes is None:
            if self.agents.size == 1:
                return
            self.scopes = np.zeros(self.data.size, np.int8)
        self.scopes[index] = strong.short

    def _check_scopes(
        self, granules: Granules, clock: Clock, strong: Strong, stamp: int, index: Addresses, spared: Mask | None = None
    ) -> None:
        """Report strong writes of another CTA that are not morally strong with this access, and not ordered before it.

        `spared` [n, 1]: accesses that do not matter.
        """
        marks, cells = self.writes.finest(granules, index)
        stamps, warps = marks.stamp[cells], self.agents.warps_per_cta
        by = agent_of(stamps)
        others = (by // warps != agent_of(stamp) // warps) & (stamps != 0)
        if not count_nonzero(others):
            return  # polls of what the own CTA writes are many
        theirs = 0 if self.scopes is None else self.scopes[index if marks.unit == 1 else index[:, ::GRANULE]]
        narrow = left_out(strong, theirs, others.astype(np.int64)) & (marks.lanes.met[cells] == 0) & others
        narrow &= (by < self.agents.first_engine) & ((stamps & EPOCH_MASK) > clock.seen[by])
        if spared is not None:
            narrow &= ~spared
        for lane, at, line in list(_one_a_line(cells, narrow, marks.line)):
            other = OtherAccess(self.agents.name(agent_of(int(marks.stamp[at]))), "wrote", line, elsewhere=True)
            short = 0 if self.scopes is None else int(self.scopes[marks.unit * at])
            report_narrow(f"this {marks.name}", strong, short, 1, other, lane=lane, address=marks.unit * at)

    def _have_bytes(self) -> None:
        """Make the marks of bytes, before the first access to less than a granule."""
        if self.writes.of_bytes.stamp.size:
            return
        for one in (self.writes, self.reads):
            one.of_bytes = Marks.of(self.data.size, 1)
        if self.place is not None:
            self.place.tell_last(*self.writes.of_bytes.arrays, *self.reads.of_bytes.arrays)

    def _check_idle(self, granules: Granules, action: str) -> bool:
        """Report a copy in flight into one of `granules`. Returns whether there is one."""
        busy = self.in_flight[granules]
        if not count_nonzero(busy):
            return False
        for lane, at, line in list(_one_a_line(granules, busy != 0, self.in_flight)):
            if line == MBARRIER:
                raise Fault("mbarrier-misuse", "an mbarrier object lies here: only mbarrier operations may touch it "
                            "before mbarrier.inval", lane=lane, address=4 * at)  # fmt: skip
            report(Fault("copy-not-awaited", f"this {self.writes.granules.name} is {action} while "
                         f"{self.agents.the_copy_at(line)} into it is in flight: nothing waits for its end",
                         lane=lane, address=4 * at,
                         other=OtherAccess(self.agents.copy_at(line), "writes", line)))  # fmt: skip
        return True

    def _check_writers(self, granules: Granules, clock: Clock, action: str, index: Cells | None = None) -> None:
        """Check that the last writers of `granules`, or of their bytes `index`, are ordered before."""
        marks, cells = self.writes.finest(granules, index)
        if self.agents.releases.any_partial:
            self._check_released(marks, cells, clock, action)
        late = unordered(marks.stamp[cells], clock.seen)
        if late is not None:
            self._race(marks, cells, late, action, "wrote")

    def _check_released(self, marks: Marks, cells: Cells, clock: Clock, action: str) -> None:
        """Report writes of lanes that are ordered before only by releases of other lanes."""
        loose = marks.lanes.loose(cells, marks.stamp[cells], clock.seen, self.agents.releases)
        for at, cell, line in list(_one_a_line(cells, loose, marks.line)):
            by_lane, agent = int(marks.lanes.lane[cell]), agent_of(int(marks.stamp[cell]))
            who = f"lane {by_lane} of {self.agents.name(agent)}" if by_lane >= 0 else self.agents.name(agent)
            why = self.agents.releases.missing_meeting(agent, by_lane, int(marks.lanes.met[cell]))
            report(Fault("lanes-unordered", f"this {marks.name} is {action} after {who} wrote it at PTX line {line}; "
                         f"{why}", lane=at, address=marks.unit * cell,
                         other=OtherAccess(who, "wrote", line)))  # fmt: skip

    def _check_overwritten(
        self, granules: Granules, clock: Clock, before: Bytes, after: Bytes, index: Addresses
    ) -> None:
        """As _check_writers, but allows threads to write the value that is there already.

        Races between writes of one size are defined (PTX ISA 8.7.2), and if the values are equal, so is the outcome.
        Triton's replicated layouts and nvcc's hoisted initialisations rely on it.
        """
        marks, cells = self.writes.finest(granules, index)
        stamps = marks.stamp[cells]
        late = unordered(stamps, clock.seen)
        if late is None:
            return
        equal = (before == after).reshape(*cells.shape, -1).all(2)
        late &= ~(equal & (agent_of(stamps) < self.agents.first_engine))
        if count_nonzero(late):
            self._race(marks, cells, late, "overwritten", "wrote")

    def _check_given_back(self, marks: Marks, cells: Cells, clock: Clock) -> None:
        """Report overwritten reads of lanes that are ordered before only by releases of other lanes."""
        loose = marks.lanes.loose(cells, marks.stamp[cells], clock.seen, self.agents.reads)
        for at, cell, line in list(_one_a_line(cells, loose, marks.line)):
            lane, agent = int(marks.lanes.lane[cell]), agent_of(int(marks.stamp[cell]))
            who = f"lane {lane} of {self.agents.name(agent)}"
            why = self.agents.reads.missing_meeting(agent, lane, int(marks.lanes.met[cell]))
            report(Fault("lanes-unordered", f"this {marks.name} is overwritten after {who} read it at PTX line {line}; "
                         f"{why}", lane=at, address=marks.unit * cell,
                         other=OtherAccess(who, "read", line)))  # fmt: skip

    def _check_readers(self, granules: Granules, clock: Clock, index: Addresses | None = None) -> None:
        """Check that the readers of `granules`, or of their bytes `index`, are ordered before an overwrite."""
        marks, cells = self.reads.finest(granules, index)
        if self.agents.reads.any_partial:
            self._check_given_back(marks, cells, clock)
        late = unordered(marks.stamp[cells], clock.seen)
        if late is not None:
            self._race(marks, cells, late, "overwritten", "read")
        if not self.readers or not count_nonzero(self.many_readers[granules]):
            return
        narrow = index is not None and index.shape[1] < GRANULE
        bits = EVERY_BYTE if index is None else np.bitwise_or.reduce(1 << index % GRANULE, axis=1)[:, None]
        for agent, (epochs, lines, read) in sorted(self.readers.items()):
            late = (epochs[granules] > clock.seen[agent]) & ((read[granules] & bits) != 0)
            if count_nonzero(late):
                for lane, at, line in _one_a_line(granules, late, lines):
                    self._collide(lane, self.reads.granules, at, "overwritten", (agent, "read", line))
        if narrow:
            return
        self.many_readers[granules] = False
        for kept in self.readers.values():
            kept[:, granules] = 0

    def _note_readers(
        self, granules: Granules, clock: Clock, stamp: int, index: Addresses | None = None,
        by: tuple[Addresses | None, int] | None = None,
    ) -> None:  # fmt: skip
        """Mark the last reader of `granules`, or of their bytes `index`. An earlier one that nothing orders before it
        moves to `readers`. `by`: the reading lanes and the meetings of their warp."""
        line, narrow = self.agents.line(), index is not None and index.shape[1] < GRANULE
        if narrow:
            self._have_bytes()
            self.reads.divide(granules)
        marks, cells = self.reads.finest(granules, index)
        found = marks.stamp[cells]
        late = unordered(found, clock.seen)
        # The four warps of a wgmma read under one stamp.
        if late is not None and count_nonzero(late := late & (found != stamp)):
            self._keep(marks, cells[late])
        noted = [(marks, cells)] if narrow or marks is self.reads.granules else [
            (marks, cells), (self.reads.granules, granules)
        ]  # fmt: skip
        for where, at in noted:
            where.note(at, stamp, line)
            if by is not None:
                where.lanes.note(at, *by)

    def _keep(self, marks: Marks, cells: Cells) -> None:
        """Keep the readings of `cells` in `readers`: of each agent and granule the last epoch, the last line then, and
        the bytes read then."""
        granules, bits = (cells, EVERY_BYTE) if marks.unit == GRANULE else (cells // GRANULE, 1 << cells % GRANULE)
        bits, stamps, lines = np.broadcast_to(bits, cells.shape), marks.stamp[cells], marks.line[cells]
        by = agent_of(stamps)
        for agent, bit in sorted(set(zip(by.tolist(), bits.tolist(), strict=True))):
            mine, kept = (by == agent) & (bits == bit), self.keep_readings_of(agent)
            at, new = granules[mine], stamps[mine] & EPOCH_MASK
            epochs, known, read = kept[:, at]
            newer, same = new > epochs, new == epochs
            kept[0, at] = np.maximum(new, epochs)
            kept[1, at] = np.where(newer, lines[mine], np.where(same, np.maximum(known, lines[mine]), known))
            kept[2, at] = np.where(newer, bit, np.where(same, read | bit, read))
        self.many_readers[granules] = True

    def keep_readings_of(self, agent: int) -> npt.NDArray[np.int32]:
        """The array that keeps readings of an agent that was not the last reader; made, for machine code too, on first
        use."""
        if agent not in self.readers:
            known, spare = len(self.readers), _SPARE_READINGS.get(self.divided.size)
            kept = spare.pop() if spare else np.zeros((3, self.divided.size), np.int32)
            self.readers[agent] = kept
            self._reader_words[1 + 2 * known : 3 + 2 * known] = agent, address_of(kept)
            self._reader_words[0] = known + 1
        return self.readers[agent]

    def give_readings_back(self) -> None:
        """Clear the arrays of readings and hand them to memories made later. Called when this memory has ended.

        Only granules in `many_readers` have readings to clear.
        """
        if not self.readers:
            return
        if len(_SPARE_READINGS) > _MAX_SIZES:
            _SPARE_READINGS.clear()
        held, spare = np.flatnonzero(self.many_readers), _SPARE_READINGS.setdefault(self.divided.size, [])
        for kept in self.readers.values():
            kept[:, held] = 0
        spare.extend(list(self.readers.values())[: _MAX_SPARE - len(spare)])
        self.readers = {}

    def _race(self, marks: Marks, cells: Cells, late: npt.NDArray[np.bool_], action: str, did: str) -> None:
        """Report that `late` cells are accessed too early, once per line of the other access."""
        for lane, at, line in _one_a_line(cells, late, marks.line):
            agent = agent_of(int(marks.stamp[at]))
            if did == "wrote" and agent >= self.agents.first_copy:
                report(Fault("copy-not-awaited", f"this {marks.name} is {action}, but {self.agents.the_copy_at(line)} "
                             "into it has not been waited for", lane=lane, address=marks.unit * at,
                             other=OtherAccess(self.agents.copy_at(line), "writes", line)))  # fmt: skip
            else:
                self._collide(lane, marks, at, action, (agent, did, line))

    def _collide(self, lane: int | None, marks: Marks, cell: int, action: str, by: tuple[int, str, int]) -> None:
        """Report a race with what an agent did at a PTX line. `lane` None: with an asynchronous operation."""
        agent, did, line = by
        elsewhere = lane is not None and self.agents.is_elsewhere(agent, self.agents.acting())
        other = OtherAccess(self.agents.name(agent, line), did, line, elsewhere=elsewhere)
        report(Fault("race", f"this {marks.name} is {action} after {other.who} {other.did} it"
                     f"{at_line(other.line)}, {UNORDERED}: a barrier, an mbarrier wait or a wait for a group is "
                     "missing", lane=lane, address=marks.unit * cell, other=other))  # fmt: skip

    def _check_inside(self, granules: Granules, what: str) -> None:
        if granules.size and (int(granules.min()) < self.first // 4 or int(granules.max()) >= self.size // 4):
            at = int(granules.max() if int(granules.max()) >= self.size // 4 else granules.min())
            raise Fault("out-of-bounds", f"{what} outside of the CTA's shared memory ({self.first:#x}..{self.size:#x})",
                        address=4 * at)  # fmt: skip

    def _check_fenced(self, granules: Granules, clock: Clock, what: str, relied: Set[int]) -> None:
        """Report writes with no proxy fence since. `relied`: lines whose writes kernels do not fence.

        A write that nothing orders before is left to _check_writers: no fence would help.
        """
        marks, cells = self.writes.finest(granules)
        found = marks.stamp[cells]
        unfenced = unordered(found, clock.fenced)
        if unfenced is None:
            return
        unfenced &= (found & EPOCH_MASK) <= clock.seen[agent_of(found)]
        for _, at, line in _one_a_line(cells, unfenced, marks.line):
            agent, address = agent_of(int(marks.stamp[at])), marks.unit * at
            who = "a copy" if line in self.copied else self.agents.name(agent, line)
            if line in relied:
                self.unfenced_overwrites += 1
                self._report_relied(
                    f"{what} the word that the tcgen05.alloc of {who} wrote", address, who, "wrote", line
                )
                continue
            copied = (agent >= self.agents.first_copy or line in self.copied) and ("tcgen05" in what or "wgmma" in what)
            rule = "copy-missing-proxy-fence" if copied else "missing-proxy-fence"
            report(Fault(rule, f"{what} what {who} wrote at PTX line {line} through the generic proxy with no "
                         "fence.proxy.async in between", address=address,
                         other=OtherAccess(who, "wrote", line)))  # fmt: skip

    def _quickly(
        self, deed: Deed, granules: Granules, clock: Clock | None, stamp: int, line: int, *, generic: bool = False
    ) -> int:
        """Run the machine code and return its answer. After NO, nothing has been done."""
        perform = None if self.place is None else compiled_granules.wanted(deed)
        if self.place is None or perform is None or not granules.flags.c_contiguous:
            return NO
        seen = 0 if clock is None else address_of(clock.seen)
        fenced = 0 if clock is None or generic else address_of(clock.fenced)
        arguments = (self.place.address, address_of(granules), seen, fenced, granules.size, stamp, line,
                     self.agents.first_engine)  # fmt: skip
        while (answer := perform(*arguments)) <= NO_ROOM:
            self.keep_readings_of(NO_ROOM - answer)
        return answer

    def async_read(self, granules: Granules, clock: Clock, stamp: int, what: str) -> bool:
        """Check and mark a read of whole 4-byte `granules` by the asynchronous proxy (TMA store, MMA operand).

        Returns whether all of them are defined.
        """
        line = self.agents.line()
        answer = self._quickly("read", granules, clock, stamp, line)
        if answer != NO:
            return not answer
        self._check_inside(granules, f"{what} reads")
        clash = self._check_idle(granules, f"read by {what}")
        whole = self.defined.view(np.uint32)[granules] == WHOLE
        if not clash:
            self._check_writers(granules, clock, f"read by {what}")
            self._check_fenced(granules, clock, f"{what} reads", frozenset())
        self._note_readers(granules, clock, stamp)
        return count_nonzero(whole) == whole.size

    def async_write_begins(
        self, granules: Granules, clock: Clock, line: int, what: str, *, generic: bool = False
    ) -> None:
        """Begin a copy into `granules` at its issue. Earlier readers and writers must be ordered before it.

        `generic`: cp.async and st.async write through the generic proxy and so need no proxy fence.
        """
        if self._quickly("write begins", granules, clock, 0, line, generic=generic) != NO:
            return
        self._check_inside(granules, f"{what} writes")
        clash = self._check_idle(granules, "overwritten")
        if not clash:
            self._check_writers(granules, clock, "overwritten")
            self._check_comparers(granules, clock)
        if not (generic or clash):
            self._check_fenced(granules, clock, f"{what} overwrites", self.allocs)
        self._check_readers(granules, clock)
        if not generic:
            self._count_unfenced_readers(granules, clock)
        self.in_flight[granules] = line

    def _count_unfenced_readers(self, granules: Granules, clock: Clock) -> None:
        """Count a bulk copy over what threads have read with no proxy fence in between.

        Only such a fence orders the two proxies in the ISA. CUTLASS's and Triton's pipelines leave it out, so a judged
        row only counts it.
        """
        marks, cells = self.reads.finest(granules)
        found = marks.stamp[cells]
        late = unordered(found, clock.fenced)
        if late is None:
            return
        late &= (agent_of(found) < self.agents.first_engine) & ((found & EPOCH_MASK) <= clock.seen[agent_of(found)])
        if not count_nonzero(late):
            return
        self.unfenced_overwrites += 1
        for _, at, line in _one_a_line(cells, late, marks.line):
            who = self.agents.name(agent_of(int(marks.stamp[at])))
            self._report_relied(f"a bulk copy overwrites what {who} read", marks.unit * at, who, "read", line)

    def _report_relied(self, what: str, address: int, who: str, did: str, line: int) -> None:
        report(Fault("unfenced-overwrite", f"{what} at PTX line {line} through the generic proxy with no "
                     "fence.proxy.async in between", address=address,
                     other=OtherAccess(who, did, line)))  # fmt: skip

    def async_write_ends(self, granules: Granules, stamp: int, line: int) -> None:
        """End a bulk copy into `granules`: it has landed."""
        if self._quickly("write ends", granules, None, stamp, line) != NO:
            return
        self.in_flight[granules] = 0
        self.divided[granules] &= LASTING
        self.defined.reshape(-1, 4)[granules] = True
        self.writes.granules.note(granules, stamp, line)


def _granules(index: Addresses) -> Granules:
    """4-byte granules [n, granules] of byte indices [n, size]."""
    return index[:, ::4] >> 2


def _one_a_line(
    granules: Granules, bad: npt.NDArray[np.bool_], lines: npt.NDArray[np.int32]
) -> Iterator[tuple[int | None, int, int]]:
    """For each line, its first bad access: lane (of [lanes, granules]; None for a flat list), granule and line."""
    where, at = np.argwhere(bad), granules[bad]
    _, firsts = np.unique(lines[at], return_index=True)
    for first in sorted(firsts.tolist()):
        yield int(where[first][0]) if granules.ndim == 2 else None, int(at[first]), int(lines[at[first]])


def wavefronts(offsets: npt.NDArray[np.int64], size: int) -> tuple[int, int]:
    """Fewest possible and actual passes over the 32 banks for lanes that access `size` bytes at `offsets` (bytes).

    Lanes are served in groups of 128 bytes: all lanes, half warps or quarter warps. Within a group every bank delivers
    one 4-byte word per pass, and lanes that want the same word share it.
    """
    words = offsets >> 2
    return _wavefronts((words - words[0]).tobytes(), max(size // 4, 1))


@lru_cache(maxsize=1024)
def _wavefronts(relative: bytes, words_per_lane: int) -> tuple[int, int]:
    """Cached by the words of the lanes, int64, relative to the first: shifting all of them only rotates the banks."""
    first = np.frombuffer(relative, np.int64)
    lanes = BANKS // words_per_lane
    taken = groups = 0
    words = first[:, None] + np.arange(words_per_lane)
    for start in range(0, first.size, lanes):
        distinct = np.unique(words[start : start + lanes])
        taken += int(np.bincount(distinct & (BANKS - 1), minlength=1).max())
        groups += 1
    return groups, taken
