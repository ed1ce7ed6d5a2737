"""A function as a graph of basic blocks, and the data-flow analysis that finds the registers still in flight.

Registers of a tcgen05.ld and of a wgmma are in flight until a wait, or until a use that counts as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import or_
from typing import TYPE_CHECKING, TypeVar

from backends.vm.bind.forms import Form
from backends.vm.machine.code import Key, Step
from backends.vm.machine.run_access import RunAccess
from backends.vm.machine.warpgroup import part_of
from backends.vm.ptx.ast import Immediate, Instruction

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp


State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Carrying:
    """How a family carries undefined bits along: `around` does the given step and marks what becomes undefined.

    Only the registers in `travels` may be undefined when it is called.
    """

    around: Callable[[Warp, Step], object]
    travels: frozenset[Key]


def preceded(first: Callable[[Warp], None], step: Step) -> Step:
    """A step that calls `first` and then `step`."""

    def run(warp: Warp) -> object:
        first(warp)
        return step(warp)

    return run


@dataclass(slots=True)
class Bound:
    """One instruction with its meaning: the form, the step, the registers that it reads and writes.

    `guard`: row of the predicate, and whether it is negated. `reads`: view and row of each source, literals included,
    in the order in which the family has bound them. `addresses`: the registers among `uses` that hold an address.
    `places`: the rows of all operands, in the order in which the family asked for them. `plain`: the step as the family
    made it; None if it computes in the ring. `before`: what data-flow analysis has put before it in `step`, in order.
    `in_run`: the memory access that it is, for a run of machine code. `unread`: what takes the place of `step` if
    nothing reads the result; None if that makes no difference.
    """

    instruction: Instruction
    form: Form
    step: Step
    uses: tuple[Key, ...]
    defines: tuple[Key, ...]
    guard: tuple[int, bool] | None
    reads: tuple[tuple[str, int], ...] = ()
    addresses: frozenset[Key] = frozenset()
    carry: Carrying | None = None
    places: tuple[Key, ...] = ()
    plain: Step | None = None
    before: tuple[Callable[[Warp], None], ...] = ()
    in_run: RunAccess | None = None
    unread: Step | None = None

    def begin_with(self, first: Callable[[Warp], None]) -> None:
        """Make `step` call `first` before everything else."""
        self.step, self.before = preceded(first, self.step), (first, *self.before)

    def as_bound(self) -> Bound:
        """This instruction without what data-flow analysis has put before it. Not for functions in the ring."""
        assert self.plain is not None, "an instruction in the ring has no plain step"
        return replace(self, step=self.plain, before=())

    @property
    def guard_key(self) -> Key | None:
        """The guard's register as a key."""
        return (1, self.guard[0]) if self.guard else None

    def spelt(self, opcode: str) -> bool:
        """Whether the form begins with `opcode`."""
        return self.form.spelling.startswith(opcode)


def touched_by(items: Sequence[Bound]) -> frozenset[Key]:
    """The registers that instructions read or write."""
    return frozenset[Key]().union(*[item.uses for item in items], *[item.defines for item in items])


@dataclass(frozen=True, slots=True)
class FlowGraph:
    """Instructions in program order. `blocks[b]` are the indices of block b, `successors[b]` the blocks after it."""

    code: Sequence[Bound]
    blocks: Sequence[range]
    successors: Sequence[Sequence[int]]

    def before_blocks(
        self,
        entry: State,
        unreached: State,
        after: Callable[[State, int], State],
        join: Callable[[State, State], State],
    ) -> list[State]:
        """As `before`, where `after(state, index)` is the state after instruction `index`."""

        def through(state: State, block: int) -> State:
            for index in self.blocks[block]:
                state = after(state, index)
            return state

        return self.before(entry, unreached, through, join)

    def before(
        self,
        entry: State,
        unreached: State,
        through: Callable[[State, int], State],
        join: Callable[[State, State], State],
    ) -> list[State]:
        """The state before each block: `entry` before the first, `unreached` before those that no path reaches.

        `through(state, block)` is the state after block `block`; `join` combines the states of two paths that meet.
        """
        before = [unreached] * len(self.blocks)
        before[0] = entry
        work, reached = [0], {0}
        while work:
            block = work.pop()
            state = through(before[block], block)
            for target in self.successors[block]:
                joined = join(before[target], state)
                if joined != before[target] or target not in reached:
                    before[target] = joined
                    reached.add(target)
                    work.append(target)
        return before


# Instructions that do something else if nobody reads their result: a wait that may give up.


def replace_unread(graph: FlowGraph) -> None:
    """Replace the steps of instructions whose result no path reads before it is overwritten."""
    own = {index: 1 << bit for bit, index in enumerate(i for i, item in enumerate(graph.code) if item.unread)}
    if not own:
        return
    written: dict[Key, int] = {}
    for index, bit in own.items():
        for key in graph.code[index].defines:
            written[key] = written.get(key, 0) | bit

    def after(pending: int, index: int) -> int:
        item = graph.code[index]
        for key in item.defines if item.guard is None else ():
            pending &= ~written.get(key, 0)
        return pending | own.get(index, 0)

    read = 0
    for block, pending in zip(graph.blocks, graph.before_blocks(0, 0, after, or_), strict=True):
        for index in block:
            for key in graph.code[index].uses:
                read |= pending & written.get(key, 0)
            pending = after(pending, index)
    for index, bit in own.items():
        item = graph.code[index]
        if not read & bit and item.unread is not None:
            item.step = item.unread


# When a tcgen05.ld has ended: at the warp's tcgen05.wait::ld, or where an instruction uses one of its registers. The
# ISA lets a register dependence wait for the load and says that it orders nothing else (PTX ISA 9.7.16.6.4.5). Kernels
# that run on silicon nevertheless take the use of a register for the end of the whole load: FlashAttention-4 uses its
# scores and then lets the next MMA overwrite them, with no tcgen05.wait::ld. So such a use counts here too, and the
# counter `tmem_unwaited_overwrites` shows that a kernel relies on it. A data-flow analysis finds the instructions that
# may be the first use on some path. A kernel that waits explicitly pays nothing.


_TMEM_LOAD, _TMEM_WAIT = "tcgen05.ld.", "tcgen05.wait::ld."


def end_loads_at_use(graph: FlowGraph) -> None:
    """Wrap the steps that may be the first to use a register of a pending tcgen05.ld."""
    lines: list[int] = []
    own: dict[int, int] = {}
    loading: dict[Key, int] = {}
    for index, item in enumerate(graph.code):
        if item.spelt(_TMEM_LOAD):
            own[index] = 1 << len(lines)
            lines.append(item.instruction.line)
            for key in item.defines:
                loading[key] = loading.get(key, 0) | own[index]
    if not lines:
        return
    touched = [_loads_of(item, loading) for item in graph.code]

    def after(pending: int, index: int) -> int:
        item = graph.code[index]
        if item.spelt(_TMEM_WAIT) and item.guard is None:
            return 0
        return pending & ~touched[index] | own.get(index, 0)

    for block, pending in zip(graph.blocks, graph.before_blocks(0, 0, after, or_), strict=True):
        for index in block:
            used = pending & touched[index]
            if used:
                graph.code[index].begin_with(_ending(tuple(line for i, line in enumerate(lines) if used >> i & 1)))
            pending = after(pending, index)


def _loads_of(item: Bound, loading: dict[Key, int]) -> int:
    """Bits of the loads whose registers an instruction uses."""
    found = 0
    for key in (*item.uses, *item.defines):
        found |= loading.get(key, 0)
    return found


def _ending(lines: tuple[int, ...]) -> Callable[[Warp], None]:
    def end(warp: Warp) -> None:
        for line in lines:
            for cells in warp.tmem_loads.get(line, {}).values():
                warp.cta.tmem.load_used(cells, line)

    return end


# Registers of wgmma: which instructions may touch them in flight, and which wgmma may lack its wgmma.fence. A data-flow
# analysis finds the few instructions where a path makes it possible. Only those are checked when they run; a kernel
# that waits and fences explicitly has none.


_MULTIPLY, _FENCE = "wgmma.mma_async", "wgmma.fence"
_COMMIT, _WAIT = "wgmma.commit_group", "wgmma.wait_group"


def _wgmma_keys(uses: Sequence[Key], defines: Sequence[Key]) -> tuple[frozenset[Key], frozenset[Key]]:
    """Accumulator and A registers of a wgmma.mma_async: descriptors and predicates are not 32 bits wide."""
    return frozenset(defines), frozenset(key for key in uses if key[0] == 32)


@dataclass(frozen=True, slots=True)
class _Flow:
    """Sets of registers as bits. `flying`: they may be in flight; `open`: they may also be in no group yet.

    `unfenced`: no wgmma has used them since the entry, nor has there been a wgmma.fence. `late`: another instruction
    has used them since the last wgmma.fence. A register that lacks a fence (Part.touched) is in one of the two.
    """

    flying: int = 0
    open: int = 0
    unfenced: int = 0
    late: int = 0

    def __or__(self, other: _Flow) -> _Flow:
        return _Flow(
            self.flying | other.flying,
            self.open | other.open,
            self.unfenced | other.unfenced,
            self.late | other.late,
        )


class _Analysis:
    """`bits`: one per register of some wgmma; `masks[i]`: the bits that instruction i reads and writes."""

    def __init__(self, graph: FlowGraph) -> None:
        self.graph = graph
        self.bits: dict[Key, int] = {}
        for item in graph.code:
            if item.spelt(_MULTIPLY):
                for key in frozenset[Key]().union(*_wgmma_keys(item.uses, item.defines)):
                    self.bits.setdefault(key, 1 << len(self.bits))
        self.masks = [self._mask(item) for item in graph.code] if self.bits else []

    def _mask(self, item: Bound) -> int:
        found = 0
        for key in (*item.uses, *item.defines):
            found |= self.bits.get(key, 0)
        return found

    def keys(self, mask: int) -> frozenset[Key]:
        """The registers of `mask`."""
        return frozenset(key for key, bit in self.bits.items() if mask & bit)

    def after(self, flow: _Flow, index: int) -> _Flow:
        """The state after instruction `index`."""
        item, mask = self.graph.code[index], self.masks[index]
        if item.spelt(_MULTIPLY):
            return _Flow(flow.flying | mask, flow.open | mask, flow.unfenced & ~mask, flow.late)
        if not item.spelt("wgmma."):
            return replace(flow, late=flow.late | mask) if mask & ~flow.late else flow
        if item.guard is not None:
            return flow
        if item.spelt(_FENCE):
            return replace(flow, unfenced=0, late=0)
        if item.spelt(_WAIT) and _allowed(item.instruction) == 0:
            return replace(flow, flying=flow.open)
        return replace(flow, open=0) if item.spelt(_COMMIT) else flow


def _allowed(instruction: Instruction) -> int:
    """How many groups a wait leaves pending; 1 if that is not a constant."""
    count = instruction.operands[0]
    return count.value if isinstance(count, Immediate) else 1


def check_warpgroup_registers(graph: FlowGraph) -> None:
    """Wrap the steps of instructions whose registers may belong to a wgmma in flight or lack a wgmma.fence."""
    analysis = _Analysis(graph)
    if not analysis.bits:
        return
    entry = _Flow(unfenced=(1 << len(analysis.bits)) - 1)
    unfenced: dict[int, int] = {}
    for block, flow in zip(graph.blocks, graph.before_blocks(entry, _Flow(), analysis.after, or_), strict=True):
        for index in block:
            item, mask = graph.code[index], analysis.masks[index]
            if item.spelt(_MULTIPLY):
                if doubtful := mask & (flow.unfenced | flow.late):
                    unfenced[index] = doubtful
            elif mask & flow.flying:
                item.begin_with(_idle(analysis.keys(mask & flow.flying), item.instruction.text))
            flow = analysis.after(flow, index)
    _watch_fences(analysis, unfenced)


def _watch_fences(analysis: _Analysis, unfenced: dict[int, int]) -> None:
    doubtful = 0
    for mask in unfenced.values():
        doubtful |= mask
    for index, (item, mask) in enumerate(zip(analysis.graph.code, analysis.masks, strict=True)):
        if index in unfenced:
            item.begin_with(_fenced(analysis.keys(unfenced[index])))
        elif mask & doubtful and not item.spelt("wgmma."):
            item.begin_with(_noted(analysis.keys(mask & doubtful)))


def _idle(keys: frozenset[Key], text: str) -> Callable[[Warp], None]:
    def check(warp: Warp) -> None:
        group = warp.cta.warpgroups.get(warp.index // 4)
        if group is not None and (part := group.parts[warp.index % 4]).busy:
            part.check_access(keys, f"`{text}`")

    return check


def _fenced(keys: frozenset[Key]) -> Callable[[Warp], None]:
    return lambda warp: part_of(warp).check_fenced(keys)


def _noted(keys: frozenset[Key]) -> Callable[[Warp], None]:
    def note(warp: Warp) -> None:
        group = warp.cta.warpgroups.get(warp.index // 4)
        if group is not None:
            group.parts[warp.index % 4].touch(keys)

    return note
