"""f16, bf16, mixed and double precision in PTX against an H200 and exact rounding (PTX ISA 9.7.3 to 9.7.5)."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.faults import UnknownInstructionError
from conformance import SILICON
from conformance.vm.kernel import run_ptx
from conformance.vm.numerics.exact_rounding import round_bf16, round_f16, round_f32, round_f64

FOLDER = SILICON / "numerics"
BINARY = np.load(FOLDER / "binary.npz")
HALF = np.load(FOLDER / "half.npz")
STORED = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
ROUND = {"f16": round_f16, "bf16": round_bf16}
ROUNDINGS = ("rn", "rz", "rm", "rp")


@pytest.mark.parametrize("op", [op for op in BINARY if op.endswith("16x2")])
def test_packed_halves_give_an_h200s_bits(op: str) -> None:
    found = run_ptx(f"{op} %d, %a, %b;", {"a": BINARY["a"], "b": BINARY["b"]}, {"d": np.uint32})["d"]
    wrong = np.flatnonzero(found != BINARY[op])
    cases = [f"{BINARY['a'][i]:08x}, {BINARY['b'][i]:08x}: {found[i]:08x} for {BINARY[op][i]:08x}" for i in wrong[:5]]
    assert not len(wrong), f"{op} differs from the H200 in {len(wrong)} of {len(found)}: {cases}"


@pytest.mark.parametrize("op", [op for op in BINARY if op.endswith("16x2")])
def test_a_scalar_half_is_the_lower_half_of_a_pair(op: str) -> None:
    a, b = (BINARY[name][:800].astype(np.uint16) for name in "ab")
    found = run_ptx(f"{op[:-2]} %d, %a, %b;", {"a": a, "b": b}, {"d": np.uint16})["d"]
    assert np.array_equal(found, BINARY[op][:800].astype(np.uint16)), f"{op[:-2]} is not the lower half of {op}"


@pytest.mark.parametrize("op", ["ex2.approx.ftz.bf16", "ex2.approx.f16", "tanh.approx.f16", "tanh.approx.bf16"])
def test_approximations_are_within_one_code_of_an_h200s(op: str) -> None:
    codes, answered = HALF["codes"], HALF[f"{op}x2"]
    found = run_ptx(f"{op} %d, %a;", {"a": codes}, {"d": np.uint16})["d"]
    kind = op.rpartition(".")[2]
    nan = np.isnan(answered.view(STORED[kind]).astype(np.float32))
    off = np.abs(found.astype(np.int64) - answered)
    assert off[~nan].max() <= 1, f"{op} is {off[~nan].max()} codes off at {codes[~nan][off[~nan].argmax()]:04x}"
    assert np.array_equal(found[nan], answered[nan]), f"{op}: another NaN"
    pairs = run_ptx(f"{op}x2 %d, %a;", {"a": codes[: len(codes) // 2 * 2].view(np.uint32)}, {"d": np.uint32})["d"]
    assert np.array_equal(pairs.view(np.uint16), found[: 2 * len(pairs)]), f"{op}x2 is not {op} twice"


def halves(kind: str, count: int = 48) -> list[npt.NDArray[np.uint16]]:
    generator = np.random.default_rng(11)
    values = np.ldexp(generator.uniform(-2, 2, (3, count)), generator.integers(-6, 6, (3, count)))
    return list(values.astype(STORED[kind]).view(np.uint16))


def exact(codes: npt.NDArray[np.uint16], kind: str) -> list[Fraction]:
    return [Fraction(float(x)) for x in codes.view(STORED[kind]).astype(np.float64)]


@pytest.mark.parametrize("kind", STORED)
def test_arithmetic_is_the_exact_result_rounded_once(kind: str) -> None:
    a, b, c = halves(kind)
    forms = {"add": "%a, %b", "sub": "%a, %b", "mul": "%a, %b", "fma.rn": "%a, %b, %c"}
    for op, sources in forms.items():
        found = run_ptx(f"{op}.{kind} %d, {sources};", {"a": a, "b": b, "c": c}, {"d": np.uint16})["d"]
        for i, (x, y, z) in enumerate(zip(*(exact(codes, kind) for codes in (a, b, c)), strict=True)):
            result = {"add": x + y, "sub": x - y, "mul": x * y, "fma.rn": x * y + z}[op]
            wanted = ROUND[kind](result, "rn") if result else 0.0
            assert float(found.view(STORED[kind])[i]) == wanted, f"{op}.{kind} of {x}, {y}, {z}: {found[i]:04x}"


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_mixed_precision_rounds_once_to_f32(kind: str, rounding: str) -> None:
    """PTX ISA 9.7.5: the half operand is widened exactly, the result is f32."""
    a, b, _ = halves(kind)
    c = np.random.default_rng(5).standard_normal(len(a)).astype(np.float32)
    x, y = exact(a, kind), exact(b, kind)
    z = [Fraction(float(value)) for value in c]
    expected = {
        f"add.{rounding}.f32.{kind} %d, %a, %c;": [p + r for p, r in zip(x, z, strict=True)],
        f"sub.{rounding}.f32.{kind} %d, %a, %c;": [p - r for p, r in zip(x, z, strict=True)],
        f"fma.{rounding}.f32.{kind} %d, %a, %b, %c;": [p * q + r for p, q, r in zip(x, y, z, strict=True)],
    }
    for instruction, results in expected.items():
        found = run_ptx(instruction, {"a": a, "b": b, "c": c}, {"d": np.float32})["d"]
        wanted = [round_f32(result, rounding) for result in results]
        assert found.tolist() == wanted, f"{instruction} is not the exact result rounded once"


def test_clamps_and_signs_of_halves() -> None:
    a = np.array([0xBC00, 0x3800, 0x4000, 0x7E00, 0x0001], np.uint16)
    one = np.uint16(0x3C00)
    sat = run_ptx("add.sat.f16 %d, %a, 0x0000;", {"a": a}, {"d": np.uint16})["d"].tolist()
    assert sat == [0, 0x3800, 0x3C00, 0, 1], "add.sat.f16 clamps to [0, 1] and makes +0 of NaN (PTX ISA 9.7.4.1)"
    relu = run_ptx("fma.rn.relu.f16 %d, %a, %b, 0x0000;", {"a": a, "b": one}, {"d": np.uint16})["d"].tolist()
    assert relu == [0, 0x3800, 0x4000, 0x7FFF, 1], "fma.relu.f16 makes +0 of negatives and canonical NaN of NaN"
    assert run_ptx("add.ftz.f16 %d, %a, %a;", {"a": a[4:]}, {"d": np.uint16})["d"].tolist() == [0]
    pair = np.array([0x8001_3C00], np.uint32)
    assert run_ptx("neg.bf16x2 %d, %a;", {"a": pair}, {"d": np.uint32})["d"].tolist() == [0x0001_BC00]
    assert run_ptx("abs.f16x2 %d, %a;", {"a": pair}, {"d": np.uint32})["d"].tolist() == [0x0001_3C00]
    assert run_ptx("neg.ftz.f16x2 %d, %a;", {"a": pair}, {"d": np.uint32})["d"].tolist() == [0x0000_BC00]
    signs = run_ptx("max.xorsign.abs.f16x2 %d, %a, %b;", {"a": pair, "b": np.uint32(0x0000_C000)}, {"d": np.uint32})
    assert signs["d"].tolist() == [0x8001_C000], (
        "max.xorsign.abs keeps the larger magnitude with the sign of the product"
    )


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_double_precision_is_the_exact_result_rounded_once(rounding: str) -> None:
    generator = np.random.default_rng(3)
    a, b, c = np.ldexp(generator.uniform(-2, 2, (3, 32)), generator.integers(-60, 60, (3, 32)))
    expected = {
        "add": ("%a, %b", lambda x, y, z: x + y),
        "sub": ("%a, %b", lambda x, y, z: x - y),
        "mul": ("%a, %b", lambda x, y, z: x * y),
        "div": ("%a, %b", lambda x, y, z: x / y),
        "rcp": ("%a", lambda x, y, z: 1 / x),
        "fma": ("%a, %b, %c", lambda x, y, z: x * y + z),
    }
    for op, (sources, result) in expected.items():
        found = run_ptx(f"{op}.{rounding}.f64 %d, {sources};", {"a": a, "b": b, "c": c}, {"d": np.float64})["d"]
        for i, row in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
            wanted = round_f64(result(*map(Fraction, row)), rounding)
            assert found[i] == wanted, f"{op}.{rounding}.f64 of {row} gives {found[i]!r}, exactly {wanted!r}"


def test_double_specials() -> None:
    a, b = np.array([0.0, -0.0, np.nan, 1.0]), np.array([-0.0, 0.0, 2.0, np.nan])
    low = run_ptx("min.f64 %d, %a, %b;", {"a": a, "b": b}, {"d": np.float64})["d"]
    high = run_ptx("max.f64 %d, %a, %b;", {"a": a, "b": b}, {"d": np.float64})["d"]
    assert np.signbit(low).tolist() == [True, True, False, False], "min.f64 of zeros is -0"
    assert (low[2:].tolist(), high[2:].tolist()) == ([2.0, 1.0], [2.0, 1.0]), "a NaN operand is passed over"
    assert np.signbit(high[:2]).tolist() == [False, False], "max.f64 of zeros is +0"
    both = run_ptx("neg.f64 %d, %a; abs.f64 %e, %d;", {"a": np.array([2.0])}, {"d": np.float64, "e": np.float64})
    assert (both["d"].tolist(), both["e"].tolist()) == ([-2.0], [2.0])
    assert run_ptx("sqrt.rn.f64 %d, 0d4010000000000000;", {}, {"d": np.float64}, threads=1)["d"].tolist() == [2.0]


def test_gross_doubles_have_an_empty_lower_word() -> None:
    """PTX ISA 9.7.3.14 and 9.7.3.17: the special values of the tables; canonical NaN is 0x7fffffff00000000."""
    a = np.array([-np.inf, -5e-324, -0.0, 0.0, 5e-324, np.inf, np.nan, 3.0])
    found = run_ptx("rcp.approx.ftz.f64 %d, %a;", {"a": a}, {"d": np.uint64})["d"]
    inf = 0x7FF0 << 48
    sign = 1 << 63
    assert found[:7].tolist() == [sign, sign | inf, sign | inf, inf, inf, 0, 0x7FFF_FFFF << 32]
    assert found[7] & 0xFFFF_FFFF == 0, f"rcp.approx.ftz.f64 of 3 is {found[7]:016x}"
    assert abs(found[7:].view(np.float64)[0] * 3 - 1) < 2.0**-19
    found = run_ptx("rsqrt.approx.ftz.f64 %d, %a;", {"a": a[1:]}, {"d": np.uint64})["d"]
    assert found[:6].tolist() == [sign | inf, sign | inf, inf, inf, 0, 0x7FFF_FFFF << 32]


@pytest.mark.parametrize(
    "instruction",
    [
        "add.rz.f16 %h, %h, %h;",
        "add.sat.bf16 %h, %h, %h;",
        "ex2.approx.bf16 %h, %h;",
        "ex2.approx.ftz.f16 %h, %h;",
        "fma.rn.sat.relu.f16 %h, %h, %h, %h;",
        "add.f16x2 %h, %h, %h;",
        "add.f16 %w, %w, %w;",
        "add.rn.f32.f16 %w, %w, %h;",
        "add.ftz.f64 %w, %w, %w;",
    ],
)
def test_forms_that_the_isa_does_not_list_are_refused(instruction: str) -> None:
    with pytest.raises(UnknownInstructionError, match="PTX line"):
        run_ptx(instruction, {"h": np.ones(1, np.uint16), "w": np.ones(1, np.uint32)}, {"h": np.uint16})
