"""A CTA and the cluster it belongs to: shared memory, tensor memory, mbarriers, named barriers, warps."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from backends.vm.faults import Fault, OtherAccess, report
from backends.vm.machine import special
from backends.vm.machine.code import LANES, STORAGE, Row, RowIndex, index_of, take_registers
from backends.vm.machine.register_pool import REGISTERS, RegisterPool
from backends.vm.machine.special import Dim3, Place, ctas_of_sm
from backends.vm.machine.warp import Warp
from backends.vm.machine.warpgroup import Warpgroup
from backends.vm.memory.clocks import ACCUMULATORS, Agents, Clock, Flag
from backends.vm.memory.global_memory import PARAM_WINDOW
from backends.vm.memory.mbarrier import MBarrier, Signaller
from backends.vm.memory.shared import MBARRIER, OFFSET_MASK, RANK_SHIFT, RESERVED, SharedMemory
from backends.vm.memory.tmem import TensorMemory
from backends.vm.memory.tmem_waits import Room
from backends.vm.numpy_calls import count_nonzero

if TYPE_CHECKING:
    from backends.vm.machine.machine import Run

NAMED_BARRIERS = 16


@dataclass(frozen=True, slots=True)
class Visit:
    """The last use of this CTA's memory by an agent of another CTA: the agent's epoch then, and the PTX line.

    `own`: a copy from this CTA's memory that signals another CTA.
    """

    epoch: int
    line: int
    own: bool = False


class BarrierArrival(NamedTuple):
    """An arrival of the warp with clock index `agent`, in its epoch `epoch`, by PTX line `line`."""

    agent: int
    epoch: int
    line: int


@dataclass(slots=True)
class NamedBarrier:
    """`barrier` resource 0..15 of a CTA (PTX ISA 9.7.13.1): arrivals in threads, and the clocks they bring.

    `expected` None: every thread of the CTA that is alive when the last one arrives. `arrivals`: those at this phase;
    `last_arrivals`: those at the phase before. `awaited`: by clock index of a warp, the generation that it has waited
    for last.
    """

    arriving: Clock
    released: Clock
    arrived: int = 0
    expected: int | None = None
    generation: int = 0
    arrivals: list[BarrierArrival] = field(default_factory=list[BarrierArrival])
    last_arrivals: list[BarrierArrival] = field(default_factory=list[BarrierArrival])
    awaited: dict[int, int] = field(default_factory=dict[int, int])
    votes: list[bool] = field(default_factory=list[bool])
    outcome: list[bool] = field(default_factory=list[bool])


class Cta:
    """One CTA. `alive`: its threads that have not ended. `cancel_failed`: who observed that a
    clusterlaunchcontrol.try_cancel has failed.

    Its tensor core is several agents, from clock index `tensor_agent` on (see Agents), since only MMAs of the same
    accumulator and shape are ordered among themselves (PTX ISA 9.7.16.6.2). With more than ACCUMULATORS accumulators,
    some share an agent, which can hide a missing wait.
    """

    def __init__(self, run: Run, cluster: Cluster, place: Place) -> None:
        self.machine = run.machine
        self.launch = run.number
        self.cluster = cluster
        self.place = place
        self.function = function = run.function
        agents, shape, code = cluster.agents, run.shape, function.code
        self.smem = SharedMemory(
            agents, function.static_shared, shape.dynamic_smem, function.dynamic_align, of_system=function.of_system
        )
        self.local_size = function.local_size
        self.mbarriers: dict[int, MBarrier] = {}
        self.warpgroups: dict[int, Warpgroup] = {}
        self.tensor_agent = agents.tensor_core(place.cta_rank)
        self.tensor_serial = 0
        self._accumulators: dict[tuple[int, ...], int] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.visits: dict[int, Visit] = {}
        self.cancel_failed: OtherAccess | None = None
        self.alive = shape.threads
        files = take_registers(code.rows, agents.warps_per_cta)
        self.warps = [
            Warp(code, self, index, min(LANES, shape.threads - LANES * index), file) for index, file in enumerate(files)
        ]
        first, *others = files
        first.begin()
        for width, rows, content in self._common_registers(self.warps[0]):
            first.write(width, rows, content)
        for file in others:
            file.begin(first)
        for warp in self.warps:
            warp.fill_own()

    @cached_property
    def tmem(self) -> TensorMemory:
        """Tensor memory, made on first use: most CTAs of some launches never use it."""
        return TensorMemory(self.cluster.agents, self._room())

    @cached_property
    def register_pool(self) -> RegisterPool:
        """The registers that setmaxnreg moves, made on first use."""
        return RegisterPool.of(self.function.code.function.directives, len(self.warps))

    def _room(self) -> Room:
        """How many CTAs like this one an SM holds at once. Registers count where the kernel states their number."""
        pool = self.register_pool
        ctas = ctas_of_sm(32 * len(self.warps), self.smem.size - RESERVED)
        if pool.size and pool.stated:
            ctas = min(ctas, REGISTERS // pool.size)
        return Room(max(1, ctas), prod(self.place.grid), pool.stated)

    @property
    def used_tmem(self) -> TensorMemory | None:
        """`tmem` if anything has used it."""
        return self.__dict__.get("tmem")

    def accumulator_agent(self, *accumulator: int) -> int:
        """Clock index of the chain of MMAs with this accumulator: (address, m, n)."""
        known = self._accumulators.get(accumulator)
        if known is None:
            known = self.tensor_agent + 1 + len(self._accumulators) % ACCUMULATORS
            self._accumulators[accumulator] = known
        return known

    @property
    def tensor_agents(self) -> slice:
        """Clock indices of the tensor core."""
        return slice(self.tensor_agent, self.tensor_agent + 1 + ACCUMULATORS)

    @property
    def rank_bits(self) -> int:
        """Bits 31..24 of this CTA's shared addresses."""
        return self.place.cta_rank << RANK_SHIFT

    def _common_registers(self, warp: Warp) -> list[tuple[int, RowIndex, Row]]:
        """Width, rows and content of the registers that are the same in all warps: symbol addresses, special
        registers."""
        rows = self.function.code.rows
        found: dict[int, dict[int, int]] = {1: {}, 32: {}, 64: {}}
        by_lane: dict[int, Row] = {}
        for (name, offset, width), (_, row) in rows.addresses.items():
            if name != "_":
                address = self.symbol_address(name, generic=width == 64) + offset & (1 << width) - 1
                found[64 if width == 64 else 32][row] = address
        for name, (width, row) in rows.specials.items():
            if not special.differs(name):
                value = special.value(name, warp)
                if isinstance(value, int):
                    found[width][row] = value
                else:
                    by_lane[row] = value
        common: list[tuple[int, RowIndex, Row]] = [
            (width, index_of(list(known)), np.array(list(known.values()), STORAGE[width])[:, None])
            for width, known in found.items()
            if known
        ]
        return [*common, (32, index_of(list(by_lane)), np.array(list(by_lane.values())))] if by_lane else common

    def symbol_address(self, name: str, *, generic: bool) -> int:
        """The address of a variable or parameter in its own state space."""
        space, offset = self.function.place_of(name, self.smem.dynamic_offset)
        if space == "shared":
            return self.rank_bits | offset
        if space == "param":
            return PARAM_WINDOW + offset
        if space in ("global", "const"):
            return self.machine.variable_address(name)
        return offset

    def own_offset(self, address: int, access: str) -> int:
        """The offset of a `.shared` (own CTA) address. Rank bits of another CTA are a fault, as on an H200."""
        if address >> RANK_SHIFT != self.place.cta_rank:
            raise Fault("remote-shared", f"{access} through .shared with the address of CTA rank "
                        f"{address >> RANK_SHIFT} from CTA rank {self.place.cta_rank}: use .shared::cluster",
                        address=address)  # fmt: skip
        return address & OFFSET_MASK

    def init_mbarrier(self, offset: int, count: int, warp: Warp) -> None:
        """`mbarrier.init` at a shared offset by `warp`, for the lanes of the innermost ByLanes."""
        known = self.mbarriers.get(offset)
        if known is not None and known.unused and known.expected == count:
            other = self._initialised(known)
            report(Fault("mbarrier-reinitialised", f"mbarrier.init where {other.who} has initialised an mbarrier of "
                         f"the same count {count}", address=offset, other=other))  # fmt: skip
            return
        if known is not None:
            raise Fault("mbarrier-misuse", "mbarrier.init where an mbarrier already lies (mbarrier.inval comes first)",
                        lane=0, address=offset)  # fmt: skip
        self.smem.check_region(offset, 8, "mbarrier.init")
        made = MBarrier.create(offset, count)
        made.line = warp.line
        made.creator, made.created = warp.agent, int(warp.clock.seen[warp.agent])
        made.copy_agent = self.cluster.agents.new_copy()
        self.mbarriers[offset] = made
        self.smem.in_flight[offset // 4 : offset // 4 + 2] = MBARRIER
        self.smem.defined[offset : offset + 8] = True

    def inval_mbarrier(self, offset: int) -> None:
        """`mbarrier.inval`: the memory may be used for other things."""
        self.mbarrier(offset)
        del self.mbarriers[offset]
        self.smem.in_flight[offset // 4 : offset // 4 + 2] = 0
        self.smem.defined[offset : offset + 8] = False

    def mbarrier(self, offset: int, clock: Clock | None = None, lane: int | None = None) -> MBarrier:
        """The live mbarrier at a shared offset. If `clock` is given, the initialisation must be ordered before it.

        `lane`: the lane of the warp that asks for it, if one does.
        """
        found = self.mbarriers.get(offset)
        if found is None:
            known = ", ".join(f"{at:#x}" for at in sorted(self.mbarriers)) or "none"
            raise Fault("mbarrier-misuse", f"no mbarrier has been initialised here; live ones of this CTA: {known}",
                        lane=lane, address=offset)  # fmt: skip
        if clock is not None and clock.seen[found.creator] < found.created:
            other = self._initialised(found)
            report(Fault("mbarrier-misuse", f"nothing orders this after the mbarrier.init by {other.who}: a barrier is "
                         "missing between the two", lane=lane, address=offset, other=other))  # fmt: skip
        return found

    def _initialised(self, barrier: MBarrier) -> OtherAccess:
        return OtherAccess(self.cluster.agents.name(barrier.creator), "initialised", barrier.line)

    @property
    def done(self) -> bool:
        """Whether all warps have ended."""
        return all(warp.done for warp in self.warps)

    def visit(self, agent: int, epoch: int, line: int, *, own: bool = False) -> None:
        """Record that an agent of another CTA uses this CTA's memory, which must outlive that use. `own`: as Visit."""
        known = self.visits.get(agent)
        if known is None or known.epoch <= epoch:
            self.visits[agent] = Visit(epoch, line, own)

    def check_present(self, access: str) -> None:
        """Report an access to the memory of this CTA by another one if this CTA has ended."""
        if self.done:
            report(Fault("ended-cta", f"{access} of CTA rank {self.place.cta_rank}, which has ended: its memory may be "
                         "another CTA's by now. A barrier of the cluster behind the last such access is missing (PTX "
                         "ISA 9.7.9.23)"))  # fmt: skip

    def check_running(self, by: Warp, access: str) -> None:
        """Check that this CTA has started, as far as a warp that accesses its memory can tell, and that it has not
        ended."""
        self.check_present(access)
        self.check_started(by, access)

    def check_started(self, by: Warp, access: str) -> None:
        """Report an access by a warp to the memory of this CTA if nothing tells that warp that this CTA has started.

        An mbarrier needs no such check: `mbarrier` asks for more, its initialisation.
        """
        if not by.knows_started(self.place.cta_rank) and not self.done:
            report(Fault("peer-not-started", f"{access} of CTA rank {self.place.cta_rank}, and nothing orders that "
                         "after that CTA's start: a barrier of the cluster before the first such access is "
                         "missing"))  # fmt: skip

    def _check_visits(self) -> None:
        """Report that the last warp of this CTA ends while another CTA may still use its memory."""
        if not self.visits:
            return
        known = np.maximum.reduce([np.maximum(warp.clock.seen, warp.met) for warp in self.warps])
        for agent, visit in self.visits.items():
            if known[agent] < visit.epoch:
                who = self.cluster.agents.name(agent, visit.line)
                rule = "exit-with-pending-operation" if visit.own else "ended-cta"
                report(Fault(rule, f"CTA rank {self.place.cta_rank} ends, but nothing orders that after {who} "
                             f"used its memory at PTX line {visit.line}: a barrier of the cluster, or a wait for what "
                             "it signals, is missing", other=OtherAccess(who, "used", visit.line)))  # fmt: skip

    def threads_ended(self) -> None:
        """Complete the barriers that were waiting only for threads that have now ended (PTX ISA 9.7.13.1)."""
        if self.done:
            self._check_visits()
        for barrier in self.named.values():
            if barrier.arrived and barrier.expected is None:
                self.complete_barrier(barrier)

    def named_barrier(self, number: int) -> NamedBarrier:
        """Barrier resource `number`, made on first use."""
        if number not in self.named:
            agents = self.cluster.agents.count
            self.named[number] = NamedBarrier(Clock.zero(agents), Clock.zero(agents))
        return self.named[number]

    def awaited_by(self, barrier: NamedBarrier) -> int:
        """How many threads a named barrier waits for."""
        return self.alive if barrier.expected is None else barrier.expected

    def complete_barrier(self, barrier: NamedBarrier) -> None:
        """End the phase of a named barrier if everything that it waits for has arrived."""
        if barrier.arrived == self.awaited_by(barrier):
            barrier.arrived = 0
            barrier.generation += 1
            barrier.released.join(barrier.arriving)
            barrier.arriving.clear()
            barrier.last_arrivals, barrier.arrivals = barrier.arrivals, []
            barrier.outcome, barrier.votes = barrier.votes, []
            self.machine.engine.repeat()

    def check_exit(self) -> None:
        """Report what an ending CTA has not waited for, or has not given back."""
        for warp in self.warps:
            if warp.used_copies is None:
                continue
            kinds = (("cp.async.bulk", warp.copies.bulk, "exit-with-pending-store"),
                     ("cp.async", warp.copies.plain, "exit-with-pending-operation"))  # fmt: skip
            for kind, places, rule in kinds:
                for lane, groups in places.items():
                    for left in groups.unread():
                        self._left(left.operation, f"the thread ends without a {kind}.wait_group for it", warp.name,
                                   rule=rule, lane=lane)  # fmt: skip
        if "register_pool" in self.__dict__:
            self._check_registers(self.register_pool)
        for group in self.warpgroups.values():
            for warp, part in zip(self.warps[group.first :], group.parts, strict=False):
                for left in part.pending():
                    self._left(left.operation, "the warp ends without a wgmma.wait_group for it", warp.name)
        for barrier in self.mbarriers.values():
            seen = max(int(warp.clock.seen[barrier.copy_agent]) for warp in self.cluster.warps)
            if barrier.last_copy is not None and barrier.last_copy_serial > seen:
                left = barrier.last_copy
                self._left(
                    left, f"nobody has waited for it at mbarrier {barrier.offset:#x} when the CTA ends", left.issuer
                )
        if self.used_tmem is not None and self.used_tmem.allocations:
            held = ", ".join(f"{a.columns} columns at {a.first} (PTX line {a.line})" for a in self.tmem.allocations)
            report(Fault("tmem-leak", f"the CTA ends with tensor memory allocated: {held}; tcgen05.dealloc is missing",
                         kernel=self.function.name, where=f"CTA {self.place.ctaid}",
                         other=OtherAccess("the CTA", "allocated", self.tmem.allocations[0].line)))  # fmt: skip

    def _check_registers(self, pool: RegisterPool) -> None:
        """Report a setmaxnreg that part of a warpgroup has not executed, or registers that no SM has."""
        if (found := pool.left_alone()) is not None:
            warp, other, one = found
            report(Fault("warpgroup-diverged", f"warp {warp} ends without the setmaxnreg.{one.way} {one.count} that "
                         f"warp {other} of its warpgroup has executed; all warps of a warpgroup execute the same",
                         kernel=self.function.name, line=one.line, text=one.text,
                         where=self.warps[other].name))  # fmt: skip
        if (excess := pool.beyond_the_sm()) is not None:
            one = excess.done.one
            report(Fault("register-pool", f"with setmaxnreg.{one.way} to {one.count} registers a thread the warps of "
                         f"the CTA hold {excess.held}, and an SM has {REGISTERS}; the launch states no number of "
                         "registers, and with any number it would wait for ever", kernel=self.function.name,
                         line=one.line, text=one.text, where=self.warps[excess.warp].name))  # fmt: skip

    def _left(
        self, operation: Signaller, but: str, where: str, *, rule: str = "exit-with-pending-operation",
        lane: int | None = None,
    ) -> None:  # fmt: skip
        """Report an operation that was never waited for, and complete it now."""
        report(Fault(rule, f"{operation.what} was issued, but {but}", lane=lane, kernel=operation.kernel,
                     line=operation.line, text=operation.text, where=where))  # fmt: skip
        self.machine.engine.settle(operation.kernel, operation.line)


class Cluster:
    """CTAs that are launched together. `first`: the coordinates of the first one.

    `met` is the clock of what was over when all threads met at a barrier of the cluster. It bounds how long CTAs must
    live, and includes relaxed arrivals, which make nothing visible. `meeting` collects the arrivals of the current
    phase; `awaited` says whether there are any.
    """

    def __init__(self, run: Run, first: Dim3) -> None:
        shape = run.shape
        self.size = shape.cluster_ctas
        serial, warps = run.machine.races.begin_cluster(first), -(-shape.threads // LANES)
        releases = run.machine.races.releases[serial]
        self.agents = Agents(serial, self.size, warps, line=run.line, acting=run.acting, global_releases=releases)
        self.copy_serial = 0
        self.arriving = Clock.zero(self.agents.count)
        self.released = Clock.zero(self.agents.count)
        self.meeting = np.zeros(self.agents.count, np.int64)
        self.met = np.zeros(self.agents.count, np.int64)
        self.generation = 0
        self.awaited = False
        self.flags: dict[tuple[str, int], Flag] = {}
        self.ctas: list[Cta] = []
        size = shape.cluster
        for rank in range(self.size):
            x, y, z = rank % size[0], rank // size[0] % size[1], rank // (size[0] * size[1])
            ctaid = (first[0] + x, first[1] + y, first[2] + z)
            self.ctas.append(Cta(run, self, Place(shape.grid, size, shape.block, ctaid, rank, shape.explicit_cluster)))

    def part(self) -> None:
        """Break the references between the CTAs and warps of an ended cluster: their memory is freed at once, without
        the cycle collector. After a fault, warps still wait, and what they wait for knows them."""
        for cta in self.ctas:
            for warp in cta.warps:
                warp.strands = []
            cta.warps = []
        self.ctas = []

    def next_copy(self) -> int:
        """A serial number for a bulk copy. For the copy's agent, it is the epoch."""
        self.copy_serial += 1
        return self.copy_serial

    def cta_of(self, address: int, access: str) -> Cta:
        """The CTA whose shared memory a `.shared::cluster` address names."""
        rank = address >> RANK_SHIFT
        if not 0 <= rank < self.size:
            raise Fault("remote-shared", f"{access} names CTA rank {rank} of a cluster of {self.size}", address=address)
        self.ctas[rank].check_present(access)
        return self.ctas[rank]

    def complete_phase(self) -> None:
        """End the phase of the cluster barrier when every living thread has arrived (PTX ISA 9.7.13.3)."""
        warps = self.warps if self.awaited else []
        if any(count_nonzero(warp.alive & ~warp.cluster_arrived) for warp in warps):
            return
        if any(count_nonzero(warp.alive) for warp in warps):
            for warp in warps:
                warp.cluster_arrived[:] = False
            self.awaited = False
            self.generation += 1
            self.released.join(self.arriving)
            self.arriving.clear()
            np.maximum(self.met, self.meeting, out=self.met)

    @property
    def done(self) -> bool:
        """Whether all CTAs have ended."""
        return all(cta.done for cta in self.ctas)

    @property
    def warps(self) -> list[Warp]:
        """All warps, by CTA rank."""
        return [warp for cta in self.ctas for warp in cta.warps]
