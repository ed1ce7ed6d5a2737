"""Approximate functions: documented bounds, and the specials that an H200 answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from backends.vm.numerics import approx
from backends.vm.numerics.f32 import Float32
from conformance import SILICON

GOLDEN = np.load(SILICON / "numerics" / "approx_specials.npz")
X = GOLDEN["x"].view(np.float32)
NAN = 0x7FFF_FFFF

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


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("op", FUNCTIONS)
def test_specials_are_those_of_an_h200(op: str) -> None:
    """Zeros, infinities, NaN and subnormals bit for bit; sin and cos of the others are a matter of the bounds."""
    special = (X == 0) | ~np.isfinite(X) | (np.abs(X) < np.float32(2.0**-126))
    answered = GOLDEN[op]
    if op[:3] not in ("sin", "cos"):
        special |= np.isin(answered & 0x7FFF_FFFF, [0, 0x7F80_0000, NAN])
    got = FUNCTIONS[op](X).view(np.uint32)
    wrong = [
        f"{GOLDEN['x'][i]:08x}: {got[i]:08x} for {answered[i]:08x}" for i in np.flatnonzero(special & (got != answered))
    ]
    assert not wrong, f"{op}: {wrong}"


@pytest.mark.parametrize("op", [op for op in FUNCTIONS if op[:3] not in ("sin", "cos")])
def test_ordinary_values_lie_within_the_measured_error_of_an_h200s(op: str) -> None:
    """facts.md 7.4: at most 2.06 units in the last place, tanh 2^-16.5."""
    got, answered = FUNCTIONS[op](X).astype(np.float64), GOLDEN[op].view(np.float32).astype(np.float64)
    finite = np.isfinite(answered) & np.isfinite(got) & (answered != 0)
    bound = 2.0**-16 if op.startswith("tanh") else 2.0**-21
    off = np.abs(got - answered) > bound * np.abs(answered) + 2.0**-149
    assert not np.any(off & finite), f"{op} at {X[off & finite]}: {got[off & finite]} for {answered[off & finite]}"


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
        ("cos", approx.cos, math.cos, sample(-2 * math.pi, 2 * math.pi), 0.0, 2.0**-20.5),
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


def test_ex2_is_exact_on_integers_and_keeps_subnormals_without_ftz() -> None:
    n = np.arange(-149, 128, dtype=np.float32)
    np.testing.assert_array_equal(approx.ex2(n), np.ldexp(1.0, n.astype(int)).astype(np.float32))
    flushed = approx.ex2(n, ftz=True)
    np.testing.assert_array_equal(flushed, np.where(n < -126, np.float32(0), approx.ex2(n)))
