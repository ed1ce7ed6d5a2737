"""PTX's approximate functions as an H200 computes them: the sequences that ptxas builds around MUFU (facts.md 7.4).

ptxas (CUDA 13.0) emits the same sequences for sm_100a. Every f32 function here gives the bits of an H200 for all 2^32
operands. The divisions were each compared on 7e9 pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from backends.vm.numerics import mufu
from backends.vm.numerics.compiled import compiled
from backends.vm.numerics.f32 import SMALLEST_KEPT_RN, Float32
from backends.vm.numerics.formats import Float64
from backends.vm.numerics.mufu import Words
from backends.vm.numerics.traced import is_traced

Codes16 = npt.NDArray[np.uint16]

_TINY: Final = np.uint32(0x0080_0000)
"""The bits of 2^-126, the smallest normal number."""
_HUGE: Final = np.uint32(0x7E80_0000)
"""The bits of 2^126."""
_INF: Final = np.uint32(0x7F80_0000)
_SIGN: Final = np.uint32(0x8000_0000)
_TURNS_A_RADIAN: Final = float(np.float32(0.15915494))


def _magnitude(a: Words) -> Words:
    return a & np.uint32(0x7FFF_FFFF)


def _canonical(a: Words) -> Words:
    return np.where(_magnitude(a) > _INF, mufu.NAN, a)


def _flushed(a: Words) -> Words:
    return np.where(_magnitude(a) < _TINY, a & _SIGN, a)


def _product(a: Words, b: Words) -> Words:
    """FMUL."""
    return _canonical((a.view(np.float32) * b.view(np.float32)).view(np.uint32))


def _product_ftz(a: Words, b: Words) -> Words:
    """FMUL.FTZ: flushes results below 2^-126 after rounding to 24 bits with an unbounded exponent."""
    a, b = _flushed(a), _flushed(b)
    exact = a.view(np.float32).astype(np.float64) * b.view(np.float32).astype(np.float64)
    size = np.where(exact < 0.0, -exact, exact)
    return np.where(size < SMALLEST_KEPT_RN, (a ^ b) & _SIGN, _product(a, b))


def _scaled(a: Words, by: float, where: npt.NDArray[np.bool_]) -> Words:
    return np.where(where, _canonical((a.view(np.float32) * np.float32(by)).view(np.uint32)), a)


def _in_turns(a: Words) -> Words:
    """FMUL.RZ by 1 / 2 pi. A result below 2^-126 may be inexact, but there its size does not matter."""
    exact = a.view(np.float32).astype(np.float64) * _TURNS_A_RADIAN
    nearest = exact.astype(np.float32)
    wide = nearest.astype(np.float64)
    beyond = np.where(wide < 0.0, -wide, wide) > np.where(exact < 0.0, -exact, exact)
    bits = nearest.view(np.uint32)
    return np.where(beyond, bits - np.uint32(1), bits)


def _rcp(a: Words) -> Words:
    size = _magnitude(a)
    tiny, huge = size < _TINY, (size > _HUGE) & (size <= _INF)
    r = mufu.rcp(_scaled(_scaled(a, 2.0**24, tiny), 0.25, huge))
    return _scaled(_scaled(r, 2.0**24, tiny), 0.25, huge)


def _rsqrt(a: Words) -> Words:
    tiny = _magnitude(a) < _TINY
    return _scaled(mufu.rsq(_scaled(a, 2.0**24, tiny)), 2.0**12, tiny)


def _sqrt(a: Words) -> Words:
    tiny = _magnitude(a) < _TINY
    return _scaled(mufu.sqrt(_scaled(a, 2.0**24, tiny)), 2.0**-12, tiny)


def _lg2(a: Words) -> Words:
    tiny = _magnitude(a) < _TINY
    r = mufu.lg2(_scaled(a, 2.0**24, tiny))
    return np.where(tiny, _canonical((r.view(np.float32) - np.float32(24)).view(np.uint32)), r)


def _ex2(a: Words) -> Words:
    low = a.view(np.float32) < np.float32(-126)
    r = mufu.ex2(_scaled(a, 0.5, low))
    return np.where(low, _product(r, r), r)


def _sin(a: Words) -> Words:
    return mufu.sin(_in_turns(a))


def _cos(a: Words) -> Words:
    return mufu.cos(_in_turns(a))


def _div_approx(a: Words, b: Words) -> Words:
    tiny = _magnitude(b) < _TINY
    return _product(_scaled(a, 2.0**24, tiny), mufu.rcp(_scaled(b, 2.0**24, tiny)))


def _div_approx_ftz(a: Words, b: Words) -> Words:
    return _product_ftz(a, mufu.rcp(b))


def _div_full(a: Words, b: Words) -> Words:
    size = _magnitude(b)
    huge, tiny = (size > _HUGE) & (size <= _INF), size < _TINY
    a, b = (_scaled(_scaled(one, 0.25, huge), 2.0**24, tiny) for one in (a, b))
    return _product(a, mufu.rcp(b))


def _div_full_ftz(a: Words, b: Words) -> Words:
    a, b = _flushed(a), _flushed(b)
    size = _magnitude(b)
    huge = (size > _HUGE) & (size <= _INF)
    return _product_ftz(_flushed(_scaled(a, 0.25, huge)), mufu.rcp(_scaled(b, 0.25, huge)))


def _float(function: Callable[..., Words], *operands: Float32) -> Float32:
    if is_traced(operands[0]):
        return function(*[one.view(np.uint32) for one in operands]).view(np.float32)
    return compiled(function, len(operands))(*[one.view(np.uint32) for one in operands]).view(np.float32)


def ex2(a: Float32, *, ftz: bool = False) -> Float32:
    """2^a (9.7.3.21). A subnormal `a` gives 1 with and without `ftz`."""
    return _float(mufu.ex2 if ftz else _ex2, a)


def lg2(a: Float32, *, ftz: bool = False) -> Float32:
    """Base-2 logarithm (9.7.3.20). Either zero gives -inf, a negative operand NaN. Near 1 its precision is absolute."""
    return _float(mufu.lg2 if ftz else _lg2, a)


def rcp(a: Float32, *, ftz: bool = False) -> Float32:
    """1 / a (9.7.3.13)."""
    return _float(mufu.rcp if ftz else _rcp, a)


def rsqrt(a: Float32, *, ftz: bool = False) -> Float32:
    """1 / sqrt(a) (9.7.3.16). A zero gives infinity of its sign."""
    return _float(mufu.rsq if ftz else _rsqrt, a)


def sqrt(a: Float32, *, ftz: bool = False) -> Float32:
    """Square root (9.7.3.15)."""
    return _float(mufu.sqrt if ftz else _sqrt, a)


def sin(a: Float32, *, ftz: bool = False) -> Float32:
    """Sine, `a` in radians (9.7.3.18). `ftz` changes nothing. A huge `a` gives a zero."""
    return _float(_sin, a)


def cos(a: Float32, *, ftz: bool = False) -> Float32:
    """Cosine, `a` in radians (9.7.3.19). `ftz` changes nothing. A huge `a` gives 1."""
    return _float(_cos, a)


def tanh(a: Float32) -> Float32:
    """Hyperbolic tangent (9.7.3.22)."""
    return _float(mufu.tanh, a)


def div_full(a: Float32, b: Float32, *, ftz: bool = False) -> Float32:
    """a / b over the full range (9.7.3.8)."""
    return _float(_div_full_ftz if ftz else _div_full, a, b)


def div_approx(a: Float32, b: Float32, *, ftz: bool = False) -> Float32:
    """a * (1 / b) (9.7.3.8). A divisor beyond 2^126 counts as infinite."""
    return _float(_div_approx_ftz if ftz else _div_approx, a, b)


def _f16_of(r: Words) -> Codes16:
    """f32 bits truncated to f16 bits. f16 subnormals stay; 2^16 and above becomes infinite."""
    b = r.astype(np.int64)
    s, e, m = (b >> 16) & 0x8000, (b >> 23) & 255, b & 0x7F_FFFF
    small = (m | 1 << 23) >> np.clip(126 - e, 0, 40)
    h = np.where(e >= 113, ((e - 112) << 10) + (m >> 13), np.where(e == 0, 0, small))
    h = np.where(e > 142, 0x7C00, h) | s
    return np.where((e == 255) & (m != 0), 0x7FFF, h).astype(np.uint16)


def _bf16_of(r: Words) -> Codes16:
    return np.where(_magnitude(r) > _INF, 0x7FFF, r >> np.uint32(16)).astype(np.uint16)


@cache
def half(function: Literal["ex2", "tanh"], dtype: Literal["f16", "bf16"]) -> Codes16:
    """`ex2.approx` and `tanh.approx` of each of the 65536 codes (9.7.4.9, 9.7.4.10): MUFU's f32 result, truncated."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    if dtype == "f16":
        wide = codes.view(np.float16).astype(np.float32).view(np.uint32)
    else:
        wide = codes.astype(np.uint32) << np.uint32(16)
    result = compiled(mufu.ex2 if function == "ex2" else mufu.tanh)(wide)
    return _f16_of(result) if dtype == "f16" else _bf16_of(result)


def _upper(function: Callable[[Words], Words], a: Float64) -> Float64:
    high = compiled(function)((a.view(np.uint64) >> np.uint64(32)).astype(np.uint32))
    return (high.astype(np.uint64) << np.uint64(32)).view(np.float64)


rcp_f64: Final = partial(_upper, mufu.rcp64h)
"""`rcp.approx.ftz.f64` (9.7.3.14): 20 bits of mantissa, subnormals flushed."""
rsqrt_f64: Final = partial(_upper, mufu.rsq64h)
"""`rsqrt.approx.ftz.f64` (9.7.3.17): 20 bits of mantissa, subnormals flushed."""
