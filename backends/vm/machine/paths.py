"""What can be read off the blocks that a warp runs over and over: what decides there, and whether it only waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from backends.vm.ptx.ast import Register, Symbol

if TYPE_CHECKING:
    from backends.vm.machine.code import Block, Code, Key

CLOCKS: Final = ("%clock", "%globaltimer")


class Deciding(NamedTuple):
    """The registers that decide in some blocks: those with values from a clock of these blocks, and the others."""

    clocked: frozenset[Key]
    others: frozenset[Key]

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Deciding:
        """See Code.deciding."""
        flows = [flow for block in blocks for flow in block.find_flow()]
        texts = [one.text for block in blocks for one in block.instructions]
        clocks = [flow for flow, text in zip(flows, texts, strict=True) if any(one in text for one in CLOCKS)]
        clocked = _closed({key for flow in clocks for key in flow.defines}, [(one.uses, one.defines) for one in flows])
        # Backwards, because results are mostly used below.
        backwards = [(one.defines, one.uses) for one in reversed(flows) if one.computes]
        found = _closed({key for one in flows if not one.computes for key in one.uses}, backwards)
        deciding = {key for one in flows for key in one.defines if key in found}
        return cls(frozenset(deciding & clocked), frozenset(deciding - clocked))


def _closed(begin: set[Key], edges: Sequence[tuple[Sequence[Key], Sequence[Key]]]) -> set[Key]:
    """`begin`, and what any number of `edges` (from, to) leads to from there."""
    found, before = set(begin), -1
    left: list[tuple[Sequence[Key], Sequence[Key]]] = list(edges)
    while len(left) != before:
        before, searched, left = len(left), left, []
        for edge in searched:
            if found.isdisjoint(edge[0]):
                left.append(edge)
            else:
                found.update(edge[1])
    return found


def idle_waits(code: Code) -> frozenset[int]:
    """See Code.idle_waits."""
    begins = [0, *accumulate(len(block.instructions) for block in code.blocks)]
    block_at = {begin: number for number, begin in reversed([*enumerate(begins)])}
    return frozenset(number for number in range(len(code.blocks)) if _comes_back(code, number, block_at))


def _comes_back(code: Code, wait: int, block_at: Mapping[int, int]) -> bool:
    """Whether a block is a wait, and a warp all of whose lanes get false returns to it over nothing but branches."""
    asked = code.blocks[wait].instructions
    if len(asked) != 1 or asked[0].guard is not None or asked[0].parts[:2] != ("mbarrier", "try_wait"):
        return False
    answer, at = asked[0].operands[0], wait + 1
    for _ in code.blocks:
        jump = code.blocks[at].instructions if at < len(code.blocks) else []
        if len(jump) != 1 or jump[0].parts[0] != "bra" or not jump[0].operands:
            return False
        guard, label = jump[0].guard, jump[0].operands[0]
        decided = guard is None or (isinstance(answer, Register) and guard.register == answer.name)
        if not decided or not isinstance(label, Symbol):
            return False
        taken = guard is None or guard.negated
        at = block_at.get(code.function.labels.get(label.name, -1), -1) if taken else at + 1
        if at == wait:
            return True
    return False
