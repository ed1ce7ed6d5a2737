"""Literals and constant expressions (PTX ISA 4.5): 64-bit integers, signed unless marked unsigned, and floats."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from backends.vm.ptx.ast import Immediate

_WORD = 1 << 64
_DIGITS = 70


class Unsigned(int):
    """An integer constant of type `.u64`: it has a `U` suffix or does not fit `.s64` (PTX ISA 4.5.1)."""


Constant = int | Immediate
"""An integer, or the bit pattern of a float."""


class ConstantError(ValueError):
    """A constant without a value. The message ends a sentence that begins with the constant's place."""


def integer(text: str) -> int:
    """The value of `12`, `0x1F`, `017`, `0b101` or any of them with `U`; ConstantError beyond 64 bits."""
    digits = text.removesuffix("U")
    base = 10
    if digits[0] == "0" and len(digits) > 1:
        base = {"x": 16, "b": 2}.get(digits[1].lower(), 8)
    if len(digits) > _DIGITS:
        raise ConstantError(f"the integer {digits[:20]}... has {len(digits)} digits; it must fit 64 bits")
    try:
        value = int(digits, base)
    except ValueError:
        raise ConstantError(f"{text} is not an integer of base {base}") from None
    if value >= _WORD:
        raise ConstantError(f"the integer {text} does not fit 64 bits")
    return Unsigned(value) if text.endswith("U") or value >= _WORD >> 1 else value


def real(text: str) -> Immediate:
    """`0fXXXXXXXX` and `0dXXXXXXXXXXXXXXXX` as bit patterns; `1.5` and `1e-3` as the bits of a double."""
    prefix = text[:2].lower()
    if prefix == "0f":
        return Immediate(int(text[2:], 16), "f32")
    if prefix == "0d":
        return Immediate(int(text[2:], 16), "f64")
    return Immediate(int.from_bytes(struct.pack(">d", float(text))), "f64")


def unary(operator: str, value: Constant) -> Constant:
    """`-x`, `+x`, `~x`, `!x`; a float takes only a sign."""
    if isinstance(value, Immediate):
        if operator not in "+-":
            raise ConstantError(f"the operator {operator} does not take a floating-point constant")
        if value.kind == "f32":
            raise ConstantError(f"a 0f literal takes no sign; set its top bit instead of writing {operator}")
        return Immediate(value.value ^ 1 << 63, value.kind) if operator == "-" else value
    if operator == "!":
        return int(value == 0)
    if operator == "+":
        return value
    if operator == "-" and value == _WORD >> 1:
        return -(_WORD >> 1)
    return _wrap(-value if operator == "-" else ~value, isinstance(value, Unsigned))


def _wrap(value: int, unsigned: bool) -> int:
    value &= _WORD - 1
    if unsigned:
        return Unsigned(value)
    return value - _WORD if value >> 63 else value


def _quotient(a: int, b: int) -> int:
    if b == 0:
        raise ConstantError("a constant is divided by zero")
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _shift_count(count: int) -> int:
    if not 0 <= count < 64:
        raise ConstantError(f"a constant is shifted by {count}; a shift is 0 to 63")
    return count


_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"*": lambda a, b: a * b, "/": _quotient, "%": lambda a, b: a - _quotient(a, b) * b},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {"<<": lambda a, b: a << _shift_count(b), ">>": lambda a, b: a >> _shift_count(b)},
    {"<": lambda a, b: a < b, ">": lambda a, b: a > b, "<=": lambda a, b: a <= b, ">=": lambda a, b: a >= b},
    {"==": lambda a, b: a == b, "!=": lambda a, b: a != b},
    {"&": lambda a, b: a & b},
    {"^": lambda a, b: a ^ b},
    {"|": lambda a, b: a | b},
    {"&&": lambda a, b: bool(a) and bool(b)},
    {"||": lambda a, b: bool(a) or bool(b)},
)
_LOGICAL = frozenset(["<", ">", "<=", ">=", "==", "!=", "&&", "||"])


def fold(terms: Sequence[str | Constant]) -> Constant:
    """The value of `a op b op c ...` with C's precedence, in wrapping 64-bit arithmetic (PTX ISA 4.5.4, 4.5.5)."""
    if len(terms) == 1:
        return _value(terms[0])
    values = [_integer_only(term) for term in terms[0::2]]
    operators = [str(term) for term in terms[1::2]]
    for level in _LEVELS:
        kept_values, kept_operators = [values[0]], []
        for operator, right in zip(operators, values[1:], strict=True):
            if operator in level:
                kept_values[-1] = _apply(operator, level[operator], kept_values[-1], right)
            else:
                kept_values.append(right)
                kept_operators.append(operator)
        values, operators = kept_values, kept_operators
    return values[0]


def _apply(operator: str, function: Callable[[int, int], int], left: int, right: int) -> int:
    if operator in _LOGICAL:
        return int(function(left, right))
    shift = operator in ("<<", ">>")
    unsigned = isinstance(left, Unsigned) or (isinstance(right, Unsigned) and not shift)
    if unsigned:
        left, right = left & (_WORD - 1), right & (_WORD - 1)
    return _wrap(function(left, right), unsigned)


def _value(term: str | Constant) -> Constant:
    if isinstance(term, str):
        raise ConstantError(f"{term} stands where a constant should")
    return term


def _integer_only(term: str | Constant) -> int:
    value = _value(term)
    if isinstance(value, Immediate):
        raise ConstantError("floating-point constants cannot be combined by an operator here; write the value itself")
    return value


def is_true(condition: Constant) -> bool:
    """Whether the condition of `a ? b : c` holds; it must be an integer."""
    return _integer_only(condition) != 0
