"""A function as a graph of basic blocks of bound instructions, and the forward data-flow that its analyses share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from backends.vm.bind.forms import Form
from backends.vm.machine.code import Step
from backends.vm.machine.registers import Key
from backends.vm.ptx.ast import Instruction

State = TypeVar("State")


@dataclass(slots=True)
class Bound:
    """One instruction with its meaning: the form, the step, the registers that it reads and writes.

    `guard`: row of the predicate, and whether it is negated. `doubtful_guard`: the predicate may be unwritten.
    """

    instruction: Instruction
    form: Form
    step: Step
    uses: tuple[Key, ...]
    defines: tuple[Key, ...]
    guard: tuple[int, bool] | None
    doubtful_guard: bool = False

    @property
    def guard_key(self) -> Key | None:
        """The guard's register as a key."""
        return (1, self.guard[0]) if self.guard else None

    def spelt(self, opcode: str) -> bool:
        """Whether the form begins with `opcode`."""
        return self.form.spelling.startswith(opcode)


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
        """The state before each block: `entry` before the first, `unreached` before those that no path reaches.

        `after(state, index)` is the state after instruction `index`, `join` that where two paths meet.
        """
        before = [unreached] * len(self.blocks)
        before[0] = entry
        work, reached = [0], {0}
        while work:
            block = work.pop()
            state = before[block]
            for index in self.blocks[block]:
                state = after(state, index)
            for target in self.successors[block]:
                joined = join(before[target], state)
                if joined != before[target] or target not in reached:
                    before[target] = joined
                    reached.add(target)
                    work.append(target)
        return before
