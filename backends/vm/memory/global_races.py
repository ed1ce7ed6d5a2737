"""Races in global memory: for each granule of a writable buffer, who wrote last and who read last in this launch.

A mark is the serial number of a cluster (bits 63..32) above a stamp of clocks.py. 0 means no access: the start of a
launch comes after everything before it, but for dependent launches (dependent_launches.py). Granules have 16 bytes
until a smaller access is seen. Strong accesses (atomics, volatile, relaxed and up) race with weak ones: a strong write
with a weak read, whichever comes first, and a weak write after it. A strong access after a strong write races with it
where a scope is too narrow (strong_writes.py). A compare-and-swap that fails is a strong read; a weak write after it
races with it. Nothing else is noticed of strong accesses. A bulk copy that reads or
overwrites generic writes of the same launch needs a proxy fence in between, on either side (PTX ISA 8.6, 9.7.9.25.2),
and so does a bulk reduction into weak ones. In the other direction, the end of each copy is a proxy fence.

Clocks are per warp, and what lanes.py says of shared memory holds here too: a lane may read what another lane of its
warp wrote, or what only other lanes have released, only after a meeting. What only other lanes have acquired it does
not know until it meets them (lane_acquires.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from backends.vm.faults import UNORDERED, Fault, OtherAccess, at_line, report
from backends.vm.memory.access_code import GLOBAL_FIELDS, MemoryWords, places_change
from backends.vm.memory.clocks import (
    CLUSTER_SHIFT,
    STAMP_MASK,
    WAITED,
    Agents,
    Clock,
    Epochs,
    Snapshot,
    agent_of,
    merge,
    parts_of,
    seen_of,
    unordered,
)
from backends.vm.memory.dependent_launches import LaunchChain
from backends.vm.memory.global_memory import Buffer, Bytes, GlobalMemory
from backends.vm.memory.lane_acquires import LaneAcquires
from backends.vm.memory.lane_releases import MAX_AGENTS, LaneReleases
from backends.vm.memory.lanes import LaneMarks
from backends.vm.memory.map_fences import MAP_HALF, MapFences
from backends.vm.memory.map_reads import MapReads
from backends.vm.memory.strong_writes import Scopes, Strong, left_out, report_narrow
from backends.vm.numpy_calls import count_nonzero

Dim3 = tuple[int, int, int]
Addresses = npt.NDArray[np.int64]
Marks = int | npt.NDArray[np.int64]
"""One mark or stamp, or one per access: [n, 1]."""
Pieces = tuple[Addresses, int, int]
"""Addresses of the pieces that a copy writes, their size in bytes, and the stamp of the copy."""
COARSE = 16
_STATE, _WRITER, _CONSTANT, _COMPARER = (
    GLOBAL_FIELDS.index(name) for name in ("state", "writer", "constant_line", "comparer")
)


class Accessor(Protocol):
    """Accessor of global memory: a warp, with its clock and the agents of its cluster."""

    @property
    def clock(self) -> Clock: ...
    @property
    def agents(self) -> Agents: ...
    @property
    def agent(self) -> int: ...
    @property
    def meetings(self) -> int: ...
    @property
    def acquires(self) -> LaneAcquires: ...
    def known(self) -> Snapshot: ...


@dataclass(slots=True)
class Shadow:
    """Marks of one buffer, which ends at `end`; granule i holds 2 ** shift bytes from base + (i << shift).

    `line` and `lanes` describe the last write, `read_line` the last read, `constant_line` the last load with .nc,
    `scopes` the last strong write, and `comparer` and `compare_line` the last compare-and-swap that failed; the last
    four are made on first use.
    """

    base: int
    end: int
    shift: int
    writer: Addresses
    reader: Addresses
    line: npt.NDArray[np.int32]
    read_line: npt.NDArray[np.int32]
    lanes: LaneMarks
    constant_line: npt.NDArray[np.int32] | None = None
    scopes: Scopes | None = None
    comparer: Addresses | None = None
    compare_line: npt.NDArray[np.int32] | None = None

    @classmethod
    def of(cls, buffer: Buffer) -> Shadow:
        base = buffer.base // COARSE * COARSE
        count = (buffer.end - base) // COARSE + 1
        return cls(
            base,
            buffer.end,
            COARSE.bit_length() - 1,
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
            np.zeros(count, np.int32),
            np.zeros(count, np.int32),
            LaneMarks(count),
        )

    def offset_in(self, buffer: Buffer, granule: int) -> int:
        """The offset in `buffer` at which `granule` begins."""
        return max(self.base + (granule << self.shift) - buffer.base, 0)

    def lines(self, marks: Addresses) -> npt.NDArray[np.int32]:
        """The PTX lines of the accesses that left `marks`, which are marks of this shadow."""
        if marks is self.comparer and self.compare_line is not None:
            return self.compare_line
        return self.line if marks is self.writer else self.read_line

    def one_a_line(
        self, granules: Addresses, bad: npt.NDArray[np.bool_], marks: Addresses
    ) -> Iterator[tuple[int, int, int]]:
        """For each PTX line of the accesses that left `marks`, its first bad access: access, granule and line."""
        lines, where, at = self.lines(marks), np.argwhere(bad), granules[bad]
        _, firsts = np.unique(lines[at], return_index=True)
        for first in sorted(firsts.tolist()):
            yield int(where[first][0]), int(at[first]), int(lines[at[first]])

    def split_for(self, size: int) -> None:
        """Split granules if accesses of `size` bytes need finer ones."""
        exact = (size & -size).bit_length() - 1
        if exact < self.shift:
            places_change()
            times = 1 << self.shift - exact
            self.writer = np.repeat(self.writer, times)
            self.reader = np.repeat(self.reader, times)
            self.line = np.repeat(self.line, times)
            self.read_line = np.repeat(self.read_line, times)
            self.lanes.split(times)
            if self.constant_line is not None:
                self.constant_line = np.repeat(self.constant_line, times)
            if self.scopes is not None:
                self.scopes = np.repeat(self.scopes, times)
            if self.comparer is not None and self.compare_line is not None:
                self.comparer = np.repeat(self.comparer, times)
                self.compare_line = np.repeat(self.compare_line, times)
            self.shift = exact

    def note_scope(self, granules: Addresses, strong: Strong | None) -> None:
        """Record the scope of a write; of a weak one, so that no older scope stays."""
        short = 0 if strong is None else strong.short
        if self.scopes is None:
            if not short:
                return
            self.scopes = np.zeros(self.writer.size, np.int8)
        self.scopes[granules] = short

    def note_constant(self, granules: Addresses, line: int) -> None:
        """Record a load with .nc at PTX `line`."""
        if self.constant_line is None:
            places_change()
            self.constant_line = np.zeros(self.writer.size, np.int32)
        self.constant_line[granules] = line

    def note_comparison(self, granules: Addresses, mark: int, line: int) -> None:
        """Record a compare-and-swap at PTX `line` that failed."""
        if self.comparer is None or self.compare_line is None:
            places_change()
            self.comparer, self.compare_line = np.zeros(self.writer.size, np.int64), np.zeros_like(self.line)
        self.comparer[granules], self.compare_line[granules] = mark, line

    def granules(self, addresses: Addresses, size: int) -> Addresses:
        """Granules [n, granules] of accesses of `size` bytes at addresses [n]. Splits granules if needed."""
        self.split_for(size)
        first = (addresses - self.base >> self.shift)[:, None]
        return first if size >> self.shift == 1 else first + np.arange(size >> self.shift)


@dataclass(slots=True)
class GlobalAccesses:
    """Accesses [n] of one buffer by `warp`, as checks see them: granules [n, k], and `action`, the verb for reports.

    `lanes` [n]: the lanes that access; None if unknown. `by_lane`: the number of an access is its lane. `written`:
    addresses [n], and what threads are about to write there.
    """

    action: str
    buffer: Buffer
    shadow: Shadow
    granules: Addresses
    warp: Accessor
    lanes: Addresses | None
    by_lane: bool
    written: tuple[Addresses, Bytes | None] | None = None

    def lane(self, access: int) -> int | None:
        """The lane of an access."""
        return access if self.by_lane else None

    def written_before(self) -> npt.NDArray[np.bool_] | None:
        """Which accesses [n, 1] write the value that is there already; None if the values are unknown."""
        addresses, values = self.written or (None, None)
        if addresses is None or values is None:
            return None
        offsets = addresses - self.buffer.base
        return (self.buffer.data[offsets[:, None] + np.arange(values.shape[1])] == values).all(1)[:, None]

    def report_lanes(self, access: int, granule: int, why: str, other: OtherAccess) -> None:
        """Report an access that lanes of a warp leave unordered."""
        offset = self.shadow.offset_in(self.buffer, granule)
        report(Fault("lanes-unordered", f"byte {offset} of `{self.buffer.name}` {self.action} {why}",
                     lane=self.lane(access), other=other))  # fmt: skip


class GlobalRaces:
    """The shadows and the flags of one launch.

    `first_ctas`: the first CTA of a cluster, by serial number; `releases`: what lanes of its warps have released.
    `stored`: there has been a generic write, so that proxy fences matter.
    """

    def __init__(self) -> None:
        self.flags: dict[int, Snapshot] = {}
        self.first_ctas: dict[int, Dim3] = {}
        self.releases: dict[int, LaneReleases] = {}
        self.chain = LaunchChain()
        self.stored = False
        self.maps = MapFences(self)
        self.map_reads = MapReads(self)
        self._shadows: dict[int, Shadow] = {}
        self._places: list[MemoryWords] = []
        self._partial = np.zeros(MAX_AGENTS, np.bool_)

    def begin_launch(self, kernel: str, *, dependent: bool = False) -> None:
        """Order everything so far before everything from now on, except what a `dependent` launch may overlap."""
        if dependent:
            self._mark_map_reads()
        self.chain.begin(kernel, self._shadows, dependent=dependent)
        self.flags.clear()
        self.first_ctas.clear()
        self.releases.clear()
        self._partial[:] = False
        self._shadows = {}
        self._places = []
        self.stored = False
        self.maps = MapFences(self)
        self.map_reads = MapReads(self)

    def touched(self, buffer: Buffer) -> bool:
        """Whether the latest launch, or one before it that may overlap it, has accessed `buffer`."""
        return buffer.base in self._shadows or self.chain.had(buffer)

    def begin_cluster(self, first: Dim3) -> int:
        """Register a cluster that begins at CTA `first`. Returns its serial number."""
        serial = len(self.first_ctas) + 1
        self.first_ctas[serial] = first
        self.releases[serial] = LaneReleases(partial=self._partial)
        return serial

    def read(
        self,
        buffer: Buffer,
        addresses: Addresses,
        size: int,
        warp: Accessor,
        stamp: Marks,
        *,
        by_lane: bool = True,
        lanes: Addresses | None = None,
        bulk: bool = False,
        constant: bool = False,
    ) -> None:
        """Check and mark a read of `size` bytes at each address [n] of one buffer, for `warp`.

        `stamp`: the reading agent and its epoch. Reports a race; its lane is the number of the access if `by_lane`.
        `lanes` [n]: the lanes of the warp that read; None if unknown. `bulk`: through the asynchronous proxy.
        `constant`: by a load with .nc.
        """
        if self.chain.before:
            self.chain.check(buffer, addresses, size, warp.clock, writes=False, by_lane=by_lane)
        shadow = self._shadow(buffer)
        granules = shadow.granules(addresses, size)
        accesses = GlobalAccesses("is read", buffer, shadow, granules, warp, lanes, by_lane)
        self._check(accesses, shadow.writer)
        self._check_met(accesses)
        self._check_released(accesses)
        self._check_acquired(accesses, shadow.writer)
        if bulk and self.stored:
            self._check_fenced(accesses, "reads")
        shadow.reader[granules] = warp.agents.mark | stamp
        shadow.read_line[granules] = line = warp.agents.line()
        if constant:
            shadow.note_constant(granules, line)

    def read_strongly(self, buffer: Buffer, addresses: Addresses, size: int, warp: Accessor, strong: Strong) -> None:
        """As `read`, for a `strong` load: it races with strong writes where a scope leaves a thread out."""
        shadow = self._shadows.get(buffer.base)
        if shadow is not None and (strong.short or shadow.scopes is not None):
            granules = shadow.granules(addresses, size)
            self._check_scopes(GlobalAccesses("is read", buffer, shadow, granules, warp, None, True), strong)

    def compare(
        self, buffer: Buffer, addresses: Addresses, size: int, warp: Accessor, stamp: int, strong: Strong
    ) -> None:
        """As `read_strongly`, for a compare-and-swap that fails; marks it, because a weak write after it races too."""
        if self.chain.before:
            self.chain.check(buffer, addresses, size, warp.clock, writes=False, by_lane=True)
        self.read_strongly(buffer, addresses, size, warp, strong)
        shadow = self._shadow(buffer)
        shadow.note_comparison(shadow.granules(addresses, size), warp.agents.mark | stamp, warp.agents.line())

    def write(
        self,
        buffer: Buffer,
        addresses: Addresses,
        size: int,
        warp: Accessor,
        stamp: Marks,
        line: int,
        *,
        strong: Strong | None,
        lanes: Addresses | None,
        values: Bytes | None = None,
    ) -> None:
        """As `read`, for a write at PTX `line` by `lanes`, or by a bulk copy (None).

        A `strong` write (None: weak) races with weak reads, and with strong writes where a scope leaves a thread out.
        `values` [n, size] is what a thread is about to write: if it is there already, the outcome of the racing writes
        is defined (PTX ISA 8.7.2).
        """
        by_lane = lanes is not None
        if self.chain.before:
            self.chain.check(buffer, addresses, size, warp.clock, writes=True, by_lane=by_lane)
        shadow = self._shadow(buffer)
        granules = shadow.granules(addresses, size)
        accesses = GlobalAccesses("is overwritten", buffer, shadow, granules, warp, lanes, by_lane, (addresses, values))
        if buffer in self.map_reads.reads:
            self.map_reads.check(accesses, size)
        if strong and not by_lane and self.stored:
            self._check_fenced(accesses, "reduces into", weak=True)
        if strong:
            self._check_scopes(accesses, strong)
            self._check(accesses, shadow.reader)
        else:
            self._check(accesses, shadow.writer)
            self._check_released(accesses)
            self._check(accesses, shadow.reader)
            if shadow.comparer is not None:
                self._check(accesses, shadow.comparer)
            for marks in (shadow.writer, shadow.reader):
                self._check_acquired(accesses, marks)
            if not by_lane and self.stored:
                self._check_fenced(accesses, "overwrites")
        self.stored |= by_lane
        shadow.writer[granules] = warp.agents.mark | stamp
        shadow.line[granules] = line
        shadow.lanes.note(granules, lanes, 0 if strong or lanes is None else warp.meetings)
        shadow.note_scope(granules, strong)

    def map_changes(self, memory: GlobalMemory, address: int, warp: Accessor, *, used: bool) -> dict[int, int]:
        """Marks and PTX lines of this launch's writes to the tensor map at `address` that are ordered before `warp`.

        `used`: the map is being used, so that a write which is not ordered before is a race, and one by a launch that
        may still run is reported too.
        """
        buffer = memory.holding(address)
        if buffer is None or not buffer.writable or address + MAP_HALF > buffer.end:
            return {}
        place = np.array([address], np.int64)
        if used and self.chain.before:
            self.chain.check(buffer, place, MAP_HALF, warp.clock, writes=False, by_lane=False)
        shadow = self._shadows.get(buffer.base)
        if shadow is None:
            return {}
        granules = shadow.granules(place, MAP_HALF)
        marks = shadow.writer[granules]
        if not count_nonzero(marks):
            return {}
        if used:
            self._check(
                GlobalAccesses("is used as a tensor map", buffer, shadow, granules, warp, None, False), shadow.writer
            )
        changed = (marks != 0) & ~_late(marks, warp)
        return dict(zip(marks[changed].tolist(), shadow.line[granules][changed].tolist(), strict=True))

    def place(self, buffer: Buffer, size: int, clock: Clock) -> MemoryWords | None:
        """`buffer` and its marks for machine code, for accesses of `size` bytes by the owner of `clock`.

        None if the marks of an earlier launch, or copies that read a tensor map there, count too.
        """
        if buffer in self.map_reads.reads:
            return None
        if self.chain.before and buffer.writable and self.chain.concerns(buffer, clock):
            return None
        shadow = self._shadow(buffer) if buffer.writable else None
        if shadow is not None:
            shadow.split_for(size)
        known, writer, constant, comparer = buffer.place, None, None, None
        if shadow is not None:
            writer, constant, comparer = shadow.writer, shadow.constant_line, shadow.comparer
        if (
            known is None
            or known.fields[_STATE] is not buffer.state
            or known.fields[_WRITER] is not writer
            or known.fields[_CONSTANT] is not constant
            or known.fields[_COMPARER] is not comparer
        ):
            marks = (0, 0, *[None] * 7)
            if shadow is not None:
                marks = (shadow.base, shadow.shift, writer, shadow.reader, shadow.line, shadow.read_line, constant,
                         shadow.lanes.lane, shadow.lanes.met)  # fmt: skip
            known = buffer.place = MemoryWords(
                buffer.data.size, buffer.data, buffer.state, *marks, comparer, self._partial
            )
            self._places.append(known)
        return known

    def lasting(self, buffer: Buffer, clock: Clock) -> int | None:
        """How long a `place` that the owner of `clock` has got holds in this launch, until access_code.CHANGES.

        0: for all warps. Otherwise: for warps whose clock is nonzero in this element. None: unknown.
        """
        if not (self.chain.before and buffer.writable and self.chain.had(buffer)):
            return 0
        return clock.seen.size - 1 if clock.seen[WAITED] else None

    def copied_from(
        self,
        memory: GlobalMemory,
        addresses: Addresses,
        size: int,
        warp: Accessor,
        stamp: int,
        lanes: Addresses | None,
        *,
        bulk: bool,
    ) -> None:
        """Check a copy for `warp` that reads `size` bytes at each address.

        Skipped if they do not all lie in one buffer, because the copy itself fails there.
        """
        buffer = memory.holding(int(addresses[0]))
        if buffer is not None and buffer.writable and _inside(buffer, addresses, size):
            self.read(buffer, addresses, size, warp, stamp, by_lane=False, lanes=lanes, bulk=bulk)

    def copied_to(
        self, memory: GlobalMemory, pieces: Sequence[Pieces], warp: Accessor, line: int, *, strong: Strong | None
    ) -> None:
        """As `copied_from`, for the writes of one bulk copy at PTX `line`. Its pieces do not race with each other."""
        for size in dict.fromkeys(size for _, size, _ in pieces):
            same = [(addresses, stamp) for addresses, bytes_, stamp in pieces if bytes_ == size and addresses.size]
            if not same:
                continue
            addresses = np.concatenate([addresses for addresses, _ in same])
            stamps = np.concatenate([np.full((addresses.size, 1), stamp, np.int64) for addresses, stamp in same])
            buffer = memory.holding(int(addresses[0]))
            if buffer is not None and buffer.writable and _inside(buffer, addresses, size):
                self.write(buffer, addresses, size, warp, stamps, line, strong=strong, lanes=None)

    def _mark_map_reads(self) -> None:
        """Mark what copies have read as tensor maps, for a dependent launch that overwrites it too early."""
        for buffer, address, mark, line in self.map_reads.latest():
            shadow = self._shadow(buffer)
            granules = shadow.granules(np.array([address], np.int64), MAP_HALF)
            shadow.reader[granules], shadow.read_line[granules] = mark, line

    def _shadow(self, buffer: Buffer) -> Shadow:
        found = self._shadows.get(buffer.base)
        if found is None:
            found = self._shadows[buffer.base] = Shadow.of(buffer)
        return found

    def _check(self, accesses: GlobalAccesses, marks: Addresses) -> None:
        """Report the accesses of `marks` that nothing orders before."""
        shadow, buffer, warp, found = accesses.shadow, accesses.buffer, accesses.warp, marks[accesses.granules]
        if not count_nonzero(found):
            return
        late = _late(found, warp)
        if not count_nonzero(late):
            return
        wrote = marks is shadow.writer
        if wrote and (same := accesses.written_before()) is not None:
            late &= ~(same & (agent_of(found & STAMP_MASK) < warp.agents.first_engine))
        for access, at, line in shadow.one_a_line(accesses.granules, late, marks):
            offset, who = shadow.offset_in(buffer, at), self.name(int(marks[at]), warp)
            did = "wrote" if wrote else "read"
            other = OtherAccess(who, did, line, elsewhere=_is_elsewhere(int(marks[at]), warp))
            report(Fault("global-race", f"byte {offset} of `{buffer.name}` {accesses.action} after {who} {did} it"
                         f"{at_line(line)}, {UNORDERED}: a barrier, or a release and an acquire of gpu scope, "
                         "with fences if they are relaxed, is missing", lane=accesses.lane(access),
                         other=other))  # fmt: skip

    def _check_scopes(self, accesses: GlobalAccesses, strong: Strong) -> None:
        """Report strong writes before a `strong` access that are not morally strong with it, and not ordered before."""
        shadow, warp, granules = accesses.shadow, accesses.warp, accesses.granules
        if not strong.short and shadow.scopes is None:
            return
        found, theirs = shadow.writer[granules], 0 if shadow.scopes is None else shadow.scopes[granules]
        by, first_engine = agent_of(found & STAMP_MASK), warp.agents.first_engine
        own_cluster, own_cta = found >> CLUSTER_SHIFT == warp.agents.serial, warp.agent // warp.agents.warps_per_cta
        distance = np.where(own_cluster, (by // warp.agents.warps_per_cta != own_cta).astype(np.int64), 2)
        narrow = left_out(strong, theirs, distance) & (found != 0) & (by < first_engine)
        narrow &= shadow.lanes.met[granules] == 0
        if not count_nonzero(narrow):
            return
        narrow &= _late(found, warp)
        if not strong.atomic and (same := accesses.written_before()) is not None:
            narrow &= ~same
        for access, at, line in shadow.one_a_line(granules, narrow, shadow.writer):
            place, mark = f"byte {shadow.offset_in(accesses.buffer, at)} of `{accesses.buffer.name}`", shadow.writer[at]
            short = 0 if shadow.scopes is None else int(shadow.scopes[at])
            far = int(distance[granules == at][0])
            other = OtherAccess(self.name(int(mark), warp), "wrote", line, elsewhere=far > 0)
            report_narrow(place, strong, short, far, other,
                          lane=accesses.lane(access), address=None)  # fmt: skip

    def _check_met(self, accesses: GlobalAccesses) -> None:
        """Report reads by lanes that have not met the lanes of their warp that wrote."""
        shadow, warp, lanes = accesses.shadow, accesses.warp, accesses.lanes
        if lanes is None:
            return
        foreign = shadow.lanes.foreign(accesses.granules, lanes, warp.meetings)
        if not count_nonzero(foreign):
            return
        marks = shadow.writer[accesses.granules]
        foreign &= (marks >> CLUSTER_SHIFT == warp.agents.serial) & (agent_of(marks & STAMP_MASK) == warp.agent)
        for access, at, line in shadow.one_a_line(accesses.granules, foreign, shadow.writer):
            who = f"lane {shadow.lanes.lane[at]} of the same warp"
            accesses.report_lanes(access, at, f"by lane {lanes[access]} after {who} wrote it at PTX line {line}, and "
                                 "the lanes have not met in between: bar.warp.sync is missing",
                                 OtherAccess(who, "wrote", line))  # fmt: skip

    def _check_released(self, accesses: GlobalAccesses) -> None:
        """Report accesses that are ordered behind a write only by a release of other lanes."""
        shadow, warp, granules = accesses.shadow, accesses.warp, accesses.granules
        marks = shadow.writer[granules]
        loose = self._partial[agent_of(marks & STAMP_MASK)] & (shadow.lanes.met[granules] > 0)
        if not count_nonzero(loose):
            return
        if (same := accesses.written_before()) is not None:
            loose &= ~same
        known = warp.known()
        for place in zip(*np.nonzero(loose), strict=True):
            at = granules[place]
            serial, agent, epoch = parts_of(int(marks[place]))
            seen = seen_of(known, serial, agent)
            lane, met = int(shadow.lanes.lane[at]), int(shadow.lanes.met[at])
            loose[place] = epoch <= seen and self.releases[serial].leave_out(agent, lane, met, epoch, seen)
        for access, at, line in shadow.one_a_line(granules, loose, shadow.writer):
            mark, lane = int(shadow.writer[at]), int(shadow.lanes.lane[at])
            serial, agent, _ = parts_of(mark)
            who = f"lane {lane} of {self.name(mark, warp)}"
            why = self.releases[serial].missing_meeting(agent, lane, int(shadow.lanes.met[at]))
            accesses.report_lanes(access, at, f"after {who} wrote it at PTX line {line}; {why}",
                                 OtherAccess(who, "wrote", line))  # fmt: skip

    def _check_acquired(self, accesses: GlobalAccesses, marks: Addresses) -> None:
        """Report accesses of `marks` that are ordered before only by acquires of other lanes of the warp."""
        shadow, warp, lanes = accesses.shadow, accesses.warp, accesses.lanes
        if lanes is None or warp.acquires.at != warp.meetings:
            return
        own = (warp.agents.serial, warp.agent)
        unknown = warp.acquires.unknown(marks[accesses.granules], lanes, warp.known(), own)
        wrote = marks is shadow.writer
        for access, at, line in shadow.one_a_line(accesses.granules, unknown, marks):
            who, did = self.name(int(marks[at]), warp), "wrote" if wrote else "read"
            accesses.report_lanes(access, at, f"by lane {lanes[access]} after {who} {did} it at PTX line {line}; what "
                                 "orders that is an acquire by other lanes, which the lane has not met since: "
                                 "bar.warp.sync is missing behind the acquire",
                                 OtherAccess(who, did, line))  # fmt: skip

    def _check_fenced(self, accesses: GlobalAccesses, does: str, *, weak: bool = False) -> None:
        """Report generic writes, or only `weak` ones, that no proxy fence covers."""
        shadow, buffer, warp = accesses.shadow, accesses.buffer, accesses.warp
        late = _unfenced(shadow.writer[accesses.granules], warp)
        if weak:
            late &= shadow.lanes.met[accesses.granules] > 0
        if not count_nonzero(late):
            return
        for _, at, line in shadow.one_a_line(accesses.granules, late, shadow.writer):
            offset, who = shadow.offset_in(buffer, at), self.name(int(shadow.writer[at]), warp)
            report(Fault("missing-proxy-fence", f"a bulk copy {does} byte {offset} of `{buffer.name}`, which {who} "
                         f"wrote at PTX line {line} through the generic proxy with no fence.proxy.async of global "
                         "memory in between", other=OtherAccess(who, "wrote", line)))  # fmt: skip

    def name(self, mark: int, warp: Accessor) -> str:
        """The agent of a mark in reports."""
        agents, serial = warp.agents, mark >> CLUSTER_SHIFT
        name = agents.name(int(agent_of(mark & STAMP_MASK)))
        if serial == agents.serial:
            return name
        return f"{name} of {'the cluster of ' if agents.size > 1 else ''}CTA {self.first_ctas[serial]}"

    def written_constants(self) -> Iterator[tuple[int, int, int, int]]:
        """Granules that this launch has written, and has loaded with .nc, one for each load and buffer: the base of the
        buffer, the address of the granule, and the PTX lines of the load and the write."""
        for base, shadow in self._shadows.items():
            if shadow.constant_line is None:
                continue
            both = np.flatnonzero((shadow.writer != 0) & (shadow.constant_line != 0))
            _, firsts = np.unique(shadow.constant_line[both], return_index=True)
            for at in both[firsts].tolist():
                address = max(shadow.base + (at << shadow.shift), base)
                yield base, address, int(shadow.constant_line[at]), int(shadow.line[at])

    def release(self, address: int, warp: Accessor, *, ordered: bool) -> None:
        """A strong write of gpu scope: if `ordered`, the flag carries what `warp` has seen, else what it has
        published."""
        grid = warp.clock.grid
        if ordered:
            carried = warp.known()
        elif grid is not None and grid.published:
            carried = grid.published
        else:
            return
        merge(self.flags.setdefault(address, {}), carried)

    def acquire(self, address: int, warp: Accessor, *, ordered: bool) -> None:
        """A strong read of gpu scope: if `ordered`, `warp` knows what the flag carries, else it only notices it."""
        found = self.flags.get(address)
        if not found:
            return
        grid = warp.clock.grid_part()
        if ordered:
            grid.learn(warp.agents.serial, warp.clock.seen, found)
        else:
            merge(grid.noticed, found)


def _inside(buffer: Buffer, addresses: Addresses, size: int) -> bool:
    return int(addresses.min()) >= buffer.base and int(addresses.max()) + size <= buffer.end


def _is_elsewhere(mark: int, warp: Accessor) -> bool:
    """Whether a warp of another CTA than that of `warp` left `mark`, or a copy of another cluster."""
    serial, agent, _ = parts_of(mark)
    return serial != warp.agents.serial or warp.agents.is_elsewhere(agent, warp.agent)


def _late(found: Addresses, warp: Accessor) -> npt.NDArray[np.bool_]:
    """Which marks no synchronisation orders before the next action of `warp`."""
    clusters = found >> CLUSTER_SHIFT
    own = warp.agents.serial
    mine = clusters == own
    late = np.zeros(found.shape, np.bool_)
    count = count_nonzero(mine)
    if count:
        late = _outside(mine, found, warp.clock.seen)
        if count == mine.size:
            return late
    grid = warp.clock.grid
    others = ~mine & (found != 0)
    if grid is None or not grid.known:
        return late | others
    for serial in np.unique(clusters[others]).tolist():
        here = clusters == serial
        seen = grid.known.get(serial)
        if seen is None:
            late |= here
        else:
            late |= _outside(here, found, seen)
    return late


def _outside(here: npt.NDArray[np.bool_], found: Addresses, seen: Epochs) -> npt.NDArray[np.bool_]:
    """Which of the marks `here`, all of one cluster, lie outside of `seen` of that cluster."""
    late = unordered(np.where(here, found & STAMP_MASK, 0).astype(np.int32), seen)
    return np.zeros(found.shape, np.bool_) if late is None else here & late


def _unfenced(found: Addresses, warp: Accessor) -> npt.NDArray[np.bool_]:
    """Which marks are generic writes that no proxy fence has made visible to the copies of `warp`."""
    late = (found != 0) & (agent_of(found & STAMP_MASK) < warp.agents.first_engine)
    if not count_nonzero(late) or warp.clock.grid is None:
        return late
    clusters = found >> CLUSTER_SHIFT
    for serial in np.unique(clusters[late]).tolist():
        visible = warp.clock.grid.known.get(-serial)
        if visible is not None:
            here = clusters == serial
            late &= ~here | _outside(here, found, visible)
    return late
