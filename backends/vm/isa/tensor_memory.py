"""tcgen05 and tensor memory: allocation, ld, st, waits, fences (PTX ISA 9.7.16.7.1, 9.7.16.8, 9.7.16.11).

With cta_group::2 one warp of each CTA of the pair must execute the allocation instructions, in the same order, and the
first waits for the second. The ISA does not say whether dealloc and relinquish wait (Table 48). Here they do, to expose
a kernel that relies on either behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault, counted, report
from backends.vm.isa.tensor_operands import GROUPS, group_of, pair, same_group
from backends.vm.machine.access import resolve, uniform
from backends.vm.machine.code import NEXT, Wait
from backends.vm.machine.undefined import BecameUndefined
from backends.vm.machine.warp import Warp
from backends.vm.memory.clocks import pending_stamp
from backends.vm.memory.shared import OFFSET_MASK
from backends.vm.memory.tmem import COLUMNS, COUNTS, LANES, Index, Meeting, TensorMemory, free_places
from backends.vm.ptx.ast import Operand, Sink
from backends.vm.tensor.tmem_layout import (
    RegisterMap,
    load_registers,
    register_map,
    split_address,
    store_registers,
)

if TYPE_CHECKING:
    from backends.vm.machine.cta import Cta


def _collective(warp: Warp, what: str, arguments: tuple[int, ...]) -> tuple[Meeting, tuple[Cta, Cta]]:
    """Enter `warp` for its CTA in the pair's next collective instruction."""
    both = pair(warp, what)
    tmem, rank = warp.cta.tmem, warp.cta.place.cta_rank
    meeting = both[0].tmem.meetings.setdefault(tmem.collectives, Meeting(what, arguments))
    tmem.collectives += 1
    if (meeting.what, meeting.arguments) != (what, arguments):
        raise Fault("cta-pair", f"{what} of {_listed(arguments)} by CTA rank {rank} where its peer executes "
                    f"{meeting.what} of {_listed(meeting.arguments)}; both must execute the same")  # fmt: skip
    meeting.ranks.add(rank)
    meeting.agents.add(warp.agent)
    warp.cta.machine.engine.events += 1
    return meeting, both


def _met(warp: Warp, meeting: Meeting) -> None:
    """The end of a collective instruction, which orders nothing, but tells that a warp of the peer has started."""
    for agent in meeting.agents - {warp.agent}:
        warp.clock.come_after(warp.agents.start_of(agent))


def _listed(arguments: tuple[int, ...]) -> str:
    return ", ".join(f"{value:#x}" for value in arguments) or "nothing"


def _absent(meeting: Meeting, both: tuple[Cta, Cta]) -> str:
    missing = [cta.place.cta_rank for cta in both if cta.place.cta_rank not in meeting.ranks]
    return f"a warp of the peer CTA rank {missing} to execute {meeting.what} with .cta_group::2 too"


@opcode("tcgen05.alloc.<group>.sync.aligned{.<space>}.b32", section="9.7.16.7.1", kind="tail", counter="tmem",
        group=GROUPS, space="shared::cta")  # fmt: skip
def alloc(b: Binder) -> Step:
    """Allocate columns (all 128 lanes) to the CTA or to both of a pair. Waits until enough are free.

    Each CTA's address goes to its own shared memory.
    """
    destination, count = b.expect(2)
    address, row = b.address(destination), b.source(count, "u32")
    wide = b.width(getattr(destination, "base", destination)) == 64
    line, group = b.instruction.line, group_of(b.words["group"])

    def step(warp: Warp) -> object:
        warp.meet("tcgen05.alloc")
        same_group(warp, group, "tcgen05.alloc")
        columns = uniform(warp.u32[row][warp.mask], "the column count")
        if columns not in COUNTS:
            raise Fault("tmem-alloc", f"{counted(columns, 'column')} asked for; the count is a power of two in 32..512")
        if not warp.cta.tmem.permit:
            raise Fault("tmem-alloc", "an alloc after the CTA gave up its permit (relinquish_alloc_permit)")
        at = address(warp)[:1]
        offset = int((resolve("", at)[1] if wide else at)[0]) & OFFSET_MASK

        def give(first: int) -> None:
            value = np.array([[first]], np.uint32).view(np.uint8)
            warp.cta.smem.store(np.array([offset], np.int64), value, warp.clock, warp.stamp, line)
            warp.cta.smem.allocs.add(line)

        return _alloc_one(warp, columns, line, give) if group == 1 else _alloc_pair(warp, columns, offset, line, give)

    return step


def _alloc_one(warp: Warp, columns: int, line: int, give: Callable[[int], None]) -> object:
    tmem = warp.cta.tmem
    if places := free_places(tmem.owned, columns):
        first = _chosen(warp, places)
        tmem.allocate(first, columns, line, warp.stamp)
        give(first)
        return NEXT
    return Wait(
        ready=lambda: bool(free_places(tmem.owned, columns)),
        reason=lambda: f"{columns} free columns of tensor memory; held: {_held(tmem)}",
        again=True,
    )


def _chosen(warp: Warp, places: list[int]) -> int:
    """One of the free places: the schedule says which, as another CTA of the kernel may hold the others.

    If an SM has no room for two CTAs, it is the first. DeepGEMM relies on that.
    """
    alone = warp.cta.tmem.room.ctas == 1
    return places[0 if alone else warp.cta.machine.schedule.place(len(places))]


def _held(tmem: TensorMemory) -> str:
    return ", ".join(f"{a.columns} columns (PTX line {a.line})" for a in tmem.allocations) or "none"


def _alloc_pair(warp: Warp, columns: int, offset: int, line: int, give: Callable[[int], None]) -> Wait:
    meeting, both = _collective(warp, "tcgen05.alloc", (columns, offset))

    def free() -> list[int]:
        return free_places(both[0].tmem.owned | both[1].tmem.owned, columns)

    def finish() -> None:
        if meeting.first is None:
            meeting.first = _chosen(warp, free())
            for cta in both:
                cta.tmem.allocate(meeting.first, columns, line, warp.stamp)
            warp.cta.machine.engine.events += 1
        give(meeting.first)
        _met(warp, meeting)

    def reason() -> str:
        held = "; ".join(f"CTA rank {cta.place.cta_rank} holds {_held(cta.tmem)}" for cta in both)
        return f"{columns} free columns in both CTAs; {held}" if len(meeting.ranks) == 2 else _absent(meeting, both)

    return Wait(
        ready=lambda: len(meeting.ranks) == 2 and (meeting.first is not None or bool(free())),
        reason=reason,
        finish=finish,
    )


def _together(warp: Warp, group: int, what: str, arguments: tuple[int, ...], perform: Callable[[], None]) -> object:
    """Perform at once or, for a pair, when the peer has arrived too."""
    if group == 1:
        perform()
        return NEXT
    meeting, both = _collective(warp, what, arguments)

    def finish() -> None:
        perform()
        _met(warp, meeting)

    return Wait(ready=lambda: len(meeting.ranks) == 2, reason=lambda: _absent(meeting, both), finish=finish)


@opcode("tcgen05.dealloc.<group>.sync.aligned.b32", section="9.7.16.7.1", kind="tail", counter="tmem", group=GROUPS)
def dealloc(b: Binder) -> Step:
    """Free an allocation."""
    address, count = b.expect(2)
    ra, rc = b.source(address, "u32"), b.source(count, "u32")
    group, line = group_of(b.words["group"]), b.instruction.line

    def step(warp: Warp) -> object:
        warp.meet("tcgen05.dealloc")
        same_group(warp, group, "tcgen05.dealloc")
        taddr, columns = (
            uniform(warp.u32[ra][warp.mask], "the address"),
            uniform(warp.u32[rc][warp.mask], "the column count"),
        )

        if group == 2:
            for cta in pair(warp, "tcgen05.dealloc"):
                cta.tmem.close(taddr, columns, warp.clock, line)

        def perform() -> None:
            warp.cta.machine.engine.events += 1
            warp.cta.tmem.free(taddr, columns, warp.clock)

        return _together(warp, group, "tcgen05.dealloc", (taddr, columns), perform)

    return step


@opcode("tcgen05.relinquish_alloc_permit.<group>.sync.aligned", section="9.7.16.7.1", kind="tail", counter="tmem",
        group=GROUPS)  # fmt: skip
def relinquish(b: Binder) -> Step:
    """Forbid further allocations by the CTA."""
    b.expect(0)
    group = group_of(b.words["group"])

    def step(warp: Warp) -> object:
        warp.meet("tcgen05.relinquish_alloc_permit")
        same_group(warp, group, "tcgen05.relinquish_alloc_permit")

        def perform() -> None:
            warp.cta.tmem.permit = False

        return _together(warp, group, "tcgen05.relinquish_alloc_permit", (), perform)

    return step


_SHAPES = "16x64b 16x128b 16x256b 32x32b"
_NUMS = "x1 x2 x4 x8 x16 x32 x64 x128"


def _cells(layout: RegisterMap, lane: int, column: int) -> list[Index]:
    if layout.transposed:
        return [(slice(lane, lane + 32), slice(column, column + len(layout.lanes)))]
    first = (layout.lanes + lane, layout.columns + column)
    return [first, (first[0], first[1] + 1)] if layout.packed else [first]


def _place(warp: Warp, taddr: int, layout: RegisterMap, what: str) -> tuple[int, int]:
    """Lane and column of an address that this warp may use: warp w owns 32 lanes from 32 (w % 4)."""
    lane, column = split_address(taddr)
    own = 32 * (warp.index % 4)
    highest = lane + int(layout.lanes.max())
    if lane >= LANES:
        raise Fault("tmem-out-of-bounds", f"{what} of lanes {lane}..{highest} of a tensor memory of {LANES} x "
                    f"{COLUMNS}", address=taddr)  # fmt: skip
    if lane < own or highest >= own + 32:
        report(Fault("tmem-lane-ignored", f"{what} of lanes {lane}..{highest} by warp {warp.index}, which reaches only "
                     f"lanes {own}..{own + 31} of tensor memory", address=taddr))  # fmt: skip
        lane, highest = own + lane % 32, own + lane % 32 + highest - lane
        if highest >= own + 32:
            raise Fault("tmem-lane", f"{what} of lanes {lane}..{highest} by warp {warp.index}, beyond its quarter of "
                        "tensor memory", address=taddr)  # fmt: skip
    return lane, column


def _layout(b: Binder, split: Operand | None) -> RegisterMap:
    packed = bool(b.words.get("pack::16b") or b.words.get("unpack::16b"))
    shape = b.words.get("shape", "16x32bx2")
    try:
        return register_map(shape, int(b.words["num"][1:]), packed, b.immediate(split) if split is not None else 0)
    except Fault as fault:
        raise b.error(fault.detail) from None


@opcode(
    "tcgen05.ld.sync.aligned.<shape>.<num>{.pack::16b}.b32",
    section="9.7.16.8.3",
    counter="tmem",
    shape=_SHAPES,
    num=_NUMS,
)
@opcode("tcgen05.ld.sync.aligned.16x32bx2.<num>{.pack::16b}.b32", section="9.7.16.8.3", counter="tmem", num=_NUMS)
def load(b: Binder) -> Step:
    """Copy tensor memory to registers. Using a loaded register needs no wait, but overwriting the cells does
    (see backends.vm.bind.flow)."""
    d, a, *rest = b.expect(2, 3)
    layout = _layout(b, rest[0] if rest else None)
    items = b.braced(d, len(layout.lanes))
    rows = [(i, b.destination(item, "u32")) for i, item in enumerate(items) if not isinstance(item, Sink)]
    address, line = _address_row(b, a), b.instruction.line

    def step(warp: Warp) -> None:
        warp.meet("tcgen05.ld")
        lane, column = _place(warp, address(warp), layout, "tcgen05.ld")
        tmem = warp.cta.tmem
        cells = _cells(layout, lane, column)
        hidden = [block for block in cells if not tmem.load_begins(block, warp.clock, warp.stamp, line)]
        warp.tmem_loads.setdefault(line, {})[lane, column] = cells
        values = load_registers(tmem.data, lane, column, layout)
        registers = warp.u32
        for i, row in rows:
            registers[row][...] = values[i]
        if hidden:
            bits, origin = load_registers(tmem.undefined_bits(), lane, column, layout), tmem.origin_of(hidden[0], line)
            warp.undefined.put_rows([row for _, row in rows], [bits[i] for i, _ in rows], warp.mask, origin)
            raise BecameUndefined

    return step


def _address_row(b: Binder, operand: Operand) -> Callable[[Warp], int]:
    address = b.address(operand)

    def at(warp: Warp) -> int:
        given = address(warp)[warp.mask]
        try:
            return uniform(given, "the tensor-memory address") & 0xFFFFFFFF
        except Fault as unlike:
            # ptxas moves the address into a uniform register, so the hardware uses one lane's.
            report(unlike)
            return int(given[0]) & 0xFFFFFFFF

    return at


@opcode(
    "tcgen05.st.sync.aligned.<shape>.<num>{.unpack::16b}.b32",
    section="9.7.16.8.4",
    counter="tmem",
    shape=_SHAPES,
    num=_NUMS,
)
@opcode("tcgen05.st.sync.aligned.16x32bx2.<num>{.unpack::16b}.b32", section="9.7.16.8.4", counter="tmem", num=_NUMS)
def store(b: Binder) -> Step:
    """Copy registers to tensor memory. The cells may not be read before this warp's tcgen05.wait::st."""
    a, *rest = b.expect(2, 3)
    layout = _layout(b, rest[0] if len(rest) == 2 else None)
    rows = [b.source(item, "u32") for item in b.braced(rest[-1], len(layout.lanes))]
    address, line = _address_row(b, a), b.instruction.line

    def step(warp: Warp) -> None:
        warp.meet("tcgen05.st")
        lane, column = _place(warp, address(warp), layout, "tcgen05.st")
        tmem, registers = warp.cta.tmem, warp.u32
        for cells in _cells(layout, lane, column):
            tmem.begin_write(cells, warp.clock, pending_stamp(warp.agent), line, "tcgen05.st writes", own=warp.agent)
            warp.tmem_stores.append(cells)
        store_registers(tmem.data, lane, column, layout, np.array([registers[row] for row in rows]))
        warp.cta.machine.engine.repeat()

    keys = [(32, row) for row in rows]

    def carry(warp: Warp, run: Step) -> object:
        origin = warp.undefined.origin(keys, line)
        outcome = run(warp)
        if origin is not None:
            (lane, column), tmem = split_address(address(warp)), warp.cta.tmem
            lane = 32 * (warp.index % 4) + lane % 32  # where `run` has stored
            bits = tmem.undefined_bits()
            store_registers(bits, lane, column, layout, np.array([warp.undefined.bits(key) for key in keys]))
            tmem.undefine(bits, origin.stored_at(line, warp.name))
        return outcome

    b.carry(carry, *keys)
    return step


@opcode("tcgen05.wait::ld.sync.aligned", section="9.7.16.8.5", counter="tmem")
def wait_load(b: Binder) -> Step:
    """Complete this thread's tcgen05.ld: agents ordered after the warp may overwrite the cells."""
    b.expect(0)
    line = b.instruction.line

    def step(warp: Warp) -> None:
        warp.meet("tcgen05.wait::ld")
        for places in warp.tmem_loads.values():
            for cells in places.values():
                warp.cta.tmem.loads_complete(warp.agent, cells, warp.stamp, line)
        warp.tmem_loads.clear()

    return step


@opcode("tcgen05.wait::st.sync.aligned", section="9.7.16.8.5", counter="tmem")
def wait_store(b: Binder) -> Step:
    """Complete this thread's tcgen05.st: agents ordered after the warp may read the cells."""
    b.expect(0)

    def step(warp: Warp) -> None:
        warp.meet("tcgen05.wait::st")
        warp.cta.tmem.stores_complete(warp.agent, warp.tmem_stores, warp.stamp)
        warp.tmem_stores.clear()

    return step


@opcode("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync", section="9.7.16.11.1", counter="fence")
def fence(b: Binder) -> Step:
    """Order tcgen05 operations around a thread barrier. A judged row only counts a missing fence, because kernels omit
    them."""
    b.expect(0)
    before = b.instruction.parts[-1].startswith("fence::before")

    def step(warp: Warp) -> None:
        if before:
            warp.agents.tensor_fences.setdefault(warp.agent, []).append(int(warp.clock.seen[warp.agent]))
            warp.next_epoch()
        else:
            warp.clock.tensor = warp.clock.seen.copy()

    return step
