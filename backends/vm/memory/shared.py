"""Shared memory of one CTA: bytes, and for each byte or granule the state that silicon hides.

The state is whether a byte is defined (it is undefined until written, and while it holds an undefined value), and for
each 4-byte granule who wrote last, who read last (stamps of clocks.py) and whether a bulk copy into it is in flight.
Bits 31..24 of a 32-bit shared address hold the CTA's rank in its cluster. The first 0x400 bytes are reserved (measured
on an H200, facts.md 0.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from backends.vm.counting import address_of, count_nonzero
from backends.vm.faults import Fault, OtherAccess, at_line, counted, report
from backends.vm.memory import compiled_granules
from backends.vm.memory.access_code import NO, NO_ROOM, MemoryWords
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
from backends.vm.memory.lanes import LaneMarks
from backends.vm.memory.pieces import read_pieces

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]
Granules = npt.NDArray[np.int64]

RESERVED = 0x400
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

    `contested` granules hold bytes of several generic writers that nothing orders. Order among these writers is not
    judged. `readers` holds readers other than the last: by agent, int32 epochs and PTX lines [2, granules].
    `many_readers` marks those granules. `unfenced_overwrites` counts bulk copies over what threads have read with no
    proxy fence in between. `allocs`: PTX lines of tcgen05.alloc, whose result word counts as such a read when a copy
    overwrites it. `lanes`: the last writing lane of each granule; `reading_lanes`: the last reading one. `copied`: PTX
    lines of cp.async whose threads have waited for them. `place`: this memory for compiled code; None when an observer
    wants every access.
    """

    def __init__(self, agents: Agents, static_size: int, dynamic_size: int, dynamic_align: int = 16) -> None:
        self.agents = agents
        self.dynamic_offset = dynamic_offset(static_size, dynamic_align)
        self.dynamic_size = dynamic_size
        self.size = self.dynamic_offset + dynamic_size
        padded = -(-self.size // 16) * 16
        self.data: Bytes = np.zeros(padded, np.uint8)
        self.defined = np.zeros(padded, np.bool_)
        self.sources = Sources()
        self.in_flight = np.zeros(padded // 4, np.int32)
        self.writer: Stamps = np.zeros(padded // 4, np.int32)
        self.reader: Stamps = np.zeros(padded // 4, np.int32)
        self.writer_line = np.zeros(padded // 4, np.int32)
        self.reader_line = np.zeros(padded // 4, np.int32)
        self.contested = np.zeros(padded // 4, np.bool_)
        self.many_readers = np.zeros(padded // 4, np.bool_)
        self.readers: dict[int, npt.NDArray[np.int32]] = {}
        self._reader_words = np.zeros(1 + 2 * agents.count, np.int64)
        self.unfenced_overwrites = 0
        self.allocs: set[int] = set()
        self.lanes, self.reading_lanes = LaneMarks(padded // 4), LaneMarks(padded // 4)
        self.copied: set[int] = set()
        partial, reads, read_by = agents.releases.partial, agents.reads, self.reading_lanes
        self.place: MemoryWords | None = MemoryWords(
            RESERVED, self.size, self.data, self.defined, self.in_flight, self.writer, self.reader, self.writer_line,
            self.reader_line, self.contested, self.many_readers, self.lanes.lane, self.lanes.met, partial,
            self._reader_words, self.reader.size, read_by.lane, read_by.met, reads.partial, reads.last,
        )  # fmt: skip

    def check(self, offsets: Addresses, size: int, access: str) -> None:
        """Raise Fault unless every access of `size` bytes is inside this CTA's shared memory and aligned."""
        bad = (offsets < RESERVED) | (offsets + size > self.size) | (offsets & (size - 1) != 0)
        if count_nonzero(bad):
            lane = int(np.flatnonzero(bad)[0])
            at = int(offsets[lane])
            if at >= RESERVED and at + size <= self.size:
                raise Fault("misaligned", f"shared {access} of {size} bytes at an address that is not a multiple of "
                            f"{size}", lane=lane, address=at)  # fmt: skip
            room = counted(self.size - RESERVED, "byte")
            raise Fault("out-of-bounds", f"shared {access} of {counted(size, 'byte')}; this CTA has {room} from "
                        f"{RESERVED:#x} to {self.size:#x}", lane=lane, address=at)  # fmt: skip

    def check_region(self, offset: int, size: int, access: str) -> None:
        """Raise Fault unless `size` bytes at `offset` are inside and aligned to their size."""
        self.check(np.array([offset], np.int64), size, access)

    def load(
        self, offsets: Addresses, size: int, clock: Clock, stamp: int, *, strong: bool = False,
        lanes: Addresses | None = None, meetings: int = 0,
    ) -> tuple[Bytes, Mask | None]:  # fmt: skip
        """Generic-proxy read of uint8 [n, size], and which of its bytes are undefined (None: none).

        Checks bulk copies in flight and races. `strong` accesses (atomics, volatile, relaxed and up) race with nothing.
        `lanes` [n] of a warp that has met `meetings` times read; by default it does not matter which.
        """
        self.check(offsets, size, "load")
        index = offsets[:, None] + np.arange(size)
        granules = _granules(index)
        clash = self._check_idle(granules, "read")
        defined = self.defined[index]
        if not strong:
            if not clash:
                self._check_writers(granules, clock, "read")
            self._note_readers(granules, clock, stamp)
            self.reading_lanes.note(granules, lanes, meetings)
        return self.data[index], None if count_nonzero(defined) == defined.size else ~defined

    def check_lanes(self, offsets: Addresses, size: int, lanes: Addresses, by: tuple[int, int], action: str) -> None:
        """Report what other lanes of a warp wrote since they last met, before `lanes` [n] access `offsets` [n].

        Each accesses `size` bytes. `by`: the warp's agent, and how often it has met.
        """
        if lanes.size != offsets.size:
            return  # ldmatrix, which gathers the lanes
        agent, meetings = by
        granules = (offsets[:, None] + np.arange(0, size, 4)) >> 2
        if int(granules.min()) < 0 or int(granules.max()) >= self.writer.size:
            return  # an address that is a fault
        foreign = self.lanes.foreign(granules, lanes, meetings)
        if not count_nonzero(foreign):
            return
        foreign &= agent_of(self.writer[granules]) == agent
        for at, granule, line in list(_one_a_line(granules, foreign, self.writer_line)):
            lane, by_lane = int(lanes[at or 0]), int(self.lanes.lane[granule])
            who = f"lane {by_lane} of the same warp" if by_lane >= 0 else "the warp"
            report(Fault("lanes-unordered", f"this granule is {action} lane {lane} after {who} wrote it at PTX line "
                         f"{line}, and the lanes have not met in between: bar.warp.sync is missing", lane=at,
                         address=4 * granule, other=OtherAccess(who, "wrote", line)))  # fmt: skip

    def check_acquired(
        self, offsets: Addresses, size: int, lanes: Addresses, acquires: LaneAcquires, by: tuple[Clock, int], *,
        writes: bool,
    ) -> None:  # fmt: skip
        """Report accesses by `lanes` [n] at `offsets` [n] that only other lanes of their warp know to be in order.

        Each accesses `size` bytes. `by`: the warp's clock and agent; `acquires`: what only some of its lanes know.
        """
        granules = (offsets[:, None] + np.arange(0, size, 4)) >> 2
        if int(granules.min()) < 0 or int(granules.max()) >= self.writer.size:
            return  # an address that is a fault
        action, (clock, agent) = "overwritten by" if writes else "read by", by
        for did, stamps, lines in (("wrote", self.writer, self.writer_line), ("read", self.reader, self.reader_line)):
            unknown = acquires.unknown_here(stamps[granules], lanes, self.agents.serial, clock.seen, agent)
            for at, granule, line in list(_one_a_line(granules, unknown, lines)):
                lane, who = int(lanes[at or 0]), self.agents.name(agent_of(int(stamps[granule])))
                report(Fault("lanes-unordered", f"this granule is {action} lane {lane} after {who} {did} it"
                             f"{at_line(line)}; what orders that is a wait or an acquire by other lanes, which the "
                             "lane has not met since: bar.warp.sync is missing behind it", lane=at,
                             address=4 * granule, other=OtherAccess(who, did, line)))  # fmt: skip
            if not writes:
                return

    def take_over(self, granules: Granules, copies: Stamps, lanes: Addresses, stamp: int, meetings: int) -> None:
        """Record that `lanes` [n] have waited for their cp.async into granules [n], written with stamps `copies`.

        Only the waiting thread sees them then (PTX ISA 9.7.9.25.3.3), so from now on they are its own stores, made with
        `stamp` after `meetings` of its warp.
        """
        kept = self.writer[granules] == copies
        granules, lanes = granules[kept], lanes[kept]
        self.copied.update(np.unique(self.writer_line[granules]).tolist())
        self.writer[granules] = stamp
        self.lanes.lane[granules], self.lanes.met[granules] = lanes, meetings

    def note_lanes(self, offsets: Addresses, size: int, lanes: Addresses, meetings: int) -> None:
        """Record a store of `size` bytes at each of `offsets` by `lanes` [n] of a warp that has met `meetings` times.

        If the counts of lanes and offsets differ, all lanes stored together.
        """
        granules = (offsets[:, None] + np.arange(0, size, 4)) >> 2
        self.lanes.note(granules, lanes if lanes.size == offsets.size else None, meetings if size >= 4 else 0)

    def undefine(self, offsets: Addresses, missing: Mask, origin: Origin) -> None:
        """Mark the bytes `missing` [n, size] at `offsets` [n] undefined: a value of `origin` was stored there."""
        at = (offsets[:, None] + np.arange(missing.shape[1]))[missing]
        self.defined[at] = False
        self.sources.note(at >> 2, origin)

    def origin_of(self, offset: int, line: int) -> Origin:
        """The origin of the undefined byte at `offset`, which PTX `line` reads."""
        known = self.sources.by_unit.get(offset >> 2)
        if known is None:
            known = Origin("uninitialised-shared", f"byte {offset:#x} of shared memory, which was never written")
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
        self, offsets: Addresses, values: Bytes, clock: Clock, stamp: int, line: int, *, strong: bool = False
    ) -> bool:
        """Generic-proxy write of uint8 [n, size] at each offset. Where lanes collide the highest lane wins. Returns
        whether a byte has changed, or has become defined.

        A `strong` write races with no write, but with weak reads: both must be strong (PTX ISA 8.7.1).
        """
        size = values.shape[1]
        self.check(offsets, size, "store")
        index = offsets[:, None] + np.arange(size)
        granules, before = _granules(index), self.data[index]
        clash = self._check_idle(granules, "overwritten")
        if size < 4 and not clash:
            self._check_neighbours(granules, clock)
        elif not clash:
            if not strong:
                self._check_overwritten(granules, clock, before, values)
            self._check_readers(granules, clock)
        if size >= 4:
            self.contested[granules] = False
        changed = before.tobytes() != values.tobytes() or not self.defined[index].all()
        self.data[index] = values
        self.defined[index] = True
        self.writer[granules] = stamp
        self.writer_line[granules] = line
        return changed

    def _check_neighbours(self, granules: Granules, clock: Clock) -> None:
        """Check a store of less than a granule, whose other bytes may legitimately belong to another warp.

        Only copies and the tensor core count here, because they access whole granules. The granule becomes contested.
        """
        for stamps, action in ((self.writer, "overwritten"), (self.reader, "overwritten")):
            found = stamps[granules]
            late = unordered(found, clock.seen)
            if late is None:
                continue
            foreign = late & (agent_of(found) >= self.agents.first_engine)
            if count_nonzero(foreign):
                self._race(granules, foreign, stamps, action)
            self.contested[granules] |= late

    def _check_idle(self, granules: Granules, action: str) -> bool:
        """Report a copy in flight into one of `granules`. Returns whether there is one."""
        busy = self.in_flight[granules]
        if not count_nonzero(busy):
            return False
        for lane, at, line in list(_one_a_line(granules, busy != 0, self.in_flight)):
            if line == MBARRIER:
                raise Fault("mbarrier-misuse", "an mbarrier object lies here: only mbarrier operations may touch it "
                            "before mbarrier.inval", lane=lane, address=4 * at)  # fmt: skip
            report(Fault("copy-not-awaited", f"this granule is {action} while the copy of PTX line {line}"
                         " into it is in flight: nothing waits for its end", lane=lane, address=4 * at,
                         other=OtherAccess("a copy", "writes", line)))  # fmt: skip
        return True

    def _check_writers(self, granules: Granules, clock: Clock, action: str) -> None:
        if self.agents.releases.any_partial:
            self._check_released(granules, clock, action)
        late = unordered(self.writer[granules], clock.seen)
        if late is not None:
            late &= ~self.contested[granules]
            if count_nonzero(late):
                self._race(granules, late, self.writer, action)

    def _check_released(self, granules: Granules, clock: Clock, action: str) -> None:
        """Report writes of lanes that are ordered before only by releases of other lanes."""
        loose = self.lanes.loose(granules, self.writer[granules], clock.seen, self.agents.releases)
        for at, granule, line in list(_one_a_line(granules, loose, self.writer_line)):
            by_lane, agent = int(self.lanes.lane[granule]), agent_of(int(self.writer[granule]))
            who = f"lane {by_lane} of {self.agents.name(agent)}" if by_lane >= 0 else self.agents.name(agent)
            why = self.agents.releases.missing_meeting(agent, by_lane, int(self.lanes.met[granule]))
            report(Fault("lanes-unordered", f"this granule is {action} after {who} wrote it at PTX line {line}; {why}",
                         lane=at, address=4 * granule, other=OtherAccess(who, "wrote", line)))  # fmt: skip

    def _check_overwritten(self, granules: Granules, clock: Clock, before: Bytes, after: Bytes) -> None:
        """As _check_writers, but allows threads to write the value that is there already, in whole granules.

        Races between writes of one size are defined (PTX ISA 8.7.2), and if the values are equal, so is the outcome.
        Triton's replicated layouts and nvcc's hoisted initialisations rely on it.
        """
        late = unordered(self.writer[granules], clock.seen)
        if late is None:
            return
        equal = (before == after).reshape(*granules.shape, 4).all(2)
        late &= ~self.contested[granules] & ~(equal & (agent_of(self.writer[granules]) < self.agents.first_engine))
        if count_nonzero(late):
            self._race(granules, late, self.writer, "overwritten")

    def _check_given_back(self, granules: Granules, clock: Clock) -> None:
        """Report overwritten reads of lanes that are ordered before only by releases of other lanes."""
        loose = self.reading_lanes.loose(granules, self.reader[granules], clock.seen, self.agents.reads)
        for at, granule, line in list(_one_a_line(granules, loose, self.reader_line)):
            lane, agent = int(self.reading_lanes.lane[granule]), agent_of(int(self.reader[granule]))
            who = f"lane {lane} of {self.agents.name(agent)}"
            why = self.agents.reads.missing_meeting(agent, lane, int(self.reading_lanes.met[granule]))
            report(Fault("lanes-unordered", f"this granule is overwritten after {who} read it at PTX line {line}; "
                         f"{why}", lane=at, address=4 * granule, other=OtherAccess(who, "read", line)))  # fmt: skip

    def _check_readers(self, granules: Granules, clock: Clock) -> None:
        if self.agents.reads.any_partial:
            self._check_given_back(granules, clock)
        late = unordered(self.reader[granules], clock.seen)
        if late is not None:
            self._race(granules, late, self.reader, "overwritten")
        if not self.readers or not count_nonzero(self.many_readers[granules]):
            return
        for agent, (epochs, lines) in sorted(self.readers.items()):
            late = epochs[granules] > clock.seen[agent]
            if count_nonzero(late):
                for lane, at, line in _one_a_line(granules, late, lines):
                    self._collide(lane, at, "overwritten", OtherAccess(self.agents.name(agent), "read", line))
        self.many_readers[granules] = False
        for kept in self.readers.values():
            kept[:, granules] = 0

    def _note_readers(self, granules: Granules, clock: Clock, stamp: int) -> None:
        """Keep the last reader in `reader`. An earlier one that nothing orders before it moves to `readers`."""
        found = self.reader[granules]
        late = unordered(found, clock.seen)
        # The four warps of a wgmma read under one stamp.
        if late is not None and count_nonzero(late := late & (found != stamp)):
            at, kept = granules[late], found[late]
            by = agent_of(kept)
            for agent in set(by.tolist()):
                (epochs, lines), mine = self.keep_readings_of(agent), by == agent
                epochs[at[mine]] = np.maximum(epochs[at[mine]], kept[mine] & EPOCH_MASK)
                lines[at[mine]] = self.reader_line[at[mine]]
            self.many_readers[at] = True
        self.reader[granules] = stamp
        self.reader_line[granules] = self.agents.line()

    def keep_readings_of(self, agent: int) -> npt.NDArray[np.int32]:
        """The array that keeps readings of an agent that was not the last reader; made, for machine code too, on first
        use."""
        if agent not in self.readers:
            known, spare = len(self.readers), _SPARE_READINGS.get(self.reader.size)
            kept = spare.pop() if spare else np.zeros((2, self.reader.size), np.int32)
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
        held, spare = np.flatnonzero(self.many_readers), _SPARE_READINGS.setdefault(self.reader.size, [])
        for kept in self.readers.values():
            kept[:, held] = 0
        spare.extend(list(self.readers.values())[: _MAX_SPARE - len(spare)])
        self.readers = {}

    def _race(self, granules: Granules, late: npt.NDArray[np.bool_], stamps: Stamps, action: str) -> None:
        """Report that `late` granules are accessed too early, once per line of the other access."""
        wrote = stamps is self.writer
        lines = self.writer_line if wrote else self.reader_line
        for lane, at, line in _one_a_line(granules, late, lines):
            agent = agent_of(int(stamps[at]))
            if wrote and agent >= self.agents.first_copy:
                report(Fault("copy-not-awaited", f"this granule is {action}, but the copy of PTX line {line} into it "
                             "has not been waited for", lane=lane, address=4 * at,
                             other=OtherAccess("a copy", "writes", line)))  # fmt: skip
            else:
                did = "wrote" if wrote else "read"
                self._collide(lane, at, action, OtherAccess(self.agents.name(agent), did, line))

    def _collide(self, lane: int | None, at: int, action: str, other: OtherAccess) -> None:
        report(Fault("race", f"this granule is {action}, but nothing orders that after {other.who} {other.did} it"
                     f"{at_line(other.line)}: a barrier, an mbarrier wait or a wait for "
                     "a group is missing", lane=lane, address=4 * at, other=other))  # fmt: skip

    def _check_inside(self, granules: Granules, what: str) -> None:
        if granules.size and (int(granules.min()) < RESERVED // 4 or int(granules.max()) >= self.size // 4):
            at = int(granules.max() if int(granules.max()) >= self.size // 4 else granules.min())
            raise Fault("out-of-bounds", f"{what} outside of the CTA's shared memory ({RESERVED:#x}..{self.size:#x})",
                        address=4 * at)  # fmt: skip

    def _check_fenced(self, granules: Granules, clock: Clock, what: str, relied: Set[int]) -> None:
        """Report writes with no proxy fence since. `relied`: lines whose writes kernels do not fence.

        A write that nothing orders before is left to _check_writers: no fence would help.
        """
        found = self.writer[granules]
        unfenced = unordered(found, clock.fenced)
        if unfenced is None:
            return
        unfenced &= (found & EPOCH_MASK) <= clock.seen[agent_of(found)]
        for _, at, line in _one_a_line(granules, unfenced, self.writer_line):
            agent = agent_of(int(self.writer[at]))
            who = "a copy" if line in self.copied else self.agents.name(agent)
            if line in relied:
                self.unfenced_overwrites += 1
                self._report_relied(f"{what} the word that the tcgen05.alloc of {who} wrote", at, who, "wrote", line)
                continue
            copied = (agent >= self.agents.first_copy or line in self.copied) and ("tcgen05" in what or "wgmma" in what)
            rule = "copy-missing-proxy-fence" if copied else "missing-proxy-fence"
            report(Fault(rule, f"{what} what {who} wrote at PTX line {line} through the generic proxy with no "
                         "fence.proxy.async in between", address=4 * at,
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
        found = self.reader[granules]
        late = unordered(found, clock.fenced)
        if late is None:
            return
        late &= (agent_of(found) < self.agents.first_engine) & ((found & EPOCH_MASK) <= clock.seen[agent_of(found)])
        if not count_nonzero(late):
            return
        self.unfenced_overwrites += 1
        for _, at, line in _one_a_line(granules, late, self.reader_line):
            who = self.agents.name(agent_of(int(self.reader[at])))
            self._report_relied(f"a bulk copy overwrites what {who} read", at, who, "read", line)

    def _report_relied(self, what: str, granule: int, who: str, did: str, line: int) -> None:
        report(Fault("unfenced-overwrite", f"{what} at PTX line {line} through the generic proxy with no "
                     "fence.proxy.async in between", address=4 * granule,
                     other=OtherAccess(who, did, line)))  # fmt: skip

    def async_write_ends(self, granules: Granules, stamp: int, line: int) -> None:
        """End a bulk copy into `granules`: it has landed."""
        if self._quickly("write ends", granules, None, stamp, line) != NO:
            return
        self.in_flight[granules] = 0
        self.contested[granules] = False
        self.defined.reshape(-1, 4)[granules] = True
        self.writer[granules] = stamp
        self.writer_line[granules] = line


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
