"""Every `cvt` of PTX ISA 9.7.9.21 that the machine knows, by destination and source type.

    conversion("bf16x2", "f32", Modifiers(rounding="rn")).apply(a, b)

Operands and results are bit patterns in unsigned arrays. A result has exactly the destination type's width; the caller
extends it into a wider register (signed integers by sign, all else by zeros).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from backends.vm.numerics.cvt_scalar import (
    WIDTH,
    Bits,
    Function,
    Modifiers,
    Rule,
    bf16_nearest,
    f16_nearest,
    read_float,
    scalar_rules,
    take,
)
from backends.vm.numerics.formats import (
    BF16,
    F16,
    FORMATS,
    Codes,
    Float64,
    FloatFormat,
    Rounding,
    decode,
    encode,
)
from backends.vm.numerics.traced import is_traced, taken
from backends.vm.numpy_calls import count_nonzero

Uint16 = npt.NDArray[np.uint16]
Uint8 = npt.NDArray[np.uint8]
Halves = Callable[..., tuple[Uint8, Uint8]]

_SMALL = {"e4m3x2": 8, "e5m2x2": 8, "e3m2x2": 8, "e2m3x2": 8, "e2m1x2": 4}
_PAIRS = {"f16x2": F16, "bf16x2": BF16}
_RANDOM_BITS = {"f16x2": 13, "bf16x2": 16}
_NONE: frozenset[str] = frozenset()
_UE8M0_NAN = 0xFF
_UE8M0_MAX = 0xFE
_BF16_INFINITY = 0x7F80
_16 = np.array(16, np.uint32)
_LOWER_HALF, _UPPER_HALF = np.uint32(0xFFFF), np.uint32(0xFFFF_0000)
_LOWER_NAN, _UPPER_NAN = np.uint32(0x7FFF), np.uint32(0x7FFF_0000)


def pack_halves(upper: Uint16, lower: Uint16) -> Bits:
    """Two 16-bit codes in one 32-bit register."""
    return np.left_shift(upper.astype(np.uint32), _16) | lower


def unpack_halves(pair: Bits) -> tuple[Uint16, Uint16]:
    """(upper, lower) 16-bit codes of a 32-bit register."""
    bits = take(pair, 32)
    return np.right_shift(bits, _16).astype(np.uint16), bits.astype(np.uint16)


def _pair_from_f32(dst: str, modifiers: Modifiers) -> Function:
    fmt = _PAIRS[dst]
    if modifiers.rounding == "rs":
        return _stochastic_pair(dst, modifiers)
    if modifiers == Modifiers(rounding="rn"):
        return _nearest_pair(np.dtype(np.float16 if dst == "f16x2" else ml_dtypes.bfloat16))

    def half(x: Bits) -> Uint16:
        rounding = cast(Rounding, modifiers.rounding)
        codes = encode(read_float(x, "f32"), fmt, rounding, satfinite=modifiers.satfinite, relu=modifiers.relu)
        return codes.astype(np.uint16)

    return lambda a, b: pack_halves(half(a), half(b))


def _nearest_pair(half: np.dtype[np.generic]) -> Function:
    one = f16_nearest if half == np.float16 else bf16_nearest

    def convert(a: Bits, b: Bits) -> Bits:
        if is_traced(a):
            return pack_halves(one(a), one(b))
        upper, lower = take(a, 32).view(np.float32), take(b, 32).view(np.float32)
        pairs = np.empty((*np.broadcast(upper, lower).shape, 2), half)
        pairs[..., 0] = lower
        pairs[..., 1] = upper
        codes = pairs.view(np.uint32)[..., 0]
        nan_upper, nan_lower = upper != upper, lower != lower
        if count_nonzero(nan_upper) or count_nonzero(nan_lower):
            codes = np.where(nan_upper, codes & _LOWER_HALF | _UPPER_NAN, codes)
            codes = np.where(nan_lower, codes & _UPPER_HALF | _LOWER_NAN, codes)
        return codes

    return convert


def _stochastic_pair(dst: str, modifiers: Modifiers) -> Function:
    """`.rs`: rounds away from zero where random bits plus dropped bits carry. They start just below the kept mantissa.

    The ISA does not cover a subnormal f16 that drops more than 13 bits. Here the random bits stay aligned at the top.
    """
    fmt, random_bits = _PAIRS[dst], _RANDOM_BITS[dst]

    def convert(a: Bits, b: Bits, random: Bits) -> Bits:
        upper, lower = unpack_halves(random)
        high, low = (_stochastic(x, own, random_bits, fmt, modifiers) for x, own in ((a, upper), (b, lower)))
        return pack_halves(high.astype(np.uint16), low.astype(np.uint16))

    return convert


def _stochastic(x: Bits, random: Uint16, random_bits: int, fmt: FloatFormat, modifiers: Modifiers) -> Codes:
    values = read_float(x, "f32")
    finite = np.isfinite(values)
    magnitude = np.where(finite, np.abs(values), 0.0)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, 1 - fmt.bias) - fmt.mantissa_bits
    below = np.ldexp((random & ((1 << random_bits) - 1)).astype(np.float64), -random_bits)
    kept = np.ldexp(np.floor(np.ldexp(magnitude, -exponent) + below), exponent)
    rounded = np.where(finite, np.copysign(kept, values), values)
    return encode(rounded, fmt, satfinite=modifiers.satfinite, relu=modifiers.relu)


def _join_bytes(codes: Sequence[Codes]) -> Bits:
    """Four bytes in one register, the first in the highest position."""
    return np.stack(codes[::-1], axis=-1).astype(np.uint8).view(np.uint32)[..., 0]


def _four_from_f32(dst: str, modifiers: Modifiers) -> Function:
    """`.rs` of four floats, highest first. The upper 16 random bits serve the first two, the lower ones the others.

    The ISA does not cover dropping more than 16 bits. Here the random bits start just below the kept mantissa, where
    they round without bias.
    """
    fmt = FORMATS[dst[:-2]]

    def convert(*operands: Bits) -> Bits:
        *values, random = operands
        upper, lower = unpack_halves(random)
        codes = [
            _stochastic(x, own, 16, fmt, modifiers) for x, own in zip(values, (upper, upper, lower, lower), strict=True)
        ]
        return _join_bytes(codes)

    return convert


@cache
def _small_codes(dst: str, src: str, relu: bool) -> Uint8:
    """The `dst` code of every f16 or bf16 code: 65536 bytes."""
    fmt = _PAIRS[src]
    values = decode(np.arange(1 << 16, dtype=np.uint16), fmt)
    return encode(values, FORMATS[dst[:-2]], satfinite=True, relu=relu).astype(np.uint8)


def sticky_bf16(a: Bits) -> Uint16:
    """The upper 16 of f32 bits, with the last one set if any lower bit is: bf16 rounded to odd.

    Its 8 significant bits are at least two more than any format of 8 bits or fewer has, so rounding it again to such a
    format equals rounding the f32 once. A NaN stays a NaN.
    """
    bits = take(a, 32)
    return np.right_shift(bits, _16).astype(np.uint16) | bits.astype(np.uint16).astype(np.bool_)


def _look_up_f32(codes: Uint8) -> Halves:
    return lambda a, b: (taken(codes, sticky_bf16(a)), taken(codes, sticky_bf16(b)))


def _look_up_pair(codes: Uint8) -> Halves:
    def halves(pair: Bits) -> tuple[Uint8, Uint8]:
        upper, lower = unpack_halves(pair)
        return taken(codes, upper), taken(codes, lower)

    return halves


def _small_from_f32(dst: str, modifiers: Modifiers) -> Function:
    return _join(dst, _look_up_f32(_small_codes(dst, "bf16x2", modifiers.relu)))


def _small_from_pair(dst: str, src: str, modifiers: Modifiers) -> Function:
    return _join(dst, _look_up_pair(_small_codes(dst, src, modifiers.relu)))


def _join(dst: str, halves: Halves) -> Function:
    bits = _SMALL.get(dst, 8)
    container = np.uint8 if bits == 4 else np.uint16
    place = np.array(bits, container)

    def joined(*operands: Bits) -> Bits:
        upper, lower = halves(*operands)
        return np.left_shift(upper.astype(container), place) | lower

    return joined


@cache
def _f16_codes(src: str, relu: bool) -> Uint16:
    fmt = FORMATS[src[:-2]]
    return encode(decode(np.arange(1 << fmt.bits, dtype=np.uint16), fmt), F16, relu=relu).astype(np.uint16)


def _f16x2_from_small(src: str, modifiers: Modifiers) -> Function:
    codes = _f16_codes(src, modifiers.relu)
    bits, mask = _SMALL[src], len(codes) - 1

    def convert(pair: Bits) -> Bits:
        whole = pair.astype(np.uint32)
        return pack_halves(taken(codes, (whole >> np.uint32(bits)) & mask), taken(codes, whole & mask))

    return convert


@cache
def _ue8m0_codes(rounding: str, satfinite: bool) -> Uint8:
    """ue8m0 code of every bf16 code: the exponent of |x|, one more under `rp` if |x| is not a power of two.

    The PTX ISA does not cover the sign, zero, and |x| < 2^-127. As in the host path of CUDA's fp8 header, the sign is
    dropped, and zero and |x| < 2^-127 give code 0, 2^-127. Not measured.
    """
    magnitude = np.arange(1 << 16) & 0x7FFF
    exponent, mantissa = magnitude >> 7, magnitude & 0x7F
    if rounding == "rp":
        exponent = exponent + ((mantissa != 0) & (magnitude > 0x0040) & (magnitude < _BF16_INFINITY))
    top = _UE8M0_MAX if satfinite else _UE8M0_NAN
    codes = np.where(magnitude > _BF16_INFINITY, _UE8M0_NAN, np.minimum(exponent, top))
    return codes.astype(np.uint8)


def _ue8m0_from_f32(modifiers: Modifiers) -> Function:
    return _join("ue8m0x2", _look_up_f32(_ue8m0_codes(modifiers.rounding, modifiers.satfinite)))


def _ue8m0_from_bf16x2(modifiers: Modifiers) -> Function:
    return _join("ue8m0x2", _look_up_pair(_ue8m0_codes(modifiers.rounding, modifiers.satfinite)))


@cache
def _ue8m0_as_bf16() -> Uint16:
    codes = np.arange(0, 256 << 7, 1 << 7, dtype=np.uint16)
    codes[0] = 0x0040
    codes[_UE8M0_NAN] = BF16.nan
    return codes


def _bf16x2_from_ue8m0(modifiers: Modifiers) -> Function:
    values = _ue8m0_as_bf16()
    return lambda pair: pack_halves(values[(pair >> 8) & 0xFF], values[pair & 0xFF])


_S2F6_ONE = 64.0
_S2F6_LEAST, _S2F6_MOST = -128, 127


def _scale_factors(scales: tuple[Bits, ...]) -> tuple[Float64, Float64]:
    """The two ue8m0 factors of `.scaled::n2::ue8m0`, the upper one first. 1 without an operand."""
    if not scales:
        return np.ones(1), np.ones(1)
    pair = take(scales[0], 16).astype(np.int64)
    upper, lower = pair >> 8, pair & 0xFF
    high, low = (np.where(code == _UE8M0_NAN, np.nan, np.ldexp(1.0, code - 127)) for code in (upper, lower))
    return high, low


def _s2f6(values: Float64, relu: bool) -> Uint16:
    """8-bit two's complement codes with six fraction bits (PTX ISA 5.2.4). The ISA does not cover NaN; it gives 0 here,
    as in a conversion to an integer."""
    scaled = np.where(np.isnan(values), 0.0, np.rint(values * _S2F6_ONE))
    codes = np.clip(scaled, 0 if relu else _S2F6_LEAST, _S2F6_MOST).astype(np.int64)
    return (codes & 0xFF).astype(np.uint16)


def _s2f6_from_f32(modifiers: Modifiers) -> Function:
    def convert(a: Bits, b: Bits, *scales: Bits) -> Bits:
        high, low = _scale_factors(scales)
        upper, lower = (_s2f6(read_float(x, "f32") / s, modifiers.relu) for x, s in ((a, high), (b, low)))
        return upper << np.uint16(8) | lower

    return convert


def _s2f6_from_bf16x2(modifiers: Modifiers) -> Function:
    def convert(pair: Bits, *scales: Bits) -> Bits:
        factors = _scale_factors(scales)
        halves = unpack_halves(pair)
        upper, lower = (_s2f6(decode(x, BF16) / s, modifiers.relu) for x, s in zip(halves, factors, strict=True))
        return upper << np.uint16(8) | lower

    return convert


def _bf16x2_from_bytes(src: str, modifiers: Modifiers) -> Function:
    """Each element, exact in bf16, times its scale factor, rounded once."""
    bits = _SMALL.get(src, 8)
    fixed = src == "s2f6x2"
    codes = np.arange(1 << (8 if fixed else FORMATS[src[:-2]].bits), dtype=np.uint16)
    values = codes.astype(np.uint8).view(np.int8) / _S2F6_ONE if fixed else decode(codes, FORMATS[src[:-2]])
    mask = np.uint32(codes.size - 1)

    def convert(pair: Bits, *scales: Bits) -> Bits:
        whole = pair.astype(np.uint32)
        halves = (whole >> np.uint32(bits)) & mask, whole & mask
        upper, lower = (
            encode(values[x] * s, BF16, satfinite=modifiers.satfinite, relu=modifiers.relu).astype(np.uint16)
            for x, s in zip(halves, _scale_factors(scales), strict=True)
        )
        return pack_halves(upper, lower)

    return convert


def packed_rules() -> dict[tuple[str, str], Rule]:
    """Rules for every pair of types where one is packed."""
    rn, relu, satfinite = frozenset({"rn"}), frozenset({"relu"}), frozenset({"satfinite"})
    rules: dict[tuple[str, str], Rule] = {}
    for dst in _PAIRS:
        rules[dst, "f32"] = Rule(
            frozenset({"rn", "rz", "rs"}), relu | satfinite, _NONE, 2, lambda m, dst=dst: _pair_from_f32(dst, m)
        )
    for small in _SMALL:
        flags = relu | satfinite
        rules[small, "f32"] = Rule(rn, flags, satfinite, 2, lambda m, dst=small: _small_from_f32(dst, m))
        for src in _PAIRS:
            rules[small, src] = Rule(
                rn, flags, satfinite, 1, lambda m, dst=small, src=src: _small_from_pair(dst, src, m)
            )
        rules["f16x2", small] = Rule(rn, relu, _NONE, 1, lambda m, src=small: _f16x2_from_small(src, m))
    outward = frozenset({"rz", "rp"})
    rules["ue8m0x2", "f32"] = Rule(outward, satfinite, _NONE, 2, _ue8m0_from_f32)
    rules["ue8m0x2", "bf16x2"] = Rule(outward, satfinite, _NONE, 1, _ue8m0_from_bf16x2)
    rules["bf16x2", "ue8m0x2"] = Rule(rn, _NONE, _NONE, 1, _bf16x2_from_ue8m0)
    scaled = relu | satfinite | {"scaled"}
    for small in (*_SMALL, "s2f6x2"):
        rules["bf16x2", small] = Rule(rn, scaled, _NONE, 1, lambda m, src=small: _bf16x2_from_bytes(src, m))
    rules["s2f6x2", "f32"] = Rule(rn, scaled, satfinite, 2, _s2f6_from_f32)
    rules["s2f6x2", "bf16x2"] = Rule(rn, scaled, satfinite, 1, _s2f6_from_bf16x2)
    for dst in ("e4m3x4", "e5m2x4", "e3m2x4", "e2m3x4"):
        flags = relu | satfinite
        rules[dst, "f32"] = Rule(frozenset({"rs"}), flags, satfinite, 4, lambda m, dst=dst: _four_from_f32(dst, m))
    return rules


__all__ = ["RULES", "WIDTH", "Conversion", "Modifiers", "UnknownConversionError", "conversion"]

RULES: dict[tuple[str, str], Rule] = {**scalar_rules(), **packed_rules()}


class UnknownConversionError(LookupError):
    """No such `cvt`. The message says what is wrong and what exists."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion ready to run. `apply` takes `operands` arrays of source bits and returns destination bits."""

    dst: str
    src: str
    operands: int
    apply: Function


def conversion(dst: str, src: str, modifiers: Modifiers) -> Conversion:
    """The conversion `cvt.MODIFIERS.dst.src`. UnknownConversionError if there is none."""
    rule = RULES.get((dst, src))
    spelling = ".".join(word for word in ("cvt", modifiers.rounding, *sorted(modifiers.flags), dst, src) if word)
    if rule is None:
        sources = ", ".join(sorted(s for d, s in RULES if d == dst))
        known = f"{dst} is converted from {sources}" if sources else f"{dst} is no destination type of cvt"
        raise UnknownConversionError(f"{spelling}: no conversion from {src} to {dst} (PTX ISA 9.7.9.21); {known}.")
    if modifiers.rounding not in rule.roundings:
        known = ", ".join(f".{word}" if word else "none" for word in sorted(rule.roundings))
        seen = f".{modifiers.rounding}" if modifiers.rounding else "no rounding modifier"
        raise UnknownConversionError(f"{spelling}: {seen} where {src} to {dst} takes {known} (PTX ISA 9.7.9.21).")
    if extra := modifiers.flags - rule.flags:
        known = ", ".join(f".{word}" for word in sorted(rule.flags)) or "no modifier besides the rounding"
        seen = ", ".join(f".{word}" for word in sorted(extra))
        raise UnknownConversionError(f"{spelling}: {seen} where {src} to {dst} takes {known} (PTX ISA 9.7.9.21).")
    if missing := rule.required - modifiers.flags:
        seen = ", ".join(f".{word}" for word in sorted(missing))
        raise UnknownConversionError(f"{spelling}: {seen} is mandatory from {src} to {dst} (PTX ISA 9.7.9.21).")
    operands = rule.operands + (modifiers.rounding == "rs") + modifiers.scaled
    return Conversion(dst, src, operands, rule.build(modifiers))
