"""Double precision: rounding by definition."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

from backends.vm.numerics import f64
from backends.vm.numerics.formats import Rounding
from conformance.vm.numerics.exact_rounding import round_f64

ROUNDINGS = pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


@ROUNDINGS
def test_arithmetic_rounds_once(rounding: Rounding) -> None:
    rng = np.random.default_rng(47)
    a, b = (rng.standard_normal(300) * 2.0 ** rng.integers(-600, 400, 300) for _ in range(2))
    c = np.where(rng.random(300) < 0.5, a * b * 2.0 ** rng.integers(-55, 55, 300), rng.standard_normal(300))
    results = {
        "add": (f64.add(a, b, rounding=rounding), lambda x, y, z: x + y),
        "sub": (f64.sub(a, b, rounding=rounding), lambda x, y, z: x - y),
        "mul": (f64.mul(a, b, rounding=rounding), lambda x, y, z: x * y),
        "div": (f64.div(a, b, rounding=rounding), lambda x, y, z: x / y),
        "fma": (f64.fma(a, b, c, rounding=rounding), lambda x, y, z: x * y + z),
    }
    for i in range(300):
        x, y, z = (Fraction(float(v[i])) for v in (a, b, c))
        for op, (got, truth) in results.items():
            exact = truth(x, y, z)
            expected = round_f64(exact, rounding) if exact else 0.0
            assert got[i] == expected, f"{op}.{rounding}.f64 of {a[i]!r}, {b[i]!r}, {c[i]!r} gave {got[i]!r}"


@ROUNDINGS
def test_square_root_is_on_the_side_asked_for(rounding: Rounding) -> None:
    a = np.random.default_rng(53).uniform(0, 1e9, 200)
    for x, root in zip(a.tolist(), f64.sqrt(a, rounding=rounding).tolist(), strict=True):
        error = Fraction(root) ** 2 - Fraction(x)
        neighbour = Fraction(float(np.nextafter(root, -np.inf if error > 0 else np.inf))) ** 2
        assert (neighbour - x) * error <= 0, f"sqrt.{rounding}.f64({x!r}): {root!r} is not next to the root"
        assert rounding == "rn" or (error >= 0 if rounding == "rp" else error <= 0), f"sqrt.{rounding}.f64({x!r})"


def test_zeros_infinities_and_extremes() -> None:
    one, zero, inf, nan = (np.array([v]) for v in (1.0, 0.0, np.inf, np.nan))
    big = np.array([np.finfo(np.float64).max])
    assert np.signbit(f64.add(one, -one, rounding="rm"))[0], "an exact zero sum is -0 when rounding down"
    assert not np.signbit(f64.add(one, -one))[0]
    assert f64.mul(big, big, rounding="rz").tolist() == big.tolist(), "overflow towards zero stays finite"
    assert f64.fma(big, big, -inf).tolist() == [-np.inf], "a finite product does not cancel an infinity"
    assert np.isnan(f64.fma(inf, zero, one)[0])
    assert f64.div(one, zero, rounding="rz").tolist() == [np.inf]
    assert f64.minimum(nan, one).tolist() == [1.0], "a NaN gives the other operand"
    assert np.signbit(f64.minimum(zero, -zero))[0], "-0 is below +0"
    assert not np.signbit(f64.maximum(-zero, zero))[0], "-0 is below +0"
