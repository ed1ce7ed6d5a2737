"""Copies of single threads from global to shared memory: cp.async and its groups (PTX ISA 9.7.9.25.3, 9.7.13.15.15)."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import ByLanes, Fault
from backends.vm.isa.mbarrier_ops import places
from backends.vm.machine.access import active, check_acquired
from backends.vm.machine.code import Wait
from backends.vm.machine.engine import Copy, ThreadGroups, submit
from backends.vm.machine.warp import Warp
from backends.vm.memory.clocks import ANYONE, Clock, stamp
from backends.vm.memory.definedness import Mask, Origin
from backends.vm.memory.global_memory import check_alignment
from backends.vm.memory.mbarrier import MBarrier
from backends.vm.numpy_calls import count_nonzero

_PREFETCH = "L2::64B L2::128B L2::256B"
Addresses = npt.NDArray[np.int64]


def _groups(warp: Warp) -> list[ThreadGroups]:
    """The groups of the active lanes. The copies of one warp are one agent."""
    plain, agent = warp.copies.plain, warp.copies.plain_agent
    if agent is None:
        agent = warp.copies.plain_agent = warp.agents.new_copy()
    return [plain.setdefault(lane, ThreadGroups(agent, agent)) for lane in active(warp).tolist()]


@opcode("cp.async.<cache>.<dst>.global{.L2::cache_hint}{.<prefetch>}", section="9.7.9.25.3.1", counter="memory",
        cache="ca cg", dst="shared shared::cta", prefetch=_PREFETCH)  # fmt: skip
def cp_async(b: Binder) -> Step:
    """Copy 4, 8 or 16 bytes per thread (.cg: 16) from global to shared memory. Bytes beyond `src-size` become zero."""
    destination, source, size_operand, *rest = b.hinted(3, 4)
    size = b.immediate(size_operand)
    if size not in ((16,) if b.words["cache"] == "cg" else (4, 8, 16)):
        raise b.error(f"cp-size {size}; it is {'16 with .cg' if b.words['cache'] == 'cg' else '4, 8 or 16'}")
    ignores = bool(rest) and b.width(rest[0]) == 1
    count_row = b.source(rest[0], "u32") if rest and not ignores else None
    ignored = b.predicate(rest[0]) if rest and ignores else None
    to, origin = b.address(destination), b.address(source)
    line, text = b.instruction.line, b.instruction.text

    def counts(warp: Warp, lanes: Addresses) -> Addresses:
        if ignored is not None:
            row, negated = ignored
            return np.where(warp.pred[row][lanes] ^ negated, 0, size)
        return np.full(lanes.size, size) if count_row is None else warp.u32[count_row][lanes].astype(np.int64)

    def step(warp: Warp) -> None:
        lanes = active(warp)
        targets, sources, valid = to(warp)[lanes], origin(warp)[lanes], counts(warp, lanes)
        smem, cluster = warp.cta.smem, warp.cta.cluster
        with ByLanes(lanes):
            offsets = np.array([warp.cta.own_offset(int(address), "cp.async") for address in targets], np.int64)
            smem.check(offsets, size, "cp.async")
            check_alignment(sources, size, "cp.async from global memory", warp.cta.machine.memory)
            if count_nonzero(valid > size):
                raise Fault("cp-async", f"src-size {int(valid.max())} exceeds cp-size {size}", lane=int(valid.argmax()))
            granules = (offsets[:, None] + np.arange(0, size, 4)) >> 2
            check_acquired(warp, warp.cta, offsets, size, lanes, writes=True)
            smem.async_write_begins(granules, warp.clock, line, "cp.async", generic=True)
        groups, serial = _groups(warp), cluster.next_copy()
        machine = warp.cta.machine
        for count in dict.fromkeys(valid[valid > 0].tolist()):
            mark = stamp(groups[0].agent, serial)
            whole = valid == count
            machine.races.copied_from(machine.memory, sources[whole], count, warp, mark, lanes[whole], bulk=False)

        def perform() -> None:
            hidden: list[tuple[int, Mask, Origin]] = []
            each = zip(lanes.tolist(), sources.tolist(), offsets.tolist(), valid.tolist(), strict=True)
            for lane, address, offset, bytes_ in each:
                piece = np.zeros(size, np.uint8)
                if bytes_:
                    buffer = warp.cta.machine.memory.find(address, bytes_, "cp.async", lane)
                    at = address - buffer.base
                    piece[:bytes_] = buffer.data[at : at + bytes_]
                    if buffer.state is not None and (missing := buffer.missing(np.array([at]), bytes_)) is not None:
                        hidden.append((offset, missing, buffer.origin_of(at + int(missing.argmax()), line)))
                smem.data[offset : offset + size] = piece
            smem.async_write_ends(granules, stamp(groups[0].agent, serial), line)
            for offset, missing, origin in hidden:
                smem.undefine(np.array([offset]), missing, origin.stored_at(line, warp.name))

        done = submit(warp, "a cp.async", line, text, perform, queue=warp.copies)
        for group, own in zip(groups, granules, strict=True):
            group.open.append(Copy(done, serial, own))

    return step


@opcode("cp.async.commit_group", section="9.7.9.25.3.2", counter="memory")
def commit_group(b: Binder) -> Step:
    """Close the thread's open group."""
    b.expect(0)

    def step(warp: Warp) -> None:
        for group in _groups(warp):
            group.commit()

    return step


@opcode("cp.async.wait_group", section="9.7.9.25.3.3", kind="tail", counter="memory")
def wait_group(b: Binder) -> Step:
    """Wait until at most N of the thread's latest groups are pending."""
    allowed = b.immediate(b.expect(1)[0])
    return lambda warp: _wait(warp, allowed)


@opcode("cp.async.wait_all", section="9.7.9.25.3.3", kind="tail", counter="memory")
def wait_all(b: Binder) -> Step:
    """Wait for everything that the thread has issued, as after a commit_group."""
    b.expect(0)

    def step(warp: Warp) -> object:
        for group in _groups(warp):
            group.commit()
        return _wait(warp, 0)

    return step


def _wait(warp: Warp, allowed: int) -> Wait:
    groups = _groups(warp)

    def finish() -> None:
        _take_over(warp, groups, allowed)
        for group in groups:
            warp.learn(group.agent, group.waited(allowed))
            group.written(allowed)

    return Wait(
        ready=lambda: not any(group.outstanding(allowed) for group in groups),
        reason=lambda: f"all but {allowed} of its cp.async groups to end",
        finish=finish,
    )


def _take_over(warp: Warp, groups: list[ThreadGroups], allowed: int) -> None:
    """After a wait by the active lanes: what each has copied counts as its own store, for it alone to release."""
    copies, lanes = list[Copy](), list[int]()
    for lane, group in zip(active(warp).tolist(), groups, strict=True):
        covered = group.covered(allowed)
        copies += covered
        lanes += [lane] * len(covered)
    granules = [copy.granules for copy in copies if copy.granules is not None]
    if not granules:
        return
    sizes, agent = [one.size for one in granules], groups[0].agent
    marks = np.repeat(np.array([stamp(agent, copy.serial) for copy in copies], np.int32), sizes)
    where = np.concatenate(granules)
    warp.cta.smem.take_over(where, marks, np.repeat(lanes, sizes), warp.stamp, warp.meetings)
    warp.stored_at = warp.meetings


@opcode("cp.async.mbarrier.arrive{.<noinc>}{.<space>}.b64", section="9.7.13.15.15", counter="mbarrier", noinc="noinc",
        space="shared shared::cta")  # fmt: skip
def copy_arrive(b: Binder) -> Step:
    """Arrive when this thread's earlier cp.async have ended. Without .noinc the pending count is raised first."""
    find = places(b, b.expect(1)[0])
    increments = not b.words["noinc"]
    line, text = b.instruction.line, b.instruction.text

    def step(warp: Warp) -> None:
        landed = warp.clock.of_copy()
        for group in _groups(warp):
            landed.seen[group.agent] = warp.cta.cluster.copy_serial
            group.hand_over()
        for (cta, offset), lanes in find(warp):
            barrier = cta.mbarrier(offset, warp.clock, lanes[0])
            if increments:
                barrier.pending += len(lanes)
            perform = partial(_arrive, barrier, len(lanes), landed, f"the cp.async.mbarrier.arrive of PTX line {line}")
            submit(warp, "an arrival of cp.async", line, text, perform, queue=warp.copies, signals=(barrier,))
        warp.next_epoch()

    return step


def _arrive(barrier: MBarrier, count: int, landed: Clock, by: str) -> None:
    barrier.arrive(count, by, (landed, ANYONE, False))
