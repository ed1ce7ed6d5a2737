"""The ring: sums, products, powers and reciprocals of its elements, and the tags."""

from __future__ import annotations

import numpy as np

from backends.vm.numerics import ring
from backends.vm.numerics.f32 import Float32

LOWEST, HIGHEST = (np.full(1, value, np.float32) for value in (-np.inf, np.inf))
EVERY = np.arange(1 << 16, dtype=np.uint16)


def drawn(seed: int) -> Float32:
    return ring.words_of(np.random.default_rng(seed).integers(0, 1 << 16, 1000).astype(np.uint16))


def same(a: Float32, b: Float32) -> bool:
    return bool((ring.order(a) == ring.order(b)).all())


def test_sums_go_in_any_order_and_products_distribute() -> None:
    a, b, c = drawn(1), drawn(2), drawn(3)
    assert same(ring.add(ring.add(a, b), c), ring.add(a, ring.add(c, b)))
    assert same(ring.mul(a, ring.add(b, c)), ring.fma(a, b, ring.mul(a, c)))
    assert same(ring.sub(a, b), ring.add(a, ring.negate(b)))


def test_powers_turn_sums_into_products() -> None:
    a, b = drawn(4), drawn(5)
    assert same(ring.ex2(ring.add(a, b)), ring.mul(ring.ex2(a), ring.ex2(b)))
    assert len(set(ring.POWERS.tolist())) == ring.POWERS.size, "fewer powers than 2^14 tell fewer terms apart"


def test_a_reciprocal_undoes_every_odd_factor() -> None:
    odd = ring.words_of(EVERY[1::2])
    assert same(ring.mul(odd, ring.rcp(odd)), np.ones(odd.size, np.float32))
    for element in (0, 2, 12, 40_000):
        scaled = ring.mul(odd, ring.words_of(np.full(odd.size, element, np.uint16)))
        expected = ring.mul(ring.rcp(odd), ring.rcp(ring.words_of(np.full(odd.size, element, np.uint16))))
        assert same(ring.rcp(scaled), expected), f"a quotient by {element} depends on the reference"


def test_every_element_is_a_word_of_its_own_beside_the_tags() -> None:
    words = ring.words_of(EVERY)
    assert (ring.elements_of(words) == EVERY).all()
    assert not np.isin(words.view(np.uint32), np.concatenate([LOWEST, HIGHEST]).view(np.uint32)).any()
    spelled = np.array([0.0, -0.0, 1.0, -1.0], np.float32)
    assert ring.elements_of(spelled).tolist() == [0, 0, 1, 0xFFFF], "numbers that a kernel spells"


def test_what_is_masked_stays_masked_and_weighs_nothing() -> None:
    a = drawn(6)[:1]
    for masked in (ring.add(LOWEST, a), ring.fma(LOWEST, a, a), ring.add(LOWEST, HIGHEST), ring.sub(a, HIGHEST)):
        assert same(masked, LOWEST)
    assert same(ring.ex2(LOWEST), np.zeros(1, np.float32))
    assert same(ring.larger(LOWEST, a), a)
    assert same(ring.smaller(HIGHEST, a), a)
    assert same(ring.sub(a, LOWEST), HIGHEST), "the first reference is above all that was there before"


def test_matrix_products_wrap() -> None:
    a, b = (drawn(seed).view(np.uint32)[:512].reshape(8, 64) >> 16 for seed in (7, 8))
    product = ring.products(a.astype(np.uint16), b.astype(np.uint16))
    exact = [[sum(int(x) * int(y) for x, y in zip(row, column, strict=True)) % 65536 for column in b] for row in a]
    assert product.tolist() == exact
