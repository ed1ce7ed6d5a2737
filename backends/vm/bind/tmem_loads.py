"""When a tcgen05.ld has ended: at the warp's tcgen05.wait::ld, or where an instruction uses one of its registers.

The ISA lets a register dependence wait for the load and says that it orders nothing else (PTX ISA 9.7.16.6.4.5).
Kernels that run on silicon take the use of a register for the end of the whole load all the same: FlashAttention-4
uses its scores and then lets the next MMA overwrite them, with no tcgen05.wait::ld. So such a use counts here too, but
the counter `tmem_unwaited_overwrites` tells that a kernel relies on it. A forward data-flow over basic blocks finds the
instructions that may be the first use on some path; a kernel that waits in plain sight pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from backends.vm.machine.code import Step

if TYPE_CHECKING:
    from backends.vm.bind.function import Bound
    from backends.vm.machine.warp import Warp

_LOAD, _WAIT = "tcgen05.ld.", "tcgen05.wait::ld."


class _Analysis:
    """`own[i]`: the bit of instruction i if it is a load; `touched[i]`: bits of the loads whose registers it uses."""

    def __init__(self, bound: Sequence[Bound]) -> None:
        self.lines: list[int] = []
        self.own: dict[int, int] = {}
        self.waits = {i for i, item in enumerate(bound) if item.form.spelling.startswith(_WAIT) and item.guard is None}
        registers: dict[object, int] = {}
        for index, item in enumerate(bound):
            if item.form.spelling.startswith(_LOAD):
                self.own[index] = 1 << len(self.lines)
                self.lines.append(item.instruction.line)
                for key in item.defines:
                    registers[key] = registers.get(key, 0) | self.own[index]
        self.touched = [_union(registers, item) for item in bound] if self.lines else []

    def after(self, index: int, pending: int) -> int:
        """Loads that may be pending after an instruction, from those that may be before it."""
        return 0 if index in self.waits else pending & ~self.touched[index] | self.own.get(index, 0)

    def before_blocks(self, starts: Sequence[range], successors: Sequence[Sequence[int]]) -> list[int]:
        """Loads that may be pending where each block begins; `starts[b]` are the instructions of block b."""
        before = [0] * len(starts)
        work, reached = [0], {0}
        while work:
            block = work.pop()
            pending = before[block]
            for index in starts[block]:
                pending = self.after(index, pending)
            for target in successors[block]:
                if pending & ~before[target] or target not in reached:
                    before[target] |= pending
                    reached.add(target)
                    work.append(target)
        return before


def _union(registers: dict[object, int], item: Bound) -> int:
    found = 0
    for key in (*item.uses, *item.defines):
        found |= registers.get(key, 0)
    return found


def end_loads_at_use(bound: Sequence[Bound], leaders: Sequence[int], successors: Sequence[Sequence[int]]) -> None:
    """Wrap the steps that may be the first to use a register of a pending tcgen05.ld.

    `leaders[b]` is the first instruction of block b, `successors[b]` the blocks that may follow it.
    """
    analysis = _Analysis(bound)
    if not analysis.lines:
        return
    starts = [range(start, end) for start, end in zip(leaders, [*leaders[1:], len(bound)], strict=True)]
    for block, pending in zip(starts, analysis.before_blocks(starts, successors), strict=True):
        for index in block:
            used = pending & analysis.touched[index]
            if used:
                lines = tuple(line for i, line in enumerate(analysis.lines) if used >> i & 1)
                bound[index].step = _ending(bound[index].step, lines)
            pending = analysis.after(index, pending)


def _ending(step: Step, lines: tuple[int, ...]) -> Step:
    def run(warp: Warp) -> object:
        for line in lines:
            for cells in warp.tmem_loads.get(line, {}).values():
                warp.cta.tmem.load_used(cells, line)
        return step(warp)

    return run
