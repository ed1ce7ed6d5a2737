"""The rules of `cvt` and the conversions between scalar types (PTX ISA 9.7.9.21, facts.md 7.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from backends.vm.numerics import half
from backends.vm.numerics.formats import (
    BF16,
    F16,
    F32,
    FORMATS,
    TF32,
    Float64,
    Rounding,
    add_to_odd,
    decode,
    directed,
    encode,
)
from backends.vm.numerics.traced import is_traced
from backends.vm.numpy_calls import count_nonzero

Bits = npt.NDArray[np.unsignedinteger]
Function = Callable[..., Bits]

_INTEGER_WIDTH = {f"{sign}{bits}": bits for sign in "us" for bits in (8, 16, 32, 64)}
_FLOAT_WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "tf32": 32}
_PACKED_WIDTH = {
    "f16x2": 32,
    "bf16x2": 32,
    "e4m3x2": 16,
    "e5m2x2": 16,
    "e3m2x2": 16,
    "e2m3x2": 16,
    "e2m1x2": 8,
    "ue8m0x2": 16,
    "s2f6x2": 16,
    "e4m3x4": 32,
    "e5m2x4": 32,
    "e3m2x4": 32,
    "e2m3x4": 32,
}
WIDTH = _INTEGER_WIDTH | _FLOAT_WIDTH | _PACKED_WIDTH
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


@dataclass(frozen=True, slots=True)
class Modifiers:
    """The words between `cvt` and the types. `rounding` has no dot, "" if absent. `scaled`: .scaled::n2::ue8m0."""

    rounding: str = ""
    ftz: bool = False
    sat: bool = False
    satfinite: bool = False
    relu: bool = False
    scaled: bool = False

    @property
    def flags(self) -> frozenset[str]:
        return frozenset(word for word in ("ftz", "sat", "satfinite", "relu", "scaled") if getattr(self, word))


@dataclass(frozen=True, slots=True)
class Rule:
    """One (destination, source) pair: its modifiers, its operands, and how to make its function."""

    roundings: frozenset[str]
    flags: frozenset[str]
    required: frozenset[str]
    operands: int
    build: Callable[[Modifiers], Function]


def take(operand: Bits, bits: int) -> Bits:
    """The low `bits` bits, because a source register may be wider than the type (PTX ISA 9.7.9.21, Notes)."""
    return operand.astype(UNSIGNED[bits], copy=False)


_INTEGERS = tuple(f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64))
_FLOATS = ("f16", "bf16", "f32", "f64")
_EXACT = {"f16": ("f16", "f32", "f64"), "bf16": ("bf16", "f32", "f64"), "f32": ("f32", "f64"), "f64": ("f64",)}
_TO_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_DIRECTED = frozenset({"rn", "rz", "rm", "rp"})
_NEAREST_OR_ZERO = frozenset({"rn", "rz"})
_F32_NAN = np.uint32(F32.nan)
_MANTISSA = {"f16": F16.mantissa_bits, "bf16": BF16.mantissa_bits, "f32": F32.mantissa_bits, "f64": 52}
# A zero-dimensional array as an operand costs half as much as a NumPy scalar.
_16 = np.array(16, np.uint32)


def flush_f32(values: Float64) -> Float64:
    """Values subnormal in f32 become zero of the same sign."""
    return np.where(np.abs(values) < 2.0**-126, np.copysign(0.0, values), values)


def bf16_nearest(a: Bits) -> npt.NDArray[np.uint16]:
    """cvt.rn.bf16.f32; `a` are f32 bits."""
    x = a.view(np.float32)
    if is_traced(a):
        # ml_dtypes cannot be traced. A carry out of the mantissa gives the next exponent, or infinity.
        return _canonical(x, ((a + np.uint32(0x7FFF) + (a >> _16 & np.uint32(1))) >> _16).astype(np.uint16))
    return _canonical(x, x.astype(ml_dtypes.bfloat16).view(np.uint16))


def f16_nearest(a: Bits) -> npt.NDArray[np.uint16]:
    """cvt.rn.f16.f32; `a` are f32 bits."""
    x = a.view(np.float32)
    return _canonical(x, x.astype(np.float16).view(np.uint16))


def _canonical(x: npt.NDArray[np.float32], codes: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    nan = x != x
    return np.where(nan, np.uint16(F16.nan), codes) if is_traced(x) or count_nonzero(nan) else codes


def read_float(bits: Bits, name: str) -> Float64:
    """The exact values of f16, bf16, f32 or f64 bits."""
    narrow = take(bits, WIDTH[name])
    return narrow.view(np.float64) if name == "f64" else decode(narrow, FORMATS[name])


def read_integer(bits: Bits, name: str) -> npt.NDArray[np.int64] | npt.NDArray[np.uint64]:
    """The values of an integer type, as uint64 for unsigned types and int64 for signed ones."""
    narrow = take(bits, WIDTH[name])
    return narrow.astype(np.uint64) if name[0] == "u" else narrow.view(SIGNED[WIDTH[name]]).astype(np.int64)


def integer_range(name: str) -> tuple[int, int]:
    bits = WIDTH[name]
    return (0, (1 << bits) - 1) if name[0] == "u" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def _integer_to_integer(dst: str, src: str, modifiers: Modifiers) -> Function:
    low = max(integer_range(dst)[0], integer_range(src)[0])
    high = min(integer_range(dst)[1], integer_range(src)[1])
    container = UNSIGNED[WIDTH[dst]]

    def extend(a: Bits) -> Bits:
        return read_integer(a, src).astype(container)

    def saturate(a: Bits) -> Bits:
        return np.clip(read_integer(a, src), low, high).astype(container)

    return saturate if modifiers.sat else extend


def _float_to_integer(dst: str, src: str, modifiers: Modifiers) -> Function:
    low, high = integer_range(dst)
    bits = WIDTH[dst]
    # PTX ISA 9.7.9.21, Integer Notes: NaN gives 0, or the top bit alone where a 64-bit type is involved.
    nan = np.uint64(1 << (bits - 1)) if src == "f64" or bits == 64 else np.uint64(0)
    to_integral = _TO_INTEGRAL[modifiers.rounding]
    wide = np.int64 if low else np.uint64

    def convert(a: Bits) -> Bits:
        values = read_float(a, src)
        if modifiers.ftz:
            values = flush_f32(values)
        integral = to_integral(values)
        inside = (integral >= low) & (integral < float(high + 1))
        codes = np.where(inside, integral, 0.0).astype(wide).astype(np.uint64)
        codes = np.where(inside, codes, np.where(integral < low, np.uint64(low % (1 << 64)), np.uint64(high)))
        return np.where(np.isnan(values), nan, codes).astype(UNSIGNED[bits])

    return convert


def _integer_to_float(dst: str, src: str, modifiers: Modifiers) -> Function:
    rounding = cast(Rounding, modifiers.rounding)
    if dst == "f32" and WIDTH[src] <= 32 and not modifiers.sat and rounding == "rn":
        return lambda a: read_integer(a, src).astype(np.float32).view(np.uint32)

    def convert(a: Bits) -> Bits:
        integers = read_integer(a, src)
        high = np.ldexp((integers >> 32).astype(np.float64), 32)
        low = (integers & 0xFFFF_FFFF).astype(np.float64)
        if dst != "f64":
            return _write(add_to_odd(high, low), dst, modifiers)
        nearest = high + low
        return _write(directed(nearest, (high - nearest) + low, rounding), dst, modifiers)

    return convert


def _float_to_float(dst: str, src: str, modifiers: Modifiers) -> Function:
    if dst in _EXACT[src] and modifiers.rounding in _DIRECTED:
        modifiers = replace(modifiers, rounding="")
    if (dst, src) in _FAST and modifiers == Modifiers(rounding=_FAST[dst, src][0]):
        fast = _FAST[dst, src][1]
        return lambda a: fast(take(a, WIDTH[src]))
    to_integral = _TO_INTEGRAL.get(modifiers.rounding)

    def convert(a: Bits) -> Bits:
        values = read_float(a, src)
        if modifiers.ftz and src == "f32":
            values = flush_f32(values)
        return _write(values if to_integral is None else to_integral(values), dst, modifiers)

    return _keeping_payloads(convert, dst, src, modifiers) if dst != src and "f64" in (dst, src) else convert


def _keeping_payloads(convert: Function, dst: str, src: str, modifiers: Modifiers) -> Function:
    """A NaN to or from f64 becomes a quiet one with its sign and upper payload, as on an H200 (conformance/silicon).

    `.sat` makes it 0. `.ftz` from f32 first makes it 0x7FFFFFFF.
    """
    if modifiers.sat:
        return convert
    flushed = modifiers.ftz and src == "f32"
    bits, mantissa = WIDTH[dst], _MANTISSA[dst]
    quiet = np.uint64(((1 << (bits - 1)) - 1) >> (mantissa - 1) << (mantissa - 1))

    def kept(a: Bits) -> Bits:
        codes, values = convert(a), read_float(a, src)
        given = np.full_like(a, F32.nan) if flushed else take(a, WIDTH[src])
        sign, below = _shifted(given, bits - WIDTH[src]), _shifted(given, mantissa - _MANTISSA[src])
        kept_sign, payload = sign & np.uint64(1 << (bits - 1)), below & np.uint64((1 << mantissa) - 1)
        return np.where(np.isnan(values), kept_sign | quiet | payload, codes).astype(codes.dtype)

    return kept


def _shifted(codes: Bits, left: int) -> npt.NDArray[np.uint64]:
    wide = codes.astype(np.uint64)
    return wide << np.uint64(left) if left > 0 else wide >> np.uint64(-left)


def _write(values: Float64, dst: str, modifiers: Modifiers) -> Bits:
    if modifiers.sat:
        values = np.where(values > 0, np.minimum(values, 1.0), 0.0)
    if dst == "f64":
        return np.asarray(values).view(np.uint64)
    rounding = cast(Rounding, modifiers.rounding if modifiers.rounding in _DIRECTED else "rn")
    codes = encode(values, FORMATS[dst], rounding, satfinite=modifiers.satfinite, relu=modifiers.relu)
    if modifiers.ftz and dst == "f32":
        codes = np.where(codes & np.uint32(0x7F80_0000), codes, codes & np.uint32(F32.sign_bit))
    return codes.astype(UNSIGNED[WIDTH[dst]])


def _widen_bf16(a: Bits) -> Bits:
    return np.left_shift(a.astype(np.uint32), _16)


def _widen_f16(a: Bits) -> Bits:
    x = a.view(np.float16)
    wide = x.astype(np.float32).view(np.uint32)
    nan = x != x
    return np.where(nan, _F32_NAN, wide) if is_traced(x) or count_nonzero(nan) else wide


# To convert to the own type, ptxas adds a zero, and the sum has one NaN.
_FAST: dict[tuple[str, str], tuple[str, Function]] = {
    ("f32", "bf16"): ("", _widen_bf16),
    ("f32", "f16"): ("", _widen_f16),
    ("bf16", "f32"): ("rn", bf16_nearest),
    ("f16", "f32"): ("rn", f16_nearest),
    ("f32", "f32"): ("", lambda a: a),
    ("f64", "f64"): ("", lambda a: a),
    ("bf16", "bf16"): ("", lambda a: half.canonical(a, BF16)),
    ("f16", "f16"): ("", lambda a: half.canonical(a, F16)),
}


_EXPONENT = np.uint32(0x7F80_0000)


def _tf32(modifiers: Modifiers) -> Function:
    """f32 bits with the low 13 cleared. `.rna` truncates infinity and NaN; `.satfinite` takes one from either [H]."""

    def away(a: Bits) -> Bits:
        bits = take(a, 32).astype(np.uint32)
        finite = (bits & _EXPONENT) != _EXPONENT
        cut = (bits + np.where(finite, np.uint32(0x1000), np.uint32(0))) & np.uint32(0xFFFF_E000)
        beyond = modifiers.satfinite & ((cut & _EXPONENT) == _EXPONENT)
        return cut - np.where(beyond, np.uint32(0x2000), np.uint32(0))

    def rounded(a: Bits) -> Bits:
        rounding = cast(Rounding, modifiers.rounding)
        codes = encode(read_float(a, "f32"), TF32, rounding, satfinite=modifiers.satfinite, relu=modifiers.relu)
        return codes << np.uint32(13)

    return away if modifiers.rounding == "rna" and not modifiers.relu else rounded


Maker = Callable[[str, str, Modifiers], Function]


def scalar_rules() -> dict[tuple[str, str], Rule]:
    """Rules for every pair of scalar types, and for tf32.

    Two departures from the ISA's text, which ptxas 13.5 takes. Between f16 and bf16 the rounding may be left out; the
    machine code is that of `.rn`. From bf16 to f32 and f64, which is exact, there may be one; without `.ftz` to f32 the
    machine code is the same, elsewhere that it changes nothing is an inference.
    """
    none: frozenset[str] = frozenset()
    rules: dict[tuple[str, str], Rule] = {}

    def rule(dst: str, src: str, make: Maker, roundings: frozenset[str], flags: frozenset[str]) -> None:
        rules[dst, src] = Rule(roundings, flags, none, 1, lambda modifiers: make(dst, src, modifiers))

    for dst in _INTEGERS:
        for src in _INTEGERS:
            rule(dst, src, _integer_to_integer, frozenset({""}), frozenset({"sat"}))
        for src in _FLOATS:
            flags = {"f32": {"sat", "ftz"}, "bf16": set[str]()}.get(src, {"sat"})
            rule(dst, src, _float_to_integer, frozenset(_TO_INTEGRAL), frozenset(flags))
            flags = ({"ftz"} if src == "f32" else set()) | ({"sat"} if src != "bf16" else set())
            rule(src, dst, _integer_to_float, _DIRECTED, frozenset(flags))
    for src in _FLOATS:
        for dst in _FLOATS:
            flags = ({"sat"} if "bf16" not in (dst, src) else set()) | ({"ftz"} if "f32" in (src, dst) else set())
            roundings = _DIRECTED
            if dst in _EXACT[src]:
                roundings = frozenset({"", *_TO_INTEGRAL}) if dst == src else frozenset({""})
                if src == "bf16" != dst:
                    roundings |= _DIRECTED
            elif {dst, src} == {"f16", "bf16"}:
                roundings |= {""}
            elif src == "f32":
                flags |= {"relu", "satfinite"}
            rule(dst, src, _float_to_float, roundings, frozenset(flags))
    flags = frozenset({"satfinite", "relu"})
    rules["tf32", "f32"] = Rule(_NEAREST_OR_ZERO | {"rna"}, flags, none, 1, _tf32)
    return rules
