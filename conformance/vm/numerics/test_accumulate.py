"""Matrix accumulation: the Hopper model against wgmma on an H200, and the laws that every policy obeys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.machine.machine import Machine
from backends.vm.numerics import accumulate, ring
from backends.vm.numerics.accumulate import Adder, Policy, mma
from backends.vm.numerics.f32 import Float32
from conformance import SILICON

GOLDEN = np.load(SILICON / "numerics" / "wgmma.npz")
K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32}
OF_FLOATS: tuple[Policy, ...] = tuple(one for one in get_args(Policy) if one != "ring")


def values(codes: npt.NDArray[np.unsignedinteger], kind: str) -> Float32:
    if kind == "tf32":
        return (codes & np.uint32(0xFFFF_E000)).view(np.float32)
    library = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}[kind]
    return codes.view(library).astype(np.float32)


def measured(kind: str, tag: str) -> Iterator[tuple[Float32, Float32, Float32 | None, Float32]]:
    """(a, b, c, d) of each wgmma instruction that an H200 ran."""
    for i in range(len(GOLDEN[f"{kind}.{tag}.d"])):
        c = GOLDEN[f"{kind}.{tag}.c"][i].view(np.float32) if tag == "add" else None
        a, b = (values(GOLDEN[f"{kind}.{tag}.{operand}"][i], kind) for operand in "ab")
        yield a, b, c, GOLDEN[f"{kind}.{tag}.d"][i].view(np.float32)


@pytest.mark.parametrize("tag", ["overwrite", "add"])
@pytest.mark.parametrize("kind", K)
def test_the_hopper_model_is_bit_for_bit_an_h200(kind: str, tag: str) -> None:
    for a, b, c, d in measured(kind, tag):
        result = mma(a, b, c, k_per_instruction=K[kind], kind=kind, policy="hopper")
        wrong = np.argwhere(result.view(np.uint32) != d.view(np.uint32))
        assert not len(wrong), f"{kind}, {tag}: {len(wrong)} of {d.size} outputs differ, the first at {wrong[0]}"


@pytest.mark.parametrize("adder", [Adder(24, 24), Adder(26, 24), Adder(25, 23)])
def test_another_adder_would_be_seen(adder: Adder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accumulate.ADDERS, "f16", adder)
    seen = any(
        np.any(mma(a, b, c, k_per_instruction=16, kind="f16", policy="hopper") != d)
        for tag in ("overwrite", "add")
        for a, b, c, d in measured("f16", tag)
    )
    assert seen, f"the golden matrices cannot tell {adder} from the measured one"


TINY = np.array([[23, 1] + 14 * [0]], np.float32), np.array([[89, 1] + 14 * [0]], np.float32)
"""Products 2047 and 1. At 2^-160 they are 2^-149 - 2^-160 and 2^-160: next to 2^-158, the last place kept, 0."""


def _tiny(scale: int) -> float:
    a, b = (operand * np.float32(2.0**scale) for operand in TINY)
    return float(mma(a, b, None, k_per_instruction=16, kind="bf16", policy="hopper")[0, 0])


def test_tiny_products_lose_the_bits_that_an_h200_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _tiny(-60) == 2.0**-109, "products within the range keep all bits"
    assert _tiny(-80) == 0, "the last bits of the products should be lost: drawn programs 2060, 15440 on an H200"
    monkeypatch.setattr(accumulate, "_LEAST_OF_ALL", -1000)
    assert _tiny(-80) == 2.0**-149, "without the least exponent the sum is another: this test can fail"


def _underflows() -> bool:
    a, b = np.full((1, 16), -(2.0**-14), np.float32), np.full((1, 16), 2.0**-16, np.float32)
    found = mma(a, b, None, k_per_instruction=16, kind="f16", policy="hopper", to_half=True)
    assert found[0, 0] == 0, f"-2^-26 is nearer to zero than to a number of f16, not {found[0, 0]}"
    return bool(np.signbit(found[0, 0]))


def test_a_negative_sum_that_underflows_in_f16_is_plus_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _underflows(), "drawn programs 3580, 30240 leave +0 on an H200"
    monkeypatch.setattr(accumulate, "_to_half", lambda total: total.astype(np.float16).astype(np.float32))
    assert _underflows(), "rounding alone keeps the sign: this test can fail"


def _beside_a_tie() -> float:
    a = np.array([[1, 2.0**-11, 2.0**-12] + 13 * [0]], np.float32)
    b = np.array([[1, 1, 2.0**-13] + 13 * [0]], np.float32)
    return float(mma(a, b, None, k_per_instruction=16, kind="f16", policy="hopper", to_half=True)[0, 0])


def test_a_sum_in_f16_is_rounded_with_all_of_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 + 2^-11 is a tie; an extra 2^-25 breaks it, although f32 could not hold the sum."""
    assert _beside_a_tie() == 1 + 2.0**-10, "drawn programs 17140, 23960 on an H200: rounded up"
    rounded = accumulate._to_half
    monkeypatch.setattr(accumulate, "_to_half", lambda total: rounded(total.astype(np.float32).astype(np.float64)))
    assert _beside_a_tie() == 1, "rounding to f32 first loses it: this test can fail"


@pytest.mark.parametrize("kind", K)
@pytest.mark.parametrize("policy", ["fast", "exact"])
def test_fast_and_exact_lie_beside_an_h200(kind: str, policy: Policy) -> None:
    """They differ by at most K + 1 addends cut at 2^(E - F), a result cut at B bits, and K roundings to float32."""
    adder = accumulate.ADDERS[kind]
    for a, b, c, d in measured(kind, "add"):
        result = mma(a, b, c, k_per_instruction=K[kind], kind=kind, policy=policy)
        assert c is not None
        addends = np.concatenate([np.abs(a[:, None, :] * b[None, :, :]), np.abs(c)[..., None]], axis=-1)
        relative = 2.0 ** (1 - adder.significand_bits) + K[kind] * 2.0**-24
        bound = (K[kind] + 1) * addends.max(-1) * 2.0**-adder.fraction_bits + addends.sum(-1) * relative
        assert np.all(np.abs(result - d) <= bound), f"{kind}, {policy}: beyond what truncation explains"


@pytest.mark.parametrize("policy", OF_FLOATS)
@pytest.mark.parametrize("with_c", [False, True])
def test_small_integers_are_exact_under_every_policy(policy: Policy, with_c: bool) -> None:
    rng = np.random.default_rng(43)
    a, b = rng.integers(-4, 5, (64, 96)), rng.integers(-4, 5, (24, 96))
    c = rng.integers(-100, 100, (64, 24)) if with_c else None
    expected = a @ b.T + (0 if c is None else c)
    addend = None if c is None else c.astype(np.float32)
    result = mma(a.astype(np.float32), b.astype(np.float32), addend, k_per_instruction=16, kind="f16", policy=policy)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == np.float32


@pytest.mark.parametrize("policy", OF_FLOATS)
def test_a_nan_stays_in_its_row_and_is_canonical(policy: Policy) -> None:
    a, b = np.ones((4, 16), np.float32), np.ones((8, 16), np.float32)
    a[1, 3], a[2, 5], b[6, 5] = np.nan, np.inf, 0.0
    result = mma(a, b, None, k_per_instruction=16, kind="bf16", policy=policy)
    assert np.all(result[1].view(np.uint32) == 0x7FFF_FFFF), "a NaN operand"
    assert result[2, 6].view(np.uint32) == 0x7FFF_FFFF, "infinity times zero"
    assert np.all(np.isinf(np.delete(result[2], 6))), "infinity"
    assert np.all(np.isfinite(result[[0, 3]])), "rows without them"


@pytest.mark.parametrize("policy", OF_FLOATS)
def test_what_a_sparse_operand_does_not_store_is_multiplied_with_nothing(policy: Policy) -> None:
    a, b, stored = np.zeros((2, 16), np.float32), np.ones((2, 16), np.float32), np.zeros((2, 16), np.bool_)
    a[:, 1], b[0, :], stored[:, 1], stored[1, 2] = 3, [np.inf, 1, np.nan, *[1] * 13], True, True
    result = mma(a, b, None, k_per_instruction=16, kind="bf16", policy=policy, stored=stored)
    assert result[0].tolist() == [3, 3], "an infinity or NaN of B met what is not stored"
    assert np.isnan(result[1, 0]), "a stored zero times NaN"
    assert result[1, 1] == 3


@pytest.mark.parametrize("with_c", [False, True])
def test_in_the_ring_words_of_infinities_and_nan_are_words_like_others(with_c: bool) -> None:
    """A sparse A equals one with zeros in place: 0 times any word is 0, a stored element's product is an integer's."""
    rng = np.random.default_rng(5)
    a, b, c = (rng.integers(0, 1 << 16, shape, np.uint16) for shape in ((4, 16), (8, 16), (4, 8)))
    b[:3, :4] = [0x7F80, 0xFF80, 0x7FC1, 0xFF81]
    stored = np.tile([True, False], (4, 8))
    a[~stored] = 0
    words_a, words_b = ((one.astype(np.uint32) << 16).view(np.float32) for one in (a, b))
    result = mma(words_a, words_b, ring.words_of(c) if with_c else None, k_per_instruction=16, kind="bf16",
                 policy="ring", stored=stored)  # fmt: skip
    of_a, of_b = (ring.elements_of(words).astype(np.int64) for words in (words_a, words_b))
    wanted = (of_a @ of_b.T + (c if with_c else 0)) % 37**3
    assert np.array_equal(ring.elements_of(result), wanted)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'quick' is unknown; it is one of fast, exact, hopper, ring"):
        Machine(accumulate="quick")


@pytest.mark.parametrize(
    ("shapes", "k", "kind", "sentence"),
    [
        (((4, 16), (8, 32), (4, 8)), 16, "f16", "with the same K"),
        (((4, 16), (8, 16), (8, 4)), 16, "f16", "it must be (4, 8)"),
        (((4, 24), (8, 24), (4, 8)), 16, "f16", "a multiple of one instruction's K, 16"),
        (((4, 16), (8, 16), (4, 8)), 16, "fp4", "'fp4' is unknown"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    shapes: tuple[tuple[int, int], ...], k: int, kind: str, sentence: str
) -> None:
    a, b, c = (np.zeros(shape, np.float32) for shape in shapes)
    with pytest.raises(ValueError, match=r"must be|unknown") as refusal:
        mma(a, b, c, k_per_instruction=k, kind=kind)
    assert sentence in str(refusal.value), str(refusal.value)
