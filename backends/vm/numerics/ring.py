"""Treats floating-point words as elements of the ring Z / 2^16, so that a sum has one value in any order.

An algebraically equal kernel and reference agree here bit for bit, and a term dropped or taken twice cannot hide in a
tolerance. The idea comes from Triton's FpSan. The difference: attention rounds P to bf16 between its two products, so
rounding must be a homomorphism. The element of a bf16 is its bits. The element of a float32 is its upper half, the
bits of its bf16.

- Computed words have a 1 in the lower half. A word with a zero lower half is a literal or an input: 1, -1, 0 and -0
  are those of the ring, infinities are tags, and any other number, such as scale, stands for its upper half.
- Tags absorb, -inf before +inf: masked scores stay masked.
- ex2(x) = 5^x, a homomorphism from sums to products: 5 has order 2^14. ex2(-inf) is 0.
- rcp(2^j u) = 2^j u^-1 for odd u, and rcp(0) = 0. rcp(c x) = c^-1 rcp(x) for every odd c, so that O / l does not
  depend on the reference subtracted in ex2's argument. It loses the upper j bits of a quotient.
- max, min and comparisons use the bits, because any element may serve as the reference. -inf is below and +inf above
  all elements.

An operation without a counterpart is refused when it runs (backends.vm.isa.ring_ops).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.vm.numerics.f32 import Float32

Elements = npt.NDArray[np.uint16]
"""Elements of the ring. NumPy's uint16 sums and products wrap as the ring's do."""
Words = npt.NDArray[np.uint32]

_LOWEST, _HIGHEST = np.uint32(0xFF800000), np.uint32(0x7F800000)
_COMPUTED = np.uint32(1)
_SPELLED = {0x80000000: 0, 0x3F800000: 1, 0xBF800000: 0xFFFF}
"""Numbers whose element is not their upper half."""
_BASE = 5
_ORDER = 1 << 14

POWERS: Elements = np.cumprod(np.where(np.arange(_ORDER) > 0, _BASE, 1), dtype=np.uint16)
"""5^x by x mod 2^14."""


def upper_halves(values: Float32) -> Elements:
    """The elements of bf16 values widened to float32 words."""
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def elements_of(values: Float32) -> Elements:
    """The elements of float32 words. The results for tags mean nothing."""
    words, elements = values.view(np.uint32), upper_halves(values)
    for word, element in _SPELLED.items():
        elements[words == word] = element
    return elements


def words_of(elements: Elements) -> Float32:
    """Elements as float32 words."""
    return (elements.astype(np.uint32) << np.uint32(16) | _COMPUTED).view(np.float32)


def _is(values: Float32, tag: np.uint32) -> npt.NDArray[np.bool_]:
    return values.view(np.uint32) == tag


def _tagged(elements: Elements, *operands: Float32) -> Float32:
    """Words of `elements`, or the tag of an operand; -inf wins over +inf."""
    words = words_of(elements).view(np.uint32)
    for tag in (_HIGHEST, _LOWEST):
        for one in operands:
            words[_is(one, tag)] = tag
    return words.view(np.float32)


def add(a: Float32, b: Float32) -> Float32:
    """a + b."""
    return _tagged(elements_of(a) + elements_of(b), a, b)


def sub(a: Float32, b: Float32) -> Float32:
    """a - b."""
    return add(a, negate(b))


def mul(a: Float32, b: Float32) -> Float32:
    """a b."""
    return _tagged(elements_of(a) * elements_of(b), a, b)


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a b + c."""
    return _tagged(elements_of(a) * elements_of(b) + elements_of(c), a, b, c)


def negate(a: Float32) -> Float32:
    """-a. The tags swap."""
    words = words_of(np.uint16(0) - elements_of(a)).view(np.uint32)
    words[_is(a, _LOWEST)], words[_is(a, _HIGHEST)] = _HIGHEST, _LOWEST
    return words.view(np.float32)


def order(values: Float32) -> npt.NDArray[np.int64]:
    """A sort key for words: elements by their bits, -inf below and +inf above all."""
    by_bits = elements_of(values).astype(np.int64)
    by_bits[_is(values, _LOWEST)], by_bits[_is(values, _HIGHEST)] = -1, 1 << 16
    return by_bits


def larger(a: Float32, b: Float32) -> Float32:
    """The operand with the larger key, whatever the order of the operands."""
    return np.where(order(a) >= order(b), a.view(np.uint32), b.view(np.uint32)).view(np.float32)


def smaller(a: Float32, b: Float32) -> Float32:
    """The operand that `larger` does not return."""
    return np.where(order(a) >= order(b), b.view(np.uint32), a.view(np.uint32)).view(np.float32)


def _finite(elements: Elements, a: Float32) -> Float32:
    return words_of(np.where(_is(a, _LOWEST) | _is(a, _HIGHEST), np.uint16(0), elements))


def ex2(a: Float32) -> Float32:
    """5^a, and 0 for a tag."""
    return _finite(POWERS[elements_of(a) & np.uint16(_ORDER - 1)], a)


def reciprocal(elements: Elements) -> Elements:
    """2^j u^-1 for 2^j u."""
    even = np.where(elements == 0, np.uint16(1), elements & (np.uint16(0) - elements))
    odd = elements // even
    inverse = odd  # right to 3 bits; each step doubles them
    for _ in range(3):
        inverse = inverse * (np.uint16(2) - odd * inverse)
    return np.where(elements == 0, np.uint16(0), even * inverse)


def rcp(a: Float32) -> Float32:
    """The reciprocal, and 0 for a tag."""
    return _finite(reciprocal(elements_of(a)), a)


def products(a: Elements, b: Elements) -> Elements:
    """a [M, K] times b [N, K] transposed: [M, N]. float64 holds the sum of 2^20 products exactly."""
    total = a.astype(np.float64) @ b.astype(np.float64).T
    return (total.astype(np.int64) & 0xFFFF).astype(np.uint16)
