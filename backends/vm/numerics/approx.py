"""Approximate functions of single precision: the correctly rounded value, with the specials a GPU gives.

A GPU's own last bits are not documented; the correctly rounded value lies within every documented bound (PTX ISA
9.7.3.8 and 9.7.3.13 to 9.7.3.22) and is what an H200 returns for most inputs (facts.md 7.4, which also has the
measured errors). Specials follow the values measured there: signed zeros, infinities, subnormals under `ftz`, NaN.
"""

from __future__ import annotations

import numpy as np

from backends.vm.numerics.f32 import NAN, SMALLEST_NORMAL, Float32, canonical, flush
from backends.vm.numerics.formats import Float64


def _result(values: Float64, ftz: bool) -> Float32:
    r = canonical(values.astype(np.float32))
    return flush(r) if ftz else r


def ex2(a: Float32, *, ftz: bool = False) -> Float32:
    """2^a (9.7.3.21). A subnormal `a` gives 1 with and without `ftz`."""
    r = canonical(np.exp2(a.astype(np.float64)).astype(np.float32))
    if ftz:
        tiny = r < SMALLEST_NORMAL
        if np.count_nonzero(tiny):
            r = np.where(tiny, np.float32(0), r)
    return r


def lg2(a: Float32, *, ftz: bool = False) -> Float32:
    """Base-2 logarithm (9.7.3.20); zero of either sign gives -inf, below zero NaN."""
    return _result(np.log2((flush(a) if ftz else a).astype(np.float64)), ftz)


def rcp(a: Float32, *, ftz: bool = False) -> Float32:
    """1 / a (9.7.3.13)."""
    return _result(1.0 / (flush(a) if ftz else a).astype(np.float64), ftz)


def rsqrt(a: Float32, *, ftz: bool = False) -> Float32:
    """1 / sqrt(a) (9.7.3.16); a zero gives infinity of its sign."""
    return _result(1.0 / np.sqrt((flush(a) if ftz else a).astype(np.float64)), ftz)


def sqrt(a: Float32, *, ftz: bool = False) -> Float32:
    """Square root (9.7.3.15)."""
    return _result(np.sqrt((flush(a) if ftz else a).astype(np.float64)), ftz)


def sin(a: Float32, *, ftz: bool = False) -> Float32:
    """Sine, `a` in radians (9.7.3.18)."""
    return _result(np.sin((flush(a) if ftz else a).astype(np.float64)), ftz)


def cos(a: Float32, *, ftz: bool = False) -> Float32:
    """Cosine, `a` in radians (9.7.3.19)."""
    return _result(np.cos((flush(a) if ftz else a).astype(np.float64)), ftz)


def tanh(a: Float32) -> Float32:
    """Hyperbolic tangent (9.7.3.22); subnormals pass through."""
    return _result(np.tanh(a.astype(np.float64)), False)


def div_full(a: Float32, b: Float32, *, ftz: bool = False) -> Float32:
    """a / b over the full range (9.7.3.8)."""
    if ftz:
        a, b = flush(a), flush(b)
    r = canonical(a / b)
    return flush(r) if ftz else r


def div_approx(a: Float32, b: Float32, *, ftz: bool = False) -> Float32:
    """a * (1 / b) (9.7.3.8): a divisor beyond 2^126 counts as infinite, except that inf / b is then NaN."""
    r = div_full(a, b, ftz=ftz)
    huge = np.isfinite(b) & (np.abs(b) > np.float32(2.0**126)) & ~np.isnan(a)
    if not np.count_nonzero(huge):
        return r
    zero = np.copysign(np.float32(0), a) * np.copysign(np.float32(1), b)
    return np.where(huge, np.where(np.isinf(a), NAN, zero), r)
