"""When a tcgen05.ld has ended: at the warp's tcgen05.wait::ld, or where an instruction uses one of its registers.

The ISA lets a register dependence wait for the load and says that it orders nothing else (PTX ISA 9.7.16.6.4.5).
Kernels that run on silicon take the use of a register for the end of the whole load all the same: FlashAttention-4
uses its scores and then lets the next MMA overwrite them, with no tcgen05.wait::ld. So such a use counts here too, and
the counter `tmem_unwaited_overwrites` tells that a kernel relies on it. A data-flow finds the instructions that may be
the first use on some path. A kernel that waits in plain sight pays nothing.
"""

from __future__ import annotations

from operator import or_
from typing import TYPE_CHECKING

from backends.vm.bind.flow import Bound, FlowGraph
from backends.vm.machine.code import Step
from backends.vm.machine.registers import Key

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp

_LOAD, _WAIT = "tcgen05.ld.", "tcgen05.wait::ld."


def end_loads_at_use(graph: FlowGraph) -> None:
    """Wrap the steps that may be the first to use a register of a pending tcgen05.ld."""
    lines: list[int] = []
    own: dict[int, int] = {}
    loading: dict[Key, int] = {}
    for index, item in enumerate(graph.code):
        if item.spelt(_LOAD):
            own[index] = 1 << len(lines)
            lines.append(item.instruction.line)
            for key in item.defines:
                loading[key] = loading.get(key, 0) | own[index]
    if not lines:
        return
    touched = [_loads_of(item, loading) for item in graph.code]

    def after(pending: int, index: int) -> int:
        item = graph.code[index]
        if item.spelt(_WAIT) and item.guard is None:
            return 0
        return pending & ~touched[index] | own.get(index, 0)

    for block, pending in zip(graph.blocks, graph.before_blocks(0, 0, after, or_), strict=True):
        for index in block:
            used = pending & touched[index]
            if used:
                item = graph.code[index]
                item.step = _ending(item.step, tuple(line for i, line in enumerate(lines) if used >> i & 1))
            pending = after(pending, index)


def _loads_of(item: Bound, loading: dict[Key, int]) -> int:
    """Bits of the loads whose registers an instruction uses."""
    found = 0
    for key in (*item.uses, *item.defines):
        found |= loading.get(key, 0)
    return found


def _ending(step: Step, lines: tuple[int, ...]) -> Step:
    def run(warp: Warp) -> object:
        for line in lines:
            for cells in warp.tmem_loads.get(line, {}).values():
                warp.cta.tmem.load_used(cells, line)
        return step(warp)

    return run
