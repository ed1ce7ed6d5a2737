"""Double-precision arithmetic (PTX ISA 9.7.3). It is rare in these kernels, so it uses exact fractions, not speed.

A NaN operand passes through quieted, with its payload and sign. Of several the last one wins; for fma the order is b
before c before a (facts.md 7.5). An invalid operation gives NumPy's NaN, the same as an H200's.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import copysign, inf, isfinite, isinf, nan

import numpy as np

from backends.vm.numerics import approx
from backends.vm.numerics.formats import Float64, Rounding, directed

_QUIET = np.uint64(1 << 51)
_SMALLEST_NORMAL = 2.0**-1022

_Nearest = tuple[float, float]
"""The nearest double, and `excess` as in `directed`."""


def add(a: Float64, b: Float64, *, rounding: Rounding = "rn") -> Float64:
    """9.7.3.3."""
    r = a + b if rounding == "rn" else _each(_fma, rounding, a, np.ones_like(a), b)
    return _nan_of(r, a, b)


def sub(a: Float64, b: Float64, *, rounding: Rounding = "rn") -> Float64:
    """9.7.3.4."""
    return _nan_of(add(a, np.negative(b), rounding=rounding), a, b)


def mul(a: Float64, b: Float64, *, rounding: Rounding = "rn") -> Float64:
    """9.7.3.5."""
    return _nan_of(a * b if rounding == "rn" else _each(_mul, rounding, a, b), a, b)


def fma(a: Float64, b: Float64, c: Float64, *, rounding: Rounding = "rn") -> Float64:
    """9.7.3.6: a * b + c rounded once."""
    return _nan_of(_each(_fma, rounding, a, b, c), a, c, b)


def _nan_of(r: Float64, *operands: Float64) -> Float64:
    """The last NaN among the operands, quieted; `r` if there is none."""
    for one in operands:
        if np.isnan(one).any():
            r = np.where(np.isnan(one), quiet(one), r)
    return r


def quiet(a: Float64) -> Float64:
    """Each NaN with the top fraction bit set. Other values are unchanged."""
    return np.where(np.isnan(a), (a.view(np.uint64) | _QUIET).view(np.float64), a)


def negate(a: Float64) -> Float64:
    """9.7.3.10; a NaN keeps its sign."""
    return np.where(np.isnan(a), quiet(a), np.negative(a))


def absolute(a: Float64) -> Float64:
    """9.7.3.9; a NaN keeps its sign."""
    return np.where(np.isnan(a), quiet(a), np.abs(a))


def rsqrt(a: Float64) -> Float64:
    """`rsqrt.approx.f64` (9.7.3.16): a 20-bit seed and one third-order step, each multiply-add rounded once.

    The order of operations was found by trial. It gives an H200's bits (conformance/silicon/lanewise).
    """
    plain = 1.0 / np.sqrt(a)
    scale = np.where(np.abs(a) < _SMALLEST_NORMAL, 2.0**54, 1.0)
    with_a_step = (a > 0) & np.isfinite(a)
    x = np.where(with_a_step, a * scale, 1.0)
    y = approx.rsqrt_f64(x)
    error = fma(x, -(y * y), np.ones_like(x))
    stepped = fma(fma(error, np.full_like(x, 0.375), np.full_like(x, 0.5)), y * error, y)
    return np.where(with_a_step, stepped * np.sqrt(scale), plain)


def div(a: Float64, b: Float64, *, rounding: Rounding = "rn") -> Float64:
    """9.7.3.8."""
    quotient = a / b
    return quotient if rounding == "rn" else _each(_div, rounding, a, b, quotient)


def sqrt(a: Float64, *, rounding: Rounding = "rn") -> Float64:
    """9.7.3.15."""
    root = np.sqrt(a)
    return root if rounding == "rn" else _each(_sqrt, rounding, a, root)


def minimum(a: Float64, b: Float64) -> Float64:
    """9.7.3.11: one NaN gives the other operand, -0 is below +0."""
    merged = (a.view(np.uint64) | b.view(np.uint64)).view(np.float64)
    return _both_nan(np.where(a == b, merged, np.fmin(a, b)), a, b)


def maximum(a: Float64, b: Float64) -> Float64:
    """9.7.3.12: one NaN gives the other operand, -0 is below +0."""
    merged = (a.view(np.uint64) & b.view(np.uint64)).view(np.float64)
    return _both_nan(np.where(a == b, merged, np.fmax(a, b)), a, b)


def _both_nan(r: Float64, a: Float64, b: Float64) -> Float64:
    return np.where(np.isnan(a) & np.isnan(b), quiet(b), r)


def _each(function: Callable[..., _Nearest], rounding: Rounding, *operands: Float64) -> Float64:
    """`function` of each element, moved to the neighbour that `rounding` requires."""
    columns = np.broadcast_arrays(*operands)
    rows = zip(*(column.ravel().tolist() for column in columns), strict=True)
    found = np.array([function(rounding, *row) for row in rows], dtype=np.float64).reshape(-1, 2)
    return directed(found[:, 0], found[:, 1], rounding).reshape(columns[0].shape)


def _nearest(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return inf if exact > 0 else -inf


def _round(exact: Fraction, rounding: Rounding) -> _Nearest:
    nearest = _nearest(exact)
    if rounding == "rn":
        return nearest, nan
    if isinf(nearest):
        return nearest, -nearest
    rounded = Fraction(nearest)
    return nearest, float((exact > rounded) - (exact < rounded))


def _mul(rounding: Rounding, a: float, b: float) -> _Nearest:
    if a == 0 or b == 0 or not isfinite(a) or not isfinite(b):
        return a * b, nan
    return _round(Fraction(a) * Fraction(b), rounding)


def _fma(rounding: Rounding, a: float, b: float, c: float) -> _Nearest:
    if not isfinite(a) or not isfinite(b):
        return a * b + c, nan
    if not isfinite(c):
        return c, nan
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact:
        return _round(exact, rounding)
    negative = (copysign(1, a) < 0) != (copysign(1, b) < 0)
    if negative == (copysign(1, c) < 0):
        return c, nan
    # IEEE 754 6.3: an exact zero sum of unlike signs is -0 when rounding down, +0 otherwise.
    return (-0.0 if rounding == "rm" else 0.0), nan


def _div(rounding: Rounding, a: float, b: float, quotient: float) -> _Nearest:
    if a == 0 or b == 0 or not isfinite(a) or not isfinite(b):
        return quotient, nan
    return _round(Fraction(a) / Fraction(b), rounding)


def _sqrt(rounding: Rounding, a: float, root: float) -> _Nearest:
    if not isfinite(root) or root == 0:
        return root, nan
    square = Fraction(root) ** 2
    return root, float((Fraction(a) > square) - (Fraction(a) < square))
