"""Tensor memory of one CTA: 128 lanes x 512 columns x 32 bit, its allocations and who touched what (PTX ISA 9.7.16.1).

Cells carry the same stamps as shared memory. A `tcgen05.st` stays pending until its warp's `tcgen05.wait::st`, even for
that warp. A wait for a commit after an MMA makes visible what the MMA wrote. A `tcgen05.ld` fills its registers at
once, since a register dependence needs no wait. But it may read its cells until it has ended (backends.vm.bind.flow),
and they must not be overwritten before (PTX ISA 9.7.16.6.4.5).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backends.vm.faults import UNORDERED, Fault, OtherAccess, at_line, counted, report
from backends.vm.memory.clocks import (
    EPOCH_MASK,
    PENDING,
    Agents,
    Clock,
    Stamps,
    agent_of,
    unordered,
)
from backends.vm.memory.definedness import Origin, Sources
from backends.vm.memory.tmem_waits import Room, fewest, listed
from backends.vm.numpy_calls import count_nonzero

LANES = 128
COLUMNS = 512
COUNTS = (32, 64, 128, 256, 512)
"""Columns that an allocation may have (PTX ISA 9.7.16.7.1)."""
Part = slice | npt.NDArray[np.int64]
Index = tuple[Part, Part]
"""(lanes, columns): two slices for a block, or two integer arrays that broadcast against each other."""
Words = npt.NDArray[np.uint32]
ALL = np.uint32(0xFFFFFFFF)


@dataclass(slots=True, eq=False)
class Allocation:
    """Columns `first` .. `first + columns - 1`, allocated at PTX line `line` by a warp in an epoch (`stamp`).

    `later`: the allocations that the CTA has made while it held this one. `earlier`: how many it still holds of those
    that it held when it got this one. `kept`: columns that it held before it got these, and has freed only after that.
    """

    first: int
    columns: int
    line: int
    stamp: int
    kept: int = 0
    earlier: int = 0
    later: list[Allocation] = field(default_factory=list["Allocation"])


@dataclass(slots=True)
class Meeting:
    """A collective instruction of a CTA pair.

    Both CTAs must give the same `arguments`. `ranks` have arrived, and `agents`, a warp of each. `first` is the first
    column that an alloc was given.
    """

    what: str
    arguments: tuple[int, ...]
    ranks: set[int] = field(default_factory=set[int])
    agents: set[int] = field(default_factory=set[int])
    first: int | None = None


@dataclass(slots=True)
class TensorMemory:
    """All of a CTA's tensor memory. Indices are (lanes, columns) arrays that broadcast against each other.

    `defined` says of each cell whether all its bits are defined once the operations issued so far have ended; `hidden`
    has the undefined bits of the other cells, None for all of them. `sources` are by column.

    `cta_group` is the group of the tcgen05 instructions so far, 0 before the first. `collectives` counts those that the
    CTA has executed as one of a pair; the even CTA keeps the pair's `meetings`, by number. `loading` holds the PTX line
    of a tcgen05.ld that may still read the cell: negative once one of its registers has been used, 0 after its wait.
    After the wait `reader` has the stamp of the wait, `waited_line` its PTX line and `begun` the stamp of the load.
    `unwaited_overwrites` counts the writes to cells where it was negative. `closed`: by column, the line of a dealloc
    that one CTA of the pair has executed. `room`: how many CTAs of the kernel one SM holds. `waits`: allocations
    before which the CTA has kept others, by how many columns those had and by PTX line.
    """

    agents: Agents
    room: Room = field(default_factory=Room)
    data: Words = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.uint32))
    defined: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.bool_))
    hidden: Words | None = None
    sources: Sources = field(default_factory=Sources)
    writer: Stamps = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.int32))
    reader: Stamps = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.int32))
    writer_line: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.int32))
    reader_line: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.int32))
    loading: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.int32))
    begun: Stamps = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.int32))
    waited_line: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((LANES, COLUMNS), np.int32))
    owned: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(COLUMNS, np.bool_))
    closed: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(COLUMNS, np.int32))
    allocations: list[Allocation] = field(default_factory=list[Allocation])
    permit: bool = True
    cta_group: int = 0
    collectives: int = 0
    meetings: dict[int, Meeting] = field(default_factory=dict[int, Meeting])
    peak_columns: int = 0
    unwaited_overwrites: int = 0
    smallest: int = COLUMNS
    waits: dict[tuple[int, int], Allocation] = field(default_factory=dict[tuple[int, int], Allocation])

    def allocate(self, first: int, columns: int, line: int, stamp: int) -> None:
        """Allocate columns. The count is a power of two in 32..512, at most that of the allocation before."""
        if columns > self.smallest:
            raise Fault("tmem-alloc", f"{columns} columns asked for after an allocation of {self.smallest}: the count "
                        "may not grow from one allocation of a CTA to the next")  # fmt: skip
        self.smallest = columns
        new = Allocation(first, columns, line, stamp, earlier=len(self.allocations))
        for held in self.allocations:
            held.later.append(new)
        self.allocations.append(new)
        self.owned[first : first + columns] = True
        self.peak_columns = max(self.peak_columns, int(self.owned.sum()))

    def close(self, address: int, columns: int, clock: Clock, line: int) -> None:
        """Record that a CTA of the pair, with what `clock` has seen, deallocates an allocation at PTX `line`.

        With cta_group::2 the dealloc frees the columns of both CTAs, and the ISA does not say that it waits for the
        other CTA (9.7.16.7.1, Table 48): all accesses by either CTA must come before.
        """
        first = address & 0xFFFF
        if any((one.first, one.columns) == (first, columns) for one in self.allocations):
            self._check_quiet((slice(0, LANES), slice(first, first + columns)), clock)
            self.closed[first : first + columns] = line

    def _check_quiet(self, cells: Index, clock: Clock) -> None:
        self._check_order(cells, self.writer, clock, "tcgen05.dealloc frees", "wrote")
        self._check_order(cells, self.reader, clock, "tcgen05.dealloc frees", "read")
        self._check_loaded(cells, "tcgen05.dealloc frees")

    def free(self, address: int, columns: int, clock: Clock) -> None:
        """Free the allocation of this address and size. All accesses to it must be ordered before."""
        for allocation in self.allocations:
            if allocation.first == address & 0xFFFF and allocation.columns == columns and address >> 16 == 0:
                cells = slice(0, LANES), slice(allocation.first, allocation.first + columns)
                self._check_quiet(cells, clock)
                self.closed[cells[1]] = 0
                self._check_kept(allocation, clock)
                self.allocations.remove(allocation)
                self.owned[cells[1]] = False
                self.defined[cells] = False
                if self.hidden is not None:
                    self.hidden[cells] = ALL
                self.writer[cells] = self.reader[cells] = self.loading[cells] = self.begun[cells] = 0
                return
        held = ", ".join(f"{a.columns} columns at {a.first:#x}" for a in self.allocations) or "none"
        raise Fault("tmem-dealloc", f"tcgen05.dealloc of {counted(columns, 'column')} at {address:#x}; live "
                    f"allocations: {held}",
                    address=address)  # fmt: skip

    def _check_kept(self, freed: Allocation, clock: Clock) -> None:
        """Report what is freed only after a later allocation, if CTAs of one SM can so wait for each other."""
        for one in freed.later:
            one.earlier -= 1
            if clock.comes_after(agent_of(one.stamp), one.stamp & EPOCH_MASK):
                one.kept += freed.columns
            if one.kept and not one.earlier and (one.kept, one.line) not in self.waits:
                self.waits[one.kept, one.line] = one
                self._check_waits(one)

    def _check_waits(self, one: Allocation) -> None:
        holders = fewest(one.kept, (kept for kept, _ in self.waits), COLUMNS)
        if 0 < len(holders) <= self.room.together(self.cta_group):
            report(Fault("tmem-hold-and-wait", f"frees the last of {one.kept} columns that the CTA has kept until it "
                         f"got {one.columns} more at PTX line {one.line}; {listed(holders)} take all {COLUMNS} columns "
                         f"of an SM, and each waits for the others; {self.room.reason(self.cta_group)}",
                         other=OtherAccess("the CTA", "allocates", one.line)))  # fmt: skip

    def _check_owned(self, index: Index, action: str) -> None:
        _check_bounds(index, action)
        owned = self.owned[index[1]]
        if count_nonzero(owned) < owned.size:
            columns = _as_array(index[1])
            column = int(columns[~self.owned[columns]].flat[0])
            raise Fault("tmem-not-allocated", f"{action} column {column}, which no live tcgen05.alloc covers",
                        address=column)  # fmt: skip
        closed = self.closed[index[1]]
        if count_nonzero(closed):
            columns = _as_array(index[1])
            column = int(columns[self.closed[columns] != 0].flat[0])
            line = int(self.closed[column])
            report(Fault("tmem-dealloc", f"{action} column {column}, which a CTA of the pair gives back by the "
                         f"tcgen05.dealloc of PTX line {line}: nothing makes that wait for this access",
                         address=column, other=OtherAccess("a CTA of the pair", "gives back", line)))  # fmt: skip

    def read(self, index: Index, clock: Clock, stamp: int, action: str) -> bool:
        """Check ownership and order of a read of the cells at `index`. Returns whether all of them are defined."""
        self._check_owned(index, action)
        wrote = self._check_order(index, self.writer, clock, action, "wrote")
        self.reader[index] = stamp
        self.begun[index] = 0
        if not self._fenced_alone(wrote, clock, stamp):
            self._check_tensor_fences(index, self.writer, clock, stamp, action)
        self.reader_line[index] = self.agents.line()
        defined = self.defined[index]
        return count_nonzero(defined) == defined.size

    def undefined_bits(self) -> Words:
        """The undefined bits of every cell: uint32 [128, 512]."""
        return np.where(self.defined, np.uint32(0), ALL if self.hidden is None else self.hidden)

    def undefine(self, bits: Words, origin: Origin) -> None:
        """Set the undefined bits of every cell, uint32 [128, 512]. Newly undefined bits come from `origin`."""
        new = (bits != 0) & (self.defined if self.hidden is None else self.defined | (bits != self.hidden))
        self.sources.note(np.flatnonzero(new.any(axis=0)), origin)
        self.defined, self.hidden = bits == 0, bits

    def origin_of(self, index: Index, line: int) -> Origin:
        """The origin of the first undefined cell at `index`, which PTX `line` reads."""
        lane, column = self._first(index, ~self.defined[index])
        known = self.sources.by_unit.get(column)
        if known is None:
            what = f"lane {lane}, column {column} of tensor memory, which was not yet written"
            known = Origin("uninitialised-tmem", what)
        return known.read_at(line)

    def begin_write(
        self, index: Index, clock: Clock, stamp: int, line: int, action: str, own: int | None = None
    ) -> None:
        """Check and mark a write. For an MMA this happens at its issue: the data comes later.

        `own`: the writing agent, which may overwrite its own pending writes.
        """
        self._check_owned(index, action)
        wrote = self._check_order(index, self.writer, clock, action, "wrote", own)
        read = self._check_order(index, self.reader, clock, action, "read")
        self._check_loaded(index, action)
        if not self._fenced_alone(wrote, clock, stamp):
            self._check_tensor_fences(index, self.writer, clock, stamp, action)
        if not self._fenced_alone(read, clock, stamp):
            self._check_tensor_fences(index, self.reader, clock, stamp, action)
        self.defined[index] = True
        self.writer[index] = stamp
        self.writer_line[index] = line

    def read_by_tensor_core(self, index: Index, clock: Clock, agent: int) -> bool:
        """Whether the tensor core `agent` reads cells at `index` for an mma whose end `clock` has not seen."""
        found = self.reader[index]
        late = unordered(found, clock.seen)
        return late is not None and int(count_nonzero(late & (agent_of(found) == agent))) > 0

    def check_pipelined(
        self, index: Index, reads: int, writes: int, ended: int, operands: Sequence[tuple[str, Index]]
    ) -> None:
        """Before an mma with these stamps writes: report cells that the tensor core still reads for another
        accumulator's mma, or as one of the `operands` of this mma, given with their names.

        `ended`: the last mma whose end its issuer has seen. The ISA orders MMAs of one accumulator (9.7.16.6.2): such
        an mma reads what it writes, or comes before the writer.
        """
        _check_bounds(index, "tcgen05.mma writes")
        found, wrote = self.reader[index], self.writer[index]
        read = _only(found)
        if read is not None and (agent_of(read) != agent_of(reads) or (read & EPOCH_MASK) <= ended):
            return
        late = (agent_of(found) == agent_of(reads)) & ((found & EPOCH_MASK) > ended)
        late &= (agent_of(wrote) != agent_of(writes)) | ((wrote & EPOCH_MASK) < (found & EPOCH_MASK))
        if count_nonzero(own := late & (found == reads)):
            lane, column = self._first(index, own)
            what = next((name for name, cells in operands if _holds(cells, lane, column)), "operand")
            report(Fault("tmem-race", f"tcgen05.mma writes D to lane {lane}, column {column}, where its own {what} "
                         "may still be read: they overlap, and must lie in columns of their own",
                         address=lane << 16 | column))  # fmt: skip
            late &= ~own
        if count_nonzero(late):
            lane, column = self._first(index, late)
            line = int(self.reader_line[lane, column])
            report(Fault("tmem-mma-unordered", f"tcgen05.mma overwrites lane {lane}, column {column}, which the mma of "
                         f"PTX line {line} reads, and nothing has shown the end of that", address=lane << 16 | column,
                         other=OtherAccess(self.agents.name(agent_of(reads)), "reads", line)))  # fmt: skip

    def _first(self, index: Index, bad: npt.NDArray[np.bool_]) -> tuple[int, int]:
        lanes, columns = _as_array(index[0]), _as_array(index[1])
        if isinstance(index[0], slice):
            lanes = lanes[:, None]
        lanes, columns = np.broadcast_arrays(lanes, columns)
        return int(lanes[bad][0]), int(columns[bad][0])

    def _check_order(
        self, index: Index, stamps: Stamps, clock: Clock, action: str, did: str, own: int | None = None
    ) -> int | None:
        """Report accesses that nothing orders before this one. Returns the stamp of all cells if they have one, and it
        is ordered."""
        found = stamps[index]
        head = _only(found)
        if head is not None and (head & EPOCH_MASK) <= clock.seen[agent_of(head)]:
            return head
        late = (found & EPOCH_MASK) > clock.seen[agent_of(found)]
        if own is not None:
            late &= agent_of(found) != own
        if not count_nonzero(late):
            return None
        lines = self.writer_line if did == "wrote" else self.reader_line
        for line in dict.fromkeys(np.broadcast_to(lines[index], late.shape)[late].tolist()):
            lane, column = self._first(index, late & (lines[index] == line))
            agent, pending = agent_of(int(stamps[lane, column])), int(stamps[lane, column]) & EPOCH_MASK == PENDING
            who = self.agents.name(agent)
            if pending:
                report(Fault("tmem-store-not-waited", f"{action} lane {lane}, column {column}, where a tcgen05.st by "
                             f"{who} at PTX line {line} is not complete: tcgen05.wait::st is missing",
                             address=lane << 16 | column, other=OtherAccess(who, "writes", line)))  # fmt: skip
            else:
                begun = int(self.begun[lane, column]) if did == "read" else 0
                if begun and begun & EPOCH_MASK <= clock.seen[agent]:
                    self._report_late_wait(action, lane, column, who)
                    continue
                report(Fault("tmem-race", f"{action} lane {lane}, column {column} after {who} {did} it"
                             f"{at_line(line)}, {UNORDERED}: a commit and a wait for it, or a barrier, is missing",
                             address=lane << 16 | column, other=OtherAccess(who, did, line)))  # fmt: skip
        return None

    def _report_late_wait(self, action: str, lane: int, column: int, who: str) -> None:
        line, waited = int(self.reader_line[lane, column]), int(self.waited_line[lane, column])
        report(Fault("tmem-load-not-waited", f"{action} lane {lane}, column {column}, where the tcgen05.ld of PTX line "
                     f"{line} by {who} may still read: its tcgen05.wait::ld at PTX line {waited} comes after what "
                     "orders the two", address=lane << 16 | column,
                     other=OtherAccess(who, "reads", line)))  # fmt: skip

    def _fenced_alone(self, head: int | None, clock: Clock, stamp: int) -> bool:
        """Whether `_check_tensor_fences` finds nothing in cells that have the one stamp `head`. False if unknown."""
        return head is not None and (
            agent_of(head) == self.agents.acting() or self._is_fenced(head, clock, agent_of(stamp))
        )

    def _check_tensor_fences(self, index: Index, stamps: Stamps, clock: Clock, stamp: int, action: str) -> None:
        """Report accesses of others that are ordered before this one, but not by tcgen05.fence (PTX ISA 9.7.16.6.3).

        A commit includes the fence before the synchronisation, and MMAs need none between them. A warp's own accesses
        come before what it issues.
        """
        found, own, engines = stamps[index], agent_of(stamp), self.agents.first_engine
        issuer = self.agents.acting()
        agents, epochs = agent_of(found), found & EPOCH_MASK
        ordered = (found != 0) & (agents != own) & (agents != issuer) & (epochs <= clock.seen[agents])
        if own >= engines:
            ordered &= agents < engines
        if not count_nonzero(ordered):
            return
        behind = ordered if clock.tensor is None else ordered & (epochs > clock.tensor[agents])
        if count_nonzero(behind):
            self._report_unfenced(index, behind, stamps, action, "no tcgen05.fence::after_thread_sync behind")
            return
        for one in np.unique(found[ordered & (agents < engines)]).tolist():
            if not self._is_fenced(one, clock, own):
                late = ordered & (found == one)
                self._report_unfenced(index, late, stamps, action, "no tcgen05.fence::before_thread_sync before")

    def _is_fenced(self, stamp: int, clock: Clock, own: int) -> bool:
        """Whether tcgen05.fence, or the pipeline, orders the access with `stamp` before what agent `own` does next."""
        agent, epoch, engines = agent_of(stamp), stamp & EPOCH_MASK, self.agents.first_engine
        if not stamp or agent == own or (own >= engines and agent >= engines) or epoch > clock.seen[agent]:
            return True
        if clock.tensor is None or epoch > clock.tensor[agent]:
            return False
        fences = self.agents.tensor_fences.get(agent, [])
        first = bisect_left(fences, epoch)
        return agent >= engines or (first < len(fences) and fences[first] <= clock.seen[agent])

    def _report_unfenced(
        self, index: Index, bad: npt.NDArray[np.bool_], stamps: Stamps, action: str, lacking: str
    ) -> None:
        lane, column = self._first(index, bad)
        wrote = stamps is self.writer
        line = int((self.writer_line if wrote else self.reader_line)[lane, column])
        other = OtherAccess(self.agents.name(agent_of(int(stamps[lane, column]))), "wrote" if wrote else "read", line)
        report(Fault("missing-tcgen05-fence", f"{action} lane {lane}, column {column} after {other.who} {other.did} it "
                     f"at PTX line {line}, with {lacking} the barrier or wait in between",
                     address=lane << 16 | column, other=other))  # fmt: skip

    def _check_loaded(self, index: Index, action: str) -> None:
        lines = self.loading[index]
        if not count_nonzero(lines):
            return
        used = not count_nonzero(lines > 0)
        self.unwaited_overwrites += used
        lane, column = self._first(index, lines != 0 if used else lines > 0)
        line, who = abs(int(self.loading[lane, column])), self.agents.name(agent_of(int(self.reader[lane, column])))
        rule, may = (
            ("tmem-load-used-unwaited", "was never waited for, though its registers were used")
            if used
            else ("tmem-load-not-waited", "may still read")
        )
        report(Fault(rule, f"{action} lane {lane}, column {column}, where the tcgen05.ld of PTX line {line} by "
                     f"{who} {may}: tcgen05.wait::ld is missing", address=lane << 16 | column,
                     other=OtherAccess(who, "reads", line)))  # fmt: skip
        self.loading[index] = 0

    def load_begins(self, index: Index, clock: Clock, stamp: int, line: int) -> bool:
        """Begin a tcgen05.ld of PTX `line`, checked as a read. Its cells are being read until `loads_complete`."""
        defined = self.read(index, clock, stamp, "tcgen05.ld reads")
        self.loading[index] = line
        return defined

    def load_used(self, cells: list[Index], line: int) -> None:
        """Record that a register that the tcgen05.ld of PTX `line` loads from `cells` has been used."""
        for index in cells:
            lines = self.loading[index]
            self.loading[index] = np.where(lines == line, np.int32(-line), lines)

    def loads_complete(self, agent: int, cells: list[Index], stamp: int, line: int) -> None:
        """`tcgen05.wait::ld` at PTX `line`: what `agent` loads from `cells` is read by now, and not before, unless a
        register of the load has been used."""
        for index in cells:
            begun, loading = self.reader[index], self.loading[index]
            mine = agent_of(begun) == agent
            reading = mine & (loading > 0)
            self.begun[index] = np.where(reading, begun, self.begun[index])
            self.reader[index] = np.where(reading, np.int32(stamp), begun)
            self.waited_line[index] = np.where(reading, np.int32(line), self.waited_line[index])
            self.loading[index] = np.where(mine, 0, loading)

    def stores_complete(self, agent: int, cells: list[Index], stamp: int) -> None:
        """`tcgen05.wait::st`: give the pending cells of `agent` the stamp of a finished write."""
        for index in cells:
            mine = self.writer[index]
            self.writer[index] = np.where(agent_of(mine) == agent, np.int32(stamp), mine)


def free_places(owned: npt.NDArray[np.bool_], columns: int) -> list[int]:
    """First columns of the free runs of `columns` columns, aligned to that number."""
    return [at for at in range(0, COLUMNS, columns) if not count_nonzero(owned[at : at + columns])]


def _check_bounds(index: Index, action: str) -> None:
    (low_lane, high_lane), (low, high) = _bounds(index[0]), _bounds(index[1])
    if low < 0 or high >= COLUMNS or low_lane < 0 or high_lane >= LANES:
        raise Fault("tmem-out-of-bounds", f"{action} lanes {low_lane}..{high_lane}, columns {low}..{high} of a "
                    f"tensor memory of {LANES} x {COLUMNS}")  # fmt: skip


def _only(stamps: Stamps) -> int | None:
    """The stamp of all cells, None if they have several."""
    head = stamps.item(0)
    return None if count_nonzero(stamps != head) else head


def _holds(index: Index, lane: int, column: int) -> bool:
    """Whether `index` has this cell."""
    return lane in _as_array(index[0]) and column in _as_array(index[1])


def _bounds(part: Part) -> tuple[int, int]:
    return (part.start, part.stop - 1) if isinstance(part, slice) else (int(part.min()), int(part.max()))


def _as_array(part: Part) -> npt.NDArray[np.int64]:
    return np.arange(part.start, part.stop, dtype=np.int64) if isinstance(part, slice) else part
