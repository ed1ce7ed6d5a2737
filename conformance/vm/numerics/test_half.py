"""Half precision against an H200 and rounding by definition; mixed precision with f32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest

from backends.vm.numerics import half
from backends.vm.numerics.formats import BF16, F16, FloatFormat, Rounding, decode
from backends.vm.numerics.half import Codes16
from conformance import SILICON
from conformance.vm.numerics.exact_rounding import round_bf16, round_f16, round_f32

FOLDER = SILICON / "numerics"
BINARY, UNARY = np.load(FOLDER / "binary.npz"), np.load(FOLDER / "half.npz")
A, B = BINARY["a"].view(np.uint16), BINARY["b"].view(np.uint16)
FORMATS = pytest.mark.parametrize("fmt", [F16, BF16], ids=lambda fmt: fmt.name)
ROUND = {"f16": round_f16, "bf16": round_bf16}

MEASURED: dict[str, Callable[[Codes16, Codes16], Codes16]] = {
    "add.f16x2": lambda a, b: half.add(a, b, F16),
    "mul.f16x2": lambda a, b: half.mul(a, b, F16),
    "max.f16x2": lambda a, b: half.maximum(a, b, F16),
    "max.NaN.f16x2": lambda a, b: half.maximum(a, b, F16, nan=True),
    "max.bf16x2": lambda a, b: half.maximum(a, b, BF16),
    "add.bf16x2": lambda a, b: half.add(a, b, BF16),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def code(*values: int) -> Codes16:
    return np.array(values, np.uint16)


@pytest.mark.parametrize("op", MEASURED)
def test_results_are_an_h200s_bits(op: str) -> None:
    result, answered = MEASURED[op](A, B), BINARY[op].view(np.uint16)
    wrong = np.flatnonzero(result != answered)
    cases = [f"{A[i]:04x}, {B[i]:04x}: {result[i]:04x} for {answered[i]:04x}" for i in wrong[:5]]
    assert not len(wrong), f"{op} differs from the H200 in {len(wrong)} of {len(A)} halves: {cases}"


@pytest.mark.parametrize("op", ["ex2.approx.f16x2", "ex2.approx.ftz.bf16x2", "tanh.approx.f16x2", "tanh.approx.bf16x2"])
def test_approximations_lie_within_one_code_of_an_h200s(op: str) -> None:
    function = half.ex2 if op.startswith("ex2") else half.tanh
    fmt = BF16 if "bf16" in op else F16
    result, answered = function(UNARY["codes"], fmt), UNARY[op]
    distance = np.abs(result.astype(int) - answered.astype(int))
    special = ~np.isfinite(decode(UNARY["codes"], fmt)) | ((UNARY["codes"] & 0x7FFF) == 0)
    wrong = np.flatnonzero((distance > 1) | (special & (distance > 0)))
    cases = [f"{UNARY['codes'][i]:04x}: {result[i]:04x} for {answered[i]:04x}" for i in wrong[:5]]
    assert not len(wrong), f"{op}: {cases}"


def test_a_sum_that_f32_would_turn_into_a_tie_is_rounded_once() -> None:
    """1.5 * (1 + 2^-7) is a tie in bf16; -2^-30 takes it below the tie, and f32 loses that."""
    a, b, c = code(0x3F81), code(0x3FC0), code(0xB080)
    through_f32 = (decode(a, BF16) * decode(b, BF16) + decode(c, BF16)).astype(np.float32)
    assert round_bf16(Fraction(float(through_f32[0])), "rn") == 1.5 + 2**-6, "this case does not catch two roundings"
    assert half.fma(a, b, c, BF16).tolist() == [0x3FC1]


@FORMATS
def test_fma_rounds_once(fmt: FloatFormat) -> None:
    rng = np.random.default_rng(17)
    a, b, c = (rng.integers(0, 1 << 16, 6000).astype(np.uint16) for _ in range(3))
    product = half.mul(a, b, fmt)
    near = product ^ (rng.integers(0, 8, 6000) << fmt.mantissa_bits).astype(np.uint16)
    c = np.where(rng.random(6000) < 0.5, near, c)
    values = [decode(x, fmt) for x in (a, b, c)]
    numbers = np.all(np.isfinite(values), axis=0)
    got = decode(half.fma(a, b, c, fmt), fmt)
    for i in np.flatnonzero(numbers):
        x, y, z = (float(v[i]) for v in values)
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        expected = ROUND[fmt.name](exact, "rn") if exact else 0.0
        assert got[i] == expected, f"fma.rn.{fmt.name} of {x!r}, {y!r}, {z!r} gave {got[i]!r}, not {expected!r}"


def test_flushing_saturation_and_relu() -> None:
    one, subnormal, minus_two, nan = code(0x3C00), code(0x8001), code(0xC000), code(0xFE01)
    zero = code(0)
    assert half.mul(subnormal, one, F16, ftz=True).tolist() == [0x8000], "an operand is flushed"
    assert half.mul(code(0x0400), code(0x3800), F16, ftz=True).tolist() == [0], "a result is flushed"
    assert half.mul(code(0x0400), code(0x3800), F16).tolist() == [0x0200], "without ftz it is subnormal"
    assert half.add(minus_two, zero, F16, sat=True).tolist() == [0], ".sat of a negative"
    assert half.add(code(0x4000), zero, F16, sat=True).tolist() == [0x3C00], ".sat above one"
    assert half.add(nan, zero, F16, sat=True).tolist() == [0], ".sat of NaN"
    assert half.fma(minus_two, one, zero, F16, relu=True).tolist() == [0], ".relu of a negative"
    assert half.fma(nan, one, zero, F16, relu=True).tolist() == [0x7FFF], ".relu keeps NaN, canonical"


def test_minimum_magnitudes_and_signs() -> None:
    assert half.minimum(code(0x4000), code(0xC200), F16, xorsign_abs=True).tolist() == [0xC000], (
        "min(|2|, |-3|), unlike"
    )
    assert half.minimum(code(0), code(0x8000), BF16).tolist() == [0x8000], "-0 is below +0"
    assert half.minimum(code(0x7FC1), code(0x3F80), BF16).tolist() == [0x3F80], "a NaN gives the other"
    assert half.minimum(code(0x7FC1), code(0x3F80), BF16, nan=True).tolist() == [0x7FFF], ".NaN"
    assert half.negate(code(0x8001), F16, ftz=True).tolist() == [0], "neg.ftz"
    assert half.absolute(code(0xBF80), BF16).tolist() == [0x3F80], "abs"


def test_comparisons_of_halves() -> None:
    a, b = code(0x3C00, 0x3C00, 0x7E00, 0x0001), code(0x4000, 0x3C00, 0x3C00, 0x0000)
    assert half.compare("lt", a, b, F16).tolist() == [True, False, False, False]
    assert half.compare("ltu", a, b, F16).tolist() == [True, False, True, False]
    assert half.compare("eq", a, b, F16, ftz=True).tolist() == [False, True, False, True], "a subnormal is flushed"


@FORMATS
@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_mixed_precision_rounds_the_exact_value_to_f32(fmt: FloatFormat, rounding: Rounding) -> None:
    """PTX ISA 9.7.5: convert exactly, then one rounding in f32."""
    rng = np.random.default_rng(23)
    exponents = (rng.integers(-3, 4, (2, 500)) + fmt.bias) << fmt.mantissa_bits
    a, b = (exponents | rng.integers(0, 1 << fmt.mantissa_bits, (2, 500))).astype(np.uint16)
    c = rng.standard_normal(500).astype(np.float32)
    x, y, z = ([Fraction(value) for value in values.tolist()] for values in (decode(a, fmt), decode(b, fmt), c))
    results = {
        "add": (half.mixed_add(a, c, fmt, rounding=rounding), [p + r for p, r in zip(x, z, strict=True)]),
        "sub": (half.mixed_sub(a, c, fmt, rounding=rounding), [p - r for p, r in zip(x, z, strict=True)]),
        "fma": (half.mixed_fma(a, b, c, fmt, rounding=rounding), [p * q + r for p, q, r in zip(x, y, z, strict=True)]),
    }
    for op, (got, exact) in results.items():
        for i, value in enumerate(got.tolist()):
            wanted = round_f32(exact[i], rounding)
            assert value == wanted, f"{op}.{rounding}.f32.{fmt.name} of {x[i]}, {y[i]}, {z[i]}: {value}, not {wanted}"
