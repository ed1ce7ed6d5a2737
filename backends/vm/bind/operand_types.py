"""Whether the declared type of a register fits the type of an instruction (PTX ISA 9.2, 9.4.1).

An integer register takes integer and bit types, a floating-point register floating-point and bit types, and a .bX
register takes every type. Checked are registers and instructions of one integer or floating-point type: packed types,
bf16 and instructions that mix types in other ways than cvt are left to the widths. So are vectors, which ptxas 13.5
does not check either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from backends.vm.ptx.ast import Address, Instruction, Operand, Register

_INTEGERS: Final = frozenset(f"{sign}{width}" for sign in "us" for width in (8, 16, 32, 64))
_FLOATS: Final = frozenset({"f16", "f32", "f64"})
_ALL_OPERANDS: Final = frozenset(
    {
        "abs", "add", "copysign", "cos", "div", "ex2", "fma", "lg2", "mad", "max", "min", "mov", "mul", "neg", "rcp",
        "rem", "rsqrt", "sad", "selp", "setp", "sin", "sqrt", "sub", "tanh",
    }
)  # fmt: skip
"""First words of the instructions whose operands all have the type, but for predicates."""
_DATA: Final = {"ld": 0, "ldu": 0, "st": 1}
"""Of instructions with one operand that has the type: which one it is."""


def mistyped(instruction: Instruction, types: Mapping[str, str]) -> str | None:
    """The reason why a register does not fit, or None. `types`: the declared type of each register."""
    for operand, kind in _typed(instruction):
        wrong = _FLOATS if kind in _INTEGERS else _INTEGERS
        if isinstance(operand, Register) and (declared := types.get(operand.name)) in wrong:
            bits = kind.lstrip("usf")
            fitting = f".b{bits}, .u{bits} or .s{bits}" if kind in _INTEGERS else f".b{bits} or .f{bits}"
            return f"`{operand.name}` is a register of type .{declared}, where .{kind} takes one of type {fitting}"
    for operand in instruction.operands:
        if isinstance(operand, Address) and isinstance(operand.base, Register):
            declared = types.get(operand.base.name)
            if declared in _FLOATS:
                return f"`{operand.base.name}` is a register of type .{declared}, which holds no address"
    return None


def _typed(instruction: Instruction) -> Iterator[tuple[Operand, str]]:
    """The operands whose type is known, with it."""
    parts, operands = instruction.parts, instruction.operands
    named = [part for part in parts[1:] if _is_type(part)]
    simple = [part for part in named if part in _INTEGERS or part in _FLOATS]
    if simple != named:
        return
    if parts[0] == "cvt" and len(named) == len(operands) == 2:
        yield from zip(operands, named, strict=True)
    elif len(named) == 1 and parts[0] in _ALL_OPERANDS:
        yield from ((one, named[0]) for one in operands)
    elif len(named) == 1 and parts[0] in _DATA and len(operands) > _DATA[parts[0]]:
        yield operands[_DATA[parts[0]]], named[0]


def _is_type(part: str) -> bool:
    """Whether a word of an opcode names a type, packed ones included."""
    return part.lstrip("befmstu")[:1].isdigit() and not part[0].isdigit() and "::" not in part
