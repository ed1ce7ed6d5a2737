"""Registers that may be unwritten: where a lane may read one, what the read checks, and what only carries its state on.

A register is assigned at a point when every path from the entry writes it without a guard first. A data-flow proves
most reads so, and those cost nothing at run time. The others are checked lane by lane: the state of a register in a
lane is 16 bits, one for each byte that is written. Bytes that it does not have count as written.

`mov` and packed arithmetic carry the state of each byte instead of judging it. Compilers pack a register that nothing
has written into half of a pair when only the other half is taken out again; CuTeDSL's attention kernels do, and its
packed additions compute with such a pair. So to copy, pack or unpack is no use of a value, and packed arithmetic keeps
its halves apart. Whatever else reads the register is a use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backends.vm.bind.flow import Bound, FlowGraph
from backends.vm.faults import Fault
from backends.vm.machine.code import Key, RegisterRows, Step
from backends.vm.ptx.ast import Instruction, Operand, Register, Vector

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp

WRITTEN = np.uint16(0xFFFF)
_ARITHMETIC = ("add", "sub", "mul", "fma", "neg", "abs", "min", "max")


def check_unwritten(graph: FlowGraph) -> frozenset[Key]:
    """Wrap the steps that may use an unwritten register; the registers whose state must be tracked.

    Guards are left to the caller: `doubtful_guard` tells of those that may be unwritten.
    """
    doubtful = _unproven_reads(graph)
    watched = {key for _, keys in doubtful for key in keys}
    for index, keys in doubtful:
        item = graph.code[index]
        item.doubtful_guard = item.guard_key in keys
        if carries(item.instruction):
            watched.update(item.defines)
        else:
            item.step = checked(item.step, tuple(key for key in keys if key != item.guard_key))
    return frozenset(watched)


def track_writes(code: Sequence[Bound], watched: frozenset[Key], rows: RegisterRows) -> None:
    """Wrap the steps that write one of `watched`, to note in which lanes."""
    for item in code:
        written = tuple(key for key in item.defines if key in watched)
        if written and carries(item.instruction):
            item.step = _carried(item.step, item.instruction, rows.rows)
        elif written:
            item.step = _tracked(item.step, written)


def _unproven_reads(graph: FlowGraph) -> list[tuple[int, tuple[Key, ...]]]:
    """Instruction indices with the registers that they may read unwritten.

    An instruction that carries the state of a register that may be unwritten assigns nothing: it only passes on what it
    finds.
    """
    code = graph.code
    bits: dict[Key, int] = {}
    for item in code:
        for key in (*item.uses, *item.defines):
            bits.setdefault(key, 1 << len(bits))
    assigning = [item.guard is None for item in code]
    while True:
        found = _unproven(graph, bits, assigning)
        passed_on = [index for index, _ in found if assigning[index] and carries(code[index].instruction)]
        if not passed_on:
            return found
        for index in passed_on:
            assigning[index] = False


def _unproven(graph: FlowGraph, bits: dict[Key, int], assigning: Sequence[bool]) -> list[tuple[int, tuple[Key, ...]]]:
    written = [
        sum({bits[key] for key in item.defines}) if assigns else 0
        for item, assigns in zip(graph.code, assigning, strict=True)
    ]

    def after(assigned: int, index: int) -> int:
        return assigned | written[index]

    found: list[tuple[int, tuple[Key, ...]]] = []
    everything = (1 << len(bits)) - 1
    for block, assigned in zip(graph.blocks, graph.before_blocks(0, everything, after, and_), strict=True):
        for index in block:
            missing = tuple(dict.fromkeys(key for key in graph.code[index].uses if not assigned & bits[key]))
            if missing:
                found.append((index, missing))
            assigned |= written[index]
    return found


@dataclass(frozen=True, slots=True)
class Piece:
    """`size` bytes from byte `source_byte` of register `source` to `byte`. None: a value that is always there."""

    source: Key | None
    source_byte: int
    size: int
    byte: int


Plan = tuple[tuple[Key, tuple[Piece, ...]], ...]
"""The pieces of each register written."""


def carries(instruction: Instruction) -> bool:
    """Whether the instruction only moves registers about, or computes on the parts of a pair one by one."""
    return instruction.parts[0] == "mov" or _is_packed_arithmetic(instruction)


def _carried(step: Step, instruction: Instruction, rows: Mapping[str, Key]) -> Step:
    """Do the step and give its destinations the state of its sources. `rows` maps register names to their keys."""
    if _is_packed_arithmetic(instruction):
        return _carried_by_parts(step, [_key_of(operand, rows) for operand in instruction.operands])
    return _carried_by_copy(step, _copy_plan(instruction, rows))


def _is_packed_arithmetic(instruction: Instruction) -> bool:
    return instruction.parts[0] in _ARITHMETIC and instruction.parts[-1] in ("f32x2", "f16x2", "bf16x2")


def _key_of(operand: Operand, rows: Mapping[str, Key]) -> Key | None:
    return rows.get(operand.name) if isinstance(operand, Register) else None


def _copy_plan(instruction: Instruction, rows: Mapping[str, Key]) -> Plan:
    written, read = instruction.operands

    def key_of(operand: Operand) -> Key | None:
        return _key_of(operand, rows)

    size = _bytes_of(instruction)
    if isinstance(written, Vector):
        size //= len(written.items)
        halves = [(key_of(item), (Piece(key_of(read), i * size, size, 0),)) for i, item in enumerate(written.items)]
        return tuple((key, pieces) for key, pieces in halves if key is not None)
    key = key_of(written)
    if key is None:
        return ()
    if isinstance(read, Vector):
        size //= len(read.items)
        return ((key, tuple(Piece(key_of(item), 0, size, i * size) for i, item in enumerate(read.items))),)
    return ((key, (Piece(key_of(read), 0, size, 0),)),)


def _carried_by_parts(step: Step, keys: Sequence[Key | None]) -> Step:
    destination, sources = keys[0], [key for key in keys[1:] if key is not None]

    def run(warp: Warp) -> object:
        states = [warp.written[key] for key in sources if key in warp.written]
        state = reduce(and_, states, np.full(warp.mask.shape, WRITTEN))
        outcome = step(warp)
        if destination in warp.written:
            np.copyto(warp.written[destination], state, where=warp.mask)
        return outcome

    return run


def _carried_by_copy(step: Step, plan: Plan) -> Step:
    def run(warp: Warp) -> object:
        states = [(key, _state(warp, pieces)) for key, pieces in plan if key in warp.written]
        outcome = step(warp)
        for key, state in states:
            np.copyto(warp.written[key], state, where=warp.mask)
        return outcome

    return run


def _state(warp: Warp, pieces: tuple[Piece, ...]) -> npt.NDArray[np.uint16]:
    everything = (1 << sum(piece.size for piece in pieces)) - 1
    state = np.full(warp.mask.shape, ~everything & 0xFFFF, np.uint16)
    for piece in pieces:
        mine = (1 << piece.size) - 1
        known = warp.written.get(piece.source) if piece.source is not None else None
        state |= np.uint16(mine << piece.byte) if known is None else ((known >> piece.source_byte) & mine) << piece.byte
    return state


def _bytes_of(instruction: Instruction) -> int:
    kind = instruction.parts[-1]
    return 1 if kind == "pred" else int(kind.lstrip("bfuse")) // 8


def _tracked(step: Step, keys: tuple[Key, ...]) -> Step:
    """Note which lanes have written registers whose reads must be checked."""

    def run(warp: Warp) -> object:
        outcome = step(warp)
        for key in keys:
            np.copyto(warp.written[key], WRITTEN, where=warp.mask)
        return outcome

    return run


def checked(step: Step, keys: tuple[Key, ...]) -> Step:
    """Fault when an active lane reads one of `keys` without having written it."""
    if not keys:
        return step

    def run(warp: Warp) -> object:
        for key in keys:
            missing = warp.mask & (warp.written[key] != WRITTEN)
            if np.count_nonzero(missing):
                name = _name_of(key, warp)
                raise Fault("uninitialised-register", f"`{name}` is read but was never written in this lane",
                            lane=int(np.flatnonzero(missing)[0]))  # fmt: skip
        return step(warp)

    return run


def _name_of(key: Key, warp: Warp) -> str:
    for name, row in warp.code.rows.rows.items():
        if row == key:
            return name
    return str(key)
