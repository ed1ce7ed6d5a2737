"""Single-precision arithmetic (PTX ISA 9.7.3): correctly rounded, subnormals kept unless `ftz`, one NaN pattern.

Measured on an H200 (facts.md 7.3): every NaN result is 0x7FFFFFFF, and min and max order -0 below +0. A `.f32x2`
operand is two float32 values, low word first: view the 64-bit array as float32 and call the same function.
The common case, round to nearest without flushing, has its own functions (`add_rn`, ...) without options to check.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from backends.vm.numerics.formats import Float64, Rounding, add_to_odd, directed
from backends.vm.numerics.traced import fused, is_traced
from backends.vm.numpy_calls import count_nonzero

Float32 = npt.NDArray[np.float32]
Property = Literal["finite", "infinite", "number", "notanumber", "normal", "subnormal"]

NAN = np.array(0x7FFF_FFFF, np.uint32).view(np.float32)[()]
SMALLEST_NORMAL = np.float32(2.0**-126)
SMALLEST_KEPT_RN = 2.0**-126 * (1 - 2.0**-25)
_SMALLEST_KEPT_RZ = 2.0**-126
_LARGEST_FLUSHED_AWAY = 2.0**-126 * (1 - 2.0**-24)
_SIGN = np.uint32(0x8000_0000)
_ABOVE_28_BITS = np.array(36, np.int64)


def canonical(r: Float32) -> Float32:
    """`r` with every NaN replaced by 0x7FFFFFFF. Tests by a sum of squares: cheap, and NaN only if a term is."""
    flat = r.ravel()
    squares = flat.dot(flat)
    if squares == squares:
        return r
    if is_traced(r):
        return np.where(np.isnan(r), NAN, r)
    # Padding rows of a tile are often NaN. This takes half the time of `where`.
    found = np.array(r)
    found[np.isnan(found)] = NAN
    return found


def flush(a: Float32) -> Float32:
    """Subnormals become zero of the same sign."""
    if is_traced(a):
        bits = a.view(np.uint32)
        return np.where(np.abs(a) < SMALLEST_NORMAL, bits & _SIGN, bits).view(np.float32)
    subnormal = np.abs(a) < SMALLEST_NORMAL
    return np.where(subnormal, np.copysign(np.float32(0), a), a) if count_nonzero(subnormal) else a


def saturate(r: Float32) -> Float32:
    """`.sat`: clamped to [0, 1]; NaN and -0 become +0."""
    return np.where(r > 0, np.minimum(r, np.float32(1)), np.float32(0))


def add_rn(a: Float32, b: Float32) -> Float32:
    return canonical(a + b)


def sub_rn(a: Float32, b: Float32) -> Float32:
    return canonical(a - b)


def mul_rn(a: Float32, b: Float32) -> Float32:
    return canonical(a * b)


def fma_rn(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c rounded once.

    The product is exact in float64, the sum is not. Rounding it again to float32 errs only where the float64 sum is
    exactly halfway between two float32 values, and such a sum ends in 28 zero bits.
    """
    if is_traced(a):
        return canonical(fused(a, b, c))
    product = a.astype(np.float64) * b.astype(np.float64)
    total = product + c
    r = total.astype(np.float32)
    tail = np.left_shift(total.view(np.int64), _ABOVE_28_BITS)
    if count_nonzero(tail) == total.size:
        return r
    halfway = (tail == 0) & (r != total)
    return canonical(add_to_odd(product, c.astype(np.float64)).astype(np.float32)) if count_nonzero(halfway) else r


def add(a: Float32, b: Float32, *, rounding: Rounding = "rn", ftz: bool = False, sat: bool = False) -> Float32:
    """PTX ISA 9.7.3.3."""
    if ftz:
        a, b = flush(a), flush(b)
    r = add_rn(a, b) if rounding == "rn" else _round_sum(a.astype(np.float64), b.astype(np.float64), rounding)
    return _finish(r, ftz, sat)


def sub(a: Float32, b: Float32, *, rounding: Rounding = "rn", ftz: bool = False, sat: bool = False) -> Float32:
    """PTX ISA 9.7.3.4."""
    return add(a, np.negative(b), rounding=rounding, ftz=ftz, sat=sat)


def mul(a: Float32, b: Float32, *, rounding: Rounding = "rn", ftz: bool = False, sat: bool = False) -> Float32:
    """PTX ISA 9.7.3.5."""
    if ftz:
        a, b = flush(a), flush(b)
    r = a * b
    if rounding == "rn" and not ftz:
        return _finish(canonical(r), ftz, sat)
    exact = a.astype(np.float64) * b.astype(np.float64)
    if rounding != "rn":
        r = directed(r, exact - r.astype(np.float64), rounding)
    return _finish(_flush_rounded(canonical(r), exact, rounding) if ftz else canonical(r), ftz, sat)


def fma(
    a: Float32, b: Float32, c: Float32, *, rounding: Rounding = "rn", ftz: bool = False, sat: bool = False
) -> Float32:
    """PTX ISA 9.7.3.6."""
    if ftz:
        a, b, c = flush(a), flush(b), flush(c)
    if rounding == "rn" and not ftz:
        return _finish(fma_rn(a, b, c), ftz, sat)
    product, wide = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    r = fma_rn(a, b, c) if rounding == "rn" else _round_sum(product, wide, rounding)
    return _finish(_flush_rounded(r, add_to_odd(product, wide), rounding) if ftz else r, ftz, sat)


def _flush_rounded(r: Float32, exact: Float64, rounding: Rounding) -> Float32:
    """`r` with `.ftz`: zero if `exact`, rounded to 24 bits with an unbounded exponent, is below 2^-126.

    Rounding in the subnormal grid first would keep 2^-126 (1 - 2^-25), which an H200 flushes (facts.md 7.3).
    `exact` may be rounded to odd: its 53 bits compare with these bounds like the exact value.
    """
    size = np.abs(exact)
    below = size < SMALLEST_KEPT_RN if rounding == "rn" else size < _SMALLEST_KEPT_RZ
    if rounding in ("rp", "rm"):
        away = (exact > 0) if rounding == "rp" else (exact < 0)
        below = np.where(away, size <= _LARGEST_FLUSHED_AWAY, below)
    flushed = below & (exact != 0)
    return np.where(flushed, np.copysign(np.float32(0), exact.astype(np.float32)), r) if np.any(flushed) else r


def _round_sum(a: Float64, b: Float64, rounding: Rounding) -> Float32:
    total = add_to_odd(a, b)
    if rounding == "rm":
        # IEEE 754 6.3: an exact zero sum of unlike signs is -0 when rounding down.
        total = np.where((total == 0) & (np.signbit(a) | np.signbit(b)), -0.0, total)
    nearest = total.astype(np.float32)
    return canonical(directed(nearest, total - nearest.astype(np.float64), rounding))


def _finish(r: Float32, ftz: bool, sat: bool) -> Float32:
    if ftz:
        r = flush(r)
    return saturate(r) if sat else r


def div(a: Float32, b: Float32, *, rounding: Rounding = "rn", ftz: bool = False) -> Float32:
    """PTX ISA 9.7.3.8, `div.rnd`."""
    if ftz:
        a, b = flush(a), flush(b)
    r = a / b
    if rounding != "rn":
        wide = b.astype(np.float64)
        # Quotient times divisor has 48 bits and the remainder fewer: both are exact in float64.
        r = directed(r, (a.astype(np.float64) - r.astype(np.float64) * wide) * np.sign(wide), rounding)
    return _finish(canonical(r), ftz, False)


def rcp(a: Float32, *, rounding: Rounding = "rn", ftz: bool = False) -> Float32:
    """PTX ISA 9.7.3.13, `rcp.rnd`."""
    r = div(np.ones_like(a), a, rounding=rounding, ftz=ftz)
    # No reciprocal is so near to a bound that rounding it to float64 moves it there.
    return _flush_rounded(r, np.reciprocal(a.astype(np.float64)), rounding) if ftz else r


def sqrt(a: Float32, *, rounding: Rounding = "rn", ftz: bool = False) -> Float32:
    """PTX ISA 9.7.3.15, `sqrt.rnd`."""
    if ftz:
        a = flush(a)
    r = np.sqrt(a)
    if rounding != "rn":
        r = directed(r, a.astype(np.float64) - np.square(r.astype(np.float64)), rounding)
    return _finish(canonical(r), ftz, False)


def minimum(
    a: Float32,
    b: Float32,
    c: Float32 | None = None,
    *,
    nan: bool = False,
    ftz: bool = False,
    abs: bool = False,
    xorsign: bool = False,
) -> Float32:
    """PTX ISA 9.7.3.11. One NaN gives the other operand, or NaN with `nan` (`.NaN`); -0 is below +0."""
    return _extreme(np.fmin, np.bitwise_or, (a, b) if c is None else (a, b, c), nan, ftz, abs, xorsign)


def maximum(
    a: Float32,
    b: Float32,
    c: Float32 | None = None,
    *,
    nan: bool = False,
    ftz: bool = False,
    abs: bool = False,
    xorsign: bool = False,
) -> Float32:
    """PTX ISA 9.7.3.12. One NaN gives the other operand, or NaN with `nan` (`.NaN`); -0 is below +0."""
    return _extreme(np.fmax, np.bitwise_and, (a, b) if c is None else (a, b, c), nan, ftz, abs, xorsign)


def min_num(a: Float32, b: Float32) -> Float32:
    """`min.f32` with no modifier."""
    return _pick(np.fmin, np.bitwise_or, a, b)


def max_num(a: Float32, b: Float32) -> Float32:
    """`max.f32` with no modifier."""
    return _pick(np.fmax, np.bitwise_and, a, b)


def _pick(choose: np.ufunc, merge: np.ufunc, a: Float32, b: Float32) -> Float32:
    r = choose(a, b)
    if is_traced(r) or count_nonzero(r) != r.size:
        # Equal operands differ in bits only if they are zeros of opposite sign: there OR gives -0 and AND gives +0.
        r = np.where(a == b, merge(a.view(np.uint32), b.view(np.uint32)).view(np.float32), r)
    return canonical(r)


def _extreme(
    choose: np.ufunc, merge: np.ufunc, operands: tuple[Float32, ...], nan: bool, ftz: bool, abs: bool, xorsign: bool
) -> Float32:
    if ftz:
        operands = tuple(flush(x) for x in operands)
    sign = operands[0].view(np.uint32) ^ operands[1].view(np.uint32)
    if abs:
        operands = tuple(np.abs(x) for x in operands)
    r = operands[0]
    for x in operands[1:]:
        r = _pick(choose, merge, r, x)
    if nan:
        for x in operands:
            r = np.where(np.isnan(x), NAN, r)
    if xorsign:
        r = np.where(np.isnan(r), r, ((r.view(np.uint32) & ~_SIGN) | (sign & _SIGN)).view(np.float32))
    return r


def negate(a: Float32, *, ftz: bool = False) -> Float32:
    """PTX ISA 9.7.3.10; a NaN becomes 0x7FFFFFFF (facts.md 7.3)."""
    return canonical(np.negative(flush(a) if ftz else a))


def absolute(a: Float32, *, ftz: bool = False) -> Float32:
    """PTX ISA 9.7.3.9; a NaN becomes 0x7FFFFFFF (facts.md 7.3)."""
    return canonical(np.abs(flush(a) if ftz else a))


def copysign(a: Float32, b: Float32) -> Float32:
    """The magnitude of `b` with the sign of `a`, in the ISA's operand order (PTX ISA 9.7.3.2)."""
    return np.copysign(b, a)


def testp(prop: Property, a: npt.NDArray[np.floating]) -> npt.NDArray[np.bool_]:
    """PTX ISA 9.7.3.1, for f32 and f64; zero counts as normal."""
    match prop:
        case "finite":
            return np.isfinite(a)
        case "infinite":
            return np.isinf(a)
        case "number":
            return ~np.isnan(a)
        case "notanumber":
            return np.isnan(a)
        case "normal":
            return np.isfinite(a) & ((np.abs(a) >= np.finfo(a.dtype).smallest_normal) | (a == 0))
        case "subnormal":
            return (np.abs(a) < np.finfo(a.dtype).smallest_normal) & (a != 0)
