"""A warp: 32 lanes in step, their registers, and the strands that they split into when they diverge.

A strand is a set of lanes of a diverged warp that share a program counter. The strand in the lowest block runs first,
which brings the lanes together again soonest. Threads of a warp are still concurrent (PTX ISA 3.2), and lanes that spin
must not starve those that they wait for: when a strand has run for long while nothing has happened in the machine,
another one runs for a while. A spin causes no events. Lanes that copy, wait or change memory are left alone.

Lanes that reach an instruction of the whole warp wait for the lanes that are elsewhere, until those come or exit (PTX
ISA 9.7.13.1: "all non-exited threads"). If all others wait so at another instruction, nobody will come: `diverged`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import length_hint
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault
from backends.vm.machine import access, special
from backends.vm.machine.code import (
    HANDLED,
    LANES,
    NEXT,
    WIDTH_OF_VIEW,
    WORD,
    Block,
    Code,
    QuickRun,
    RegisterFile,
    Shown,
    Step,
    Wait,
    first_lanes,
    index_of,
    lanes_in,
)
from backends.vm.machine.engine import CopyGroups
from backends.vm.machine.poll_watch import PollWatch
from backends.vm.machine.undefined import BecameUndefined, Carrier, UndefinedRegisters
from backends.vm.memory.access_code import CHANGES
from backends.vm.memory.clocks import START, Carried, Clock, Snapshot, stamp
from backends.vm.memory.definedness import Sources
from backends.vm.memory.lane_acquires import LaneAcquires
from backends.vm.memory.lane_releases import EVERY, NOBODY
from backends.vm.memory.tmem import Index
from backends.vm.numpy_calls import address_of, count_nonzero

if TYPE_CHECKING:
    from backends.vm.machine.cta import Cta
    from backends.vm.ptx.ast import Instruction


Mask = npt.NDArray[np.bool_]
_Outcome = TypeVar("_Outcome")

FIRST_PATIENCE = 4096
"""Blocks without an event before other lanes get a turn. Long enough for a long computation of some lanes to end."""
LATER_PATIENCE = 32
"""The same in a warp that has spun before."""
POLLS = 32
"""Polls without an event before other lanes get a turn: lanes that poll are likely to wait for them."""
POLLS_A_TURN = 8
"""Polls of memory without an event that end a warp's turn: nothing that it polls changes before others move."""
TURN = 32
_EVERY_LANE_ADDRESS: Final = address_of(first_lanes(LANES))


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """Local memory of a warp's lanes: uint8 [32, bytes], and which bytes are defined."""

    data: npt.NDArray[np.uint8]
    defined: Mask
    sources: Sources

    @classmethod
    def of(cls, size: int) -> LocalMemory:
        """`size` unwritten bytes per lane."""
        return cls(np.zeros((LANES, size), np.uint8), np.zeros((LANES, size), np.bool_), Sources())


@dataclass(slots=True, eq=False)
class Strand:
    """Lanes that share a program counter. `wait` is set while they are parked in `block`, and `early` while it is for
    the other lanes of the warp, which the block needs."""

    block: int
    mask: Mask
    wait: Wait | None = None
    early: bool = False

    @property
    def able(self) -> bool:
        """Whether the lanes can go on: they wait for nothing, or their wait is over."""
        return self.wait is None or self.wait.ready()


@dataclass(slots=True)
class Gathering:
    """Lanes that have reached a bar.warp.sync with one mask. `over`: all lanes in the mask have."""

    here: Mask = field(default_factory=lambda: np.zeros(LANES, np.bool_))
    over: bool = False


@dataclass(slots=True)
class LaneTurns:
    """Picks which lanes of a diverged warp run next.

    `quiet` blocks have run since event `events` of the machine, and `polls` of them poll. Lane `chosen` has `left`
    blocks of its turn left.
    """

    patience: int = FIRST_PATIENCE
    quiet: int = 0
    polls: int = 0
    events: int = -1
    left: int = 0
    chosen: int = 0
    given: int = 0

    def after_block(self, warp: Warp, block: Block) -> None:
        """Order the strands for the next block after one of the diverged `warp` has run `block`."""
        events = warp.cta.machine.engine.events
        if events != self.events:
            self.events, self.quiet, self.polls = events, 0, 0
        self.quiet += 1
        self.polls += block.polls()
        if self.left:
            self.left -= 1
            if not (self.left and self._bring_forward(warp)):
                self.left = self.quiet = self.polls = 0
                warp.sort_strands()
        elif self.quiet >= self.patience or self.polls >= POLLS:
            self._choose(warp)

    def _choose(self, warp: Warp) -> None:
        able = [strand for strand in warp.strands[1:] if strand.able]
        self.quiet = self.polls = 0
        if able:
            self.given += 1
            self.patience, self.left = LATER_PATIENCE, TURN
            self.chosen = int(able[self.given % len(able)].mask.argmax())
            self._bring_forward(warp)

    def _bring_forward(self, warp: Warp) -> bool:
        for position, strand in enumerate(warp.strands):
            if strand.mask[self.chosen]:
                if not strand.able:
                    return False
                warp.strands.insert(0, warp.strands.pop(position))
                return True
        return False


def merged(strands: list[Strand]) -> list[Strand]:
    """Strands sorted by block; running strands at the same block become one."""
    found: list[Strand] = []
    for strand in sorted(strands, key=lambda one: one.block):
        last = found[-1] if found else None
        if last is not None and last.block == strand.block and last.wait is None and strand.wait is None:
            last.mask = last.mask | strand.mask
        else:
            found.append(strand)
    return found


def bits_of(lanes: Mask) -> int:
    """Lanes as bits."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


class Warp:
    """32 lanes of a CTA running one function.

    Register rows are arrays of shape [32], found by row, for each way to read them (`f32`, `u64`, `pred`, ...). `mask`
    holds the active lanes. `where` is the same for ufuncs, or True when all 32 are active.

    Relaxed arrivals carry `released`, the clock that a fence has covered, and to the warp's own CTA `released_to_cta`.
    A fence acquires what relaxed waits have `noticed`, by mbarrier. `met`: what a barrier of the cluster has shown to
    be over. `meetings` counts, from 1, what may order the lanes among themselves; `stored_at` is its value at the last
    weak store to shared memory, `stored_globally_at` at the last one to global memory. `acquires`: what only some lanes
    know. `gatherings`: by mask, the lanes that wait at bar.warp.sync.
    """

    pred: Mapping[int, Mask]
    u16: Mapping[int, npt.NDArray[np.uint16]]
    s16: Mapping[int, npt.NDArray[np.int16]]
    f16: Mapping[int, npt.NDArray[np.float16]]
    u32: Mapping[int, npt.NDArray[np.uint32]]
    s32: Mapping[int, npt.NDArray[np.int32]]
    f32: Mapping[int, npt.NDArray[np.float32]]
    u16x2: Mapping[int, npt.NDArray[np.uint16]]
    u64: Mapping[int, npt.NDArray[np.uint64]]
    s64: Mapping[int, npt.NDArray[np.int64]]
    f64: Mapping[int, npt.NDArray[np.float64]]
    f32x2: Mapping[int, npt.NDArray[np.float32]]
    u32x2: Mapping[int, npt.NDArray[np.uint32]]
    u64x2: Mapping[int, npt.NDArray[np.uint64]]

    def __init__(self, code: Code, cta: Cta, index: int, lanes: int, file: RegisterFile) -> None:
        self.code = code
        self.cta = cta
        self.index = index
        self.agents = cta.cluster.agents
        self.agent = agent = self.agents.warp(cta.place.cta_rank, index)
        self.clock = Clock.zero(self.agents.count)
        self.clock.seen[agent] = START + 1
        self.seen_address: int = address_of(self.clock.seen)
        self.stamp = stamp(agent, START + 1)
        self.registers = file
        self._tell(file)
        self.executed = array("q", bytes(8 * len(code.blocks)))
        self.alive = first_lanes(lanes)
        self.undefined = UndefinedRegisters.at_start(code, lanes)
        self.strands = [Strand(0, self.alive)]
        self.block = 0
        self._steps: Iterator[Step] | None = None
        self.where: Mask | bool = True
        self.set_mask(self.alive)
        self.noticed: dict[int, Carried] = {}
        self.tmem_stores: list[Index] = []
        self.tmem_loads: dict[int, dict[tuple[int, int], list[Index]]] = {}
        self.meetings = 1
        self.stored_at = self.stored_globally_at = 0
        self.acquires = LaneAcquires()
        self.gatherings: dict[int, Gathering] = {}
        self.watch = PollWatch() if cta.machine.schedule.watches_polls else None

    @cached_property
    def local(self) -> LocalMemory:
        """Local memory, made on first use like the properties below: most warps never use it."""
        return LocalMemory.of(self.cta.local_size)

    @cached_property
    def cluster_arrived(self) -> Mask:
        """The lanes that have arrived at the cluster barrier in its current phase."""
        return np.zeros(LANES, np.bool_)

    @cached_property
    def cluster_owed(self) -> Mask:
        """The lanes that have arrived at the cluster barrier and not waited since."""
        return np.zeros(LANES, np.bool_)

    @cached_property
    def cluster_phase(self) -> npt.NDArray[np.int64]:
        """By lane, the phase of the cluster barrier that its last arrival ends."""
        return np.zeros(LANES, np.int64)

    @cached_property
    def met(self) -> npt.NDArray[np.int64]:
        """See the class."""
        return np.zeros(self.agents.count, np.int64)

    @cached_property
    def _running(self) -> set[int]:
        """The ranks of the CTAs that are known to have started."""
        return {self.cta.place.cta_rank}

    def knows_started(self, rank: int) -> bool:
        """Whether the start of the CTA of `rank` comes before the next action: something that tells of a thread of
        that CTA has reached this warp. A relaxed arrival tells enough."""
        if rank not in self._running:
            theirs = self.agents.warps_of(rank)
            if not (self.clock.has_heard_of(theirs) or self.met[theirs].any()):
                return False
            self._running.add(rank)
        return True

    @cached_property
    def copies(self) -> CopyGroups:
        """The async-copy groups of the lanes."""
        return CopyGroups()

    @property
    def used_copies(self) -> CopyGroups | None:
        """`copies` if one has been issued."""
        return self.__dict__.get("copies")

    @cached_property
    def turns(self) -> LaneTurns:
        """Picks which lanes run next."""
        return LaneTurns()

    @cached_property
    def released(self) -> Clock:
        """See the class."""
        return Clock.zero(self.agents.count)

    @cached_property
    def released_to_cta(self) -> Clock:
        """See the class."""
        return Clock.zero(self.agents.count)

    def __getattr__(self, name: str) -> Shown:
        """A view of the registers, made when an instruction first needs it: most are never needed."""
        if name not in WIDTH_OF_VIEW:
            raise AttributeError(f"a warp has no {name!r}")
        rows = self.registers.view(name)
        setattr(self, name, rows)
        return rows

    def _tell(self, file: RegisterFile) -> None:
        """Give machine code the words about this warp that do not change and that its memory accesses need."""
        cta, told = self.cta, file.told
        smem, params = cta.smem, cta.machine.params
        told[WORD["parameters"]], told[WORD["parameter_bytes"]] = address_of(params), params.size
        told[WORD["changes"]], told[WORD["base"]] = address_of(CHANGES), cta.rank_bits
        told[WORD["shared"]] = 0 if smem.place is None else smem.place.address
        told[WORD["seen"]], told[WORD["agent"]] = self.seen_address, self.agent
        told[WORD["cluster"]], told[WORD["launch"]] = self.agents.mark, cta.launch

    def note_stores(self, changes: int) -> None:
        """Note stores to shared memory by machine code. `changes`: more than 0 if one has changed something, so that a
        waiter may go on."""
        if changes:
            self.cta.machine.engine.repeat(changes)
        self.stored_at = self.meetings

    def note_global_stores(self, changes: int) -> None:
        """As note_stores, for global memory."""
        machine = self.cta.machine
        machine.engine.events += changes
        machine.races.stored = True
        self.stored_globally_at = self.meetings

    def count_served(self) -> None:
        """Add the accesses that machine code has served to the machine's counters."""
        if groups := self.registers.told[WORD["served"]]:
            self.registers.told[WORD["served"]] = 0
            access.count_served(self.cta.machine, groups)

    def fill_own(self) -> None:
        """Write the special registers that differ between the warps of a CTA. Called once, when the CTA is complete."""
        key = self.index, self.cta.place.block
        known = self.code.own.get(key)
        if known is None:
            found = {row: special.value(name, self) for name, (_, row) in self.code.rows.specials.items()
                     if special.differs(name)}  # fmt: skip
            rows = [np.broadcast_to(one, LANES) for one in found.values()]
            known = index_of(list(found)), np.array(rows, np.uint32).reshape(len(found), LANES)
            self.code.own[key] = known
        if known[1].size:
            self.registers.write(32, *known)

    def set_mask(self, mask: Mask) -> None:
        """Make `mask` the active lanes."""
        self.mask = mask
        whole = count_nonzero(mask) == LANES
        self.where = True if whole else mask
        self._mask_address = _EVERY_LANE_ADDRESS if whole else 0

    def in_lanes(self, lanes: Mask, act: Callable[..., _Outcome], *given: object) -> _Outcome:
        """Call `act` with this warp and `given` while only `lanes` are active, and return its result."""
        saved = self.mask
        self.set_mask(lanes)
        try:
            return act(self, *given)
        finally:
            self.set_mask(saved)

    @property
    def mask_address(self) -> int:
        """Address of the active lanes for machine code, a byte per lane. Cached, because asking an array for it is
        slow."""
        if not self._mask_address:
            self._mask_address = address_of(self.mask)
        return self._mask_address

    @property
    def full(self) -> bool:
        """Whether every living lane is active, as `.aligned` requires."""
        return self.where is True or not count_nonzero(self.mask != self.alive)

    def converged(self, what: str) -> None:
        """Fault unless all living lanes are here (PTX `.sync.aligned`: undefined behaviour otherwise)."""
        if not self.full:
            lanes = np.flatnonzero(self.alive & ~self.mask)
            others = [self.code.blocks[one.block].instructions[-1].line for one in self.strands if one.early]
            wait = f" and wait at PTX line {min(others)} for the rest" if others else ""
            raise Fault("diverged", f"{what} must be executed by all threads of the warp together; lanes "
                        f"{lanes.tolist()} are elsewhere{wait}", lane=int(lanes[0]))  # fmt: skip

    def meet(self, what: str) -> None:
        """`converged`, and what the lanes have done is ordered among them from here on (`meetings`)."""
        self.converged(what)
        self.meetings += 1

    def next_epoch(self, lanes: int = EVERY, meetings: int | None = None) -> None:
        """Begin an epoch: what `lanes` of this warp have released does not cover what it does from now on.

        `meetings`: the warp's count before the release, if it is not the current one.
        """
        epoch, met = int(self.clock.seen[self.agent]) + 1, self.meetings if meetings is None else meetings
        if self.stored_at == met:
            self.agents.releases.note(self.agent, epoch - 1, met, lanes)
        self.agents.reads.release(self.agent, epoch - 1, met, lanes)
        if self.stored_globally_at == met:
            self.agents.global_releases.note(self.agent, epoch - 1, met, lanes)
        self.clock.seen[self.agent] = epoch
        self.stamp = stamp(self.agent, epoch)

    def active_bits(self) -> int:
        """The active lanes as bits, or EVERY if all living lanes are active: `LaneReleases.ended` knows the others."""
        return EVERY if self.full else bits_of(self.mask)

    def known(self) -> Snapshot:
        """What is ordered before the next action, by cluster."""
        grid = self.clock.grid
        return {**(grid.known if grid is not None else {}), self.agents.serial: self.clock.seen.copy()}

    def given(self, *, relaxed: bool, narrow: bool) -> tuple[tuple[Clock, int, bool], ...]:
        """What a release of this warp gives, for Carried.give: clocks, the CTA's rank, and whether only to the own CTA.

        A `relaxed` one gives what a fence has covered. `narrow`: of scope .cta.
        """
        rank = self.cta.place.cta_rank
        if relaxed:
            told = self.clock.relaxed(self.released, self.agent)
            return (told, rank, narrow), (self.released_to_cta, rank, True)
        return ((self.clock, rank, narrow),)

    def take(self, carried: Carried, place: object, *, relaxed: bool, narrow: bool) -> None:
        """An acquire of what releases have `carried` to `place`, a flag or an mbarrier. A `relaxed` one learns only
        that they come before in time, until a fence."""
        if relaxed:
            carried.notice(self.clock)
            self.noticed[id(place)] = carried
        else:
            carried.take(self.clock, self.cta.place.cta_rank, narrow=narrow)

    def acquiring(self) -> Snapshot | None:
        """Call before the active lanes acquire. Returns what the warp knows if other living lanes are inactive."""
        alone, uneven = self.where is not True and not self.full, self.acquires.at == self.meetings
        self.meetings += 1
        if alone and uneven:
            self.acquires.at = self.meetings
        return self.known() if alone else None

    def have_acquired(self, before: Snapshot, lanes: int = EVERY) -> None:
        """Call after such an acquire: until the lanes meet, only the active ones of `lanes` know what they have
        learned. They may have learned what others knew already."""
        after, uneven = self.known(), self.acquires.at == self.meetings
        if uneven or any(
            cluster not in before or count_nonzero(seen > before[cluster]) for cluster, seen in after.items()
        ):
            self.acquires.note(self.active_bits() & lanes, self.meetings, before, after)

    def learn(self, agent: int, epoch: int) -> None:
        """Take over the actions of an agent up to `epoch`, which no lane has to learn from another one."""
        self.clock.seen[agent] = max(int(self.clock.seen[agent]), epoch)
        if self.acquires.at == self.meetings:
            self.acquires.tell(self.agents.serial, agent, epoch)

    def knows_unevenly(self) -> bool:
        """Whether an active lane may know less than its warp does."""
        return self.acquires.at == self.meetings and self.acquires.concern(self.active_bits())

    def fence_proxy(self, *, shared: bool, global_: bool) -> None:
        """`fence.proxy.async`: make what is ordered before now in these memories visible to the asynchronous proxy."""
        if shared:
            self.clock.fence_proxy()
        if global_ and self.cta.machine.races.stored:
            self.clock.grid_part().fence_proxy(self.agents.serial, self.clock.seen)
        self.next_epoch(NOBODY)

    @cached_property
    def name(self) -> str:
        """The name of this warp in reports."""
        return f"CTA {self.cta.place.ctaid}, warp {self.index}"

    @property
    def done(self) -> bool:
        """Whether every lane has ended."""
        return not self.strands

    def split(self, *parts: tuple[int, Mask]) -> None:
        """Replace the running strand by several."""
        self.strands.pop(0)
        for block, mask in parts:
            self._place(block, mask)

    def retire(self) -> None:
        """End the lanes of the running strand."""
        self._end(self.strands.pop(0).mask)

    def drop(self, lanes: Mask) -> None:
        """End some lanes of the running strand; the others go on."""
        self.strands[0].mask = self.mask & ~lanes
        self.set_mask(self.strands[0].mask)
        self._end(lanes)

    def _end(self, lanes: Mask) -> None:
        before, self.alive = count_nonzero(self.alive), self.alive & ~lanes
        left = count_nonzero(self.alive)
        self.cta.alive -= int(before - left)
        if left:
            self._note_end(bits_of(lanes))
        if self.undefined:
            self.undefined.forget_dead(self.alive)
        self.cta.machine.engine.events += 1
        self.cta.cluster.complete_phase()
        self.cta.threads_ended()

    def _note_end(self, lanes: int) -> None:
        """Record that some lanes end and others go on: a release by the others does not cover the ended lanes'
        stores."""
        epoch = int(self.clock.seen[self.agent])
        if self.stored_at == self.meetings:
            self.agents.releases.end(self.agent, epoch, self.meetings, lanes)
        if self.stored_globally_at == self.meetings:
            self.agents.global_releases.end(self.agent, epoch, self.meetings, lanes)

    def _place(self, block: int, mask: Mask) -> None:
        if block >= len(self.code.blocks):
            self._end(mask)
            return
        for position, other in enumerate(self.strands):
            if other.block == block and other.wait is None:
                other.mask = other.mask | mask
                return
            if other.block > block:
                self.strands.insert(position, Strand(block, mask))
                return
        self.strands.append(Strand(block, mask))

    def waiting(self) -> Wait | None:
        """The wait that the foremost strand is parked at, if it is not ready."""
        if not self.strands:
            return None
        wait = self.strands[0].wait
        if wait is None or wait.ready() or (wait.local and any(other.wait is None for other in self.strands)):
            return None
        return wait

    def yield_strand(self) -> bool:
        """Let another strand run while the foremost one waits (independent thread scheduling). False if none can."""
        return self._put_first(lambda strand: strand.able)

    def _put_first(self, suits: Callable[[Strand], bool]) -> bool:
        """Move the first strand that suits to the front. False if none does, or if it is there already."""
        for position, strand in enumerate(self.strands):
            if suits(strand):
                self.strands.insert(0, self.strands.pop(position))
                return position > 0
        return False

    def sort_strands(self) -> None:
        """Put the strand in the lowest block first, and join strands in one block."""
        self.strands[:] = merged(self.strands)

    def run(self, quantum: int) -> int:
        """Execute up to `quantum` blocks, or until a wait or the end. Returns how many blocks were executed."""
        done = polls = 0
        engine, events = self.cta.machine.engine, -1
        while done < quantum and polls < POLLS_A_TURN and self.strands:
            strand = self.strands[0]
            if strand.wait is not None and not self._resume(strand):
                if strand.wait.local and self.yield_strand():
                    continue
                # Who asks the warp what it waits for learns of the wait that ends elsewhere in the machine.
                self._put_first(lambda one: one.wait is not None and not one.wait.local)
                break
            if not self.strands or self.strands[0] is not strand or strand.wait is not None:
                continue
            if self.mask is not strand.mask:
                self.set_mask(strand.mask)
            self.block = strand.block
            if len(self.strands) > 1 and self._is_early(strand):
                continue
            block = self.code.blocks[strand.block]
            self._execute(strand, block)
            done += 1
            if polled := block.polls_memory():
                polls = polls + 1 if engine.events == events else 0
                events = engine.events
            if self.watch is not None:
                self.watch.after(self.block if polled else None, events)
            if len(self.strands) > 1:
                self.turns.after_block(self, block)
        return done

    def _is_early(self, strand: Strand) -> bool:
        """Whether lanes that the block of the foremost strand needs are elsewhere and may still come. Then it is
        parked."""
        number, bits = strand.block, self.code.blocks[strand.block].together()
        if not bits or not count_nonzero(lanes_in(bits) & self.alive & ~strand.mask):
            return False

        def missing() -> Mask:
            here = [one.mask for one in self.strands if one.early and one.block == number]
            return lanes_in(bits) & self.alive & ~np.logical_or.reduce(here)

        strand.early = True
        strand.wait = Wait(ready=lambda: not count_nonzero(missing()), finish=partial(self._gather, strand),
                           reason=lambda: f"lanes {np.flatnonzero(missing()).tolist()} of its warp to come there",
                           again=True, local=True)  # fmt: skip
        if any(not one.early or one.able for one in self.strands):
            return True
        # Nobody will come. The lowest block is rather in the branch that should not have been taken.
        first = min(self.strands, key=lambda one: one.block)
        self._put_first(lambda one: one is first)
        self._gather(first)
        first.wait, self.block = None, first.block
        self._execute(first, self.code.blocks[first.block])
        return True

    def _gather(self, strand: Strand) -> None:
        """Join a parked strand, which may go on, with those that are parked in the same block."""
        for other in [one for one in self.strands if one.early and one.block == strand.block and one is not strand]:
            strand.mask = strand.mask | other.mask
            self.strands.remove(other)
        strand.early = False
        self.set_mask(strand.mask)

    def _resume(self, strand: Strand) -> bool:
        wait = strand.wait
        if wait is None or not wait.ready():
            return False
        strand.wait = None
        if self.mask is not strand.mask:
            self.set_mask(strand.mask)
        if wait.finish is not None:
            self.block, self._steps = strand.block, None
            try:
                wait.finish()
            except Fault as fault:
                self.locate(fault)
                raise
        if not wait.again:
            self._move(strand, strand.block + 1)
        return True

    def rejoin(self) -> None:
        """Join the foremost strand with those that wait at the same instruction and may go on."""
        strand = self.strands[0]
        others = [other for other in self.strands[1:] if other.block == strand.block and other.wait is not None]
        for other in others:
            if other.wait is not None and other.wait.local and other.able:
                strand.mask = strand.mask | other.mask
                self.strands.remove(other)
        self.set_mask(strand.mask)

    @property
    def polls_in_vain(self) -> bool:
        """Whether it polls memory in which nothing has changed, and no other of its lanes could run."""
        watch, (first, *others) = self.watch, self.strands
        if watch is None or first.wait is not None or not watch.in_vain(self.cta.machine.engine.events):
            return False
        return not any(one.able for one in others)

    @property
    def idle(self) -> bool:
        """Whether it does nothing but wait: see Code.idle_waits."""
        return len(self.strands) == 1 and self.strands[0].block in self.code.idle_waits

    def expire(self) -> None:
        """End a wait that may time out: the instruction reports failure and the strand goes on."""
        strand = self.strands[0]
        if strand.wait is not None and strand.wait.expire is not None:
            self.set_mask(strand.mask)
            strand.wait.expire()
            strand.wait = None
            self._move(strand, strand.block + 1)

    def _move(self, strand: Strand, block: int) -> None:
        if len(self.strands) == 1 and block < len(self.code.blocks):
            strand.block = block
            return
        self.strands.remove(strand)
        self._place(block, strand.mask)

    def _execute(self, strand: Strand, block: Block) -> None:
        self.executed[strand.block] += 1
        block.left -= 1
        if not block.left:
            block.quicken()
        self._steps = steps = iter(block.quick)
        try:
            try:
                if self.undefined and not self.undefined.keys().isdisjoint(block.touched()):
                    outcome = self._carry(block, steps)
                else:
                    for step in steps:
                        step(self)
                    self._steps = None
                    outcome = block.tail(self) if block.tail is not None else NEXT
            except BecameUndefined:
                outcome = self._carry(block, steps)
        except Fault as fault:
            self.locate(fault)
            raise
        except Exception as error:
            instruction = self.instruction
            error.add_note(f"the VM failed while executing PTX line {instruction.line}: `{instruction.text}`")
            raise
        if outcome is HANDLED:
            return
        if isinstance(outcome, Wait):
            strand.wait = outcome
            return
        following = outcome if isinstance(outcome, int) else strand.block + 1
        if len(self.strands) == 1 and following < len(self.code.blocks):
            strand.block = following
        else:
            self._move(strand, following)

    def _carry(self, block: Block, left: Iterator[Step]) -> object:
        """Execute the remaining steps of a block, some of which touch undefined registers, and its tail."""
        undefined, end, carriers = self.undefined, len(block.steps), block.carriers
        self._steps, index = iter(block.steps), end - length_hint(left)
        while index < end:
            self.at_step(index)
            run = block.runs.get(index)
            try:
                if run is not None:
                    self._carry_run(block, index, run)
                    index += run.count
                    continue
                step, carrier = block.steps[index], carriers[index]
                index += 1
                if undefined.keys().isdisjoint(carrier.touches):
                    step(self)
                else:
                    carrier.carry(self, step)
            except BecameUndefined:
                index = end - length_hint(self._steps)
        self._steps = None
        if block.tail is None:
            return NEXT
        carrier = carriers[index]
        return block.tail(self) if undefined.keys().isdisjoint(carrier.touches) else carrier.carry(self, block.tail)

    def _carry_run(self, block: Block, begin: int, run: QuickRun) -> None:
        """Execute `run`, which begins at step `begin`, doing as many steps at once as touch no undefined register."""
        end, carriers = begin + run.count, block.carriers
        if self.undefined.keys().isdisjoint(run.touches):
            run.step(self)
            return
        index = begin
        while index < end:
            ahead = self._mark_ahead(carriers, index, begin, run)
            if ahead > index:
                run.part(self, index - begin, ahead - index)
                index = ahead
                continue
            self.at_step(index)
            carriers[index].carry(self, partial(run.part, first=index - begin, count=1))
            index += 1

    def _mark_ahead(self, carriers: Sequence[Carrier], index: int, begin: int, run: QuickRun) -> int:
        """Mark undefined bits in the steps of `run`, which begins at `begin`, from `index` up to the returned one: that
        has to see the values of those before it."""
        undefined, marked, accessed = self.undefined, False, False
        while index < begin + run.count:
            carrier = carriers[index]
            plain = undefined.keys().isdisjoint(carrier.touches)
            # A load may find more undefined bits, and what is marked beyond it would be wrong.
            accessed |= not carrier.computes
            if accessed and (marked or not plain):
                break
            if not plain and not (carrier.by_bits and self.where is True):
                break
            if not plain:
                carrier.mark(self, partial(run.part, first=index - begin, count=1))
                marked = True
            index += 1
        return index

    def at_step(self, index: int) -> None:
        """Mark step `index` of the block as the running one."""
        cast("Any", self._steps).__setstate__(index + 1)

    def locate(self, fault: Fault) -> None:
        """Fill in the running instruction as the place of `fault`, unless its place is known."""
        if not fault.line:
            instruction = self.instruction
            fault.kernel = self.code.function.name
            fault.line = instruction.line
            fault.text = instruction.text
            fault.where = self.name

    @property
    def instruction(self) -> Instruction:
        """The instruction that runs or that the warp waits at. Instructions and steps of a block share one order."""
        block = self.code.blocks[self.block]
        if self._steps is None:
            return block.instructions[-1]
        return block.instructions[len(block.steps) - length_hint(self._steps) - 1]

    @property
    def line(self) -> int:
        """PTX line of the instruction that runs or that the warp waits at."""
        return self.instruction.line if self.code.blocks[self.block].instructions else 0
