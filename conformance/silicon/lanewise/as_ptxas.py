"""Where ptxas 13.0 departs from the ISA, which the machine follows, and what it makes of scalar video instructions.

Hopper has no such instructions. ptxas computes with 64-bit integers instead; `translated` is read from its SASS.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from conformance.silicon.lanewise.programs import Program, Words

MERGED: Final = "of a result merged into .h1, ptxas takes the upper half; the ISA takes the lower half (9.7.18.1)"
PART: Final = (
    "ptxas saturates a shift to a word even if it is merged into a part, and makes any other negative result the "
    "maximum of a part; the ISA saturates to the range of the part (9.7.18.1)"
)
WRAPS: Final = "ptxas saturates an unsigned sum or difference only from below; the ISA also from above (9.7.18.1)"
EXTENDED: Final = (
    "before .min and .max, ptxas extends the word of an unsigned sum, difference or saturated shift by its upper bit; "
    "in the ISA the sign depends on the type of the destination (9.7.18.1)"
)
PRODUCT: Final = (
    "ptxas multiplies and adds signed words; for the ISA a .u32 is unsigned, and c is if both factors are (9.7.18.1.3)"
)
KEPT: Final = "ptxas drops .ftz of a conversion from f32 to f16; the ISA flushes a subnormal operand (9.7.9.21)"
DIFFERS: Final = {
    r"v[a-z]+\.\S+ %d\.h1,": MERGED,
    r"v(add|sub|min|max|shl|shr)\.\S+\.sat\S* %d\.(b\d|h0),": PART,
    r"(vadd\.u32\.u32\.u32|vabsdiff\.u32\.u32\.s32)\.sat(\.add|\.max)? %d, ": WRAPS,
    r"v(add|sub)\.u32\.\S+\.(min|max) ": EXTENDED,
    r"vsh[lr]\.u32\.\S+\.sat\.\S+\.(min|max) ": EXTENDED,
    r"vmad\.[su]32\.(?=\S*(sat|shr))(u32\.u32\S* |u32\.s32\S* %d, %a,|s32\.u32\S* %d, \S+ %b,)": PRODUCT,
    r"cvt\.(rm\.ftz|rp\.ftz(\.sat)?)\.f16\.f32 ": KEPT,
}
"""By the beginning of a program's text: why ptxas does not follow the ISA, and the machine does."""
_WORD: Final = (1 << 32) - 1


def departures(program: Program) -> list[str]:
    """The keys of DIFFERS that the program's text begins with."""
    return [begin for begin in DIFFERS if re.match(begin, program.text)]


def translated(program: Program, values: tuple[Words, ...]) -> Words:
    """uint64 [n]: what ptxas's instructions make of the operands' `values`, each uint64 [n]."""
    name, *words = program.opcode.split(".")
    places = re.findall(r"%[dabc](?:\.(\w\d))?", program.text.partition(" ")[2])
    rows = zip(*(column.tolist() for column in values), strict=True)
    compute = _product if name == "vmad" else _scalar
    return np.array([compute(name, words, places, list(row)) & _WORD for row in rows], np.uint64)


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _part(word: int, place: str, kind: str) -> int:
    bits = {"b": 8, "h": 16, "": 32}[place[:1]]
    value = word >> bits * int(place[1:] or 0) & (1 << bits) - 1
    return _signed(value, bits) if kind == "s32" else value


def _clamped(value: int, kind: str) -> int:
    low, high = (-(1 << 31), (1 << 31) - 1) if kind == "s32" else (0, _WORD)
    return min(max(value, low), high)


def _product(name: str, words: list[str], places: list[str], row: list[int]) -> int:
    kinds = words[1:3]
    a, b = (_signed(_part(x, place, kind), 32) for x, place, kind in zip(row, places[1:], kinds, strict=False))
    unsigned = kinds == ["u32", "u32"]
    total = a * b + _signed(row[2], 32) + ("po" in words)
    scale = int(words[-1].removeprefix("shr")) if words[-1].startswith("shr") else 0
    total = (total & (1 << 64) - 1 if unsigned and scale else total) >> scale
    return _clamped(total, "u32" if unsigned else "s32") if "sat" in words else total


def _scalar(name: str, words: list[str], places: list[str], row: list[int]) -> int:
    to, *kinds = words[:3] if name != "vset" else [words[0], *words[:2]]
    a, b = (_part(x, place, kind) for x, place, kind in zip(row, places[1:], kinds, strict=False))
    value = _combined(name, words, a, b)
    place, second = places[0], words[-1]
    if "sat" in words:
        value = _saturated(name, value, to, place)
    if place:
        return _merged(value, row[2], place)
    if second == "add":
        return value + row[2]
    if second not in ("min", "max"):
        return value
    if name in ("vadd", "vsub") or ("sat" in words and name in ("vshl", "vshr")):
        value = _signed(value, 32)
    value = value if to == "s32" else value & (1 << 64) - 1
    return {"min": min, "max": max}[second](value, _part(row[2], "", to))


def _combined(name: str, words: list[str], a: int, b: int) -> int:
    amount = b & 31 if "wrap" in words else min(b, 32)
    match name:
        case "vadd":
            return a + b
        case "vsub":
            return a - b
        case "vabsdiff":
            return abs(a - b)
        case "vmin":
            return min(a, b)
        case "vmax":
            return max(a, b)
        case "vshl":
            return _signed(a << amount, 64)
        case "vshr":
            return a >> amount
        case _:
            held = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
            return int(held[words[2]])


def _saturated(name: str, value: int, to: str, place: str) -> int:
    if name in ("vshl", "vshr"):
        return _clamped(_signed(value, 34), to)
    if place:
        most = (1 << {"b": 8, "h": 16}[place[0]] - (to == "s32")) - 1
        return min(value, most) if value >= 0 else most
    if to == "u32" and name in ("vadd", "vsub"):
        return value & _WORD if value >= 0 else 0
    return value if to == "u32" and name == "vabsdiff" else _clamped(value, to)


def _merged(value: int, into: int, place: str) -> int:
    if place == "h1":
        return value & 0xFFFF_0000 | into & 0xFFFF
    bits = {"b": 8, "h": 16}[place[0]]
    shift, mask = bits * int(place[1]), (1 << bits) - 1
    return into & ~(mask << shift) | (value & mask) << shift
