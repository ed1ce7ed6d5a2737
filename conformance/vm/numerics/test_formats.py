"""Formats: values against ml_dtypes, rounding against its definition at every value and tie."""

from __future__ import annotations

from fractions import Fraction
from typing import cast

import ml_dtypes
import numpy as np
import pytest

from backends.vm.numerics.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    F16,
    FloatFormat,
    Rounding,
    add_to_odd,
    decode,
    encode,
)

LIBRARY = {
    F16: np.float16,
    BF16: ml_dtypes.bfloat16,
    E5M2: ml_dtypes.float8_e5m2,
    E4M3: ml_dtypes.float8_e4m3fn,
    E3M2: ml_dtypes.float6_e3m2fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    E2M1: ml_dtypes.float4_e2m1fn,
}
FORMATS = pytest.mark.parametrize("fmt", LIBRARY, ids=lambda fmt: fmt.name)


def all_codes(fmt: FloatFormat) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    return np.arange(1 << fmt.bits, dtype=np.uint16)


@FORMATS
def test_every_code_has_the_value_that_ml_dtypes_gives_it(fmt: FloatFormat) -> None:
    raw = all_codes(fmt).astype(np.uint16 if fmt.bits == 16 else np.uint8)
    expected = raw.view(LIBRARY[fmt]).astype(np.float64)
    np.testing.assert_array_equal(decode(all_codes(fmt), fmt), expected)


@FORMATS
@pytest.mark.parametrize("rounding", ["rn", "rna", "rz", "rm", "rp"])
def test_every_number_survives_every_rounding(fmt: FloatFormat, rounding: str) -> None:
    codes = all_codes(fmt)
    values = decode(codes, fmt)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(encode(values, fmt, cast(Rounding, rounding))[numbers], codes[numbers])


@FORMATS
def test_nan_has_one_code(fmt: FloatFormat) -> None:
    """PTX ISA 9.7.9.21: canonical NaN, or +maximum in the formats that have no NaN."""
    payloads = np.array([0x7FF8 << 48, 0xFFF8 << 48, 0xFFF0 << 48 | 1], np.uint64).view(np.float64)
    expected = {"f16": 0x7FFF, "bf16": 0x7FFF, "e5m2": 0x7F, "e4m3": 0x7F, "e3m2": 0x1F, "e2m3": 0x1F, "e2m1": 0x7}
    for relu in (False, True):
        assert encode(payloads, fmt, relu=relu).tolist() == [expected[fmt.name]] * 3, f"{fmt.name}, relu={relu}"


@FORMATS
@pytest.mark.parametrize("negative", [False, True])
def test_rounding_between_all_neighbours(fmt: FloatFormat, negative: bool) -> None:
    """The midpoints between all adjacent values of one sign, and their neighbours on either side."""
    lower = np.arange(fmt.max_finite, dtype=np.uint16)
    upper = lower + np.uint16(1)
    low, high = decode(lower, fmt), decode(upper, fmt)
    middle = (low + high) / 2
    sign = np.uint16(fmt.sign_bit if negative else 0)
    even = np.where(lower % 2 == 0, lower, upper)
    away, towards = (lower, upper) if negative else (upper, lower)
    nearest = {"just below": (np.nextafter(middle, 0), lower), "just above": (np.nextafter(middle, np.inf), upper)}
    for name, (values, expected) in {"middle": (middle, even), **nearest}.items():
        signed = -values if negative else values
        place = f"{name} of neighbouring {fmt.name} values"
        np.testing.assert_array_equal(encode(signed, fmt, "rn"), expected | sign, f"rn, {place}")
        np.testing.assert_array_equal(encode(signed, fmt, "rz"), lower | sign, f"rz, {place}")
        np.testing.assert_array_equal(encode(signed, fmt, "rm"), towards | sign, f"rm, {place}")
        np.testing.assert_array_equal(encode(signed, fmt, "rp"), away | sign, f"rp, {place}")
        ties_away = upper if name == "middle" else expected
        np.testing.assert_array_equal(encode(signed, fmt, "rna"), ties_away | sign, f"rna, {place}")


@FORMATS
def test_overflow_goes_where_the_rounding_sends_it(fmt: FloatFormat) -> None:
    largest = decode(np.array([fmt.max_finite], np.uint16), fmt)
    step = largest - decode(np.array([fmt.max_finite - 1], np.uint16), fmt)
    beyond = np.concatenate([largest + step / 2, largest * 4, [np.inf]])
    infinity = fmt.max_finite if fmt.infinity is None else fmt.infinity
    for rounding, positive, negative in (("rn", infinity, infinity), ("rz", None, None), ("rm", None, infinity)):
        for values, goal, sign in ((beyond, positive, 0), (-beyond, negative, fmt.sign_bit)):
            finite = fmt.max_finite if goal is None else goal
            expected = [finite | sign, finite | sign, infinity | sign]
            assert encode(values, fmt, cast(Rounding, rounding)).tolist() == expected, f"{rounding} to {fmt.name}"
    saturated = encode(np.concatenate([beyond, -beyond]), fmt, satfinite=True).tolist()
    assert saturated == [fmt.max_finite] * 3 + [fmt.max_finite | fmt.sign_bit] * 3, f"satfinite to {fmt.name}"


def test_addition_to_odd_keeps_the_side_of_the_exact_sum() -> None:
    rng = np.random.default_rng(11)
    a = np.ldexp(rng.standard_normal(3000), rng.integers(-90, 90, 3000))
    b = np.where(rng.random(3000) < 0.5, a * rng.choice([-1, 1], 3000) * 2.0**-53, 1.0) * rng.standard_normal(3000)
    for x, y, got in zip(a.tolist(), b.tolist(), add_to_odd(a, b).tolist(), strict=True):
        exact = Fraction(x) + Fraction(y)
        if Fraction(got) == exact:
            continue
        below, above = sorted((got, float(np.nextafter(got, np.inf if exact > Fraction(got) else -np.inf))))
        assert Fraction(below) < exact < Fraction(above), f"{x!r} + {y!r} gave {got!r}, a neighbour of another sum"
        assert int(np.float64(got).view(np.uint64)) & 1, f"{x!r} + {y!r} is inexact, so {got!r} must end in an odd bit"
