"""Single-precision arithmetic against an H200 and against rounding by definition."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.numerics import approx, f32, f64
from backends.vm.numerics.f32 import Float32
from backends.vm.numerics.formats import COMPARISONS, Rounding
from conformance import SILICON
from conformance.vm.numerics.exact_rounding import round_f32, round_f64

GOLDEN = np.load(SILICON / "numerics" / "binary.npz")
A, B = GOLDEN["a"].view(np.float32), GOLDEN["b"].view(np.float32)
ROUNDINGS: tuple[Rounding, ...] = ("rn", "rz", "rm", "rp")
NAN, MAX, TINY = 0x7FFF_FFFF, 0x7F7F_FFFF, 0x0080_0000

MEASURED: dict[str, Callable[[Float32, Float32], Float32]] = {
    "min.f32": f32.minimum,
    "max.f32": f32.maximum,
    "min.NaN.f32": lambda a, b: f32.minimum(a, b, nan=True),
    "max.NaN.f32": lambda a, b: f32.maximum(a, b, nan=True),
    "min.ftz.f32": lambda a, b: f32.minimum(a, b, ftz=True),
    "add.rn.f32": f32.add,
    "mul.rn.f32": f32.mul,
    "add.rn.ftz.f32": lambda a, b: f32.add(a, b, ftz=True),
    "mul.rn.ftz.f32": lambda a, b: f32.mul(a, b, ftz=True),
}


def floats(*codes: int) -> Float32:
    return np.array(codes, np.uint32).view(np.float32)


def codes(values: Float32) -> list[int]:
    return values.view(np.uint32).tolist()


@pytest.mark.parametrize("op", MEASURED)
def test_results_are_an_h200s_bits(op: str) -> None:
    result = MEASURED[op](A, B).view(np.uint32)
    wrong = np.flatnonzero(result != GOLDEN[op])
    cases = [f"{GOLDEN['a'][i]:08x}, {GOLDEN['b'][i]:08x}: {result[i]:08x} for {GOLDEN[op][i]:08x}" for i in wrong[:5]]
    assert not len(wrong), f"{op} differs from the H200 in {len(wrong)} of {len(A)}: {cases}"


def test_the_fast_forms_are_the_general_ones() -> None:
    pairs = ((f32.add_rn, "add.rn.f32"), (f32.mul_rn, "mul.rn.f32"), (f32.min_num, "min.f32"), (f32.max_num, "max.f32"))
    for function, op in pairs:
        np.testing.assert_array_equal(function(A, B).view(np.uint32), GOLDEN[op], op)
    np.testing.assert_array_equal(f32.sub_rn(A, -B).view(np.uint32), GOLDEN["add.rn.f32"], "a - (-b)")


def test_a_nan_or_a_signed_zero_dropped_on_the_way_would_be_seen() -> None:
    """Planted faults: NumPy's own minimum, and a sum that keeps NaN payloads."""
    assert np.any(np.fmin(A, B).view(np.uint32) != GOLDEN["min.f32"]), "the golden pairs cannot tell fmin from min.f32"
    assert np.any((A + B).view(np.uint32) != GOLDEN["add.rn.f32"]), "the golden pairs hold no NaN with a payload"


def hard_operands(count: int, seed: int) -> tuple[Float32, Float32, Float32]:
    """Finite operands: random bits, few significant bits, subnormals. The third is often near a tie of a * b + c."""
    rng = np.random.default_rng(seed)

    def draw() -> npt.NDArray[np.uint32]:
        bits = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
        middle = rng.integers(96, 160, count).astype(np.uint32) << np.uint32(23)
        short = (bits & 0x807F_0000) | middle
        kinds = [bits, short, (bits & 0x807F_FFFF) | middle, bits & 0x800F_FFFF]
        chosen = np.choose(rng.integers(0, 4, count), kinds)
        return np.where((chosen & 0x7F80_0000) == 0x7F80_0000, chosen & 0xBFFF_FFFF, chosen)

    a, b, c = (draw().view(np.float32) for _ in range(3))
    product = (a.astype(np.float64) * b.astype(np.float64)).astype(np.float32)
    near = product * np.ldexp(np.float32(1), rng.integers(-26, 27, count))
    tied = np.isfinite(near) & (rng.random(count) < 0.5)
    return a, b, np.where(tied, near, c)


def midpoint_operands() -> tuple[Float32, Float32, Float32]:
    """a * b is half a unit of c, or that plus a rest that float64 cannot hold next to c; normal and subnormal sums."""
    halves = ((1.0, 1.0), (1 + 2.0**-23, 1 - 2.0**-23), (1 + 2.0**-12, 1 - 2.0**-12 + 2.0**-24))
    places = ((2.0**-12, 2.0**-12, 1.0, 2.0**-23), (2.0**-75, 2.0**-75, 2.0**-127, 2.0**-149))
    rows = [
        (x * scale_x, sign * y * scale_y, c + units * unit)
        for scale_x, scale_y, c, unit in places
        for x, y in halves
        for units in (0, 1, 2)
        for sign in (1, -1)
    ]
    a, b, c = (np.array(column, np.float32) for column in zip(*rows, strict=True))
    return a, b, c


def disagreements(got: Float32, exact: list[Fraction | None], rounding: str) -> list[str]:
    wrong = []
    for i, (value, truth) in enumerate(zip(got.tolist(), exact, strict=True)):
        if truth is not None and (value != round_f32(truth, rounding) if truth else value != 0):
            wrong.append(f"case {i}: {value!r} for {float(truth)!r}")
    return wrong


def exact_fma(a: Float32, b: Float32, c: Float32) -> list[Fraction | None]:
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    return [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in rows]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_fma_rounds_once(rounding: Rounding) -> None:
    for operands in (hard_operands(3000, 5), midpoint_operands()):
        wrong = disagreements(f32.fma(*operands, rounding=rounding), exact_fma(*operands), rounding)
        assert not wrong, f"fma.{rounding}.f32 is not the once-rounded value: {wrong[:3]}"


def test_an_fma_rounded_twice_would_be_seen() -> None:
    a, b, c = midpoint_operands()
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    exact = exact_fma(a, b, c)
    for name, here in (("normal", np.abs(c) > 0.5), ("subnormal", np.abs(c) < 0.5)):
        caught = disagreements(twice[here], [exact[i] for i in np.flatnonzero(here)], "rn")
        assert caught, f"the midpoints with {name} sums do not catch a float64 sum rounded again"


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_sum_product_quotient_and_root_are_correctly_rounded(rounding: Rounding) -> None:
    a, b, _ = hard_operands(2000, 6)
    rows = [(Fraction(x), Fraction(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    truths: dict[str, tuple[Float32, list[Fraction | None]]] = {
        "add": (f32.add(a, b, rounding=rounding), [x + y for x, y in rows]),
        "sub": (f32.sub(a, b, rounding=rounding), [x - y for x, y in rows]),
        "mul": (f32.mul(a, b, rounding=rounding), [x * y for x, y in rows]),
        "div": (f32.div(a, b, rounding=rounding), [x / y if y else None for x, y in rows]),
        "rcp": (f32.rcp(b, rounding=rounding), [1 / y if y else None for _, y in rows]),
    }
    for op, (got, exact) in truths.items():
        wrong = disagreements(got, exact, rounding)
        assert not wrong, f"{op}.{rounding}.f32: {wrong[:3]}"


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_square_root_brackets_its_operand(rounding: Rounding) -> None:
    a = np.abs(hard_operands(1000, 7)[0])
    for x, root in zip(a.tolist(), f32.sqrt(a, rounding=rounding), strict=True):
        down, up = (Fraction(float(np.nextafter(root, np.float32(end)))) for end in (0, np.inf))
        middle, here = Fraction(float(root)), Fraction(x)
        holds = {
            "rn": ((down + middle) / 2) ** 2 <= here <= ((middle + up) / 2) ** 2,
            "rz": middle**2 <= here < up**2,
            "rm": middle**2 <= here < up**2,
            "rp": middle**2 >= here and (here == 0 or here > down**2),
        }
        assert holds[rounding], f"sqrt.{rounding}.f32({x!r}) = {float(root)!r}"


def test_exact_zero_sums_are_negative_only_when_rounding_down() -> None:
    """IEEE 754 section 6.3."""
    one, zero = floats(0x3F80_0000), floats(0)
    for rounding in ROUNDINGS:
        expected = [0x8000_0000 if rounding == "rm" else 0]
        assert codes(f32.add(one, -one, rounding=rounding)) == expected, f"1 + -1 under {rounding}"
        assert codes(f32.fma(one, one, -one, rounding=rounding)) == expected, f"1 * 1 + -1 under {rounding}"
        assert codes(f32.add(zero, zero, rounding=rounding)) == [0], f"0 + 0 under {rounding}"
        assert codes(f32.add(-zero, -zero, rounding=rounding)) == [0x8000_0000], f"-0 + -0 under {rounding}"


def test_overflow_under_directed_rounding() -> None:
    big = floats(MAX)
    expected = {"rn": 0x7F80_0000, "rz": MAX, "rm": MAX, "rp": 0x7F80_0000}
    for rounding in ROUNDINGS:
        assert codes(f32.add(big, big, rounding=rounding)) == [expected[rounding]], f"max + max under {rounding}"
        assert codes(f32.mul(big, big, rounding=rounding)) == [expected[rounding]], f"max * max under {rounding}"
        assert codes(f32.fma(big, big, big, rounding=rounding)) == [expected[rounding]], f"fma under {rounding}"


def test_every_nan_result_is_canonical() -> None:
    nan, inf, zero = floats(0xFFC1_2345), floats(0x7F80_0000), floats(0)
    one = np.ones(1, np.float32)
    results = {
        "fma of NaN": f32.fma_rn(one, one, nan),
        "fma inf * 0": f32.fma_rn(inf, zero, one),
        "fma inf - inf": f32.fma_rn(inf, one, -inf),
        "fma.rz of NaN": f32.fma(nan, one, one, rounding="rz"),
        "0 / 0": f32.div(zero, zero),
        "sqrt(-1)": f32.sqrt(-one),
        "max of NaN, NaN": f32.max_num(nan, nan),
    }
    for name, result in results.items():
        assert codes(result) == [NAN], f"{name} gives {codes(result)[0]:08x}, an H200 {NAN:08x}"


@pytest.mark.parametrize(
    ("rounding", "sign", "flushed"),
    [("rn", 1, True), ("rz", 1, True), ("rp", 1, True), ("rp", -1, True), ("rm", -1, True)],
)
def test_ftz_flushes_before_the_subnormal_grid_rounds(rounding: Rounding, sign: int, flushed: bool) -> None:
    """facts.md 7.3: 0x3F7FFFFF * 0x00800000 is 2^-126 (1 - 2^-24). The subnormal grid would round it to 2^-126."""
    below, smallest = floats(0x3F7F_FFFF) * np.float32(sign), floats(0x0080_0000)
    zero = 0 if sign > 0 else 0x8000_0000
    assert codes(f32.mul(below, smallest, rounding=rounding, ftz=True)) == [zero], "mul"
    assert codes(f32.fma(below, smallest, floats(0) * np.float32(sign), rounding=rounding, ftz=True)) == [zero], "fma"


def test_ftz_keeps_a_result_that_rounds_up_to_the_smallest_normal_number() -> None:
    """2^-126 (1 - 2^-24 + 2^-47): only rounding away from zero reaches 2^-126."""
    a, b = floats(0x3F7F_FFFE), floats(0x0080_0001)
    assert codes(f32.mul(a, b, rounding="rp", ftz=True)) == [0x0080_0000]
    assert codes(f32.mul(a, b, rounding="rz", ftz=True)) == [0]


def test_ftz_flushes_a_reciprocal_before_it_rounds_up() -> None:
    a = np.array([0x7E80_0001, 0x7E80_0000], np.uint32).view(np.float32)
    assert codes(f32.rcp(a, rounding="rp", ftz=True)) == [0, 0x0080_0000]
    assert codes(f32.rcp(a, rounding="rp")) == [0x0080_0000, 0x0080_0000]


def test_ftz_flushes_operands_and_result_and_keeps_the_sign() -> None:
    subnormal, one, smallest = floats(0x8000_0001), floats(0x3F80_0000), floats(TINY)
    half = floats(0x3F00_0000)
    assert codes(f32.fma(subnormal, one, -floats(0), ftz=True)) == [0x8000_0000], "operand"
    assert codes(f32.mul(-smallest, half, ftz=True)) == [0x8000_0000], "result"
    assert codes(f32.mul(-smallest, half)) == [0x8040_0000], "without ftz the result is subnormal"
    assert codes(f32.absolute(subnormal, ftz=True)) == [0], "abs"
    assert codes(f32.negate(subnormal, ftz=True)) == [0], "neg"


def test_saturation_clamps_and_makes_nan_zero() -> None:
    """PTX ISA 9.7.3.3."""
    values = floats(0x4000_0000, 0xBF80_0000, 0x7FC0_0000, 0x3F00_0000, 0x7F80_0000)
    assert codes(f32.add(values, np.zeros(5, np.float32), sat=True)) == [0x3F80_0000, 0, 0, 0x3F00_0000, 0x3F80_0000]


def test_extremes_of_three_and_of_magnitudes() -> None:
    """PTX ISA 9.7.3.11: .xorsign.abs and three inputs."""
    two, minus_three, nan, five = floats(0x4000_0000), floats(0xC040_0000), floats(0x7FC0_0001), floats(0x40A0_0000)
    assert codes(f32.maximum(two, minus_three, abs=True, xorsign=True)) == [0xC040_0000], "max.xorsign.abs(2, -3) is -3"
    assert codes(f32.minimum(two, minus_three, abs=True, xorsign=True)) == [0xC000_0000], "min.xorsign.abs(2, -3) is -2"
    assert codes(f32.minimum(-two, minus_three, abs=True, xorsign=True)) == [0x4000_0000], "like signs give a plus"
    assert codes(f32.maximum(two, nan, five)) == codes(five), "NaN among three is passed over"
    assert codes(f32.maximum(two, nan, five, nan=True)) == [NAN], ".NaN of three"
    assert codes(f32.minimum(five, two, minus_three, abs=True)) == [0x4000_0000], "min.abs of three"
    assert codes(f32.maximum(nan, two, nan=True, abs=True, xorsign=True)) == [NAN], "xorsign leaves NaN alone"


def test_copysign_takes_the_sign_of_its_first_operand() -> None:
    assert codes(f32.copysign(floats(0x8000_0000), floats(0x4000_0000))) == [0xC000_0000]


def test_testp_classes() -> None:
    values = floats(0, 1, TINY, 0x7F80_0000, 0x7FC0_0000, 0x8000_0000)
    expected = {
        "finite": [1, 1, 1, 0, 0, 1],
        "infinite": [0, 0, 0, 1, 0, 0],
        "number": [1, 1, 1, 1, 0, 1],
        "notanumber": [0, 0, 0, 0, 1, 0],
        "normal": [1, 0, 1, 0, 0, 1],
        "subnormal": [0, 1, 0, 0, 0, 0],
    }
    for prop, truth in expected.items():
        assert f32.testp(cast(f32.Property, prop), values).tolist() == [bool(t) for t in truth], f"testp.{prop}"


@pytest.mark.parametrize("op", COMPARISONS)
def test_comparisons_treat_nan_as_the_isa_table_says(op: str) -> None:
    """PTX ISA 9.3.1.2, tables 23 to 25."""
    less, equal, greater = {
        "eq": (0, 1, 0), "ne": (1, 0, 1), "lt": (1, 0, 0), "le": (1, 1, 0), "gt": (0, 0, 1), "ge": (0, 1, 1),
        "nu": (1, 1, 1), "na": (0, 0, 0),
    }[op[:2]]  # fmt: skip
    unordered = op == "nan" or (len(op) == 3 and op.endswith("u"))
    a = np.array([1, 2, 3, np.nan, 1, np.nan], np.float32)
    b = np.array([2, 2, 2, 1, np.nan, np.nan], np.float32)
    expected = [bool(less), bool(equal), bool(greater)] + [unordered] * 3
    assert COMPARISONS[op](a, b).tolist() == expected, f"setp.{op} of <, =, >, and three with NaN"


@pytest.mark.parametrize("op", ["div.full.f32", "div.approx.f32"])
def test_approximate_quotients_lie_within_two_units_of_an_h200s(op: str) -> None:
    result = (approx.div_full if op == "div.full.f32" else approx.div_approx)(A, B).view(np.uint32)
    distance = np.abs(result.astype(np.int64) - GOLDEN[op].astype(np.int64))
    unbounded = np.isin(GOLDEN[op] & 0x7FFF_FFFF, [0x7F80_0000, NAN])
    wrong = np.flatnonzero((distance > 2) | (unbounded & (distance > 0)))
    cases = [f"{GOLDEN['a'][i]:08x}/{GOLDEN['b'][i]:08x}: {result[i]:08x} for {GOLDEN[op][i]:08x}" for i in wrong[:5]]
    assert not len(wrong), f"{op} is off in {len(wrong)} of {len(A)}: {cases}"


# Double precision against rounding by definition.


@pytest.mark.parametrize("rounding", ROUNDINGS)
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


@pytest.mark.parametrize("rounding", ROUNDINGS)
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
