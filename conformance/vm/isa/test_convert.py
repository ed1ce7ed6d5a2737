"""cvt and cvt.pack in PTX against an H200: values, register widths, examples (PTX ISA 9.7.9.21, 9.7.9.22)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.faults import UnknownInstructionError
from conformance import SILICON
from conformance.vm.kernel import run_ptx

FOLDER = SILICON / "numerics"
F32 = np.load(FOLDER / "cvt_f32.npz")
HALF = np.load(FOLDER / "half.npz")


def report(op: str, found: npt.NDArray[np.generic], answered: npt.NDArray[np.generic], source: object) -> str:
    at = np.flatnonzero(found != answered)[:5]
    cases = [f"{np.asarray(source)[i]:x} gives {found[i]:x}, the H200 {answered[i]:x}" for i in at]
    return f"{op}: {cases}"


@pytest.mark.parametrize("op", [op for op in F32 if op.startswith("cvt") and "x2.f32" in op])
def test_two_floats_into_a_pair_as_an_h200_does(op: str) -> None:
    found = run_ptx(f"{op} %d, %a, %b;", {"a": F32["a"], "b": F32["b"]}, {"d": F32[op].dtype})["d"]
    assert np.array_equal(found, F32[op]), report(op, found, F32[op], F32["a"])


@pytest.mark.parametrize("op", [op for op in F32 if op.startswith("cvt") and "x2.f32" not in op])
def test_one_float_as_an_h200_does(op: str) -> None:
    """A narrow result is extended into its 32-bit register, as in the measured programs."""
    found = run_ptx(f"{op} %d, %a;", {"a": F32["single"]}, {"d": F32[op].dtype})["d"]
    assert np.array_equal(found, F32[op]), report(op, found, F32[op], F32["single"])


@pytest.mark.parametrize("op", ["cvt.f32.bf16", "cvt.f32.f16"])
def test_halves_widen_as_on_an_h200(op: str) -> None:
    found = run_ptx(f"{op} %d, %a;", {"a": HALF["codes"]}, {"d": np.uint32})["d"]
    assert np.array_equal(found, HALF[op]), report(op, found, HALF[op], HALF["codes"])


@pytest.mark.parametrize("op", ["cvt.rn.f16x2.e4m3x2", "cvt.rn.f16x2.e5m2x2"])
def test_bytes_widen_as_on_an_h200(op: str) -> None:
    found = run_ptx(f"{op} %d, %a;", {"a": HALF["bytes"]}, {"d": np.uint32})["d"]
    assert np.array_equal(found, HALF[op]), report(op, found, HALF[op], HALF["bytes"])


@pytest.mark.parametrize("op", ["cvt.rn.satfinite.e4m3x2.f16x2", "cvt.rn.satfinite.e5m2x2.f16x2"])
def test_pairs_of_halves_narrow_as_on_an_h200(op: str) -> None:
    codes = np.arange(0, 1 << 16, 37, dtype=np.uint32)
    found = run_ptx(f"{op} %d, %a;", {"a": codes | 0x3C00_0000}, {"d": np.uint16})["d"]
    assert np.array_equal(found & 0xFF, HALF[op][::37]), report(op, found & 0xFF, HALF[op][::37], codes)
    one = {"e4m3": 0x38, "e5m2": 0x3C}[op.split(".")[3][:4]]
    assert (found >> 8 == one).all(), f"{op}: the upper half holds 1.0, whose code is {one:#x}"


INTEGERS = {
    f"{sign}{bits}": np.dtype(f"{kind}{bits // 8}")
    for sign, kind in (("u", "u"), ("s", "i"))
    for bits in (8, 16, 32, 64)
}
EDGES = [2**bits for bits in (7, 8, 15, 16, 31, 32, 63)]
PATTERNS = [0, 1, *EDGES, *(edge - 1 for edge in EDGES), 2**64 - 1]


def read(pattern: int, kind: str) -> int:
    bits = int(kind[1:])
    low = pattern & (2**bits - 1)
    return low - 2**bits if kind[0] == "s" and low >> (bits - 1) else low


def value_range(kind: str) -> tuple[int, int]:
    """The smallest and the largest integer of a type."""
    bits = int(kind[1:])
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind[0] == "s" else (0, 2**bits - 1)


@pytest.mark.parametrize("dst", INTEGERS)
@pytest.mark.parametrize("src", INTEGERS)
def test_integers_chop_extend_and_saturate(dst: str, src: str) -> None:
    """All registers have 64 bits: sources are truncated, results extended by their sign (PTX ISA 9.4.1)."""
    wide = np.array(PATTERNS, np.uint64)
    (low, high), (least, most) = value_range(dst), value_range(src)
    # ptxas has no .sat for conversions where every value fits.
    sat = "" if low <= least and most <= high else ".sat"
    found = run_ptx(
        f"cvt.{dst}.{src} %d, %a; cvt{sat}.{dst}.{src} %e, %a;", {"a": wide}, {"d": np.uint64, "e": np.uint64}
    )
    for i, pattern in enumerate(PATTERNS):
        value = read(pattern, src)
        plain, clamped = read(value, dst) % 2**64, min(max(value, low), high) % 2**64
        assert int(found["d"][i]) == plain, f"cvt.{dst}.{src} of {pattern:#x}: {found['d'][i]:#x}, not {plain:#x}"
        assert int(found["e"][i]) == clamped, f"cvt.sat.{dst}.{src} of {pattern:#x}: {found['e'][i]:#x}"


def test_narrow_registers_hold_narrow_types() -> None:
    word = np.array([0x1234_FF80], np.uint32)
    found = run_ptx(
        "cvt.u16.u32 %a, %w; cvt.s32.s8 %b, %w; cvt.u8.u32 %c, %w; cvt.s64.s32 %e, %w; cvt.s8.s32 %f, %w;",
        {"w": word}, {"a": np.uint16, "b": np.int32, "c": np.uint16, "e": np.int64, "f": np.int16},
    )  # fmt: skip
    assert {name: int(values[0]) for name, values in found.items()} == {
        "a": 0xFF80, "b": -128, "c": 0x80, "e": 0x1234_FF80, "f": -128,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("op", "wanted"), [("rni", [2, -2, 0]), ("rzi", [1, -1, 0]), ("rmi", [1, -2, 0]), ("rpi", [2, -1, 1])]
)
def test_integral_roundings(op: str, wanted: list[int]) -> None:
    a = np.array([1.5, -1.5, 0.25], np.float32)
    assert run_ptx(f"cvt.{op}.s32.f32 %d, %a;", {"a": a}, {"d": np.int32})["d"].tolist() == wanted
    assert run_ptx(f"cvt.{op}.f32.f32 %d, %a;", {"a": a}, {"d": np.float32})["d"].tolist() == wanted
    assert run_ptx(f"cvt.{op}.s64.f64 %d, %a;", {"a": a.astype(np.float64)}, {"d": np.int64})["d"].tolist() == wanted


def test_nan_and_overflow_into_integers() -> None:
    """PTX ISA 9.7.9.21: clamped by default; NaN gives 0, or the top bit if f64, s64 or u64 is involved."""
    a = np.array([np.nan, np.inf, -np.inf, 3e9], np.float32)
    expected = {
        "cvt.rzi.s32.f32": (np.int32, [0, 2**31 - 1, -(2**31), 2**31 - 1]),
        "cvt.rzi.u32.f32": (np.uint32, [0, 2**32 - 1, 0, 3_000_000_000]),
        "cvt.rzi.s64.f32": (np.int64, [-(2**63), 2**63 - 1, -(2**63), 3_000_000_000]),
        "cvt.rzi.u64.f32": (np.uint64, [2**63, 2**64 - 1, 0, 3_000_000_000]),
    }
    for op, (dtype, wanted) in expected.items():
        found = run_ptx(f"{op} %d, %a;", {"a": a}, {"d": dtype})["d"].tolist()
        assert found == wanted, f"{op} gives {found}"


def test_integers_into_floats() -> None:
    a = np.array([2**24 + 1, -(2**24 + 1), 7], np.int32)
    expected = {"rn": [2**24, -(2**24), 7], "rz": [2**24, -(2**24), 7], "rm": [2**24, -(2**24 + 2), 7],
                "rp": [2**24 + 2, -(2**24), 7]}  # fmt: skip
    for rounding, wanted in expected.items():
        found = run_ptx(f"cvt.{rounding}.f32.s32 %d, %a;", {"a": a}, {"d": np.float32})["d"]
        assert found.tolist() == wanted, f"cvt.{rounding}.f32.s32 gives {found}"
    inputs = {"a": np.array([-3], np.int16), "b": np.array([2**32 - 1], np.uint32)}
    body = "cvt.rn.f32.s16 %d, %a; cvt.rn.f64.u32 %e, %b;"
    found = run_ptx(body, inputs, {"d": np.float32, "e": np.float64})
    assert (found["d"].tolist(), found["e"].tolist()) == ([-3.0], [2.0**32 - 1])


def test_saturated_floats_lie_in_zero_to_one() -> None:
    a = np.array([-1.0, 0.5, 2.0, np.nan], np.float32)
    assert run_ptx("cvt.sat.f32.f32 %d, %a;", {"a": a}, {"d": np.float32})["d"].tolist() == [0.0, 0.5, 1.0, 0.0]
    assert run_ptx("cvt.rn.sat.f16.f32 %d, %a;", {"a": a}, {"d": np.float16})["d"].tolist() == [0.0, 0.5, 1.0, 0.0]


def test_small_formats() -> None:
    """e2m1 codes of PTX ISA 5.2.3: 1.0 is 2, 6.0 is 7; the first source goes to the upper half."""
    a, b = np.float32(1.0), np.float32(-6.0)
    inputs = {"a": np.array([a]), "b": b}
    assert run_ptx("cvt.rn.satfinite.e2m1x2.f32 %d, %a, %b;", inputs, {"d": np.uint8})["d"].tolist() == [0x2F]
    assert run_ptx("cvt.rn.satfinite.e2m3x2.f32 %d, %a, %b;", inputs, {"d": np.uint16})["d"].tolist() == [0x083C]
    back = run_ptx("cvt.rn.f16x2.e2m1x2 %d, %a;", {"a": np.array([0x2F], np.uint8)}, {"d": np.uint32})["d"]
    assert back.view(np.float16).tolist() == [-6.0, 1.0], "cvt.rn.f16x2.e2m1x2"
    inputs = {"a": np.array([3.0], np.float32), "b": np.float32(0.25)}
    body = "cvt.rp.ue8m0x2.f32 %d, %a, %b; cvt.rn.bf16x2.ue8m0x2 %e, %d;"
    scales = run_ptx(body, inputs, {"d": np.uint16, "e": np.uint32})
    assert (scales["d"].tolist(), scales["e"].tolist()) == ([0x817D], [0x4080_3E80]), "3.0 rounds up to 4, 0.25 stays"


def test_stochastic_rounding_carries_with_its_random_bits() -> None:
    """PTX ISA 9.7.9.21: away from zero if the random bits plus the dropped bits carry; the upper bits are for a."""
    one_and_a_half_units = np.array([0x3F80_8000], np.uint32)
    inputs = {"a": one_and_a_half_units, "b": one_and_a_half_units}
    for random, wanted in ((0x8000_0000, 0x3F81_3F80), (0x0000_8000, 0x3F80_3F81), (0x7FFF_7FFF, 0x3F80_3F80)):
        found = run_ptx("cvt.rs.bf16x2.f32 %d, %a, %b, %r;", {**inputs, "r": np.uint32(random)}, {"d": np.uint32})["d"]
        assert found.tolist() == [wanted], f"random bits {random:08x} give {found[0]:08x}"


def test_literals_are_converted() -> None:
    found = run_ptx("cvt.rn.bf16x2.f32 %d, 0f3F800000, 0f40000000; cvt.rn.f32.s32 %e, -5; cvt.u64.u16 %f, 70000;", {},
                    {"d": np.uint32, "e": np.float32, "f": np.uint64}, threads=1)  # fmt: skip
    assert (found["d"].tolist(), found["e"].tolist(), found["f"].tolist()) == ([0x3F80_4000], [-5.0], [70000 - 65536])


def test_packing_with_saturation() -> None:
    """PTX ISA 9.7.9.22: %r7 = {%r5, %r6, %r8, %r9} takes two instructions."""
    a, b, c, e = (np.array([value], np.int32) for value in (300, -5, 17, 255))
    inputs = {"a": a, "b": b, "c": c, "e": e}
    chained = "cvt.pack.sat.u8.s32.b32 %d, %a, %b, 0; cvt.pack.sat.u8.s32.b32 %d, %c, %e, %d;"
    assert run_ptx(chained, inputs, {"d": np.uint32})["d"].tolist() == [0xFF00_11FF]
    expected = {
        "cvt.pack.sat.s16.s32 %d, %a, %b;": 0x012C_FFFB,
        "cvt.pack.sat.u16.s32 %d, %a, %b;": 0x012C_0000,
        "cvt.pack.sat.s8.s32.b32 %d, %a, %b, 0x1234567;": 0x4567_7FFB,
        "cvt.pack.sat.s4.s32.b32 %d, %a, %b, 0xABCDEF01;": 0xCDEF_017B,
        "cvt.pack.sat.u2.s32.b32 %d, %c, %b, 0;": 0xC,
    }
    for instruction, wanted in expected.items():
        found = run_ptx(instruction, inputs, {"d": np.uint32})["d"][0]
        assert found == wanted, f"{instruction} gives {found:08x}, not {wanted:08x}"


@pytest.mark.parametrize(
    "instruction",
    [
        "cvt.f16.f32 %h, %w;",
        "cvt.rn.f32.f16 %w, %h;",
        "cvt.rn.s32.f32 %w, %w;",
        "cvt.s32.f32 %w, %w;",
        "cvt.rn.e4m3x2.f32 %h, %w, %w;",
        "cvt.rn.bf16x2.f32 %w, %w;",
        "cvt.rn.bf16x2.f32 %h, %w, %w;",
        "cvt.rna.bf16x2.f32 %w, %w, %w;",
        "cvt.f64.f32 %w, %w;",
        "cvt.u32.u64 %w, %w;",
        "cvt.pack.sat.u8.s32 %w, %w, %w;",
        "cvt.ftz.s32.u32 %w, %w;",
    ],
)
def test_conversions_that_the_isa_does_not_have_are_refused(instruction: str) -> None:
    with pytest.raises(UnknownInstructionError, match="PTX line"):
        run_ptx(instruction, {"h": np.ones(1, np.uint16), "w": np.ones(1, np.uint32)}, {"w": np.uint32})


NARROW = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e3m2": ml_dtypes.float6_e3m2fn,
          "e2m3": ml_dtypes.float6_e2m3fn}  # fmt: skip


@pytest.mark.parametrize(
    ("bare", "spelled"),
    [
        ("cvt.bf16.f16", "cvt.rn.bf16.f16"),
        ("cvt.f16.bf16", "cvt.rn.f16.bf16"),
        *[(f"cvt{rounding}.f32.bf16", "cvt.f32.bf16") for rounding in (".rn", ".rz", ".rm", ".rp")],
        ("cvt.rn.satfinite.relu.bf16.f32", "cvt.rn.relu.satfinite.bf16.f32"),
    ],
)
def test_roundings_that_ptxas_does_not_demand(bare: str, spelled: str) -> None:
    """ptxas 13.5 makes the same machine code of both, for every value of a half."""
    codes = np.arange(1 << 16, dtype=np.uint32)
    found, wanted = (
        run_ptx(f"{op} %d, %a;", {"a": codes << (16 if op.endswith("f32") else 0)}, {"d": np.uint32})["d"]
        for op in (bare, spelled)
    )
    assert np.array_equal(found, wanted), report(bare, found, wanted, codes)


@pytest.mark.parametrize("kind", NARROW)
def test_four_floats_round_stochastically(kind: str) -> None:
    """Random bits of 0 truncate the magnitude; with all bits set only exact values stay. a and b use the upper half, e
    and f the lower half (PTX ISA 9.7.9.21)."""
    values = np.linspace(-6.0, 6.0, 997, dtype=np.float32)
    names = ("a", "b", "e", "f")
    inputs: dict[str, npt.ArrayLike] = {name: np.roll(values, 7 * i) for i, name in enumerate(names)}
    codes = np.arange(256 if kind[:2] in ("e4", "e5") else 64, dtype=np.uint8)
    grid = np.unique(codes.view(NARROW[kind]).astype(np.float32))
    grid = grid[np.isfinite(grid)]

    def rounded(x: npt.NDArray[np.float32], away: bool) -> npt.NDArray[np.float32]:
        magnitude, steps = np.abs(x), grid[grid >= 0]
        below = steps[np.searchsorted(steps, magnitude, side="right") - 1]
        above = steps[np.searchsorted(steps, magnitude, side="left")]
        return np.copysign(above if away else below, x)

    upper, lower = (True, True, False, False), (False, False, True, True)
    for random, aways in ((0, (False,) * 4), (0xFFFF_0000, upper), (0xFFFF, lower)):
        found = run_ptx(f"cvt.rs.satfinite.{kind}x4.f32 %d, {{%a, %b, %e, %f}}, %r;",
                        {**inputs, "r": np.uint32(random)}, {"d": np.uint32})["d"]  # fmt: skip
        bytes_ = found.view(np.uint8).reshape(-1, 4)[:, ::-1]
        for column, (name, away) in enumerate(zip(names, aways, strict=True)):
            got = np.ascontiguousarray(bytes_[:, column]).view(NARROW[kind]).astype(np.float32)
            assert np.array_equal(got, rounded(np.asarray(inputs[name]), away)), f"operand {name}, random {random:#x}"


def test_fixed_point_of_two_and_six_bits() -> None:
    """s2f6 is an 8-bit integer times 2^-6 (PTX ISA 5.2.4), rounded to even and clamped; scales divide and multiply."""
    a = np.array([0.0, 1.0, -2.0, 5.0, -7.0, 1.5 / 64, 2.5 / 64, -1.5 / 64], np.float32)
    wanted = np.clip(np.rint(a.astype(np.float64) * 64), -128, 127).astype(np.int64)
    b = a[::-1].copy()
    found = run_ptx("cvt.rn.satfinite.s2f6x2.f32 %d, %a, %b;", {"a": a, "b": b}, {"d": np.uint16})["d"]
    assert np.array_equal((found >> 8).astype(np.uint8).view(np.int8), wanted), "the upper half is of a"
    assert np.array_equal(found.astype(np.uint8).view(np.int8), wanted[::-1]), "the lower half is of b"
    relu = run_ptx("cvt.rn.satfinite.relu.s2f6x2.f32 %d, %a, %b;", {"a": a, "b": b}, {"d": np.uint16})["d"]
    assert np.array_equal(relu >> 8, np.maximum(wanted, 0)), "negative values become 0"
    scale = np.uint16((127 + 2) << 8 | (127 - 1))
    scaled = run_ptx("cvt.rn.satfinite.scaled::n2::ue8m0.s2f6x2.f32 %d, %a, %b, %s;",
                     {"a": a, "b": b, "s": scale}, {"d": np.uint16})["d"]  # fmt: skip
    assert np.array_equal((scaled >> 8).astype(np.uint8).view(np.int8), np.rint(a * 16).clip(-128, 127)), "a / 4"
    assert np.array_equal(scaled.astype(np.uint8).view(np.int8), np.rint(b * 128.0).clip(-128, 127)), "b / 0.5"


WIDENED = {"e4m3x2": NARROW["e4m3"], "e5m2x2": NARROW["e5m2"], "e3m2x2": NARROW["e3m2"], "e2m3x2": NARROW["e2m3"]}


@pytest.mark.parametrize("kind", [*WIDENED, "s2f6x2"])
def test_bytes_become_scaled_bf16(kind: str) -> None:
    """PTX ISA 9.7.9.21: converted, then multiplied by the ue8m0 factor of its half."""
    count = 64 if kind[:2] in ("e3", "e2") else 256
    codes = np.arange(count, dtype=np.uint16)
    pair = codes << 8 | codes[::-1]
    if kind == "s2f6x2":
        values = codes.astype(np.uint8).view(np.int8).astype(np.float32) / 64
    else:
        values = codes.astype(np.uint8).view(WIDENED[kind]).astype(np.float32)
    scale = np.uint16((127 + 3) << 8 | (127 - 2))
    found = run_ptx(f"cvt.rn.scaled::n2::ue8m0.bf16x2.{kind} %d, %a, %s; cvt.rn.bf16x2.{kind} %e, %a;",
                    {"a": pair, "s": scale}, {"d": np.uint32, "e": np.uint32})  # fmt: skip
    for name, high, low in (("d", 8.0, 0.25), ("e", 1.0, 1.0)):
        halves = found[name].view(np.uint16).reshape(-1, 2).view(ml_dtypes.bfloat16).astype(np.float32)
        assert np.array_equal(halves[:, 1], values * high, equal_nan=True), f"{kind}, upper halves times {high}"
        assert np.array_equal(halves[:, 0], values[::-1] * low, equal_nan=True), f"{kind}, lower halves times {low}"
