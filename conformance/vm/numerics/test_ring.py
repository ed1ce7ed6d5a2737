"""The ring: sums, products, powers, reciprocals and logarithms of its elements, and the tags."""

from __future__ import annotations

import numpy as np
import pytest

from backends.vm.numerics import ring
from backends.vm.numerics.f32 import Float32

LOWEST, HIGHEST = (np.full(1, value, np.float32) for value in (-np.inf, np.inf))
EVERY = np.arange(37**3, dtype=np.uint32)
UNITS = EVERY[EVERY % 37 > 0]
LN_2, LOG2_E = (np.full(1000, value, np.float32) for value in (np.log(2), np.log2(np.e)))


def drawn(seed: int) -> Float32:
    return ring.words_of(np.random.default_rng(seed).integers(0, EVERY.size, 1000))


def drawn_units(seed: int) -> Float32:
    return ring.words_of(np.random.default_rng(seed).choice(UNITS, 1000))


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
    assert len(set(ring.POWERS.tolist())) == 37**2, "fewer powers tell fewer terms apart"


@pytest.mark.parametrize("count", [1, 36, 38, 512])
def test_a_sum_of_powers_is_a_unit_unless_37_divides_their_number(count: int) -> None:
    total = np.zeros(1000, np.float32)
    for seed in range(count):
        total = ring.add(total, ring.ex2(drawn(seed)))
    assert same(ring.mul(total, ring.rcp(total)), np.ones(1000, np.float32))


def test_a_reciprocal_undoes_every_unit() -> None:
    units = ring.words_of(UNITS)
    assert same(ring.mul(units, ring.rcp(units)), np.ones(units.size, np.float32))
    for element in (0, 37, 74, 3 * 37**2):
        factor = ring.words_of(np.full(units.size, element))
        expected = ring.mul(ring.rcp(units), ring.rcp(factor))
        assert same(ring.rcp(ring.mul(units, factor)), expected), f"a quotient by {element} depends on the reference"
        assert same(ring.div(units, factor), ring.mul(units, ring.rcp(factor)))


def test_a_logarithm_is_what_ex2_undoes() -> None:
    words = ring.words_of(EVERY[1:])
    assert same(ring.ex2(ring.lg2(words)), words)
    assert len(set(ring.lg2(words).view(np.uint32).tolist())) == words.size
    assert not (ring.lg2(words).view(np.uint32) == words.view(np.uint32)).any()


def test_logarithms_turn_products_into_sums() -> None:
    a, b, x = drawn(6), drawn_units(7), drawn(8)
    of_a, of_b = ring.lg2(a), ring.lg2(b)
    assert same(ring.lg2(ring.mul(a, b)), ring.add(of_a, of_b))
    assert same(ring.lg2(ring.div(a, b)), ring.sub(of_a, of_b))
    assert same(ring.lg2(ring.mul(ring.ex2(x), a)), ring.add(x, of_a))
    assert same(ring.sub(of_b, x), ring.negate(ring.sub(x, of_b)))
    assert same(ring.mul(of_b, ring.words_of(np.full(1000, 37**3 - 1))), ring.negate(of_b))


def test_ln_2_changes_the_base_of_a_logarithm_and_log2_e_changes_it_back() -> None:
    a, x = drawn(9), drawn(10)
    binary = ring.lg2(a)
    natural = ring.mul(binary, LN_2)
    assert same(ring.mul(LOG2_E, natural), binary)
    assert not (ring.order(natural) == ring.order(binary))[ring.elements_of(a) > 0].any(), "a base that is left out"
    assert same(ring.mul(ring.add(x, binary), LN_2), ring.fma(x, LN_2, natural))
    assert same(ring.add(natural, natural), ring.mul(ring.add(binary, binary), LN_2))
    assert same(ring.mul(LN_2, LOG2_E), np.ones(1000, np.float32))


def test_the_logarithm_of_0_is_lowest() -> None:
    zero, a = np.zeros(1, np.float32), drawn(11)[:1]
    for masked in (ring.lg2(zero), ring.fma(ring.lg2(zero), LN_2[:1], a), ring.sub(ring.lg2(zero), ring.lg2(a))):
        assert same(masked, LOWEST)
    nilpotent = ring.lg2(ring.words_of(np.full(1, 37**2)))
    assert same(ring.add(nilpotent, nilpotent), LOWEST), "37^4 is 0"
    assert same(ring.larger(LOWEST, ring.lg2(a)), ring.lg2(a))


def test_what_has_no_meaning_is_nothing_and_stays_so() -> None:
    a = drawn_units(12)
    binary, two = ring.lg2(a), ring.words_of(np.full(1000, 2))
    natural, lowest = ring.mul(binary, LN_2), np.repeat(LOWEST, 1000)
    found = [
        ring.mul(binary, binary), ring.mul(two, binary), ring.mul(binary, LOG2_E), ring.mul(natural, LN_2),
        ring.add(binary, natural), ring.fma(binary, two, natural), ring.ex2(natural), ring.lg2(binary),
        ring.lg2(lowest), ring.rcp(binary), ring.div(a, natural), ring.rounded(binary), ring.rounded(lowest),
    ]  # fmt: skip
    for number, one in enumerate(found):
        assert ring.meaningless(one).all(), f"number {number}"
    nothing = found[0]
    for one in (ring.add(lowest, nothing), ring.mul(nothing, lowest), ring.negate(nothing), ring.ex2(nothing),
                ring.lg2(nothing), ring.rcp(nothing), ring.rounded(nothing)):  # fmt: skip
        assert ring.meaningless(one).all()


def test_every_element_is_a_word_of_its_own_beside_the_tags() -> None:
    words = ring.words_of(EVERY)
    assert (ring.elements_of(words) == EVERY).all()
    assert not np.isin(words.view(np.uint32), np.concatenate([LOWEST, HIGHEST]).view(np.uint32)).any()
    assert not ring.meaningless(words).any()
    spelled = np.array([0.0, -0.0, 1.0, -1.0], np.float32)
    assert ring.elements_of(spelled).tolist() == [0, 0, 1, 37**3 - 1], "numbers that a kernel spells"


def test_bits_of_bf16_are_the_same_element_however_they_are_widened() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = bits[(bits & 0x7FFF) != 0x7F80]
    shifted = (finite.astype(np.uint32) << 16).view(np.float32)
    assert same(ring.widened(finite), shifted)
    assert same(ring.rounded(shifted), shifted)
    assert not (ring.rounded(shifted).view(np.uint32) & 0xFFFF).any(), "bits that bf16 loses"


def test_what_is_masked_stays_masked_and_weighs_nothing() -> None:
    a = drawn(13)[:1]
    for masked in (ring.add(LOWEST, a), ring.fma(LOWEST, a, a), ring.add(LOWEST, HIGHEST), ring.sub(a, HIGHEST)):
        assert same(masked, LOWEST)
    assert same(ring.ex2(LOWEST), np.zeros(1, np.float32))
    assert same(ring.larger(LOWEST, a), a)
    assert same(ring.smaller(HIGHEST, a), a)
    assert same(ring.sub(a, LOWEST), HIGHEST), "the first reference is above all that was there before"


def every_kind() -> Float32:
    """Each element, the logarithms of each to both bases, the tags, and the word that stands for nothing."""
    words = ring.words_of(EVERY)
    ln_2, nothing = np.resize(LN_2, EVERY.size), np.array([ring.NOTHING]).view(np.float32)
    return np.concatenate([words, ring.lg2(words), ring.mul(ring.lg2(words), ln_2), LOWEST, HIGHEST, nothing])


def test_a_product_with_minus_1_is_the_negative() -> None:
    a = every_kind()
    zero, minus = np.zeros(a.size, np.float32), np.full(a.size, -1, np.float32)
    negative = ring.negate(a).view(np.uint32)
    for name, one in {
        "a (-1)": ring.mul(a, minus), "(-1) a": ring.mul(minus, a), "0 - a": ring.sub(zero, a),
        "a (-1) + 0": ring.fma(a, minus, zero), "a / -1": ring.div(a, minus),
    }.items():  # fmt: skip
        wrong = np.flatnonzero(one.view(np.uint32) != negative)
        assert not wrong.size, f"{name} is no -a for the words {a.view(np.uint32)[wrong[:5]]}"


def test_a_sum_with_a_product_with_minus_1_is_a_difference() -> None:
    """For every two words of which each is of any kind."""
    some = np.concatenate([every_kind()[:: 37**2 + 1], LOWEST, HIGHEST, np.array([ring.NOTHING]).view(np.float32)])
    a, b = np.repeat(some, some.size), np.tile(some, some.size)
    minus = np.full(a.size, -1, np.float32)
    assert (ring.fma(a, minus, b).view(np.uint32) == ring.sub(b, a).view(np.uint32)).all()
    assert (ring.mul(a, b).view(np.uint32) == ring.mul(b, a).view(np.uint32)).all()


def test_products_of_tags_have_the_sign_of_floats() -> None:
    for a in (LOWEST, HIGHEST, np.ones(1, np.float32), -np.ones(1, np.float32)):
        for b in (LOWEST, HIGHEST):
            assert same(ring.mul(a, b), a * b), f"{a} {b}"
    for factor in drawn(16)[:9, None]:
        assert same(ring.mul(LOWEST, factor), LOWEST), "a scale leaves a masked score masked"


def test_matrix_products_wrap() -> None:
    a, b = (ring.elements_of(drawn(seed)[:512].reshape(8, 64)) for seed in (14, 15))
    exact = [[sum(int(x) * int(y) for x, y in zip(row, column, strict=True)) % 37**3 for column in b] for row in a]
    assert ring.products(a, b).tolist() == exact
