"""tcgen05 between tensor memory and registers: ld, st, waits, fences (PTX ISA 9.7.16.8, 9.7.16.11)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault
from backends.vm.machine.warp import Warp
from backends.vm.memory.clocks import pending_stamp
from backends.vm.memory.tmem import Index
from backends.vm.ptx.ast import Operand, Sink
from backends.vm.tensor.tmem_layout import RegisterMap, load_registers, register_map, split_address, store_registers

_SHAPES = "16x64b 16x128b 16x256b 32x32b"
_NUMS = "x1 x2 x4 x8 x16 x32 x64 x128"


def _cells(layout: RegisterMap, lane: int, column: int) -> list[Index]:
    if layout.transposed:
        return [(slice(lane, lane + 32), slice(column, column + len(layout.lanes)))]
    first = (layout.lanes + lane, layout.columns + column)
    return [first, (first[0], first[1] + 1)] if layout.packed else [first]


def _place(warp: Warp, taddr: int, layout: RegisterMap, what: str) -> tuple[int, int]:
    """Lane and column of an address that this warp may use: warp w reaches lanes 32 (w % 4) and up."""
    lane, column = split_address(taddr)
    own = 32 * (warp.index % 4)
    highest = lane + int(layout.lanes.max())
    if lane < own or highest >= own + 32:
        raise Fault("tmem-lane", f"{what} of lanes {lane}..{highest} by warp {warp.index}, which reaches only lanes "
                    f"{own}..{own + 31} of tensor memory", address=taddr)  # fmt: skip
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
    """Tensor memory to registers. A register dependence needs no wait; overwriting the cells does,
    see backends.vm.bind.tmem_loads."""
    d, a, *rest = b.expect(2, 3)
    layout = _layout(b, rest[0] if rest else None)
    items = b.vector(d, len(layout.lanes))
    rows = [(i, b.destination(item, "u32")) for i, item in enumerate(items) if not isinstance(item, Sink)]
    address, line = _address_row(b, a), b.instruction.line

    def step(warp: Warp) -> None:
        warp.converged("tcgen05.ld")
        lane, column = _place(warp, address(warp), layout, "tcgen05.ld")
        tmem = warp.cta.tmem
        cells = _cells(layout, lane, column)
        for block in cells:
            tmem.load_begins(block, warp.clock, warp.stamp, line)
        warp.tmem_loads.setdefault(line, {})[lane, column] = cells
        values = load_registers(tmem.data, lane, column, layout)
        registers = warp.u32
        for i, row in rows:
            registers[row][...] = values[i]

    return step


def _address_row(b: Binder, operand: Operand) -> Callable[[Warp], int]:
    address = b.address(operand)

    def at(warp: Warp) -> int:
        values = address(warp)[warp.mask]
        if (values != values[0]).any():
            raise Fault(
                "diverged", f"the tensor-memory address must be the same in all lanes, not {values.tolist()[:4]}..."
            )
        return int(values[0]) & 0xFFFFFFFF

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
    """Registers to tensor memory; nobody may read the cells before this warp's tcgen05.wait::st."""
    a, *rest = b.expect(2, 3)
    layout = _layout(b, rest[0] if len(rest) == 2 else None)
    rows = [b.source(item, "u32") for item in b.vector(rest[-1], len(layout.lanes))]
    address, line = _address_row(b, a), b.instruction.line

    def step(warp: Warp) -> None:
        warp.converged("tcgen05.st")
        lane, column = _place(warp, address(warp), layout, "tcgen05.st")
        tmem, registers = warp.cta.tmem, warp.u32
        for cells in _cells(layout, lane, column):
            tmem.begin_write(cells, warp.clock, pending_stamp(warp.agent), line, "tcgen05.st writes", own=warp.agent)
            warp.tmem_stores.append(cells)
        store_registers(tmem.data, lane, column, layout, np.array([registers[row] for row in rows]))

    return step


@opcode("tcgen05.wait::ld.sync.aligned", section="9.7.16.8.5", counter="tmem")
def wait_load(b: Binder) -> Step:
    """This thread's tcgen05.ld are complete: agents ordered after the warp may overwrite the cells."""
    b.expect(0)

    def step(warp: Warp) -> None:
        warp.converged("tcgen05.wait::ld")
        for places in warp.tmem_loads.values():
            for cells in places.values():
                warp.cta.tmem.loads_complete(cells)
        warp.tmem_loads.clear()

    return step


@opcode("tcgen05.wait::st.sync.aligned", section="9.7.16.8.5", counter="tmem")
def wait_store(b: Binder) -> Step:
    """This thread's tcgen05.st are complete: agents ordered after the warp may read the cells."""
    b.expect(0)

    def step(warp: Warp) -> None:
        warp.converged("tcgen05.wait::st")
        warp.cta.tmem.stores_complete(warp.agent, warp.tmem_stores, warp.stamp)
        warp.tmem_stores.clear()

    return step


@opcode("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync", section="9.7.16.11.1", counter="fence")
def fence(b: Binder) -> Step:
    """Order only; what it orders is checked through commits, waits and barriers."""
    b.expect(0)
    return lambda warp: None
