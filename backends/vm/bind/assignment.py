"""Which register reads cannot be proven to follow a write: the few that a run must check lane by lane.

A forward data-flow over basic blocks: a register is assigned at a point when every path from the entry writes it
without a guard first. A read that is proven costs nothing at run time. An instruction that carries the state
of a register which may be unwritten assigns nothing, since it only passes on what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Protocol

from backends.vm.machine.registers import Key


class Access(Protocol):
    """What this analysis needs to know of an instruction."""

    @property
    def uses(self) -> tuple[Key, ...]: ...
    @property
    def defines(self) -> tuple[Key, ...]: ...
    @property
    def guard(self) -> tuple[int, bool] | None: ...
    @property
    def carries(self) -> bool: ...


def unproven_reads(
    code: Sequence[Access], leaders: Sequence[int], successors: Sequence[Sequence[int]]
) -> list[tuple[int, tuple[Key, ...]]]:
    """Instruction indices with the registers that they may read unwritten.

    `leaders[b]` is the first instruction of block b, `successors[b]` the blocks that may follow it.
    """
    bits: dict[Key, int] = {}
    for access in code:
        for key in (*access.uses, *access.defines):
            bits.setdefault(key, 1 << len(bits))
    assigning = [access.guard is None for access in code]
    while True:
        found = _unproven(code, leaders, successors, bits, assigning)
        doubtful = [index for index, _ in found if code[index].carries and assigning[index]]
        if not doubtful:
            return found
        for index in doubtful:
            assigning[index] = False


def _unproven(
    code: Sequence[Access],
    leaders: Sequence[int],
    successors: Sequence[Sequence[int]],
    bits: dict[Key, int],
    assigning: Sequence[bool],
) -> list[tuple[int, tuple[Key, ...]]]:
    ends = [*leaders[1:], len(code)]
    everything = (1 << len(bits)) - 1
    written = [
        sum({bits[key] for key in access.defines}) if assigns else 0
        for access, assigns in zip(code, assigning, strict=True)
    ]
    made = [reduce(or_, written[start:end], 0) for start, end in zip(leaders, ends, strict=True)]
    before = _fixed_point(made, successors, everything)
    found: list[tuple[int, tuple[Key, ...]]] = []
    for block, (start, end) in enumerate(zip(leaders, ends, strict=True)):
        assigned = before[block]
        for index in range(start, end):
            missing = tuple(dict.fromkeys(key for key in code[index].uses if not assigned & bits[key]))
            if missing:
                found.append((index, missing))
            assigned |= written[index]
    return found


def _fixed_point(made: list[int], successors: Sequence[Sequence[int]], everything: int) -> list[int]:
    before = [everything] * len(made)
    if before:
        before[0] = 0
    work = [0] if made else []
    reached = {0}
    while work:
        block = work.pop()
        after = before[block] | made[block]
        for target in successors[block]:
            narrowed = before[target] & after
            if narrowed != before[target] or target not in reached:
                before[target] = narrowed
                reached.add(target)
                work.append(target)
    return before
