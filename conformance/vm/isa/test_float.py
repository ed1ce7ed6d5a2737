"""f32 arithmetic in PTX against an H200 and exact rounding, with every modifier of the family."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.faults import UnknownInstructionError
from conformance import SILICON
from conformance.vm.kernel import run_ptx
from conformance.vm.numerics.exact_rounding import round_f32

FOLDER = SILICON / "numerics"
BINARY = np.load(FOLDER / "binary.npz")
SPECIALS = np.load(FOLDER / "approx_specials.npz")
ROUNDINGS = ("rn", "rz", "rm", "rp")
NAN, INF, MAX, TINY, MINUS_ZERO = 0x7FFF_FFFF, 0x7F80_0000, 0x7F7F_FFFF, 0x0080_0000, 0x8000_0000


def f32s(*codes: int) -> npt.NDArray[np.float32]:
    return np.array(codes, np.uint32).view(np.float32)


def codes_of(instruction: str, **inputs: npt.ArrayLike) -> list[int]:
    return run_ptx(instruction, inputs, {"d": np.float32})["d"].view(np.uint32).tolist()


def differences(found: npt.NDArray[np.uint32], answered: npt.NDArray[np.uint32], *operands: object) -> str:
    at = np.flatnonzero(found != answered)[:5]
    columns = [np.asarray(operand) for operand in operands]
    cases = [f"{[hex(c[i]) for c in columns]} gives {found[i]:08x}, the H200 {answered[i]:08x}" for i in at]
    return f"{len(at)} or more differ: {cases}"


@pytest.mark.parametrize("op", [op for op in BINARY if op.endswith("f32") and not op.startswith("div")])
def test_two_operands_give_an_h200s_bits(op: str) -> None:
    a, b = BINARY["a"], BINARY["b"]
    found = run_ptx(f"{op} %d, %a, %b;", {"a": a, "b": b}, {"d": np.uint32})["d"]
    assert np.array_equal(found, BINARY[op]), f"{op}: {differences(found, BINARY[op], a, b)}"


@pytest.mark.parametrize("op", ["add", "mul"])
def test_no_rounding_modifier_means_nearest(op: str) -> None:
    """PTX ISA 9.7.3.3: the default rounding is .rn."""
    found = run_ptx(f"{op}.f32 %d, %a, %b;", {"a": BINARY["a"], "b": BINARY["b"]}, {"d": np.uint32})["d"]
    assert np.array_equal(found, BINARY[f"{op}.rn.f32"]), f"{op}.f32 is not {op}.rn.f32"


@pytest.mark.parametrize("op", ["div.full.f32", "div.approx.f32"])
def test_approximate_quotients_are_within_two_units_of_an_h200s(op: str) -> None:
    """PTX ISA 9.7.3.8: 2 ulp for .approx while |b| lies in [2^-126, 2^126]."""
    divisor = np.abs(BINARY["b"].view(np.float32))
    usual = (divisor >= 2.0**-126) & (divisor <= 2.0**126)
    a, b, answered = (BINARY[name][usual] for name in ("a", "b", op))
    found = run_ptx(f"{op} %d, %a, %b;", {"a": a, "b": b}, {"d": np.uint32})["d"]
    off = np.abs(found.astype(np.int64) - answered)
    assert off.max() <= 2, f"{op}: {differences(np.where(off > 2, found, answered), answered, a, b)}"


@pytest.mark.parametrize("op", [op for op in SPECIALS if op != "x" and op[:3] not in ("sin", "cos")])
def test_approximate_functions_are_near_an_h200s_and_equal_on_specials(op: str) -> None:
    answered = SPECIALS[op]
    found = run_ptx(f"{op} %d, %x;", {"x": SPECIALS["x"]}, {"d": np.uint32})["d"]
    special = np.isin(answered & 0x7FFF_FFFF, [0, INF, NAN])
    assert np.array_equal(found[special], answered[special]), f"{op}: {differences(found, answered, SPECIALS['x'])}"
    near, true = found.view(np.float32).astype(np.float64), answered.view(np.float32).astype(np.float64)
    bound = 2.0**-16 if op.startswith("tanh") else 2.0**-21
    with np.errstate(invalid="ignore"):
        off = np.abs(near - true) > bound * np.abs(true) + 2.0**-149
    assert not (off & ~special).any(), f"{op}: {differences(found, answered, SPECIALS['x'])}"


@pytest.mark.parametrize("op", ["sin", "cos"])
def test_sine_and_cosine_lie_within_the_documented_error(op: str) -> None:
    """PTX ISA 9.7.3.18: absolute error at most 2^-20.5 in [-pi, pi]."""
    x = np.linspace(-np.pi, np.pi, 64).astype(np.float32)
    found = run_ptx(f"{op}.approx.f32 %d, %x;", {"x": x}, {"d": np.float32})["d"]
    exact = getattr(np, op)(x.astype(np.float64))
    assert np.abs(found - exact).max() <= 2.0**-20.5, f"{op}.approx.f32 is off by {np.abs(found - exact).max()}"


EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b, c: a + b,
    "sub": lambda a, b, c: a - b,
    "mul": lambda a, b, c: a * b,
    "fma": lambda a, b, c: a * b + c,
    "mad": lambda a, b, c: a * b + c,
    "div": lambda a, b, c: a / b,
    "rcp": lambda a, b, c: 1 / a,
}
SOURCES = {"fma": "%a, %b, %c", "mad": "%a, %b, %c", "rcp": "%a", "sqrt": "%a"}


def random_operands(count: int = 64) -> list[npt.NDArray[np.float32]]:
    generator = np.random.default_rng(7)
    exponents = generator.integers(-40, 40, (3, count))
    return list(np.ldexp(generator.uniform(-2, 2, (3, count)), exponents).astype(np.float32))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("op", EXACT)
def test_every_rounding_is_the_exact_result_rounded_once(op: str, rounding: str) -> None:
    a, b, c = random_operands()
    sources = SOURCES.get(op, "%a, %b")
    found = run_ptx(f"{op}.{rounding}.f32 %d, {sources};", {"a": a, "b": b, "c": c}, {"d": np.float32})["d"]
    for i, triple in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        wanted = round_f32(EXACT[op](*map(Fraction, triple)), rounding)
        assert found[i] == wanted, f"{op}.{rounding}.f32 of {triple} gives {found[i]!r}, exactly {wanted!r}"


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_square_roots_bracket_the_exact_one(rounding: str) -> None:
    a = np.abs(random_operands()[0])
    found = run_ptx(f"sqrt.{rounding}.f32 %d, %a;", {"a": a}, {"d": np.float32})["d"]
    for x, root in zip(a, found, strict=True):
        below, above = (Fraction(float(np.nextafter(root, np.float32(side)))) for side in (0, np.inf))
        value, square = Fraction(float(x)), Fraction(float(root)) ** 2
        fits = {
            "rn": ((below + Fraction(float(root))) / 2) ** 2 < value < ((above + Fraction(float(root))) / 2) ** 2,
            "rz": square <= value < above**2,
            "rm": square <= value < above**2,
            "rp": below**2 < value <= square,
        }
        assert fits[rounding], f"sqrt.{rounding}.f32 of {x!r} gives {root!r}"


@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize("modifiers", ["rn", "rz.ftz", "rm", "rp"])
def test_a_pair_is_two_scalars(op: str, modifiers: str) -> None:
    operands = [values.view(np.uint32) for values in random_operands()]
    operands[0][:4] = [0x0000_0001, 0x8000_0001, NAN, INF]
    scalar = run_ptx(f"{op}.{modifiers}.f32 %d, {SOURCES.get(op, '%a, %b')};",
                     dict(zip("abc", operands, strict=True)), {"d": np.uint32})["d"]  # fmt: skip
    pairs = [np.ascontiguousarray(values).view(np.uint64) for values in operands]
    found = run_ptx(f"{op}.{modifiers}.f32x2 %d, {SOURCES.get(op, '%a, %b')};",
                    dict(zip("abc", pairs, strict=True)), {"d": np.uint64})["d"].view(np.uint32)  # fmt: skip
    assert np.array_equal(found, scalar), (
        f"{op}.{modifiers}.f32x2 differs from .f32 at {np.flatnonzero(found != scalar)}"
    )


def test_pairs_without_a_rounding_modifier_bind() -> None:
    pair = np.array([[1.5, -2.0]], np.float32).view(np.uint64)[:, 0]
    for op, wanted in (("add", [3.0, -4.0]), ("sub", [0.0, 0.0]), ("mul", [2.25, 4.0])):
        found = run_ptx(f"{op}.f32x2 %d, %a, %a;", {"a": pair}, {"d": np.uint64})["d"].view(np.float32)
        assert found.tolist() == wanted, f"{op}.f32x2 gives {found}"


def test_saturation_clamps_and_makes_zero_of_nan() -> None:
    """PTX ISA 9.7.3.3: clamped to [0.0, 1.0], NaN results are flushed to +0.0."""
    a = f32s(0xBF80_0000, 0x3E80_0000, 0x4000_0000, NAN, INF, MINUS_ZERO)
    for op, other in (("add", 0.0), ("sub", 0.0), ("mul", 1.0)):
        found = codes_of(f"{op}.sat.f32 %d, %a, %b;", a=a, b=np.float32(other))
        assert found == [0, 0x3E80_0000, 0x3F80_0000, 0, 0x3F80_0000, 0], f"{op}.sat.f32 gives {found}"
    found = codes_of("fma.rn.sat.f32 %d, %a, 0f3F800000, 0f00000000;", a=a)
    assert found == [0, 0x3E80_0000, 0x3F80_0000, 0, 0x3F80_0000, 0], f"fma.rn.sat.f32 gives {found}"


def test_flushing_keeps_the_sign() -> None:
    """PTX ISA 9.7.3.3: .ftz flushes subnormal inputs and results to sign-preserving zero."""
    a = f32s(0x0000_0001, 0x8000_0001)
    assert codes_of("add.ftz.f32 %d, %a, %a;", a=a) == [0, MINUS_ZERO]
    assert codes_of("mul.ftz.f32 %d, %a, 0f7F000000;", a=a) == [0, MINUS_ZERO]
    assert codes_of("abs.ftz.f32 %d, %a;", a=a) == [0, 0]
    assert codes_of("neg.ftz.f32 %d, %a;", a=a) == [MINUS_ZERO, 0]
    assert codes_of("mul.ftz.f32 %d, %a, 0f3F000000;", a=f32s(TINY, TINY | MINUS_ZERO)) == [0, MINUS_ZERO]


def test_three_operands_of_min_and_max() -> None:
    """PTX ISA 9.7.3.11: NaN operands are ignored, but win with .NaN; .abs compares magnitudes."""
    one, two, three = 0x3F80_0000, 0x4000_0000, 0xC040_0000
    a, b, c = f32s(one, NAN, NAN, MINUS_ZERO), f32s(two, one, NAN, 0), f32s(three, two, NAN, 0)
    expected = {
        "min.f32": [three, one, NAN, MINUS_ZERO],
        "max.f32": [two, two, NAN, 0],
        "max.NaN.f32": [two, NAN, NAN, 0],
        "min.abs.f32": [one, one, NAN, 0],
        "max.ftz.NaN.abs.f32": [three & NAN, NAN, NAN, 0],
    }
    for op, wanted in expected.items():
        found = codes_of(f"{op} %d, %a, %b, %c;", a=a, b=b, c=c)
        assert found == wanted, f"{op}: {[hex(x) for x in found]} where {[hex(x) for x in wanted]}"


def test_xorsign_takes_the_sign_of_the_product() -> None:
    one, two = 0x3F80_0000, 0x4000_0000
    a, b = f32s(one, one | MINUS_ZERO, one | MINUS_ZERO, NAN), f32s(two, two, two | MINUS_ZERO, NAN | MINUS_ZERO)
    assert codes_of("max.xorsign.abs.f32 %d, %a, %b;", a=a, b=b) == [two, two | MINUS_ZERO, two, NAN]
    assert codes_of("min.xorsign.abs.f32 %d, %a, %b;", a=a, b=b) == [one, one | MINUS_ZERO, one, NAN]


def test_copysign_takes_the_sign_of_its_first_source() -> None:
    """PTX ISA 9.7.3.2: copy the sign bit of a into the value of b."""
    found = run_ptx("copysign.f32 %d, %a, %b;", {"a": f32s(MINUS_ZERO), "b": f32s(0x3F80_0000)}, {"d": np.float32})
    assert found["d"].tolist() == [-1.0]
    wide = run_ptx("copysign.f64 %d, %a, %b;", {"a": np.array([-0.0]), "b": np.array([2.5])}, {"d": np.float64})
    assert wide["d"].tolist() == [-2.5]


def test_testp_knows_every_property() -> None:
    """PTX ISA 9.7.3.1: applied to 1, a subnormal, -0, infinity and NaN."""
    a = f32s(0x3F80_0000, 1, MINUS_ZERO, INF, NAN)
    expected = {
        "finite": [1, 1, 1, 0, 0],
        "infinite": [0, 0, 0, 1, 0],
        "number": [1, 1, 1, 1, 0],
        "notanumber": [0, 0, 0, 0, 1],
        "normal": [1, 0, 1, 0, 0],
        "subnormal": [0, 1, 0, 0, 0],
    }
    for prop, wanted in expected.items():
        found = run_ptx(f"testp.{prop}.f32 %p, %a;", {"a": a}, {"p": np.bool_})["p"]
        assert found.tolist() == [bool(x) for x in wanted], f"testp.{prop}.f32 gives {found}"


@pytest.mark.parametrize(
    "instruction",
    [
        "add.rna.f32 %d, %a, %a;",
        "fma.f32 %d, %a, %a, %a;",
        "add.rn.sat.f32x2 %d, %a, %a;",
        "max.xorsign.f32 %d, %a, %a;",
        "max.abs.f32 %d, %a, %a;",
        "max.xorsign.abs.f32 %d, %a, %a, %a;",
        "ex2.f32 %d, %a;",
        "tanh.approx.ftz.f32 %d, %a;",
        "add.f32 %d, %a;",
        "add.f32 %d, %a, 1;",
        "add.f64 %d, %a, %a;",
        "sqrt.approx.rn.f32 %d, %a;",
    ],
)
def test_forms_that_the_isa_does_not_list_are_refused(instruction: str) -> None:
    with pytest.raises(UnknownInstructionError, match="PTX line"):
        run_ptx(instruction, {"a": np.ones(1, np.float32)}, {"d": np.float32})
