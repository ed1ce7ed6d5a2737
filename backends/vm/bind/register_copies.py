"""Registers that may be unwritten: `mov` and packed arithmetic carry the state of each byte instead of judging it.

Compilers pack a register that nothing has written into half of a pair when only the other half is taken out again;
CuTeDSL's attention kernels do, and its packed additions compute with such a pair. So to copy, pack or unpack is no use
of a value, and packed arithmetic keeps its halves apart; whatever else reads the register is a use. The state of a
register in a lane is 16 bits, one for each byte that is written; bytes that it does not have count as written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backends.vm.machine.code import Step
from backends.vm.machine.registers import Key
from backends.vm.ptx.ast import Instruction, Operand, Register, Vector

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp

WRITTEN = np.uint16(0xFFFF)
_ARITHMETIC = ("add", "sub", "mul", "fma", "neg", "abs", "min", "max")


@dataclass(frozen=True, slots=True)
class Piece:
    """`size` bytes from byte `source_byte` of a register (None: of a value that is always there) to `byte`."""

    source: Key | None
    source_byte: int
    size: int
    byte: int


Plan = tuple[tuple[Key, tuple[Piece, ...]], ...]
"""For each register written, the pieces that it is made of."""


def carries(instruction: Instruction) -> bool:
    """Whether the instruction only moves registers about, or computes on the parts of a pair one by one."""
    return instruction.parts[0] == "mov" or _is_packed_arithmetic(instruction)


def carried(step: Step, instruction: Instruction, rows: Mapping[str, Key]) -> Step:
    """Do the step, and give what it writes the state of what it reads. `rows` maps register names to their keys."""
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
