"""Treats floating-point words as elements of the ring Z / 37^3, so that a sum has one value in any order.

An algebraically equal kernel and reference agree here bit for bit, and a term dropped or taken twice cannot hide in a
tolerance. The idea comes from Triton's FpSan. The difference: attention rounds P to bf16 between its two products, so
rounding must be a homomorphism. The element of a bf16 is its bits modulo 37^3. The element of a float32 is that of its
upper half, the bits of its bf16.

- 1, -1, 0 and -0 are those of the ring, and log2 e is the inverse of ln 2. Infinities are tags. Elements whose own bits
  are taken by one of these have spare ones. Any other number, such as scale, stands for its upper half. An integer that
  is converted is itself.
- Tags absorb, -inf before +inf in sums: masked scores stay masked. Elements have no sign. So a factor leaves a tag as
  it is, unless the factor is -1 or -inf, which turn it into the other one: a product with -1 is the negative.
- ex2(x) = 38^x, a homomorphism from sums to products: 38 has order 37^2. ex2(-inf) is 0.
- rcp(37^j u) = 37^j u^-1 for a unit u, and rcp(0) = 0. rcp(c x) = c^-1 rcp(x) for every unit c, so that O / l does not
  depend on the reference subtracted in ex2's argument. It loses the upper j digits of a quotient.
- lg2(l) is a word for the y with ex2(y) = l. The upper half is l, the lower half 1. Times ln 2 it is a word for ln l,
  with a lower half of 2, and times log2 e it is lg2(l) again. Logarithms of one base add up to that of the product,
  -lg2(l) = lg2(rcp l), and x + lg2(l) = lg2(38^x l), so that lse does not depend on the reference either. lg2(0) is
  -inf.
- max, min and comparisons use the bits, because any element may serve as the reference. -inf is below and +inf above
  all elements.

Powers of 38 are 1 modulo 37. A sum of n of them is a unit unless 37 divides n. So a kernel with split keys may divide
each part by its own sum and multiply by it later: modulo a power of 2 every even number of keys would lose bits. Such a
kernel still differs from others where 37 divides the number of keys, a sink included, that a row sees in a part.

A logarithm has no other product, no logarithm, no reciprocal and no bf16. Logarithms of two bases have no sum, and ex2
takes one of base 2 only. Such a result is NOTHING. Executing it is refused, and so is an operation without a
counterpart (backends.vm.isa.ring_ops). A literal whose lower half is 1 or 2 would be read as a logarithm; the attention
kernels have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from backends.vm.numerics.compiled import compiled
from backends.vm.numerics.f32 import Float32
from backends.vm.numerics.traced import is_traced, taken

Elements = npt.NDArray[np.uint32]
"""Elements of the ring, each below SIZE. Their products fit in 32 bits."""
Words = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]

PRIME = 37
SIZE = PRIME**3
"""Below 2^16, because every element has bits of a bf16."""
NOTHING = np.uint32(0x7FFFFFFF)
"""The word of a result that has no meaning."""
_LOWEST, _HIGHEST = np.uint32(0xFF800000), np.uint32(0x7F800000)
_PLAIN, _LOG_2, _LOG_E = np.uint32(0), np.uint32(1), np.uint32(2)
"""Lower halves of computed words: elements, and logarithms to the bases 2 and e."""
_LN_2, _LOG2_E = 0x3F31, pow(0x3F31, -1, SIZE)
_SPELLED = {0x8000: 0, 0x3F80: 1, 0xBF80: SIZE - 1, 0x3FB8: _LOG2_E}
"""Elements of bf16 values whose bits they are not: -0, 1, -1 and log2 e."""
_SPARE = {0x8000: 0xFFFF, 0x3F80: 0xFFFE, 0xBF80: 0xFFFD, 0x3FB8: 0xFFFC, 0x7F80: 0xFFFB}
"""Bits of the elements whose own bits stand for other elements or, in float32, for an infinity."""
_ORDER = PRIME**2


def _powers(base: Elements | int, exponent: int) -> Elements:
    """base^exponent, by squaring."""
    power, result = np.asarray(base, np.uint32), np.ones_like(base, np.uint32)
    while exponent:
        if exponent % 2:
            result = result * power % SIZE
        power, exponent = power * power % SIZE, exponent // 2
    return result


def _reciprocals() -> Elements:
    """The reciprocals of all elements: 37^j u^-1 for 37^j u."""
    every = np.arange(SIZE, dtype=np.uint32)
    common = np.gcd(every, np.uint32(SIZE))
    return common * _powers(every // common, SIZE - SIZE // PRIME - 1) % SIZE


def _encoding() -> tuple[Elements, Words]:
    """Element by bits of a bf16, and bits by element."""
    elements, bits = np.arange(1 << 16, dtype=np.uint32) % SIZE, np.arange(SIZE, dtype=np.uint32)
    for element, own in _SPARE.items():
        elements[own], bits[element] = element, own
    elements[list(_SPELLED)] = list(_SPELLED.values())
    return elements, bits


_ELEMENTS, _BITS = _encoding()
POWERS: Elements = np.array([pow(PRIME + 1, x, SIZE) for x in range(_ORDER)], np.uint32)
"""38^x by x mod 37^2."""
RECIPROCALS: Elements = _reciprocals()


def elements_of(values: Float32) -> Elements:
    """The elements of words; of logarithms, those that they are of. The results for tags mean nothing."""
    return taken(_ELEMENTS, values.view(np.uint32) >> np.uint32(16))


def words_of(elements: npt.NDArray[np.integer], kind: Words | np.uint32 = _PLAIN) -> Float32:
    """Sums and products of elements as words; of a `kind` of logarithms, they are what these are of."""
    words = taken(_BITS, elements % SIZE) << np.uint32(16) | kind
    return np.where((kind != _PLAIN) & (words == kind), _LOWEST, words).view(np.float32)


def widened(values: npt.NDArray[np.uint16]) -> Float32:
    """The words of bf16 values."""
    return words_of(_ELEMENTS[values])


def bases(values: Float32) -> Words:
    """_LOG_2 or _LOG_E for words that are logarithms, and 0 for others."""
    lower = values.view(np.uint32) & np.uint32(0xFFFF)
    return np.where((lower == _LOG_2) | (lower == _LOG_E), lower, np.uint32(0))


def _is(values: Float32, word: np.uint32) -> Mask:
    return values.view(np.uint32) == word


def meaningless(values: Float32) -> Mask:
    """Where words are NOTHING."""
    return _is(values, NOTHING)


def _tags(values: Float32) -> Mask:
    """Where words are infinities."""
    return _is(values, _LOWEST) | _is(values, _HIGHEST)


def _no_element(values: Float32) -> Mask:
    """Where words are logarithms, tags or NOTHING."""
    return (bases(values) > 0) | _tags(values) | meaningless(values)


def _either(mask: Mask, a: Float32, b: Float32) -> Float32:
    """`a` where the mask is set, else `b`, bit for bit."""
    return np.where(mask, a.view(np.uint32), b.view(np.uint32)).view(np.float32)


def _nothing_where(mask: Mask, values: Float32) -> Float32:
    return np.where(mask, NOTHING, values.view(np.uint32)).view(np.float32)


def _tagged(values: Float32, *operands: Float32) -> Float32:
    """`values`, or NOTHING or the tag of an operand; -inf wins over +inf, and NOTHING over both."""
    words = values.view(np.uint32)
    for tag in (_HIGHEST, _LOWEST, NOTHING):
        for one in operands:
            words = np.where(_is(one, tag), tag, words)
    return words.view(np.float32)


Operation = TypeVar("Operation", bound=Callable[..., Float32])


def _lanewise(function: Operation) -> Operation:
    """`function` of words of one shape as machine code: NumPy would make 20 to 60 calls of a microsecond.

    On traced words it is a part of other machine code.
    """

    def of_words(*words: Words) -> Words:
        return function(*[one.view(np.float32) for one in words]).view(np.uint32)

    @wraps(function)
    def run(*values: Float32) -> Float32:
        if is_traced(values[0]):
            return function(*values)
        return compiled(of_words, len(values))(*[one.view(np.uint32) for one in values]).view(np.float32)

    return cast(Operation, run)


@_lanewise
def add(a: Float32, b: Float32) -> Float32:
    """a + b."""
    return _tagged(_sum(a, b), a, b)


def _sum(a: Float32, b: Float32) -> Float32:
    """a + b, whatever it is for tags."""
    plain = words_of(elements_of(a) + elements_of(b))
    base_a, base_b = bases(a), bases(b)
    base = np.maximum(base_a, base_b)
    logarithm = words_of(_raised(a, base) * _raised(b, base), base)
    return _nothing_where((base_a != base_b) & (base_a > 0) & (base_b > 0), _either(base > 0, logarithm, plain))


def _raised(values: Float32, base: Words) -> Elements:
    """What words are logarithms of. Plain ones become exponents of `base`."""
    elements = elements_of(values)
    exponents = elements * np.where(base == _LOG_E, np.uint32(_LOG2_E), np.uint32(1)) % SIZE
    return np.where(bases(values) > 0, elements, taken(POWERS, exponents % _ORDER))


@_lanewise
def sub(a: Float32, b: Float32) -> Float32:
    """a - b."""
    return add(a, negate(b))


@_lanewise
def mul(a: Float32, b: Float32) -> Float32:
    """a b."""
    base_a, base_b = bases(a), bases(b)
    product = words_of(elements_of(a) * elements_of(b))
    product = _either(base_a > 0, _scaled(a, b), product)
    product = _either((base_b > 0) & (base_a == 0), _scaled(b, a), product)
    tag_a, tag_b = _tags(a), _tags(b)
    product = _either(tag_a | tag_b, _turned(a, b, tag_a), product)
    return _nothing_where(meaningless(a) | meaningless(b), product)


def _turned(a: Float32, b: Float32, tag_a: Mask) -> Float32:
    """The product of two words of which one is a tag: `a` where `tag_a` is set, `b` elsewhere."""
    tag, factor = _either(tag_a, a, b), _either(tag_a, b, a)
    minus = _is(factor, _LOWEST) | (~_no_element(factor) & (elements_of(factor) == SIZE - 1))
    return _either(minus, negate(tag), tag)


def _scaled(logarithm: Float32, factor: Float32) -> Float32:
    """A logarithm times 1 or -1, or in the other base."""
    base, element = bases(logarithm), elements_of(factor)
    scaled = _either(element == 1, logarithm, negate(logarithm))
    changes = ((base == _LOG_2) & (element == _LN_2)) | ((base == _LOG_E) & (element == _LOG2_E))
    other = words_of(elements_of(logarithm), _LOG_2 + _LOG_E - np.maximum(base, _LOG_2))
    known = changes | (element == 1) | (element == SIZE - 1)
    return _nothing_where((bases(factor) > 0) | ~known, _either(changes, other, scaled))


@_lanewise
def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a b + c."""
    return add(mul(a, b), c)


@_lanewise
def div(a: Float32, b: Float32) -> Float32:
    """a times the reciprocal of b."""
    return mul(a, rcp(b))


@_lanewise
def negate(a: Float32) -> Float32:
    """-a. The tags swap."""
    base, elements = bases(a), elements_of(a)
    words = words_of(np.where(base > 0, taken(RECIPROCALS, elements), SIZE - elements), base).view(np.uint32)
    swapped = np.where(_is(a, _LOWEST), _HIGHEST, np.where(_is(a, _HIGHEST), _LOWEST, words))
    return _nothing_where(meaningless(a), swapped.view(np.float32))


def order(values: Float32) -> npt.NDArray[np.int64]:
    """A sort key for words: elements by their bits, below logarithms of the same; -inf below and +inf above all."""
    by_bits = elements_of(values).astype(np.int64) * 4 + bases(values)
    return np.where(_is(values, _LOWEST), -1, np.where(_is(values, _HIGHEST), 4 * SIZE, by_bits))


@_lanewise
def larger(a: Float32, b: Float32) -> Float32:
    """The operand with the larger key, whatever the order of the operands."""
    return _either(order(a) >= order(b), a, b)


@_lanewise
def smaller(a: Float32, b: Float32) -> Float32:
    """The operand that `larger` does not return."""
    return _either(order(a) >= order(b), b, a)


def _finite(elements: Elements, a: Float32) -> Float32:
    return words_of(np.where(_tags(a), np.uint32(0), elements))


@_lanewise
def ex2(a: Float32) -> Float32:
    """38^a, what a logarithm to the base 2 is of, and 0 for a tag."""
    base, elements = bases(a), elements_of(a)
    powers = _finite(np.where(base > 0, elements, taken(POWERS, elements % _ORDER)), a)
    return _nothing_where((base == _LOG_E) | meaningless(a), powers)


@_lanewise
def lg2(a: Float32) -> Float32:
    """The logarithm to the base 2: -inf for 0."""
    return _nothing_where(_no_element(a), words_of(elements_of(a), _LOG_2))


@_lanewise
def rcp(a: Float32) -> Float32:
    """The reciprocal, and 0 for a tag."""
    return _nothing_where((bases(a) > 0) | meaningless(a), _finite(taken(RECIPROCALS, elements_of(a)), a))


@_lanewise
def rounded(a: Float32) -> Float32:
    """An element as a word, whose upper half is its bf16."""
    return _nothing_where(_no_element(a), words_of(elements_of(a)))


_OF_SUMS = "logarithms of two bases have no sum"
_OF_PRODUCTS = "a logarithm has a product with 1, -1, ln 2 if its base is 2, and log2 e if its base is e"
_OF_RECIPROCALS = "a logarithm has no reciprocal"
_REASONS = {
    "add": _OF_SUMS, "sub": _OF_SUMS, "mul": _OF_PRODUCTS, "rcp": _OF_RECIPROCALS,
    "ex2": "ex2 takes a logarithm to the base 2 only", "lg2": "logarithms and infinities have no logarithm",
    "cvt": "bf16 has neither logarithms nor infinities",
}  # fmt: skip


def described(word: np.uint32) -> str:
    """What a word stands for."""
    value = np.array([word], np.uint32).view(np.float32)
    if meaningless(value)[0]:
        return f"the word {word:#x} (which stands for nothing)"
    if _tags(value)[0]:
        return "-inf" if word == _LOWEST else "+inf"
    element, base = int(elements_of(value)[0]), bases(value)[0]
    if base:
        return f"a logarithm to the base {2 if base == _LOG_2 else 'e'} (of {element})"
    return f"the element {element} ({word:#x})"


def reason(name: str, operands: Sequence[Float32]) -> str:
    """Why operation `name` of operands, one word each, is NOTHING."""
    if any(meaningless(one).any() for one in operands):
        return "nothing can be computed from a word that stands for nothing"
    if name in ("fma", "mad"):
        return _OF_PRODUCTS if meaningless(mul(*operands[:2])).any() else _OF_SUMS
    if name == "div":
        return _OF_RECIPROCALS if bases(operands[1]).any() else _OF_PRODUCTS
    return _REASONS[name]


def products(a: Elements, b: Elements) -> Elements:
    """a [M, K] times b [N, K] transposed: [M, N]. float64 holds the sum of 2^20 products exactly."""
    total = a.astype(np.float64) @ b.astype(np.float64).T
    return (total.astype(np.int64) % SIZE).astype(np.uint32)
