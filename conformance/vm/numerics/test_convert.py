"""Conversions against an H200; Blackwell's only against the ISA's tables; the rest against exact values."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise, product

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.numerics.convert import (
    RULES,
    WIDTH,
    Conversion,
    Modifiers,
    UnknownConversionError,
    conversion,
)
from backends.vm.numerics.formats import BF16, F16, decode
from conformance import SILICON
from conformance.vm.numerics.exact_rounding import round_bf16, round_f16, round_f32, round_f64

FOLDER = SILICON / "numerics"
FROM_F32, SHORT = np.load(FOLDER / "cvt_f32.npz"), np.load(FOLDER / "half.npz")
FLAGS = ("ftz", "sat", "satfinite", "relu")


def parse(spelling: str) -> Conversion:
    """The conversion of a spelling such as `cvt.rn.relu.bf16x2.f32`, looked up like the instruction family does."""
    *words, dst, src = spelling.split(".")[1:]
    rounding = "".join(word for word in words if word not in FLAGS)
    return conversion(dst, src, Modifiers(rounding, **{word: word in words for word in FLAGS}))


def f32(*values: float) -> npt.NDArray[np.uint32]:
    return np.array(values, np.float32).view(np.uint32)


def u(bits: int, *values: int) -> npt.NDArray[np.unsignedinteger]:
    return np.array([value % (1 << bits) for value in values], f"u{bits // 8}")


@pytest.mark.parametrize("spelling", [name for name in FROM_F32.files if name.startswith("cvt")])
def test_conversions_from_f32_are_an_h200s_bits(spelling: str) -> None:
    cvt = parse(spelling)
    operands = (FROM_F32["a"], FROM_F32["b"]) if cvt.operands == 2 else (FROM_F32["single"],)
    result = cvt.apply(*operands)
    if spelling == "cvt.rni.s8.f32":
        result = result.view(np.int8).astype(np.int32).view(np.uint32)
    answered = FROM_F32[spelling]
    wrong = np.flatnonzero(result != answered)
    cases = [f"{[hex(x[i]) for x in operands]}: {result[i]:x} for {answered[i]:x}" for i in wrong[:5]]
    assert not len(wrong), f"{spelling} differs from the H200 in {len(wrong)} of {len(result)}: {cases}"


@pytest.mark.parametrize("spelling", [name for name in SHORT.files if name.startswith("cvt")])
def test_conversions_from_short_sources_are_an_h200s_bits(spelling: str) -> None:
    if spelling.endswith("f16x2"):
        codes = np.arange(1 << 16, dtype=np.uint32)
        result = parse(spelling).apply(codes | codes << np.uint32(16))
        np.testing.assert_array_equal(result >> 8, SHORT[spelling], f"{spelling}, upper half")
        np.testing.assert_array_equal(result & 0xFF, SHORT[spelling], f"{spelling}, lower half")
    else:
        source = SHORT["codes" if spelling.startswith("cvt.f32") else "bytes"]
        np.testing.assert_array_equal(parse(spelling).apply(source), SHORT[spelling], spelling)


def test_a_swapped_pair_and_a_wrong_tie_would_be_seen() -> None:
    """Planted faults: operands swapped, truncation instead of rounding, no saturation."""
    answered = FROM_F32["cvt.rn.bf16x2.f32"]
    cvt = parse("cvt.rn.bf16x2.f32")
    assert np.any(cvt.apply(FROM_F32["b"], FROM_F32["a"]) != answered)
    assert np.any(parse("cvt.rz.bf16x2.f32").apply(FROM_F32["a"], FROM_F32["b"]) != answered)
    assert np.any(parse("cvt.rn.satfinite.bf16x2.f32").apply(FROM_F32["a"], FROM_F32["b"]) != answered)


# PTX ISA 5.2.3 and the values of facts.md 7.2: code to magnitude.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_e2m1_codes_ties_and_saturation() -> None:
    cvt = parse("cvt.rn.satfinite.e2m1x2.f32")
    for code, value in enumerate(E2M1_VALUES):
        assert cvt.apply(f32(value), f32(-value)).tolist() == [code << 4 | code | 8], f"{value} high, its negative low"
    ties = [(low + high) / 2 for low, high in pairwise(E2M1_VALUES)]
    even = [code + code % 2 for code in range(7)]
    assert (cvt.apply(f32(*ties), f32(*ties)) & 0xF).tolist() == even, "a tie goes to the even code"
    above = np.nextafter(np.array(ties, np.float32), np.float32(9)).view(np.uint32)
    assert (cvt.apply(above, above) & 0xF).tolist() == list(range(1, 8)), "just above a tie goes up"
    extremes = cvt.apply(f32(5.0, np.inf, 1e30, np.nan), f32(-5.0, -np.inf, -1e30, -np.nan))
    assert extremes.tolist() == [0x6E, 0x7F, 0x7F, 0x77], "5 ties to 4, beyond 6 saturates, NaN is +6"
    relu = parse("cvt.rn.relu.satfinite.e2m1x2.f32")
    assert relu.apply(f32(-3.0), f32(-0.0)).tolist() == [0], "relu"


@pytest.mark.parametrize(
    ("name", "library", "bits"),
    [
        ("e2m1", ml_dtypes.float4_e2m1fn, 4),
        ("e2m3", ml_dtypes.float6_e2m3fn, 6),
        ("e3m2", ml_dtypes.float6_e3m2fn, 6),
        ("e4m3", ml_dtypes.float8_e4m3fn, 8),
        ("e5m2", ml_dtypes.float8_e5m2, 8),
    ],
)
def test_small_formats_both_ways(name: str, library: type[np.generic], bits: int) -> None:
    """Every code up to f16x2, and every bf16 and f16 down, against ml_dtypes within range."""
    place = 4 if bits == 4 else 8
    codes = np.arange(1 << bits, dtype=np.uint8)
    values = codes.view(library).astype(np.float32)
    pairs = codes.astype(np.uint16) << place | codes[::-1]
    up = parse(f"cvt.rn.f16x2.{name}x2").apply(pairs)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal((up >> 16).astype(np.uint16).view(np.float16)[numbers], values[numbers])
    np.testing.assert_array_equal(
        (up & 0xFFFF).astype(np.uint16).view(np.float16)[numbers[::-1]], values[::-1][numbers[::-1]]
    )
    largest = np.nanmax(values[np.isfinite(values)])
    for source, fmt in (("f16x2", F16), ("bf16x2", BF16)):
        halves = np.arange(1 << 16, dtype=np.uint32)
        wide = decode(halves.astype(np.uint16), fmt).astype(np.float32)
        inside = np.abs(wide) <= largest
        expected = wide[inside].astype(library).view(np.uint8)
        down = parse(f"cvt.rn.satfinite.{name}x2.{source}").apply(halves << np.uint32(16) | halves)
        np.testing.assert_array_equal((down >> place)[inside], expected, f"{name}x2.{source}, upper")
        np.testing.assert_array_equal((down & ((1 << place) - 1))[inside], expected, f"{name}x2.{source}, lower")
        direct = parse(f"cvt.rn.satfinite.{name}x2.f32").apply(wide.view(np.uint32), wide.view(np.uint32))
        np.testing.assert_array_equal(direct[~np.isnan(wide)], down[~np.isnan(wide)], f"f32 and {source} disagree")


def test_small_formats_from_f32_round_once_around_every_tie() -> None:
    """An f32 next to a tie must not be moved onto it: its lowest bits count."""
    for name, library in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)):
        values = np.arange(0x78, dtype=np.uint8).view(library).astype(np.float32)
        ties = (values[:-1] + values[1:]) / 2
        for direction, codes in ((0, np.arange(0x77)), (9e9, np.arange(1, 0x78))):
            beside = np.nextafter(ties, np.float32(direction)).view(np.uint32)
            result = parse(f"cvt.rn.satfinite.{name}x2.f32").apply(beside, beside)
            np.testing.assert_array_equal(result & 0xFF, codes, f"{name}, neighbours of ties towards {direction}")


def test_six_bit_maxima_and_nan() -> None:
    """PTX ISA 9.7.9.21: NaN becomes +maximum; 7.5 and 28."""
    for name, largest in (("e2m3", 7.5), ("e3m2", 28.0)):
        result = parse(f"cvt.rn.satfinite.{name}x2.f32").apply(f32(np.nan, largest), f32(-1e9, -largest))
        assert result.tolist() == [0x1F3F, 0x1F3F], f"{name}: NaN to +max, overflow to -max, both exact"


@pytest.mark.parametrize("source", ["f32", "bf16x2"])
def test_ue8m0_is_the_exponent_rounded_as_asked(source: str) -> None:
    """value = 2^(code - 127), 0xFF NaN, .satfinite 0xFE (facts.md 7.2)."""
    # Value: the codes under rz and under rp.
    table = {1.0: (127, 127), 1.5: (127, 128), 2.0: (128, 128), 1.984375: (127, 128), np.nan: (255, 255)}
    table |= {2.0**-127: (0, 0), 65 * 2.0**-133: (0, 1), 1.5 * 2.0**-127: (0, 1), 2.0**-126: (1, 1)}
    table |= {2.0**127: (254, 254), 1.5 * 2.0**127: (254, 254), np.inf: (254, 254)}
    values = f32(*table)
    for column, rounding in enumerate(("rz", "rp")):
        cvt = parse(f"cvt.{rounding}.satfinite.ue8m0x2.{source}")
        halves = values >> np.uint32(16)
        result = cvt.apply(values, values) if source == "f32" else cvt.apply(halves << np.uint32(16) | halves)
        expected = [codes[column] << 8 | codes[column] for codes in table.values()]
        assert result.tolist() == expected, f"{rounding}.satfinite from {source}"
    barely = np.nextafter(np.float32(1), np.float32(2)).reshape(1).view(np.uint32)
    assert parse("cvt.rp.satfinite.ue8m0x2.f32").apply(barely, barely).tolist() == [128 << 8 | 128], (
        "the next f32 above 1"
    )
    overflow = f32(1.5 * 2.0**127)
    assert parse("cvt.rp.ue8m0x2.f32").apply(overflow, overflow).tolist() == [0xFFFF], "overflow without satfinite"


def test_every_ue8m0_code_is_a_power_of_two_in_bf16() -> None:
    codes = np.arange(256, dtype=np.uint16)
    result = parse("cvt.rn.bf16x2.ue8m0x2").apply(codes << 8 | codes)
    upper, lower = decode((result >> 16).astype(np.uint16), BF16), decode((result & 0xFFFF).astype(np.uint16), BF16)
    np.testing.assert_array_equal(upper[:255], np.ldexp(1.0, np.arange(255) - 127))
    np.testing.assert_array_equal(lower, upper)
    assert np.isnan(upper[255])


INTEGERS = [name for name in WIDTH if name[0] in "us" and name[1:].isdigit()]


def integer_range(name: str) -> tuple[int, int]:
    bits = WIDTH[name]
    return (0, 2**bits - 1) if name[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize(("dst", "src"), list(product(INTEGERS, INTEGERS)))
def test_integers_extend_truncate_and_saturate(dst: str, src: str) -> None:
    low, high = integer_range(src)
    values = sorted(
        {v for v in (low, low + 1, -129, -128, -1, 0, 1, 127, 128, 255, 256, high - 1, high) if low <= v <= high}
    )
    source = u(WIDTH[src], *values)
    wrapped = [v % 2 ** WIDTH[dst] for v in values]
    assert parse(f"cvt.{dst}.{src}").apply(source).tolist() == wrapped, f"{src} to {dst} keeps the low bits"
    bottom, top = integer_range(dst)
    clamped = [min(max(v, bottom), top) % 2 ** WIDTH[dst] for v in values]
    assert parse(f"cvt.sat.{dst}.{src}").apply(source).tolist() == clamped, f"{src} to {dst} saturates"


@pytest.mark.parametrize("src", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("dst", INTEGERS)
def test_floats_to_integers_round_clamp_and_map_nan(dst: str, src: str) -> None:
    bottom, top = integer_range(dst)
    values = [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.75, -3.75, 1e4, -1e4, np.inf, -np.inf]
    rounders = {"rni": round, "rzi": int, "rmi": lambda x: x.__floor__(), "rpi": lambda x: x.__ceil__()}
    if src in ("f32", "f64"):
        values += [2.0**31, -(2.0**31), 2.0**32, 2.0**63, -(2.0**63), 2.0**64, 2.0**62 * 3]
    container = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}[src]
    stored = np.array(values, container)
    source = stored.view(f"u{WIDTH[src] // 8}")
    for name, rounder in rounders.items():
        expected = []
        for value in stored.astype(np.float64).tolist():
            integer = (top if value > 0 else bottom) if np.isinf(value) else rounder(Fraction(value))
            expected.append(min(max(integer, bottom), top) % 2 ** WIDTH[dst])
        assert parse(f"cvt.{name}.{dst}.{src}").apply(source).tolist() == expected, f"cvt.{name}.{dst}.{src}"
    nan = np.array([np.nan], container).view(source.dtype)
    # PTX ISA 9.7.9.21, Integer Notes.
    expected_nan = 2 ** (WIDTH[dst] - 1) if src == "f64" or WIDTH[dst] == 64 else 0
    assert parse(f"cvt.rzi.{dst}.{src}").apply(nan).tolist() == [expected_nan], f"NaN to {dst} from {src}"


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("dst", ["f16", "bf16", "f32", "f64"])
def test_integers_to_floats_round_once(dst: str, rounding: str) -> None:
    rounder = {"f16": round_f16, "bf16": round_bf16, "f32": round_f32, "f64": round_f64}[dst]
    container = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}[dst]
    rng = np.random.default_rng(31)
    for src in ("s64", "u64", "s32", "u32", "s16", "u8"):
        low, high = integer_range(src)
        near = [2**n + d for n in (8, 11, 24, 25, 53, 54, 60, 63) for d in (-1, 0, 1, 2**10, 2 ** max(n - 9, 0))]
        near += [2**n + 2 ** (n - 53) + d for n in (62, 63) for d in (-1, 0, 1)]
        near += [2**60 + 2 ** (60 - bits) + d for bits in (8, 11, 24, 53) for d in (-1, 0, 1)]
        drawn = [
            int(v) >> int(s) for v, s in zip(rng.integers(-(2**63), 2**63, 200), rng.integers(0, 60, 200), strict=True)
        ]
        values = [v for v in (*near, *(-v for v in near), *drawn, low, high) if low <= v <= high and v]
        result = parse(f"cvt.{rounding}.{dst}.{src}").apply(u(WIDTH[src], *values))
        got = result.view(container).astype(np.float64).tolist()
        for value, number in zip(values, got, strict=True):
            expected = rounder(Fraction(value), rounding)
            assert number == expected, f"cvt.{rounding}.{dst}.{src} of {value} gave {number!r}, not {expected!r}"


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("pair", ["f16.f32", "bf16.f32", "f32.f64", "f16.f64", "bf16.f64", "bf16.f16", "f16.bf16"])
def test_narrowing_floats_rounds_once(pair: str, rounding: str) -> None:
    dst, src = pair.split(".")
    rounder = {"f16": round_f16, "bf16": round_bf16, "f32": round_f32}[dst]
    kind = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
    rng = np.random.default_rng(37)
    top = 15 if "f16" in (src, dst) else 120
    values = (rng.uniform(-1, 1, 400) * 2.0 ** rng.integers(-30, top, 400)).astype(kind[src])
    values[::3] = values[::3].astype(kind[dst]).astype(kind[src]) * (1 + 2.0 ** -{"f16": 11, "bf16": 8, "f32": 24}[dst])
    got = parse(f"cvt.{rounding}.{pair}").apply(values.view(f"u{WIDTH[src] // 8}")).view(kind[dst]).astype(np.float64)
    for value, number in zip(values.astype(np.float64).tolist(), got.tolist(), strict=True):
        expected = rounder(Fraction(value), rounding) if value else 0.0
        assert number == expected, f"cvt.{rounding}.{pair} of {value!r} gave {number!r}, not {expected!r}"


def test_widening_is_exact() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    for src, fmt in (("f16", F16), ("bf16", BF16)):
        numbers = ~np.isnan(decode(codes, fmt))
        wide = parse(f"cvt.f64.{src}").apply(codes).view(np.float64)
        np.testing.assert_array_equal(wide[numbers], decode(codes, fmt)[numbers])
    singles = f32(1.5, -(2.0**-149), np.inf, 3.4e38)
    np.testing.assert_array_equal(parse("cvt.f64.f32").apply(singles).view(np.float64), singles.view(np.float32))


@pytest.mark.parametrize(
    ("dst", "src", "modifiers", "given", "wanted"),
    [
        ("f64", "f16", Modifiers(), 0xFD5E, 0xFFFD_7800_0000_0000),
        ("f64", "bf16", Modifiers(), 0x7F88, 0x7FF9_0000_0000_0000),
        ("f64", "f32", Modifiers(), 0xFF80_F00A, 0xFFF8_1E01_4000_0000),
        ("f64", "f32", Modifiers(ftz=True), 0xFF80_F00A, 0x7FFF_FFFF_E000_0000),
        ("f16", "f64", Modifiers("rz"), 0xFFF0_0000_0000_0001, 0xFE00),
        ("bf16", "f64", Modifiers("rn"), 0x7FF7_D1CE_25DA_09CA, 0x7FFE),
        ("f32", "f64", Modifiers("rn", sat=True), 0x7FF7_D1CE_25DA_09CA, 0),
        ("f16", "f16", Modifiers(), 0xFC01, 0x7FFF),
        ("bf16", "bf16", Modifiers(), 0xFF81, 0x7FFF),
    ],
)
def test_what_a_nan_keeps(dst: str, src: str, modifiers: Modifiers, given: int, wanted: int) -> None:
    bits = np.array([given], f"u{WIDTH[src] // 8}")
    made = int(conversion(dst, src, modifiers).apply(bits)[0])
    assert made == wanted, f"{dst} of the {src} {given:#x} is {made:#x}"


def test_modifiers_of_scalar_conversions() -> None:
    values = f32(-1.0, 0.25, 7.0, np.nan, -0.0)
    assert parse("cvt.sat.f32.f32").apply(values).tolist() == f32(0, 0.25, 1, 0, 0).tolist(), ".sat"
    assert parse("cvt.rn.sat.f16.f32").apply(values).tolist() == [0, 0x3400, 0x3C00, 0, 0], ".sat into f16"
    subnormal = np.array([0x8000_0001], np.uint32)
    assert parse("cvt.ftz.f32.f32").apply(subnormal).tolist() == [0x8000_0000], ".ftz"
    assert parse("cvt.ftz.f64.f32").apply(subnormal).tolist() == [1 << 63], ".ftz of a source"
    assert parse("cvt.rpi.ftz.s32.f32").apply(np.array([1], np.uint32)).tolist() == [0], ".ftz before rounding up"
    assert parse("cvt.rpi.s32.f32").apply(np.array([1], np.uint32)).tolist() == [1], "without it"
    tiny = np.array([2.0**-140], np.float64).view(np.uint64)
    assert parse("cvt.rn.ftz.f32.f64").apply(tiny).tolist() == [0], ".ftz of a result"
    assert parse("cvt.rni.f32.f32").apply(f32(2.5, -0.3)).tolist() == f32(2.0, -0.0).tolist(), "to an integral value"
    assert parse("cvt.rz.relu.satfinite.bf16.f32").apply(f32(-3.0, np.inf)).tolist() == [0, 0x7F7F], "relu.satfinite"


def test_tf32_saturation_and_relu() -> None:
    values = f32(np.inf, -np.inf, -1.0, 3.4028234e38)
    assert parse("cvt.rn.satfinite.tf32.f32").apply(values).tolist() == [
        0x7F7F_E000,
        0xFF7F_E000,
        0xBF80_0000,
        0x7F7F_E000,
    ]
    assert parse("cvt.rz.relu.tf32.f32").apply(values).tolist() == [0x7F80_0000, 0, 0, 0x7F7F_E000]


@pytest.mark.parametrize(("pair", "bits"), [("f16x2", 13), ("bf16x2", 16)])
def test_stochastic_rounding_carries(pair: str, bits: int) -> None:
    """PTX ISA 9.7.9.21, `.rs`: away from zero exactly when the random bits plus the dropped bits carry out."""
    cvt = parse(f"cvt.rs.{pair}.f32")
    assert cvt.operands == 3
    truncate, fmt = parse(f"cvt.rz.{pair}.f32"), F16 if pair == "f16x2" else BF16
    dropped = np.array([0, 1, 5, (1 << bits) - 1], np.uint32)
    for negative in (0, 0x8000_0000):
        a = np.uint32(0x3FC0_0000 | negative) | dropped
        for random in (0, 1, (1 << bits) - 5, (1 << bits) - 1):
            result = cvt.apply(a, a[::-1].copy(), np.full(4, random << 16 | random, np.uint32))
            carries = ((dropped + random) >> bits).astype(np.uint32)
            expected = truncate.apply(a, a[::-1].copy()) + (carries << 16 | carries[::-1])
            np.testing.assert_array_equal(result, expected, f"{fmt.name}, random bits {random:#x}")


def modifier_sets() -> Iterator[tuple[str, str, Modifiers]]:
    for (dst, src), rule in RULES.items():
        for rounding, chosen in product(sorted(rule.roundings), product((False, True), repeat=len(rule.flags))):
            flags = {flag for flag, on in zip(sorted(rule.flags), chosen, strict=True) if on} | rule.required
            yield dst, src, Modifiers(rounding, **{flag: flag in flags for flag in FLAGS})


def test_every_rule_runs_and_keeps_width_and_shape() -> None:
    rng = np.random.default_rng(41)
    for dst, src, modifiers in modifier_sets():
        cvt = conversion(dst, src, modifiers)
        kind = f"u{WIDTH[src] // 8}"
        operands = [rng.integers(0, 2 ** WIDTH[src], (2, 3), dtype=np.uint64).astype(kind) for _ in range(cvt.operands)]
        result = cvt.apply(*operands)
        assert result.dtype == np.dtype(f"u{WIDTH[dst] // 8}"), f"{dst}.{src} {modifiers} gives {result.dtype}"
        assert result.shape == (2, 3), f"{dst}.{src} {modifiers} changes the shape to {result.shape}"


@pytest.mark.parametrize(
    ("dst", "src", "modifiers", "sentence"),
    [
        ("e4m3x8", "f32", Modifiers("rs", satfinite=True), "no destination type"),
        ("e4m3x2", "u32", Modifiers("rn", satfinite=True), "converted from bf16x2, f16x2, f32"),
        ("bf16x2", "f32", Modifiers(), "no rounding modifier where f32 to bf16x2 takes .rn, .rs, .rz"),
        ("bf16x2", "f32", Modifiers("rp"), ".rp where"),
        ("f32", "s32", Modifiers(), "takes .rm, .rn, .rp, .rz"),
        ("s32", "f32", Modifiers("rn"), ".rmi, .rni, .rpi, .rzi"),
        ("e2m1x2", "f32", Modifiers("rn"), ".satfinite is mandatory"),
        ("s32", "s64", Modifiers(relu=True), ".relu where s64 to s32 takes .sat"),
        ("bf16", "f32", Modifiers("rn", sat=True), ".sat where"),
    ],
)
def test_conversions_that_the_isa_does_not_have_are_refused_in_a_sentence(
    dst: str, src: str, modifiers: Modifiers, sentence: str
) -> None:
    with pytest.raises(UnknownConversionError) as refusal:
        conversion(dst, src, modifiers)
    message = str(refusal.value)
    assert sentence in message, message
    assert message.startswith("cvt."), message
    assert message.endswith("."), message
