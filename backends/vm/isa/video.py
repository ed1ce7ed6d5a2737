"""Video instructions: bytes, halves and words of 32-bit registers, selected, combined and merged (PTX ISA 9.7.18).

They are rare, so this computes lane by lane in Python integers, like the ISA's pseudo-code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.machine.warp import Warp
from backends.vm.ptx.ast import Operand, Register

_TYPES = "u32 s32"
_SECOND = "add min max"
_COMPARISONS = "eq ne lt le gt ge"
_WORD = (1 << 32) - 1
_RESULT = 34
"""Bits of the signed result before it is saturated (PTX ISA 9.7.18.1); only a left shift loses some."""

Integers = Sequence[int]

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_COMBINE: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "absdiff": lambda a, b: abs(a - b),
    "min": min,
    "max": max,
    # A half rounds up if the sum is not negative, and down otherwise.
    "avrg": lambda a, b: (a + b + (a + b >= 0)) >> 1,
}


def _read(value: int, bits: int, *, signed: bool) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def _clamped(value: int, bits: int, *, signed: bool) -> int:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return min(max(value, low), high)


@dataclass(frozen=True, slots=True)
class _Selected:
    """An operand such as `%r1.h0`: a register and the selected part."""

    operand: Operand
    selector: str

    @classmethod
    def of(cls, operand: Operand) -> _Selected:
        """Splits an operand into register and part."""
        found = re.fullmatch(r"(.*)\.([bh]\d)", operand.name) if isinstance(operand, Register) else None
        return cls(Register(found[1]), found[2]) if found else cls(operand, "")

    @property
    def bits(self) -> int:
        """Width of the selected part in bits."""
        return {"b": 8, "h": 16, "": 32}[self.selector[:1]]

    def part(self, value: int, *, signed: bool) -> int:
        """The selected part of a word, zero- or sign-extended."""
        return _read(value >> self.bits * int(self.selector[1:] or 0), self.bits, signed=signed)

    def merged(self, value: int, into: int) -> int:
        """`into` with the selected part replaced by the low bits of `value`; the low word if nothing is selected."""
        if not self.selector:
            return value & _WORD
        shift = self.bits * int(self.selector[1:])
        mask = (1 << self.bits) - 1
        return (into & ~(mask << shift)) | (value & mask) << shift


def _lanes(b: Binder, operands: Sequence[Operand], destination: Operand, compute: Callable[[Integers], int]) -> Step:
    """Applies `compute` lane by lane. It takes the 32-bit sources of one lane as unsigned integers."""
    rows = [b.source(one, "u32") for one in operands]
    rd = b.destination(destination, "u32")

    def step(warp: Warp) -> None:
        columns = zip(*(warp.u32[row].tolist() for row in rows), strict=True)
        np.copyto(warp.u32[rd], np.array([compute(one) & _WORD for one in columns], np.uint32), where=warp.where)

    return step


def _scalar(b: Binder, combine: Callable[[int, int], int], types: tuple[str, str, str]) -> Step:
    """Computes one pair of parts: `combine`, then `.sat`, then a second operation or a merge with the third source."""
    d, left, right, *rest = (_Selected.of(one) for one in b.expect(3, 4))
    second, saturates = b.words.get("second", ""), bool(b.words.get("sat"))
    if bool(rest) != bool(second or d.selector):
        raise b.error("the third source goes with a second operation or with a selector of the destination")
    if second and d.selector:
        raise b.error("a second operation and a selector of the destination exclude each other")
    to, *given = (kind == "s32" for kind in types)
    # To compare, an H200 keeps 64 bits, but only a word of a signed sum or difference. The ISA keeps 34 (9.7.18.1).
    compared = 32 if to and b.instruction.parts[0] in ("vadd", "vsub") else 64

    def compute(x: Integers) -> int:
        value = combine(left.part(x[0], signed=given[0]), right.part(x[1], signed=given[1]))
        if saturates:
            value = _clamped(_read(value, _RESULT, signed=True), d.bits, signed=to)
        if second:
            value = _COMBINE[second](_read(value, compared, signed=to), _read(x[2], 32, signed=to))
        return d.merged(value, x[2] if rest else 0)

    return _lanes(b, [one.operand for one in (left, right, *rest)], d.operand, compute)


def _types(b: Binder) -> tuple[str, str, str]:
    return b.words["d"], b.words["a"], b.words["b"]


@opcode("vadd.<d>.<a>.<b>{.sat}{.<second>}", "vsub.<d>.<a>.<b>{.sat}{.<second>}",
        "vabsdiff.<d>.<a>.<b>{.sat}{.<second>}", "vmin.<d>.<a>.<b>{.sat}{.<second>}",
        "vmax.<d>.<a>.<b>{.sat}{.<second>}", section="9.7.18.1.1", d=_TYPES, a=_TYPES, b=_TYPES,
        second=_SECOND)  # fmt: skip
def combine_parts(b: Binder) -> Step:
    """Sum, difference, absolute difference, minimum or maximum of two selected parts."""
    return _scalar(b, _COMBINE[b.instruction.parts[0][1:]], _types(b))


@opcode("vshl.<d>.<a>.<b>{.sat}.<mode>{.<second>}", "vshr.<d>.<a>.<b>{.sat}.<mode>{.<second>}", section="9.7.18.1.2",
        d=_TYPES, a=_TYPES, b="u32", mode="clamp wrap", second=_SECOND)  # fmt: skip
def shift_part(b: Binder) -> Step:
    """A selected part shifted by another. The amount is clamped to 32 or taken modulo 32."""
    left, wraps = b.instruction.parts[0] == "vshl", b.words["mode"] == "wrap"

    def shifted(value: int, amount: int) -> int:
        amount = amount & 31 if wraps else min(amount, 32)
        return value << amount if left else value >> amount

    return _scalar(b, shifted, _types(b))


@opcode("vset.<a>.<b>.<cmp>{.<second>}", section="9.7.18.1.4", a=_TYPES, b=_TYPES, cmp=_COMPARISONS, second=_SECOND)
def compare_parts(b: Binder) -> Step:
    """1 if the comparison of two selected parts holds, else 0."""
    compare = _COMPARE[b.words["cmp"]]
    return _scalar(b, lambda x, y: int(compare(x, y)), (b.words["a"], b.words["a"], b.words["b"]))


@opcode("vmad.<d>.<a>.<b>{.po}{.sat}{.<scale>}", section="9.7.18.1.3", d=_TYPES, a=_TYPES, b=_TYPES,
        scale="shr7 shr15")  # fmt: skip
def multiply_parts(b: Binder) -> Step:
    """The product of two selected parts plus c (plus one for `.po`), scaled, saturated to 32 bits.

    The machine's grammar does not have negated sources (`-%r1`).
    """
    d, left, right, added = (_Selected.of(one) for one in b.expect(4))
    saturates, scale = bool(b.words["sat"]), int(b.words["scale"].removeprefix("shr") or 0)
    signs = [b.words["a"] == "s32", b.words["b"] == "s32"]
    plus_one, signed = bool(b.words["po"]), any(signs)

    def compute(x: Integers) -> int:
        product = left.part(x[0], signed=signs[0]) * right.part(x[1], signed=signs[1])
        value = product + _read(x[2], 32, signed=signed) + plus_one >> scale
        return _clamped(value, 32, signed=signed) if saturates else value

    return _lanes(b, [one.operand for one in (left, right, added)], d.operand, compute)


# Two halves or four bytes at once.


@dataclass(frozen=True, slots=True)
class _Places:
    """`%r1.h10` or `%r1.b7654`. In a source: where its parts come from, lowest part first. In a destination: a mask."""

    operand: Operand
    digits: tuple[int, ...]

    @classmethod
    def of(cls, operand: Operand, default: str) -> _Places:
        """Splits an operand. `default`: the digits if it has none, highest part first."""
        found = re.fullmatch(r"(.*)\.[bh](\d+)", operand.name) if isinstance(operand, Register) else None
        digits = found[2] if found else default
        return cls(Register(found[1]) if found else operand, tuple(int(one) for one in reversed(digits)))


def _simd(b: Binder, combine: Callable[[int, int], int], types: tuple[str, str, str]) -> Step:
    """Computes on parts chosen from both sources together. Results go to d or, with `.add`, are added to c."""
    count = int(b.instruction.parts[0][-1])
    bits, accumulates, saturates = 32 // count, bool(b.words["add"]), bool(b.words.get("sat"))
    defaults = ("10", "10", "32", "10") if count == 2 else ("3210", "3210", "7654", "3210")
    d, left, right, third = (_Places.of(one, default) for one, default in zip(b.expect(4), defaults, strict=True))
    to, *given = (kind == "s32" for kind in types)

    def chosen(x: Integers, places: _Places, *, signed: bool) -> list[int]:
        both = x[0] | x[1] << 32
        return [_read(both >> bits * place, bits, signed=signed) for place in places.digits]

    def compute(x: Integers) -> int:
        pairs = zip(chosen(x, left, signed=given[0]), chosen(x, right, signed=given[1]), strict=True)
        results = [combine(one, other) for one, other in pairs]
        if saturates:
            results = [_clamped(one, bits, signed=to) for one in results]
        if accumulates:
            return x[2] + sum(results[place] for place in d.digits)
        word, mask = x[2], (1 << bits) - 1
        for place in d.digits:
            word = (word & ~(mask << bits * place)) | (results[place] & mask) << bits * place
        return word

    return _lanes(b, [left.operand, right.operand, third.operand], d.operand, compute)


_SIMD = "add sub avrg absdiff min max"
_PAIRS = " ".join(f"v{name}2" for name in _SIMD.split())
_QUADS = " ".join(f"v{name}4" for name in _SIMD.split())


@opcode(*(f"{name}.<d>.<a>.<b>{{.sat}}{{.add}}" for name in _PAIRS.split()), section="9.7.18.2.1", d=_TYPES, a=_TYPES,
        b=_TYPES)  # fmt: skip
@opcode(*(f"{name}.<d>.<a>.<b>{{.sat}}{{.add}}" for name in _QUADS.split()), section="9.7.18.2.3", d=_TYPES, a=_TYPES,
        b=_TYPES)  # fmt: skip
def combine_many(b: Binder) -> Step:
    """Sum, difference, rounded mean, absolute difference, minimum or maximum of each pair of parts."""
    if b.words["sat"] and b.words["add"]:
        raise b.error(".sat and .add exclude each other")
    return _simd(b, _COMBINE[b.instruction.parts[0][1:-1]], _types(b))


@opcode("vset2.<a>.<b>.<cmp>{.add}", section="9.7.18.2.2", a=_TYPES, b=_TYPES, cmp=_COMPARISONS)
@opcode("vset4.<a>.<b>.<cmp>{.add}", section="9.7.18.2.4", a=_TYPES, b=_TYPES, cmp=_COMPARISONS)
def compare_many(b: Binder) -> Step:
    """1 for each pair of parts whose comparison holds, else 0."""
    compare = _COMPARE[b.words["cmp"]]
    return _simd(b, lambda x, y: int(compare(x, y)), ("u32", b.words["a"], b.words["b"]))
