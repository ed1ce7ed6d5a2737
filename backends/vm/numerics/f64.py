"""Double-precision arithmetic (PTX ISA 9.7.3). Rare in these kernels, so exact fractions rather than speed.

The bit pattern of a NaN result is not documented and was not measured: it is NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import copysign, inf, isfinite, isinf

import numpy as np

from backends.vm.numerics.formats import Float64, Rounding, directed


def add(a: Float64, b: Float64, *, rounding: Rounding = "rn") -> Float64:
    """9.7.3.3."""
    return a + b if rounding == "rn" else fma(a, np.ones_like(a), b, rounding=rounding)


def sub(a: Float64, b: Float64, *, rounding: Rounding = "rn") -> Float64:
    """9.7.3.4."""
    return add(a, np.negative(b), rounding=rounding)


def mul(a: Float64, b: Float64, *, rounding: Rounding = "rn") -> Float64:
    """9.7.3.5."""
    return a * b if rounding == "rn" else _each(_mul, rounding, a, b)


def fma(a: Float64, b: Float64, c: Float64, *, rounding: Rounding = "rn") -> Float64:
    """9.7.3.6: a * b + c rounded once."""
    return _each(_fma, rounding, a, b, c)


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
    return np.where(a == b, merged, np.fmin(a, b))


def maximum(a: Float64, b: Float64) -> Float64:
    """9.7.3.12: one NaN gives the other operand, -0 is below +0."""
    merged = (a.view(np.uint64) & b.view(np.uint64)).view(np.float64)
    return np.where(a == b, merged, np.fmax(a, b))


def _each(function: Callable[..., float], rounding: Rounding, *operands: Float64) -> Float64:
    columns = np.broadcast_arrays(*operands)
    rows = zip(*(column.ravel().tolist() for column in columns), strict=True)
    return np.array([function(rounding, *row) for row in rows], dtype=np.float64).reshape(columns[0].shape)


def _nearest(exact: Fraction) -> float:
    try:
        return float(exact)
    except OverflowError:
        return inf if exact > 0 else -inf


def _step(nearest: float, excess: float, rounding: Rounding) -> float:
    return float(directed(np.array([nearest]), np.array([excess]), rounding)[0])


def _round(exact: Fraction, rounding: Rounding) -> float:
    """A nonzero value rounded once."""
    nearest = _nearest(exact)
    if isinf(nearest):
        return _step(nearest, -nearest, rounding)
    return _step(nearest, float((exact > Fraction(nearest)) - (exact < Fraction(nearest))), rounding)


def _mul(rounding: Rounding, a: float, b: float) -> float:
    if a == 0 or b == 0 or not isfinite(a) or not isfinite(b):
        return a * b
    return _round(Fraction(a) * Fraction(b), rounding)


def _fma(rounding: Rounding, a: float, b: float, c: float) -> float:
    if not isfinite(a) or not isfinite(b):
        return a * b + c
    if not isfinite(c):
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact:
        return _round(exact, rounding)
    negative = (copysign(1, a) < 0) != (copysign(1, b) < 0)
    if negative == (copysign(1, c) < 0):
        return c
    # IEEE 754 6.3: an exact zero sum of unlike signs is -0 when rounding down, +0 otherwise.
    return -0.0 if rounding == "rm" else 0.0


def _div(rounding: Rounding, a: float, b: float, quotient: float) -> float:
    if a == 0 or b == 0 or not isfinite(a) or not isfinite(b):
        return quotient
    return _round(Fraction(a) / Fraction(b), rounding)


def _sqrt(rounding: Rounding, a: float, root: float) -> float:
    if not isfinite(root) or root == 0:
        return root
    square = Fraction(root) ** 2
    return _step(root, float((Fraction(a) > square) - (Fraction(a) < square)), rounding)
