"""Registers of wgmma: which instructions may touch them in flight, and which wgmma may lack its wgmma.fence.

A forward data-flow over basic blocks finds the few instructions where a path makes it possible; only those are checked
when they run. In a kernel that waits and fences in plain sight nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from backends.vm.machine.code import Step
from backends.vm.machine.registers import Key
from backends.vm.machine.warpgroup import part_of

if TYPE_CHECKING:
    from backends.vm.bind.function import Bound
    from backends.vm.machine.warp import Warp
    from backends.vm.ptx.ast import Instruction

_MULTIPLY, _FENCE = "wgmma.mma_async", "wgmma.fence"
_COMMIT, _WAIT = "wgmma.commit_group", "wgmma.wait_group"


def wgmma_keys(uses: Sequence[Key], defines: Sequence[Key]) -> tuple[frozenset[Key], frozenset[Key]]:
    """Accumulator and A registers of a wgmma.mma_async: descriptors and predicates are not 32 bits wide."""
    return frozenset(defines), frozenset(key for key in uses if key[0] == 32)


@dataclass(slots=True)
class _Flow:
    """Bits of registers that may be in flight, those of no group yet among them (`open`); and since a wgmma.fence, used
    by wgmma, and touched after that use."""

    flying: int = 0
    open: int = 0
    used: int = 0
    touched: int = 0

    def join(self, other: _Flow) -> bool:
        """Take in another path; whether that added anything."""
        before = (self.flying, self.open, self.used, self.touched)
        self.flying |= other.flying
        self.open |= other.open
        self.used |= other.used
        self.touched |= other.touched
        return before != (self.flying, self.open, self.used, self.touched)


class _Analysis:
    def __init__(self, bound: Sequence[Bound]) -> None:
        self.bits: dict[Key, int] = {}
        for item in bound:
            if _is(item, _MULTIPLY):
                for keys in wgmma_keys(item.uses, item.defines):
                    for key in keys:
                        self.bits.setdefault(key, 1 << len(self.bits))
        self.everything = (1 << len(self.bits)) - 1

    def mask(self, item: Bound) -> int:
        found = 0
        for key in (*item.uses, *item.defines):
            found |= self.bits.get(key, 0)
        return found

    def step(self, flow: _Flow, item: Bound, mask: int) -> None:
        if _is(item, _MULTIPLY):
            flow.flying |= mask
            flow.open |= mask
            flow.used |= mask
            flow.touched &= ~mask
        elif item.form.spelling.startswith("wgmma."):
            if _is(item, _FENCE) and item.guard is None:
                flow.used = flow.touched = 0
            if _is(item, _WAIT) and item.guard is None and _allowed(item.instruction) == 0:
                flow.flying = flow.open
            if _is(item, _COMMIT) and item.guard is None:
                flow.open = 0
        else:
            flow.touched |= mask & flow.used

    def before_blocks(
        self, bound: Sequence[Bound], masks: list[int], leaders: Sequence[int], successors: Sequence[Sequence[int]]
    ) -> list[_Flow]:
        ends = [*leaders[1:], len(bound)]
        before = [_Flow() for _ in leaders]
        before[0].touched = self.everything
        work, reached = [0], {0}
        while work:
            block = work.pop()
            flow = replace(before[block])
            for index in range(leaders[block], ends[block]):
                self.step(flow, bound[index], masks[index])
            for target in successors[block]:
                if before[target].join(flow) or target not in reached:
                    reached.add(target)
                    work.append(target)
        return before


def _is(item: Bound, opcode: str) -> bool:
    return item.form.spelling.startswith(opcode)


def _allowed(instruction: Instruction) -> int:
    return int(getattr(instruction.operands[0], "value", 1))


def check_warpgroup_registers(
    bound: Sequence[Bound], leaders: Sequence[int], successors: Sequence[Sequence[int]]
) -> None:
    """Wrap the steps of those instructions whose registers may belong to a wgmma in flight or lack a wgmma.fence.

    `leaders[b]` is the first instruction of block b, `successors[b]` the blocks that may follow it.
    """
    analysis = _Analysis(bound)
    if not analysis.bits:
        return
    masks = [analysis.mask(item) for item in bound]
    before = analysis.before_blocks(bound, masks, leaders, successors)
    unfenced: dict[int, int] = {}
    for block, (start, end) in enumerate(zip(leaders, [*leaders[1:], len(bound)], strict=True)):
        flow = replace(before[block])
        for index in range(start, end):
            item, mask = bound[index], masks[index]
            if _is(item, _MULTIPLY):
                if mask & flow.touched:
                    unfenced[index] = mask & flow.touched
            elif mask & flow.flying:
                item.step = _idle(item.step, _keys(analysis, mask & flow.flying), item.instruction.text)
            analysis.step(flow, item, mask)
    _watch_fences(bound, masks, analysis, unfenced)


def _keys(analysis: _Analysis, mask: int) -> frozenset[Key]:
    return frozenset(key for key, bit in analysis.bits.items() if mask & bit)


def _watch_fences(bound: Sequence[Bound], masks: list[int], analysis: _Analysis, unfenced: dict[int, int]) -> None:
    doubtful = 0
    for mask in unfenced.values():
        doubtful |= mask
    for index, item in enumerate(bound):
        if index in unfenced:
            item.step = _fenced(item.step, _keys(analysis, unfenced[index]))
        elif masks[index] & doubtful and not item.form.spelling.startswith("wgmma."):
            item.step = _noted(item.step, _keys(analysis, masks[index] & doubtful))


def _wrapped(step: Step, before: Callable[[Warp], None]) -> Step:
    def run(warp: Warp) -> object:
        before(warp)
        return step(warp)

    return run


def _idle(step: Step, keys: frozenset[Key], text: str) -> Step:
    def check(warp: Warp) -> None:
        group = warp.cta.warpgroups.get(warp.index // 4)
        if group is not None:
            group.parts[warp.index % 4].check_access(keys, f"`{text}`")

    return _wrapped(step, check)


def _fenced(step: Step, keys: frozenset[Key]) -> Step:
    return _wrapped(step, lambda warp: part_of(warp).check_fenced(keys))


def _noted(step: Step, keys: frozenset[Key]) -> Step:
    def note(warp: Warp) -> None:
        group = warp.cta.warpgroups.get(warp.index // 4)
        if group is not None:
            group.parts[warp.index % 4].touch(keys)

    return _wrapped(step, note)
