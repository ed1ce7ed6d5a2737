"""Approximate functions: documented bounds, and special values against an H200."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from backends.vm.numerics import approx, half
from backends.vm.numerics.f32 import Float32
from backends.vm.numerics.formats import BF16, F16, FloatFormat, Rounding, decode
from backends.vm.numerics.half import Codes16
from conformance import SILICON
from conformance.vm.numerics.exact_rounding import round_bf16, round_f16, round_f32

GOLDEN = np.load(SILICON / "numerics" / "approx_specials.npz")
X = GOLDEN["x"].view(np.float32)

FUNCTIONS: dict[str, Callable[[Float32], Float32]] = {
    "ex2.approx.ftz.f32": lambda x: approx.ex2(x, ftz=True),
    "ex2.approx.f32": approx.ex2,
    "lg2.approx.ftz.f32": lambda x: approx.lg2(x, ftz=True),
    "rcp.approx.ftz.f32": lambda x: approx.rcp(x, ftz=True),
    "rsqrt.approx.ftz.f32": lambda x: approx.rsqrt(x, ftz=True),
    "sqrt.approx.ftz.f32": lambda x: approx.sqrt(x, ftz=True),
    "tanh.approx.f32": approx.tanh,
    "sin.approx.ftz.f32": lambda x: approx.sin(x, ftz=True),
    "cos.approx.ftz.f32": lambda x: approx.cos(x, ftz=True),
}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_specials_are_those_of_an_h200(op: str) -> None:
    got, answered = FUNCTIONS[op](X).view(np.uint32), GOLDEN[op]
    wrong = [f"{GOLDEN['x'][i]:08x}: {got[i]:08x} for {answered[i]:08x}" for i in np.flatnonzero(got != answered)]
    assert not wrong, f"{op}: {wrong}"


def sample(low: float, high: float, count: int = 4000) -> Float32:
    return np.random.default_rng(3).uniform(low, high, count).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "function", "truth", "x", "relative", "absolute"),
    [
        ("ex2", approx.ex2, lambda x: 2.0**x, sample(-125, 127), 2.0**-22.5, 0.0),
        ("lg2 near 1", approx.lg2, math.log2, sample(0.5, 2), 0.0, 2.0**-22),
        ("lg2", approx.lg2, math.log2, sample(2, 1e30), 2.0**-22, 0.0),
        ("rcp", approx.rcp, lambda x: 1 / x, sample(1e-3, 1e3), 2.0**-23, 0.0),
        ("rsqrt", approx.rsqrt, lambda x: 1 / math.sqrt(x), sample(1e-6, 1e6), 2.0**-22.9, 0.0),
        ("sqrt", approx.sqrt, math.sqrt, sample(0, 1e6), 2.0**-23, 0.0),
        ("tanh", approx.tanh, math.tanh, sample(-9, 9), 2.0**-11, 0.0),
        ("sin", approx.sin, math.sin, sample(-2 * math.pi, 2 * math.pi), 0.0, 2.0**-20.5),
        # An H200 exceeds the ISA's 2^-20.5 by 1.5 %.
        ("cos", approx.cos, math.cos, sample(-2 * math.pi, 2 * math.pi), 0.0, 2.0**-20.47),
    ],
)
def test_documented_error_bounds(
    name: str,
    function: Callable[[Float32], Float32],
    truth: Callable[[float], float],
    x: Float32,
    relative: float,
    absolute: float,
) -> None:
    """PTX ISA 9.7.3.13 to 9.7.3.22."""
    exact = np.array([truth(float(value)) for value in x])
    error = np.abs(function(x).astype(np.float64) - exact)
    worst = int(np.argmax(error - relative * np.abs(exact)))
    assert error[worst] <= relative * abs(exact[worst]) + absolute, f"{name}({x[worst]!r}) is off by {error[worst]!r}"


def test_ex2_is_exact_on_integers_from_the_smallest_normal_result_on() -> None:
    """Below -126 the result is a square of 2^(n / 2): exact for even n, an ulp short for some odd n."""
    n = np.arange(-149, 128, dtype=np.float32)
    exact = np.ldexp(1.0, n.astype(int)).astype(np.float32)
    short = approx.ex2(n).view(np.int32) - exact.view(np.int32)
    assert np.all(short[(n >= -126) | (n % 2 == 0)] == 0)
    assert np.all(short >= -1)
    np.testing.assert_array_equal(approx.ex2(n, ftz=True), np.where(n < -126, np.float32(0), exact))


# Half precision against an H200 and against rounding by definition; mixed precision against f32.


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
    """1.5 * (1 + 2^-7) is a tie in bf16; -2^-30 moves it below the tie, and f32 loses that."""
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
    """PTX ISA 9.7.5: convert exactly, then round once in f32."""
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
