"""Whether the type of a register fits the type of an instruction (PTX ISA 9.2, 9.4.1, 10), and the state space of a
variable that of an address (PTX ISA 6.4.1).

An integer register takes integer and bit types, a floating-point register floating-point and bit types, and a .bX
register takes every type. Checked are registers and instructions of one integer or floating-point type: packed types,
bf16 and instructions that mix types in other ways than cvt are left to the widths. So are vectors, which ptxas 13.5
does not check either.

Special registers are read by mov and by cvt between integers alone, as ptxas 13.5 has it; it does not look at those in
an address or a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from backends.vm.bind.forms import is_type
from backends.vm.ptx.ast import Address, Instruction, Negated, Operand, Register, Symbol, Vector
from backends.vm.ptx.functions import is_special

_INTEGERS: Final = frozenset(f"{sign}{width}" for sign in "us" for width in (8, 16, 32, 64))
_BYTES: Final = frozenset({"u8", "s8"})
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
    for operand in instruction.operands:
        inner = operand.operand if isinstance(operand, Negated) else operand
        if not isinstance(inner, Register) or inner.name in types or not is_special(inner.name):
            continue
        if not _reads_special(instruction):
            return (
                f"`{inner.name}` is a special register; only mov and cvt between integers read those (PTX ISA 10), so "
                "move it to a register first"
            )
    if instruction.parts[0] == "cvt" and "bf16" in instruction.parts:
        for operand, kind in zip(instruction.operands, instruction.parts[-2:], strict=False):
            if kind in _BYTES and isinstance(operand, Register) and types.get(operand.name) not in {*_BYTES, "b8"}:
                return f"from or to bf16, .{kind} takes a register of 8 bits, and `{operand.name}` has more"
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


def _reads_special(instruction: Instruction) -> bool:
    first, *words = instruction.parts
    named = {word for word in words if is_type(word)}
    return (first == "mov" and not named & _FLOATS) or (first == "cvt" and named <= _INTEGERS)


def _typed(instruction: Instruction) -> Iterator[tuple[Operand, str]]:
    """The operands whose type is known, with it."""
    parts, operands = instruction.parts, instruction.operands
    named = [part for part in parts[1:] if is_type(part)]
    simple = [part for part in named if part in _INTEGERS or part in _FLOATS]
    if simple != named:
        return
    if parts[0] == "cvt" and len(named) == len(operands) == 2:
        yield from zip(operands, named, strict=True)
    elif len(named) == 1 and parts[0] in _ALL_OPERANDS:
        yield from ((one, named[0]) for one in operands)
    elif len(named) == 1 and parts[0] in _DATA and len(operands) > _DATA[parts[0]]:
        yield operands[_DATA[parts[0]]], named[0]


_SPACES: Final = frozenset({"global", "shared", "const", "local", "param"})
_TAKE_SYMBOLS: Final = frozenset({"cvta", "mapa", "getctarank"})
"""Instructions that name a variable without brackets, in the space that they name."""
_READ_SYMBOLS: Final = frozenset({"mov", "isspacep", *_TAKE_SYMBOLS})
"""All that name a variable without brackets, but for those that go to a label."""
_UNORDERED: Final[Mapping[str, frozenset[str]]] = {
    "local": frozenset({"relaxed", "acquire", "release"}),
    "const": frozenset({"volatile", "relaxed", "acquire", "release"}),
    "param": frozenset({"volatile", "relaxed", "acquire", "release"}),
}
"""The orders that loads and stores of a state space do not have, since no other thread stores there."""
_NO_CODE: Final[Mapping[str, frozenset[str]]] = {
    "atom": frozenset({"local"}),
    "prefetch": frozenset({"shared"}),
    "prefetchu": frozenset({"shared", "local"}),
    "applypriority": frozenset({"shared"}),
    "discard": frozenset({"shared"}),
}
"""Spaces whose variables ptxas 13.5 does not take in place of a generic address: but for prefetchu it ends in an error
of its own, and there is no code to run. It takes them in red."""


def misplaced(instruction: Instruction, symbols: Mapping[str, str]) -> str | None:
    """The reason why an instruction cannot do this in a state space or with a variable, or None. `symbols`: the state
    space of each variable.
    """
    parts = instruction.parts
    spaces = [space for part in parts if (space := part.partition("::")[0]) in _SPACES]
    if parts[0] in ("ld", "st") and spaces:
        for word in sorted(_UNORDERED.get(spaces[0], frozenset()).intersection(parts)):
            return f"there is no .{word} in .{spaces[0]}, where no other thread stores (PTX ISA 9.7.9.8, 9.7.9.11)"
    if parts[0] == "st" and spaces == ["param"]:
        for one in instruction.operands[:1]:
            if isinstance(one, Address) and isinstance(one.base, Symbol) and symbols.get(one.base.name) == "param":
                return f"`{one.base.name}` is a parameter of the kernel, which cannot be written (PTX ISA 5.1.6)"
    return _as_a_value(instruction, symbols) or _in_another_space(instruction, symbols)


def _as_a_value(instruction: Instruction, symbols: Mapping[str, str]) -> str | None:
    """The reason why a variable's name without brackets is no operand here, or None."""
    parts = instruction.parts
    reads, floats = parts[0] in _READ_SYMBOLS, not _FLOATS.isdisjoint(parts)
    for operand in instruction.operands:
        for one in operand.items if isinstance(operand, Vector) else [operand]:
            if not isinstance(one, Symbol) or (there := symbols.get(one.name, "code")) == "code":
                continue
            # ptxas takes a sum, such as `g+4`, in the place of any integer.
            if one is not operand or floats or not (reads or one.offset):
                return f"`{one.name}` is a variable; its address is no operand here, so move it to a register first"
            if parts[0] == "mov" and there == "global" and not one.offset and parts[-1] in ("u32", "s32", "b32"):
                return f"`{one.name}` is a variable in .global, where an address has 64 bits"
            if parts[0] == "isspacep" and there in ("const", "param") and parts[1] not in ("const", "param"):
                return f"`{one.name}` is a variable in .{there}, which has no generic address here; use cvta"
    return None


def _in_another_space(instruction: Instruction, symbols: Mapping[str, str]) -> str | None:
    """The reason why a variable does not lie where the instruction looks for it, or None; see `misplaced`."""
    if instruction.parts[:2] == ("cvta", "to") or instruction.parts[0] == "isspacep":
        for one in instruction.operands:
            # ptxas takes a sum, such as `g+4`.
            if isinstance(one, Symbol) and not one.offset and one.name in symbols:
                return f"`{one.name}` is a variable, where this takes a generic address in a register"
    named = [space for part in instruction.parts if (space := part.partition("::")[0]) in _SPACES]
    if not named and instruction.parts[0] == "mbarrier":
        named = ["shared"]
    if not named:
        return _without_generic_address(instruction, symbols)
    bare = instruction.parts[0] in _TAKE_SYMBOLS
    places = [one.base if isinstance(one, Address) else one for one in instruction.operands
              if isinstance(one, Address) or (bare and isinstance(one, Symbol))]  # fmt: skip
    # Behind the destination and the source of a copy comes its mbarrier.
    last = named[0] if len(named) == 1 else "shared"
    for at, place in enumerate(places):
        space = named[at] if at < len(named) else last
        there = symbols.get(place.name, space) if isinstance(place, Symbol) else space
        # What a call passes is local here; its loads and stores say so.
        passed = (there, space) == ("local", "param") and instruction.parts[0] not in ("ld", "st")
        if isinstance(place, Symbol) and there != space and not passed:
            return (
                f"`{place.name}` is a variable in .{there}, where this operand is an address in .{space}; name its "
                "state space, or use a generic address"
            )
    return None


def _without_generic_address(instruction: Instruction, symbols: Mapping[str, str]) -> str | None:
    """The reason why an instruction without a state space, which takes generic addresses, does not take a variable.

    As in ptxas 13.5, it takes the names of those in .global, .shared and .local: their addresses become generic. A
    tensor map fence takes all, mapa and getctarank those in .shared. _NO_CODE has the exceptions.
    """
    first = instruction.parts[0]
    untaken = frozenset[str]() if "tensormap" in instruction.parts else _NO_CODE.get(first, frozenset())
    for one in () if first == "fence" else instruction.operands:
        place = one.base if isinstance(one, Address) else one if first in _TAKE_SYMBOLS else None
        there = symbols.get(place.name, "shared") if isinstance(place, Symbol) else "shared"
        if isinstance(place, Symbol) and (there in ("const", "param") or (place is one and there != "shared")):
            return (
                f"`{place.name}` is a variable in .{there}, which has no generic address here; name its state space, "
                "or take its address with cvta"
            )
        if isinstance(place, Symbol) and there in untaken:
            return f"`{place.name}` is a variable in .{there}, of which {first} takes no address"
    return None
