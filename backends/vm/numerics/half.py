"""Half-precision arithmetic (PTX ISA 9.7.4), also mixed with f32 (9.7.5). Each result is rounded once.

Operands and results are 16-bit codes; `fmt` is `formats.F16` or `formats.BF16`. A `.f16x2` or `.bf16x2` operand is two
codes, low half first: view the 32-bit array as uint16 and call the same function. Every NaN result is 0x7FFF (measured
on an H200, facts.md 7.2 and 7.3). `ftz` exists for f16 only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import numpy.typing as npt

from backends.vm.numerics import approx, f32
from backends.vm.numerics.f32 import Float32
from backends.vm.numerics.formats import (
    BF16,
    COMPARISONS,
    F16,
    Float64,
    FloatFormat,
    Rounding,
    Truth,
    add_to_odd,
    decode,
    encode,
)
from backends.vm.numerics.traced import is_traced

Codes16 = npt.NDArray[np.uint16]

FORMATS: dict[str, FloatFormat] = {fmt.name: fmt for fmt in (F16, BF16)}
_SIGN = np.uint16(0x8000)


def widen(a: Codes16, fmt: FloatFormat) -> Float32:
    """The exact value of each code as float32, NaN as 0x7FFFFFFF."""
    return f32.canonical(decode(a, fmt).astype(np.float32))


def flush(a: Codes16, fmt: FloatFormat) -> Codes16:
    """Subnormals become zero of the same sign."""
    exponent = np.uint16(fmt.infinity or 0)
    return np.where(a & exponent, a, a & _SIGN)


def _nearest_f16(values: Float64 | Float32) -> Codes16:
    """As `encode`: NumPy rounds to float16 once, to nearest."""
    if is_traced(values) and values.dtype == np.float64:
        return encode(cast("Float64", values), F16).astype(np.uint16)
    with np.errstate(over="ignore"):
        codes = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(F16.nan), codes)


def _finish(values: Float64 | Float32, fmt: FloatFormat, ftz: bool, sat: bool, relu: bool) -> Codes16:
    if sat:
        values = np.where(values > 0, np.minimum(values, 1.0), 0.0)
    wide = cast("Float64", values)
    codes = _nearest_f16(values) if fmt is F16 and not relu else encode(wide, fmt, relu=relu).astype(np.uint16)
    return flush(codes, fmt) if ftz else codes


def add(a: Codes16, b: Codes16, fmt: FloatFormat, *, ftz: bool = False, sat: bool = False) -> Codes16:
    """9.7.4.1."""
    if ftz:
        a, b = flush(a, fmt), flush(b, fmt)
    return _finish(add_to_odd(decode(a, fmt), decode(b, fmt)), fmt, ftz, sat, False)


def sub(a: Codes16, b: Codes16, fmt: FloatFormat, *, ftz: bool = False, sat: bool = False) -> Codes16:
    """9.7.4.2."""
    return add(a, b ^ _SIGN, fmt, ftz=ftz, sat=sat)


def mul(a: Codes16, b: Codes16, fmt: FloatFormat, *, ftz: bool = False, sat: bool = False) -> Codes16:
    """9.7.4.3."""
    if ftz:
        a, b = flush(a, fmt), flush(b, fmt)
    if fmt is F16:
        # The product is exact in float32: 22 bits, and no exponent below -48.
        x, y = (one.view(np.float16).astype(np.float32) for one in (a, b))
        return _finish(x * y, fmt, ftz, sat, False)
    return _finish(decode(a, fmt) * decode(b, fmt), fmt, ftz, sat, False)


def fma(
    a: Codes16,
    b: Codes16,
    c: Codes16,
    fmt: FloatFormat,
    *,
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
) -> Codes16:
    """9.7.4.4; `relu` makes a negative result +0."""
    if ftz:
        a, b, c = flush(a, fmt), flush(b, fmt), flush(c, fmt)
    return _finish(add_to_odd(decode(a, fmt) * decode(b, fmt), decode(c, fmt)), fmt, ftz, sat, relu)


def minimum(
    a: Codes16, b: Codes16, fmt: FloatFormat, *, nan: bool = False, ftz: bool = False, xorsign_abs: bool = False
) -> Codes16:
    """9.7.4.7. One NaN gives the other operand, or NaN with `nan` (`.NaN`); -0 is below +0."""
    if ftz:
        a, b = flush(a, fmt), flush(b, fmt)
    return _extreme(f32.minimum, a, b, fmt, nan, xorsign_abs)


def maximum(
    a: Codes16, b: Codes16, fmt: FloatFormat, *, nan: bool = False, ftz: bool = False, xorsign_abs: bool = False
) -> Codes16:
    """9.7.4.8. One NaN gives the other operand, or NaN with `nan` (`.NaN`); -0 is below +0."""
    if ftz:
        a, b = flush(a, fmt), flush(b, fmt)
    return _extreme(f32.maximum, a, b, fmt, nan, xorsign_abs)


def _extreme(
    choose: Callable[..., Float32], a: Codes16, b: Codes16, fmt: FloatFormat, nan: bool, xorsign_abs: bool
) -> Codes16:
    chosen = choose(widen(a, fmt), widen(b, fmt), nan=nan, abs=xorsign_abs)
    r = encode(chosen.astype(np.float64), fmt).astype(np.uint16)
    # Signs come from the codes, because a NaN operand's sign counts too and widening drops it.
    return np.where(np.isnan(chosen), r, (r & ~_SIGN) | ((a ^ b) & _SIGN)) if xorsign_abs else r


REDUCTIONS: dict[str, Callable[[Codes16, Codes16, FloatFormat], Codes16]] = {
    "add": add,
    "min": minimum,
    "max": maximum,
}
"""How atomics and bulk reductions combine halves. Subnormals are kept (`.noftz`)."""


def negate(a: Codes16, fmt: FloatFormat, *, ftz: bool = False) -> Codes16:
    """9.7.4.5; a NaN becomes 0x7FFF (facts.md 7.3)."""
    return canonical((flush(a, fmt) if ftz else a) ^ _SIGN, fmt)


def absolute(a: Codes16, fmt: FloatFormat, *, ftz: bool = False) -> Codes16:
    """9.7.4.6; a NaN becomes 0x7FFF (facts.md 7.3)."""
    return canonical((flush(a, fmt) if ftz else a) & ~_SIGN, fmt)


def canonical(a: Codes16, fmt: FloatFormat) -> Codes16:
    """The codes, with the one NaN of arithmetic for every NaN."""
    return np.where((a & 0x7FFF) > (fmt.infinity or 0), 0x7FFF, a).astype(np.uint16)


def compare(op: str, a: Codes16, b: Codes16, fmt: FloatFormat, *, ftz: bool = False) -> Truth:
    """One of `compare.COMPARISONS` (9.7.7)."""
    if ftz:
        a, b = flush(a, fmt), flush(b, fmt)
    return COMPARISONS[op](decode(a, fmt), decode(b, fmt))


def ex2(a: Codes16, fmt: FloatFormat) -> Codes16:
    """`ex2.approx.f16` and `ex2.approx.ftz.bf16`, whose subnormal inputs and results are flushed (9.7.4.10)."""
    return approx.half("ex2", fmt.name)[a]


def tanh(a: Codes16, fmt: FloatFormat) -> Codes16:
    """`tanh.approx` (9.7.4.9)."""
    return approx.half("tanh", fmt.name)[a]


def mixed_add(a: Codes16, c: Float32, fmt: FloatFormat, *, rounding: Rounding = "rn", sat: bool = False) -> Float32:
    """`add.f32.f16` and `add.f32.bf16`: a + c in f32 (9.7.5.1)."""
    return f32.add(widen(a, fmt), c, rounding=rounding, sat=sat)


def mixed_sub(a: Codes16, c: Float32, fmt: FloatFormat, *, rounding: Rounding = "rn", sat: bool = False) -> Float32:
    """`sub.f32.f16` and `sub.f32.bf16`: a - c in f32 (9.7.5.2)."""
    return f32.sub(widen(a, fmt), c, rounding=rounding, sat=sat)


def mixed_fma(
    a: Codes16, b: Codes16, c: Float32, fmt: FloatFormat, *, rounding: Rounding = "rn", sat: bool = False
) -> Float32:
    """`fma.f32.f16` and `fma.f32.bf16`: a * b + c rounded once to f32 (9.7.5.3)."""
    return f32.fma(widen(a, fmt), widen(b, fmt), c, rounding=rounding, sat=sat)
