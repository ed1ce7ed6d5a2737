"""MUFU, the special-function unit of an H200 (sm_90a), bit for bit: bits in, bits out (facts.md 7.4).

One datapath serves all functions: (C0 + C1 x + C2 T(x)) 2^-q, truncated. The leading mantissa bits choose the row
(C0, C1, C2): 128 rows for the reciprocal, 64 per binade for the others, uneven rows for tanh. x is the next 17 mantissa
bits (16 for the reciprocal). T(x) is x^2 from a squarer that drops every partial product below 2^19.

The tables were solved from an H200's outputs, and the functions agree with it for all 2^32 inputs
(conformance/silicon/numerics/mufu_hashes.npz). That Blackwell has the same tables is an assumption.

Functions take and return uint32 arrays of any shape. They use only what `traced.Traced` can follow, so that
`compiled.compiled` can turn them into machine code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from backends.vm.numerics.traced import taken

Words = npt.NDArray[np.uint32]
Int64 = npt.NDArray[np.int64]

NAN: Final = np.uint32(0x7FFF_FFFF)
_INF: Final = 0xFF << 23
_ONE: Final = 1 << 23
_MASK: Final = _ONE - 1
_SIGN: Final = 1 << 31
_QUARTER_TURN: Final = 1 << 23
_TURN_MASK: Final = (1 << 25) - 1


def _squares() -> npt.NDArray[np.int32]:
    """T(x) of every 17-bit x: the partial products of weight 2^19 and more, in units of 2^19."""
    x = np.arange(1 << 17, dtype=np.int64)
    total = np.zeros_like(x)
    for i in range(17):
        bit = (x >> i) & 1
        for j in range(i, 17):
            weight = 2 * i if i == j else i + j + 1
            if weight >= 19:
                total += (bit & (x >> j)) << (weight - 19)
    return total.astype(np.int32)


def _taken(table: npt.NDArray[np.integer], index: Int64) -> Int64:
    return taken(table, index).astype(np.int64)


class _Polynomial:
    """Rows of coefficients: `at(row, x17)` is C0 + C1 x + C2 T(x). `x_shift` drops low bits of x from the C1 term."""

    def __init__(self, rows: Int64, x_shift: int = 0) -> None:
        self.c0, self.c1, self.c2 = (np.ascontiguousarray(rows[:, column]) for column in range(3))
        self.x_shift = x_shift

    def at(self, row: Int64, x17: Int64) -> Int64:
        linear = _taken(self.c1, row) * (x17 >> self.x_shift)
        return _taken(self.c0, row) + linear + _taken(self.c2, row) * _taken(_SQUARES, x17)


_TABLES = np.load(Path(__file__).with_name("mufu_tables.npz"))
_SQUARES: Final = _squares()
_RCP: Final = _Polynomial(_TABLES["rcp"], x_shift=1)
_EX2: Final = _Polynomial(_TABLES["ex2"])
_LG2: Final = _Polynomial(_TABLES["lg2"])
_SIN: Final = _Polynomial(_TABLES["sin"])
_TANH: Final = _Polynomial(_TABLES["tanh"])
# Rows 0 to 63 are for odd exponents, 64 to 127 for even ones: the 7-bit row starts with the exponent's last bit.
_RSQ: Final = _Polynomial(np.concatenate([_TABLES["rsqrt1"], _TABLES["rsqrt0"]]))
_SQRT: Final = _Polynomial(np.concatenate([_TABLES["sqrt1"] * 2, _TABLES["sqrt0"]]))
# By exponent, 119 to 129: the number of dropped mantissa bits, and the first row.
_TANH_SHIFT: Final = np.array([6, 6, 6, 5, 5, 4, 4, 4, 3, 2, 3], np.int64)
_TANH_FIRST: Final = np.array([0, 1, 2, 3, 5, 7, 11, 15, 19, 27, 43], np.int64)


def _split(a: Words) -> tuple[Int64, Int64, Int64]:
    """Sign (in place), biased exponent and mantissa."""
    b = a.astype(np.int64)
    return b & _SIGN, (b >> 23) & 255, b & _MASK


def _or_nan(a: Words, r: Int64) -> Words:
    """`r`, or NaN where `a` is NaN."""
    return np.where((a & np.uint32(0x7FFF_FFFF)) > np.uint32(_INF), NAN, r.astype(np.uint32))


def _truncated(value: Int64, q: int) -> Int64:
    """The bits of value 2^-q, 0 <= value < 2^53, truncated to single precision. 0 gives +0."""
    bits = value.astype(np.float64).view(np.int64) >> 29
    return np.where(value == 0, 0, bits - ((1023 - 127 + q) << 23))


def rcp(a: Words) -> Words:
    """1 / a. Subnormal operands count as zero. Results below 2^-126 become zero."""
    s, e, m = _split(a)
    r = ((253 - e) << 23) + (_RCP.at(m >> 16, (m & 0xFFFF) << 1) >> 15) - _ONE
    r = np.where(r < _ONE, 0, r)
    return _or_nan(a, np.where(e == 0, _INF, np.where(e == 255, 0, r)) | s)


def rsq(a: Words) -> Words:
    """1 / sqrt(a). Subnormal operands count as zero. A negative operand gives NaN."""
    s, e, m = _split(a)
    f = _RSQ.at((a.astype(np.int64) >> 17) & 127, m & 0x1FFFF) >> 16
    # An even power of two is exact; the polynomial is one unit short there.
    f = np.where((m == 0) & ((e & 1) == 1), 2 * _ONE, f)
    r = ((126 - ((e - 127) >> 1)) << 23) + f - _ONE
    r = np.where(s != 0, 0x7FFF_FFFF, np.where(e == 255, 0, r))
    return _or_nan(a, np.where(e == 0, s | _INF, r))


def sqrt(a: Words) -> Words:
    """The square root. Subnormal operands count as zero. A negative operand gives NaN."""
    s, e, m = _split(a)
    f = _SQRT.at((a.astype(np.int64) >> 17) & 127, m & 0x1FFFF) >> 17
    r = ((127 + ((e - 127) >> 1)) << 23) + f - _ONE
    r = np.where(s != 0, 0x7FFF_FFFF, np.where(e == 255, _INF, r))
    return _or_nan(a, np.where(e == 0, s, r))


def ex2(a: Words) -> Words:
    """2^a. The operand is truncated to 23 fraction bits. Results below 2^-126 become zero."""
    s, e, m = _split(a)
    n = e - 127
    v = (m | _ONE) << np.minimum(np.maximum(n, 0), 8) >> np.minimum(np.maximum(-n, 0), 40)
    v = np.where(e == 0, 0, v)
    # One's complement, but exact where the fraction is zero.
    g = np.where(s != 0, np.where((v & _MASK) == 0, -v, ~v), v)
    w, x = g & _MASK, 127 + (g >> 23)
    r = (x << 23) + (_EX2.at(w >> 17, w & 0x1FFFF) >> 15) - _ONE
    r = np.where(x <= 0, 0, np.where(x >= 255, _INF, r))
    return _or_nan(a, np.where(n >= 8, np.where(s != 0, 0, _INF), r))


def lg2(a: Words) -> Words:
    """The base-2 logarithm. Subnormal operands count as zero and give -inf. A negative operand gives NaN."""
    s, e, m = _split(a)
    n = e - 127
    f = _LG2.at(m >> 17, m & 0x1FFFF) >> 2
    v = np.where(n >= 0, (n << 36) + f, (-n << 36) - f - 1)
    v = np.where((n == 0) & (m == 0), 0, v)
    r = _truncated(v, 36) | np.where(n < 0, _SIGN, 0)
    r = np.where(s != 0, 0x7FFF_FFFF, np.where(e == 255, _INF, r))
    return _or_nan(a, np.where(e == 0, _INF | _SIGN, r))


def _turns(a: Words) -> Int64:
    """|a| in units of 2^-25 turns, truncated, modulo one turn."""
    _, e, m = _split(a)
    n = e - 127 + 2
    v = (m | _ONE) << np.minimum(np.maximum(n, 0), 30) >> np.minimum(np.maximum(-n, 0), 40)
    return np.where((e == 0) | (n > 25), 0, v) & _TURN_MASK


def _sine(turns: Int64) -> Int64:
    w = np.where(((turns >> 23) & 1) != 0, ~turns, turns) & _MASK
    f = np.minimum(_SIN.at(w >> 17, w & 0x1FFFF), 1 << 37)
    return _truncated(f, 37) | np.where(((turns >> 24) & 1) != 0, _SIGN, 0)


def sin(a: Words) -> Words:
    """The sine of `a` turns; infinities give NaN."""
    s, e, _ = _split(a)
    return np.where(e == 255, NAN, (_sine(_turns(a)) ^ s).astype(np.uint32))


def cos(a: Words) -> Words:
    """The cosine of `a` turns; infinities give NaN."""
    _, e, _ = _split(a)
    return np.where(e == 255, NAN, _sine((_turns(a) + _QUARTER_TURN) & _TURN_MASK).astype(np.uint32))


def tanh(a: Words) -> Words:
    """The hyperbolic tangent: `a` itself below 2^-8, 1 from 8 on."""
    s, e, m = _split(a)
    k = np.minimum(np.maximum(e - 119, 0), 10)
    i = m >> _taken(_TANH_SHIFT, k)
    f = _TANH.at(_taken(_TANH_FIRST, k) + (i >> 17), i & 0x1FFFF)
    r = np.where(e < 119, (e << 23) | m, np.where(e > 129, 127 << 23, _truncated(f, 39)))
    return _or_nan(a, r | s)


def _split64(high: Words) -> tuple[Int64, Int64, Int64]:
    b = high.astype(np.int64)
    return b & _SIGN, (b >> 20) & 2047, b & 0xFFFFF


def _or_nan64(high: Words, r: Int64) -> Words:
    """As _or_nan for high words of doubles. A NaN whose high fraction is zero counts as an infinity."""
    return np.where((high & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7FF0_0000), NAN, r.astype(np.uint32))


def rcp64h(high: Words) -> Words:
    """The high word of 1 / x from the high word of x. The unit does not read the low word and returns zero for it."""
    s, e, m = _split64(high)
    r = ((2045 - e) << 20) + (_RCP.at(m >> 13, (m & 0x1FFF) << 4) >> 18) - (1 << 20)
    r = np.where(r < 1 << 20, 0, r)
    return _or_nan64(high, np.where(e == 0, 0x7FF << 20, np.where(e == 2047, 0, r)) | s)


def rsq64h(high: Words) -> Words:
    """The high word of 1 / sqrt(x) from the high word of x, as rcp64h."""
    s, e, m = _split64(high)
    f = _RSQ.at((high.astype(np.int64) >> 14) & 127, (m & 0x3FFF) << 3) >> 19
    f = np.where((m == 0) & ((e & 1) == 1), 1 << 21, f)
    r = ((1022 - ((e - 1023) >> 1)) << 20) + f - (1 << 20)
    r = np.where(s != 0, 0x7FFF_FFFF, np.where(e == 2047, 0, r))
    return _or_nan64(high, np.where(e == 0, s | (0x7FF << 20), r))
