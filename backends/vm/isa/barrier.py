"""CTA, cluster and warp barriers, and fences (PTX ISA 9.7.13.1 to 9.7.13.4)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault, OtherAccess, counted, report
from backends.vm.machine.code import NEXT, Wait, lanes_in
from backends.vm.machine.cta import NAMED_BARRIERS, BarrierArrival, NamedBarrier
from backends.vm.machine.warp import Gathering, Warp
from backends.vm.memory.clocks import Clock
from backends.vm.memory.lane_releases import EVERY
from backends.vm.numpy_calls import count_nonzero
from backends.vm.ptx.ast import Operand


def _arrive(warp: Warp, number: int, count: int | None, *, aligned: bool) -> NamedBarrier:
    if not 0 <= number < NAMED_BARRIERS:
        raise Fault("barrier-misuse", f"barrier {number} does not exist; there are 0..{NAMED_BARRIERS - 1}")
    if count is not None and (count % 32 or count <= 0):
        raise Fault("barrier-misuse", f"a thread count of {count} for barrier {number} is not a multiple of 32")
    if aligned:
        warp.converged(f"barrier {number}")
    warp.meetings += 1
    barrier = warp.cta.named_barrier(number)
    if barrier.arrived and barrier.expected != count:
        raise Fault(
            "barrier-misuse", f"barrier {number} is awaited with {_expected(count)} here and with "
            f"{_expected(barrier.expected)} by those that have arrived"
        )  # fmt: skip
    barrier.expected = count
    _check_after_last_phase(warp, number, barrier)
    # A count is in whole warps: a warp with exited lanes still counts as 32 threads (PTX ISA 9.7.13.1). Without a
    # count, threads are counted.
    barrier.arrived += 32 if count is not None and warp.full else int(count_nonzero(warp.mask))
    barrier.arriving.join(warp.clock)
    barrier.arrivals.append(BarrierArrival(warp.agent, int(warp.clock.seen[warp.agent]), warp.line))
    warp.next_epoch()
    warp.cta.machine.engine.repeat()
    if count is not None and barrier.arrived > count:
        raise Fault("barrier-misuse", f"{barrier.arrived} threads arrive at barrier {number}, which waits for {count}")
    warp.cta.complete_barrier(barrier)
    return barrier


def _check_after_last_phase(warp: Warp, number: int, barrier: NamedBarrier) -> None:
    """Report an arrival that could have come before the last phase ended, and then counts for that phase.

    A relaxed arrival at an mbarrier or at the cluster's barrier orders no memory, but what its waiters do comes later.
    """
    if barrier.awaited.get(warp.agent) == barrier.generation:
        return
    for one in barrier.last_arrivals:
        if not warp.clock.comes_after(one.agent, one.epoch):
            who = warp.agents.name(one.agent)
            report(Fault("barrier-phase-unordered", f"nothing orders this arrival at barrier {number} after the "
                         f"barrier's last phase, at which {who} arrived at PTX line {one.line}: it may count for that "
                         "phase", other=OtherAccess(who, "arrived at", one.line)))  # fmt: skip
            return


def _expected(count: int | None) -> str:
    return "all threads of the CTA" if count is None else counted(count, "thread")


def _operands(b: Binder, sources: tuple[Operand, ...]) -> tuple[int, int | None]:
    rows = [b.source(item, "u32") for item in sources]
    return rows[0], rows[1] if len(rows) > 1 else None


def _uniform(warp: Warp, row: int) -> int:
    return int(warp.u32[row][int(warp.mask.argmax())])


_SYNC = ("bar{.cta}.sync", "barrier{.cta}.sync{.aligned}")
_ARRIVE = ("bar{.cta}.arrive", "barrier{.cta}.arrive{.aligned}")


def _aligned(b: Binder) -> bool:
    return b.instruction.parts[0] == "bar" or bool(b.words.get("aligned"))


@opcode(*_SYNC, section="9.7.13.1", kind="tail", counter="barrier")
def sync(b: Binder) -> Step:
    """Arrive at a named barrier and wait until enough threads have arrived."""
    row, count = _operands(b, b.expect(1, 2))
    aligned = _aligned(b)

    def step(warp: Warp) -> object:
        number = _uniform(warp, row)
        barrier = _arrive(warp, number, None if count is None else _uniform(warp, count), aligned=aligned)
        return _wait(warp, number, barrier)

    return step


def _wait(warp: Warp, number: int, barrier: NamedBarrier, then: Callable[[], None] | None = None) -> Wait:
    """Wait for the end of the phase at which the warp has arrived; `then`: what it does after that."""
    target = barrier.generation + (1 if barrier.arrived else 0)
    warp.cta.machine.counters["barrier_waits"] += 1

    def finish() -> None:
        _join(warp, barrier.released)
        barrier.awaited[warp.agent] = target
        if then is not None:
            then()

    def reason() -> str:
        awaited = counted(warp.cta.awaited_by(barrier), "thread")
        return f"barrier {number}, where {barrier.arrived} of {awaited} have arrived"

    return Wait(
        ready=lambda: barrier.generation >= target,
        reason=reason,
        finish=finish,
    )


def _join(warp: Warp, released: Clock) -> None:
    """Learn what a barrier has gathered. Other lanes of the warp may have acquired something since the arrival."""
    warp.meetings += 1
    warp.clock.join(released)


@opcode(*_ARRIVE, section="9.7.13.1", counter="barrier")
def arrive(b: Binder) -> Step:
    """Arrive at a named barrier without waiting."""
    row, count = _operands(b, b.expect(2))
    aligned = _aligned(b)

    def step(warp: Warp) -> None:
        _arrive(warp, _uniform(warp, row), None if count is None else _uniform(warp, count), aligned=aligned)

    return step


@opcode("bar{.cta}.red.<op>.<type>", "barrier{.cta}.red{.aligned}.<op>.<type>", section="9.7.13.1", kind="tail",
        counter="barrier", op="and or popc", type="pred u32")  # fmt: skip
def reduce(b: Binder) -> Step:
    """Wait at a named barrier and combine a predicate of all its threads."""
    d, *between, p = b.expect(3, 4)
    row, count = _operands(b, tuple(between))
    rp, negated = b.predicate(p)
    view = "u32" if b.words["op"] == "popc" else "pred"
    rd, aligned, operation = b.destination(d, view), _aligned(b), b.words["op"]

    def step(warp: Warp) -> object:
        number, mask = _uniform(warp, row), warp.mask
        warp.cta.named_barrier(number).votes.extend((warp.pred[rp] ^ negated)[mask].tolist())
        barrier = _arrive(warp, number, None if count is None else _uniform(warp, count), aligned=aligned)

        def combine() -> None:
            votes = barrier.outcome
            outcome = {"and": all(votes), "or": any(votes), "popc": sum(votes)}[operation]
            np.copyto(getattr(warp, view)[rd], outcome, where=mask, casting="unsafe")

        return _wait(warp, number, barrier, combine)

    return step


@opcode("bar.warp.sync", section="9.7.13.2", kind="tail", counter="barrier")
def warp_sync(b: Binder) -> Step:
    """Wait for all named live lanes of the warp to reach this or another bar.warp.sync with the same mask."""
    members = b.source(b.expect(1)[0], "u32")

    def step(warp: Warp) -> object:
        mask = warp.mask
        bits = int(warp.u32[members][int(mask.argmax())])
        named = lanes_in(bits)
        if not count_nonzero(named & mask) or count_nonzero(mask & ~named):
            raise Fault("barrier-misuse", f"bar.warp.sync {bits:#x} by lanes that it does not name",
                        lane=int((mask & ~named).argmax()))  # fmt: skip

        warp.meetings += 1
        if not count_nonzero(named & warp.alive & ~mask):
            return NEXT
        gathering = warp.gatherings.setdefault(bits, Gathering())
        gathering.here |= mask

        def here() -> bool:
            if not gathering.over and not count_nonzero(named & warp.alive & ~gathering.here):
                gathering.over = True
                del warp.gatherings[bits]
            return gathering.over

        return Wait(ready=here, reason=lambda: f"the lanes {bits:#x} of its warp to reach bar.warp.sync",
                    finish=warp.rejoin, local=True)  # fmt: skip

    return step


@opcode("barrier.cluster.arrive{.<sem>}{.aligned}", section="9.7.13.3", counter="barrier", sem="release relaxed")
def cluster_arrive(b: Binder) -> Step:
    """Arrive at the cluster barrier."""
    b.expect(0)
    relaxed = b.words["sem"] == "relaxed"

    def step(warp: Warp) -> None:
        cluster = warp.cta.cluster
        twice = warp.mask & warp.cluster_owed
        if count_nonzero(twice):
            raise Fault("barrier-misuse", "barrier.cluster.arrive by a thread that has not waited since its last "
                        "arrival", lane=int(twice.argmax()))  # fmt: skip
        warp.cluster_arrived |= warp.mask
        cluster.awaited = True
        warp.cluster_owed |= warp.mask
        warp.cluster_phase[warp.mask] = cluster.generation + 1
        cluster.arriving.join(warp.released if relaxed else warp.clock)
        if relaxed:
            cluster.arriving.come_after(warp.clock.past())
        np.maximum(cluster.meeting, np.maximum(warp.clock.seen, warp.met), out=cluster.meeting)
        warp.next_epoch()
        warp.cta.machine.engine.repeat()
        cluster.complete_phase()

    return step


@opcode("barrier.cluster.wait{.<sem>}{.aligned}", section="9.7.13.3", kind="tail", counter="barrier", sem="acquire")
def cluster_wait(b: Binder) -> Step:
    """Wait until all threads of the cluster have arrived."""
    b.expect(0)

    def step(warp: Warp) -> object:
        cluster = warp.cta.cluster
        early = warp.mask & ~warp.cluster_owed
        if count_nonzero(early):
            raise Fault(
                "barrier-misuse", "barrier.cluster.wait by a thread that has not arrived", lane=int(early.argmax())
            )
        target, mask = int(warp.cluster_phase[warp.mask].max()), warp.mask.copy()
        warp.meetings += 1

        def finish() -> None:
            warp.cluster_owed &= ~mask
            _join(warp, cluster.released)
            np.maximum(warp.met, cluster.met, out=warp.met)

        def reason() -> str:
            arrived = sum(int(w.cluster_arrived.sum()) for w in cluster.warps)
            alive = sum(int(w.alive.sum()) for w in cluster.warps)
            return f"the barrier of the cluster, where {arrived} of {alive} threads have arrived"

        return Wait(ready=lambda: cluster.generation >= target, reason=reason, finish=finish)

    return step


@opcode("fence.proxy.async{.<space>}", section="9.7.13.4", counter="fence",
        space="global shared::cta shared::cluster")  # fmt: skip
@opcode("fence.proxy.alias", section="9.7.13.4", counter="fence")
def proxy_fence(b: Binder) -> Step:
    """Make earlier accesses visible to the async proxy, in one state space or in both."""
    b.expect(0)
    if b.instruction.parts[2] == "alias":
        return lambda warp: None
    space = b.words.get("space")
    shared, global_ = space != "global", space in ("global", "", None)
    return lambda warp: warp.fence_proxy(shared=shared, global_=global_)


@opcode("fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
        "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster",
        section="9.7.13.4", counter="fence")  # fmt: skip
def one_way_proxy_fence(b: Binder) -> Step:
    """Order generic accesses to shared memory before later accesses of the async proxy, within the cluster.

    The ISA pairs a release by the thread that has accessed with an acquire by the one that issues. Here one of the two
    is enough, like one fence.proxy.async.
    """
    b.expect(0)
    releases = "release" in b.instruction.parts

    def fence(warp: Warp) -> None:
        if releases:
            warp.fence_proxy(shared=True, global_=False)
        order_memory(warp, "cluster", acquires=not releases, releases=releases)
        if not releases:
            warp.fence_proxy(shared=True, global_=False)

    return fence


@opcode("fence{.<sem>}.<scope>", section="9.7.13.4", counter="fence", sem="sc acq_rel acquire release",
        scope="cta cluster gpu sys")  # fmt: skip
@opcode("fence.acquire.sync_restrict::shared::cluster.cluster", "fence.release.sync_restrict::shared::cta.cluster",
        section="9.7.13.4", counter="fence")  # fmt: skip
@opcode("fence.mbarrier_init.release.cluster", section="9.7.13.4", counter="fence")
@opcode("membar.<scope>", section="9.7.13.4", counter="fence", scope="cta gl sys")
def memory_fence(b: Binder) -> Step:
    """Order memory accesses."""
    b.expect(0)
    parts = b.instruction.parts
    scope, releases, acquires = parts[-1], "acquire" not in parts, "release" not in parts
    if "mbarrier_init" not in parts:
        return lambda warp: order_memory(warp, scope, acquires=acquires, releases=releases)

    def announce(warp: Warp) -> None:
        for barrier in warp.cta.mbarriers.values():
            barrier.announced |= barrier.creator == warp.agent
        order_memory(warp, scope, acquires=acquires, releases=releases)

    return announce


def order_memory(warp: Warp, scope: str, *, acquires: bool = True, releases: bool = True) -> None:
    """A fence; memory itself is sequentially consistent here. A relaxed arrival releases what precedes the last
    releasing fence, and only within the CTA if that fence has scope .cta. What relaxed waits observed counts as
    acquired after an acquiring fence. Relaxed accesses to global memory need a fence of gpu scope."""
    wide, narrow = scope in ("gpu", "sys", "gl"), scope == "cta"
    grid = warp.clock.grid_part() if wide else None
    noticed = (acquires and warp.noticed) or (grid is not None and grid.noticed)
    before = warp.acquiring() if noticed else None
    if acquires:
        for carried in warp.noticed.values():
            carried.take(warp.clock, warp.cta.place.cta_rank, narrow=narrow)
        if not narrow:
            warp.noticed.clear()
    if grid is not None:
        grid.fence(warp.agents.serial, warp.clock.seen)
    if before is not None:
        warp.have_acquired(before)
    if releases:
        warp.released_to_cta.join(warp.clock)
        if not narrow:
            warp.released.join(warp.clock)
    warp.next_epoch(warp.active_bits() if releases else EVERY)
