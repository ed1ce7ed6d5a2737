"""Binary floating-point formats: decode codes, encode values under a rounding mode, and compare values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from backends.vm.numerics.traced import is_traced, taken
from backends.vm.numpy_calls import count_nonzero

Float64 = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint32]
Rounding = Literal["rn", "rna", "rz", "rm", "rp"]
_Float = TypeVar("_Float", np.float32, np.float64)

_F64_MANTISSA = np.uint64(52)
_F64_FRACTION = np.uint64((1 << 52) - 1)
_F64_HIDDEN = np.uint64(1 << 52)
_ONE = np.uint64(1)


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A format of at most 32 bits: sign, exponent and mantissa from the top bit down.

    `nan` is the code that a conversion writes for NaN, measured on an H200 (facts.md 7.2). The four- and six-bit
    formats have no NaN and use +maximum (PTX ISA 9.7.9.21). `infinity` is None where there is none.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_finite: int
    nan: int
    infinity: int | None = None

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def has_nan(self) -> bool:
        return self.nan != self.max_finite


F32 = FloatFormat("f32", 8, 23, 127, 0x7F7F_FFFF, 0x7FFF_FFFF, 0x7F80_0000)
TF32 = FloatFormat("tf32", 8, 10, 127, 0x3FBFF, 0x3FFFF, 0x3FC00)
F16 = FloatFormat("f16", 5, 10, 15, 0x7BFF, 0x7FFF, 0x7C00)
BF16 = FloatFormat("bf16", 8, 7, 127, 0x7F7F, 0x7FFF, 0x7F80)
E5M2 = FloatFormat("e5m2", 5, 2, 15, 0x7B, 0x7F, 0x7C)
E4M3 = FloatFormat("e4m3", 4, 3, 7, 0x7E, 0x7F)
E3M2 = FloatFormat("e3m2", 3, 2, 3, 0x1F, 0x1F)
E2M3 = FloatFormat("e2m3", 2, 3, 1, 0x1F, 0x1F)
E2M1 = FloatFormat("e2m1", 2, 1, 1, 0x7, 0x7)

FORMATS: dict[str, FloatFormat] = {f.name: f for f in (F32, TF32, F16, BF16, E5M2, E4M3, E3M2, E2M3, E2M1)}


@cache
def _values(fmt: FloatFormat) -> Float64:
    codes = np.arange(1 << fmt.bits, dtype=np.int64)
    magnitude = codes & (fmt.sign_bit - 1)
    exponent = magnitude >> fmt.mantissa_bits
    mantissa = magnitude & ((1 << fmt.mantissa_bits) - 1)
    significand = np.where(exponent == 0, mantissa, mantissa + (1 << fmt.mantissa_bits))
    values = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - fmt.bias - fmt.mantissa_bits)
    if fmt.infinity is not None:
        values[magnitude == fmt.infinity] = np.inf
    if fmt.has_nan:
        values[magnitude > (fmt.max_finite if fmt.infinity is None else fmt.infinity)] = np.nan
    values = np.where(codes & fmt.sign_bit, -values, values)
    values.setflags(write=False)
    return values


def decode(codes: npt.NDArray[np.unsignedinteger], fmt: FloatFormat) -> Float64:
    """The exact value of each code as float64. Bits above the format's width must be zero."""
    if fmt is F32:
        return codes.astype(np.uint32).view(np.float32).astype(np.float64)
    return taken(_values(fmt), codes)


def encode(
    values: Float64, fmt: FloatFormat, rounding: Rounding = "rn", *, satfinite: bool = False, relu: bool = False
) -> Codes:
    """The code of each value, rounded once. Subnormals are kept and zero keeps its sign.

    Overflow gives infinity or the maximum by rounding mode, and always the maximum with `satfinite` or in a format
    without infinity. NaN gives `fmt.nan` with the sign dropped. `relu` gives +0 for a negative result and leaves NaN
    (facts.md 7.2). A value that is itself inexact must have been rounded to odd.
    """
    bits = (values if is_traced(values) else np.asarray(values, dtype=np.float64)).view(np.uint64)
    negative = (bits >> np.uint64(63)).astype(bool)
    field = ((bits >> _F64_MANTISSA) & np.uint64(0x7FF)).astype(np.int64)
    fraction = bits & _F64_FRACTION
    significand = np.where(field == 0, fraction, fraction | _F64_HIDDEN)
    lowest = 1 - fmt.bias
    exponent = np.maximum(field, 1) - 1023
    scale = np.maximum(exponent, lowest)
    shift = np.minimum(52 - fmt.mantissa_bits + scale - exponent, 63).astype(np.uint64)
    kept = significand >> shift
    kept += _rounds_away(significand, kept, shift, negative, rounding)
    magnitude = ((scale - lowest) << fmt.mantissa_bits) + kept.astype(np.int64)
    magnitude = np.where(magnitude > fmt.max_finite, _overflow(fmt, negative, rounding, satfinite), magnitude)
    magnitude = np.where(field == 0x7FF, fmt.max_finite if satfinite else fmt.infinity or fmt.max_finite, magnitude)
    codes = np.where(negative, 0 if relu else magnitude | fmt.sign_bit, magnitude)
    return np.where(np.isnan(values), fmt.nan, codes).astype(np.uint32)


def _rounds_away(
    significand: npt.NDArray[np.uint64],
    kept: npt.NDArray[np.uint64],
    shift: npt.NDArray[np.uint64],
    negative: npt.NDArray[np.bool_],
    rounding: Rounding,
) -> npt.NDArray[np.bool_]:
    dropped = significand & ((_ONE << shift) - _ONE)
    half = (_ONE << shift) >> _ONE
    match rounding:
        case "rn":
            return (dropped > half) | ((dropped == half) & (half != 0) & ((kept & _ONE) == _ONE))
        case "rna":
            return (dropped >= half) & (half != 0)
        case "rm":
            return (dropped != 0) & negative
        case "rp":
            return (dropped != 0) & ~negative
        case "rz":
            return np.zeros(dropped.shape, dtype=np.bool_)


def _overflow(
    fmt: FloatFormat, negative: npt.NDArray[np.bool_], rounding: Rounding, satfinite: bool
) -> npt.NDArray[np.int64] | int:
    if satfinite or fmt.infinity is None or rounding == "rz":
        return fmt.max_finite
    if rounding == "rm":
        return np.where(negative, fmt.infinity, fmt.max_finite)
    if rounding == "rp":
        return np.where(negative, fmt.max_finite, fmt.infinity)
    return fmt.infinity


def add_to_odd(a: Float64, b: Float64) -> Float64:
    """a + b rounded to odd, so that rounding the result to 51 bits or fewer gives the once-rounded sum.

    Knuth's two-sum yields the exact error. An inexact sum with an even last bit moves one unit towards the error.
    Exact while sum and error stay in the normal range of float64. Infinities and NaN come out as in a + b.
    """
    total = a + b
    seen = total - a
    error = (a - (total - seen)) + (b - seen)
    inexact = (error < 0) | (error > 0)
    if not is_traced(inexact) and not count_nonzero(inexact):
        return total
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + np.where(inexact & ((bits & 1) == 0), step, 0)).view(np.float64)


def directed(nearest: npt.NDArray[_Float], excess: Float64, rounding: Rounding) -> npt.NDArray[_Float]:
    """Moves a round-to-nearest result to the neighbour that `rounding` requires.

    `excess` has the sign of the exact value minus `nearest`. NaN means that the result is exact (an infinity, a NaN).
    """
    if rounding == "rn":
        return nearest
    down = {"rm": excess < 0, "rp": np.False_, "rz": (excess < 0) & (nearest > 0)}[rounding]
    up = {"rm": np.False_, "rp": excess > 0, "rz": (excess > 0) & (nearest < 0)}[rounding]
    infinity = nearest.dtype.type(np.inf)
    lowered = np.where(down, np.nextafter(nearest, -infinity), nearest)
    return np.where(up, np.nextafter(nearest, infinity), lowered)


# Floating-point comparisons of `set`, `setp` and `slct` (PTX ISA 9.3.1.2).


Float = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Truth = npt.NDArray[np.bool_]


def _ordered_unequal(a: Float, b: Float) -> Truth:
    return (a < b) | (a > b)


def _numbers(a: Float, b: Float) -> Truth:
    return (a == a) & (b == b)


# With a NaN operand an ordered comparison is false and an unordered one (`u`) is true.
COMPARISONS: dict[str, Callable[[Float, Float], Truth]] = {
    "eq": np.equal,
    "ne": _ordered_unequal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: ~_ordered_unequal(a, b),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~np.greater_equal(a, b),
    "leu": lambda a, b: ~np.greater(a, b),
    "gtu": lambda a, b: ~np.less_equal(a, b),
    "geu": lambda a, b: ~np.less(a, b),
    "num": _numbers,
    "nan": lambda a, b: ~_numbers(a, b),
}
"""`COMPARISONS[op](a, b)`, a bool array; with `.ftz`, flush f32 operands first (`f32.flush`)."""
