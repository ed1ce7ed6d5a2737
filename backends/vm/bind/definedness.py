"""What an instruction makes of undefined operands, and which registers a lane may read before it has written them.

A register is assigned at a point if every path from the entry has written it by then without a guard. A data-flow
analysis proves this for most reads. The other registers begin undefined in every lane (machine.undefined), and their
bits travel from there:

- An instruction that only computes makes its results undefined in the lanes where an operand is. A family of
  backends.vm.isa may say it more exactly, by `carries` or through its Binder.
- Loads, stores, shuffles and matrix multiplications carry the bits along; the family says how.
- Everything else depends on its operands: an undefined one is a fault. So is an undefined address, guard of a branch,
  or guard of an instruction that does more than compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING

from backends.vm.bind.flow import Bound, FlowGraph
from backends.vm.machine.code import LANES, WIDTH_OF_VIEW, Flow, Key, RegisterRows, Step
from backends.vm.machine.undefined import Bits, all_bits, lanes_of, no_bits, spread
from backends.vm.memory.definedness import Mask, Origin
from backends.vm.numpy_calls import count_nonzero
from backends.vm.ptx.ast import Negated

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp


def unwritten_registers(graph: FlowGraph, rows: RegisterRows) -> dict[Key, Origin]:
    """The registers that some path from the entry may read before writing them."""
    names = {key: name for name, key in rows.rows.items()}
    return {
        key: Origin("uninitialised-register", f"`{names[key]}`, which was never written in this lane")
        for key in sorted(_unproven_reads(graph))
    }


def _unproven_reads(graph: FlowGraph) -> set[Key]:
    bits: dict[Key, int] = {}
    # By block: the registers it surely writes, and those it reads before that.
    written, read = list[int](), list[int]()
    for block in graph.blocks:
        assigned = asked = 0
        for index in block:
            item = graph.code[index]
            for key in item.uses:
                asked |= bits.setdefault(key, 1 << len(bits)) & ~assigned
            if item.guard is None:
                for key in item.defines:
                    assigned |= bits.setdefault(key, 1 << len(bits))
        written.append(assigned)
        read.append(asked)
    everything = (1 << len(bits)) - 1
    before = graph.before(0, everything, lambda assigned, block: assigned | written[block], and_)
    found = reduce(or_, [asked & ~assigned for asked, assigned in zip(read, before, strict=True)], 0)
    return {key for key, bit in bits.items() if found & bit}


# How the undefined bits of the operands become those of the results.


PURE = frozenset({"alu", "float", "special", "convert", "move"})
"""Counters of the instructions that only compute: nothing but their results depends on their operands."""


def flow_of(items: Sequence[Bound]) -> list[Flow]:
    """What each instruction reads and writes."""
    return [Flow(item.uses, item.defines, item.form.counter in PURE) for item in items]


_PACKED = {"f32x2": 4, "f16x2": 2, "bf16x2": 2, "u16x2": 2, "s16x2": 2}
_BY_PARTS = ("add", "sub", "mul", "fma", "neg", "abs", "min", "max", "ex2", "tanh")
_UNSIGNED = {1: "pred", 16: "u16", 32: "u32", 64: "u64", 128: "u64x2"}


@dataclass(slots=True)
class Computing:
    """An instruction about to run on a warp with an undefined operand, as a rule sees it."""

    warp: Warp
    item: Bound
    step: Step

    @property
    def parts(self) -> tuple[str, ...]:
        """The dotted parts of the opcode."""
        return self.item.instruction.parts

    def bits(self, source: int) -> Bits:
        """The undefined bits of source number `source`, in the shape of its view."""
        return self.warp.undefined.shown(*self.item.reads[source])

    def values(self, source: int) -> Bits:
        """The value of source number `source` as unsigned integers. A negated predicate is returned negated."""
        view, row = self.item.reads[source]
        values: Bits = getattr(self.warp, view)[row]
        if view == "pred":
            return ~values if isinstance(self.item.instruction.operands[source + 1], Negated) else values
        return values.view(self.bits(source).dtype)

    def same(self, *sources: int) -> bool:
        """Whether the sources are one register, read as one value."""
        operands = self.item.instruction.operands
        return len({(*self.item.reads[i], isinstance(operands[i + 1], Negated)) for i in sources}) == 1

    def defined(self, source: int) -> bool:
        """Whether a source is defined in all active lanes."""
        return not count_nonzero(lanes_of(self.bits(source)) & self.warp.mask)


Rule = Callable[[Computing], Sequence[Bits] | None]
"""Returns the undefined bits of each result, in the order of the family's binding. None: use `any_operand`."""
Watches = Callable[[Bound], bool]
"""Whether the rule of an instruction looks at values of registers."""
_RULES: dict[str, tuple[Rule, Watches]] = {}


def carries(*opcodes: str, sources: tuple[int, ...], watches: Watches = lambda item: True) -> Callable[[Rule], Rule]:
    """Register the rule for instructions that begin with one of `opcodes` and only compute.

    `sources`: the numbers of sources that the rule handles. `any_operand` handles a spelling with another number.
    If it `watches` nothing, it knows the results by the undefined bits and the literals of an instruction.
    """

    def register(rule: Rule) -> Rule:
        def counted(seen: Computing) -> Sequence[Bits] | None:
            return rule(seen) if len(seen.item.reads) in sources else None

        _RULES.update(dict.fromkeys(opcodes, (counted, watches)))
        return rule

    return register


def any_operand(seen: Computing) -> Sequence[Bits]:
    """A lane with an undefined operand has undefined results; packed arithmetic decides by element."""
    item, undefined = seen.item, seen.warp.undefined
    size = _PACKED.get(seen.parts[-1]) if seen.parts[0] in _BY_PARTS else None
    if size is not None and all(key[0] == item.defines[0][0] for key in item.uses if key[0] > 1):
        lost = reduce(or_, [undefined.bits(key).view(f"u{size}") != 0 for key in item.uses if key[0] > 1])
        whole = spread(lost, 8 * size)
        return [whole.view(no_bits(key[0]).dtype) for key in item.defines]
    found = [undefined[key].bits for key in item.uses if key in undefined]
    lanes = lanes_of(found[0])
    for bits in found[1:]:
        lanes = lanes | lanes_of(bits)
    return [all_bits(key[0], lanes) for key in item.defines]


def moved(seen: Computing, *controls: int) -> Sequence[Bits] | None:
    """Move the bits as the values move: run the instruction itself on them, with the sources `controls` unchanged.

    Returns None if a control is undefined, or shares a register with what is moved.
    """
    warp, item = seen.warp, seen.item
    reads = [(WIDTH_OF_VIEW[view], row) for view, row in item.reads]
    steering = {reads[i] for i in controls}
    moving = {key for i, key in enumerate(reads) if i not in controls}
    if steering & moving or not all(seen.defined(i) for i in controls):
        return None
    kept: dict[Key, Bits] = {}
    rows = {key: getattr(warp, _UNSIGNED[key[0]])[key[1]] for key in moving | set(item.defines)}
    for key, row in rows.items():
        kept[key] = row.copy()
        if key in moving:
            row[...] = warp.undefined.bits(key)
    seen.step(warp)
    found = [rows[key].copy() for key in item.defines]
    for key, row in rows.items():
        row[...] = kept[key]
    return found


# The carrier of an instruction.


MAX_KNOWN = 16
"""Results that a carrier remembers: a kernel's undefined bits take few forms, such as the padding rows of a tile."""


class InstructionCarrier:
    """See machine.undefined.Carrier."""

    __slots__ = ("_computed_from", "_deciding", "_item", "_known", "_rule", "by_bits", "computes", "touches")

    def __init__(self, item: Bound) -> None:
        self._item = item
        travels = item.carry.travels if item.carry is not None else frozenset[Key]()
        self._computed_from = [key for key in item.uses if key != item.guard_key]
        self._deciding = [key for key in self._computed_from if key in item.addresses or key not in travels]
        self._rule, watches = _RULES.get(item.instruction.parts[0], (any_operand, lambda item: False))
        self.computes = item.form.counter in PURE
        self.by_bits = self.computes and item.guard is None and not watches(item)
        self._known: dict[tuple[bytes, ...], Sequence[Bits]] = {}
        self.touches = frozenset((*item.uses, *item.defines))

    def mark(self, warp: Warp, step: Step) -> None:
        """Mark the results of an instruction that is `by_bits`, in all lanes, before or after it has run."""
        item, undefined = self._item, warp.undefined
        asked = tuple([undefined[key].bits.tobytes() if key in undefined else b"" for key in self._computed_from])
        if not any(asked):
            for key in item.defines:
                undefined.pop(key, None)
            return
        results = self._known.get(asked)
        if results is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            results = self._known[asked] = self._results(Computing(warp, item, step))
        origin = undefined.origin(self._computed_from, item.instruction.line)
        for key, bits in zip(item.defines, results, strict=True):
            undefined.put(key, bits, warp.mask, origin)

    def _results(self, seen: Computing) -> Sequence[Bits]:
        found = self._rule(seen)
        return any_operand(seen) if found is None else found

    def carry(self, warp: Warp, step: Step) -> object:
        """Run the instruction in the active lanes whose guard holds."""
        item = self._item
        if item.guard is None:
            return self._run(warp, step, warp.mask)
        doubt = warp.undefined.get((1, item.guard[0]))
        doubtful = None if doubt is None else doubt.bits & warp.mask
        if doubt is not None and doubtful is not None and count_nonzero(doubtful):
            if not self.computes or item.form.kind == "tail":
                what = "where this branch goes" if item.form.control else "whether this instruction is executed"
                warp.undefined.decide(warp, (1, item.guard[0]), what, item.instruction.line)
            outcome = self._run_guarded(warp, step)
            for key in item.defines:
                origin = doubt.origin.read_at(item.instruction.line)
                warp.undefined.put(key, all_bits(key[0], doubtful), doubtful, origin)
            return outcome
        return self._run_guarded(warp, step)

    def _run_guarded(self, warp: Warp, step: Step) -> object:
        assert self._item.guard is not None
        row, negated = self._item.guard
        lanes = warp.mask & (~warp.pred[row] if negated else warp.pred[row])
        if not count_nonzero(lanes):
            return step(warp)
        if self._item.form.kind == "tail":
            return self._run(warp, step, lanes)
        return warp.in_lanes(lanes, self._run, step, lanes)

    def _run(self, warp: Warp, step: Step, lanes: Mask) -> object:
        if self.by_bits and warp.where is True:
            self.mark(warp, step)
            return step(warp)
        if self.computes:
            return self._compute(warp, step, lanes)
        item, undefined = self._item, warp.undefined
        for key in self._deciding:
            if key in undefined:
                address = key in item.addresses
                what = "the address of this access" if address else f"what this {item.instruction.opcode} does"
                undefined.decide(warp, key, what, item.instruction.line, lanes)
        if item.carry is not None:
            return item.carry.around(warp, step)
        outcome = step(warp)
        for key in item.defines:
            undefined.clear_lanes(key, lanes)
        return outcome

    def _compute(self, warp: Warp, step: Step, lanes: Mask) -> object:
        item, undefined = self._item, warp.undefined
        known = [key for key in self._computed_from if key in undefined]
        if len(known) > 1 and count_nonzero(lanes) < LANES:
            here = [key for key in known if count_nonzero(lanes_of(undefined.bits(key)) & lanes)]
            known = here or known
        if not known:
            outcome = step(warp)
            for key in item.defines:
                undefined.clear_lanes(key, lanes)
            return outcome
        origin, seen = undefined.origin(known, item.instruction.line), Computing(warp, item, step)
        results = self._results(seen)
        outcome = step(warp)
        for key, bits in zip(item.defines, results, strict=True):
            undefined.put(key, bits, lanes, origin)
        return outcome
