"""Instruction descriptors: constants of real kernels, Table 39 of the PTX ISA row by row, and every refusal."""

from __future__ import annotations

from itertools import product

import pytest

from backends.vm.faults import Fault
from backends.vm.tensor.instruction_descriptor import (
    CtaGroup,
    InstructionDescriptor,
    check_operand_swizzle,
    decode_instruction_descriptor,
)
from backends.vm.tensor.swizzle import Swizzle


def plain(m: int, n: int, d: int, a: int, b: int, extra: int = 0) -> int:
    """The bits of Table 42."""
    return d << 4 | a << 7 | b << 10 | (n >> 3) << 17 | (m >> 4) << 24 | extra


def scaled(m: int, n: int, a: int, b: int, scale: int, extra: int = 0) -> int:
    """The bits of Tables 43 and 44."""
    return a << 7 | b << 10 | (n >> 3) << 17 | scale << 23 | (m >> 7) << 27 | extra


def test_constants_of_real_kernels_decode() -> None:
    gemm = decode_instruction_descriptor(0x08400010, "f16", 1)
    assert (gemm.m, gemm.n, gemm.k, gemm.a_type, gemm.b_type, gemm.d_type) == (128, 256, 16, "f16", "f16", "f32"), gemm
    assert not gemm.transpose_a, gemm
    assert not gemm.transpose_b, gemm
    fmha = decode_instruction_descriptor(0x08210010, "f16", 1)
    assert (fmha.m, fmha.n, fmha.transpose_a, fmha.transpose_b) == (128, 128, False, True), fmha
    mx = decode_instruction_descriptor(0x08A00000, "mxf8f6f4", 1, scale_vectorsize="block32")
    assert (mx.m, mx.n, mx.k, mx.a_type, mx.sf_type, mx.sf_blocks) == (128, 128, 32, "e4m3", "ue8m0", 1), mx


def test_every_field_comes_from_its_own_bits() -> None:
    raw = plain(64, 24, 1, 1, 0)
    base = decode_instruction_descriptor(raw, "f16", 1)
    assert (base.a_type, base.b_type, base.m, base.n) == ("bf16", "f16", 64, 24), base
    for bit, field in ((13, "negate_a"), (14, "negate_b"), (15, "transpose_a"), (16, "transpose_b")):
        found = decode_instruction_descriptor(raw | 1 << bit, "f16", 1)
        changed = [name for name in InstructionDescriptor.__slots__ if getattr(found, name) != getattr(base, name)]
        assert changed == [field], f"bit {bit} is {field}, and it changes {changed}"
    integer = decode_instruction_descriptor(plain(128, 32, 2, 1, 0, 1 << 3), "i8", 1)
    assert (integer.saturate, integer.a_type, integer.b_type, integer.d_type) == (True, "s8", "u8", "s32"), integer
    shifted = decode_instruction_descriptor(plain(32, 64, 1, 0, 0, 3 << 30), "f16", 1, weight_stationary=True)
    assert shifted.max_shift == 32, shifted
    sparse = decode_instruction_descriptor(plain(64, 64, 1, 2, 2, 0b111), "tf32", 1, sparse=True)
    assert (sparse.sparsity_selector, sparse.k) == (3, 16), sparse
    fp4 = decode_instruction_descriptor(scaled(256, 64, 1, 1, 1, 2 << 29 | 2 << 4), "mxf4", 2)
    assert (fp4.m, fp4.k, fp4.sfa_id, fp4.sfb_id, fp4.sf_blocks, fp4.sf_type) == (256, 64, 2, 2, 2, "ue8m0"), fp4
    nvfp4 = decode_instruction_descriptor(scaled(128, 8, 1, 1, 0), "mxf4nvf4", 1, scale_vectorsize="scale_vec::4X")
    assert (nvfp4.sf_blocks, nvfp4.sf_type, nvfp4.stored_bits) == (4, "ue4m3", 4), nvfp4


STEP_8, STEP_16, STEP_32 = (set(range(step, 257, step)) for step in (8, 16, 32))
I8_STEPS = {8, 16, 24, 32} | set(range(48, 257, 16))
WS = {64, 128, 256}
# PTX ISA 9.7.16.2.1, Table 39, dense: (kind, cta_group, .ws) -> (all M, all N, K).
TABLE_39: dict[tuple[str, CtaGroup, bool], tuple[set[int], set[int], int]] = {
    ("f16", 1, False): ({64, 128}, STEP_8, 16),
    ("f16", 2, False): ({128, 256}, STEP_16, 16),
    ("f16", 1, True): ({32, 64, 128}, WS, 16),
    ("tf32", 1, False): ({64, 128}, STEP_8, 8),
    ("tf32", 2, False): ({128, 256}, STEP_16, 8),
    ("tf32", 1, True): ({32, 64, 128}, WS, 8),
    ("f8f6f4", 1, False): ({64, 128}, STEP_8, 32),
    ("f8f6f4", 2, False): ({128, 256}, STEP_16, 32),
    ("f8f6f4", 1, True): ({32, 64, 128}, WS, 32),
    ("i8", 1, False): ({64, 128}, I8_STEPS, 32),
    ("i8", 2, False): ({128, 256}, STEP_32, 32),
    ("i8", 1, True): ({32, 64, 128}, WS, 32),
    ("mxf8f6f4", 1, False): ({128}, STEP_8, 32),
    ("mxf8f6f4", 2, False): ({128, 256}, STEP_16, 32),
    ("mxf4", 1, False): ({128}, STEP_8, 64),
    ("mxf4", 2, False): ({128, 256}, STEP_16, 64),
    ("mxf4nvf4", 1, False): ({128}, STEP_8, 64),
    ("mxf4nvf4", 2, False): ({128, 256}, STEP_16, 64),
}


def bits_of(kind: str, m: int, n: int) -> int:
    if kind.startswith("mx"):
        code = 0 if kind == "mxf8f6f4" else 1
        return scaled(m, n, code, code, 1)
    return plain(m, n, 2 if kind == "i8" else 1, *([2, 2] if kind == "tf32" else [0, 0]))


def decoded_or_refusal(raw: int, kind: str, cta_group: CtaGroup, ws: bool, size: str) -> InstructionDescriptor | Fault:
    try:
        return decode_instruction_descriptor(raw, kind, cta_group, ws, scale_vectorsize=size)
    except Fault as refusal:
        return refusal


@pytest.mark.parametrize("row", TABLE_39, ids=lambda row: f"{row[0]}-cg{row[1]}{'-ws' if row[2] else ''}")
def test_exactly_the_shapes_of_table_39_are_accepted(row: tuple[str, CtaGroup, bool]) -> None:
    kind, cta_group, ws = row
    ms, ns, k = TABLE_39[row]
    size = "scale_vec::2X" if kind == "mxf4nvf4" else ""
    m_values = (128, 256) if kind.startswith("mx") else (16, 32, 48, 64, 96, 128, 192, 256)
    for m, n in product(m_values, range(0, 257, 8)):
        found = decoded_or_refusal(bits_of(kind, m, n), kind, cta_group, ws, size)
        if m in ms and n in ns:
            assert isinstance(found, InstructionDescriptor), f"{row}: M = {m}, N = {n} is legal and refused: {found}"
            assert (found.m, found.n, found.k) == (m, n, k), f"{row}: decoded as {found}"
        else:
            assert isinstance(found, Fault), f"{row}: M = {m}, N = {n} is accepted; M is of {ms}, N of {sorted(ns)}"


@pytest.mark.parametrize(("kind", "cta_group", "step"), [("f8f6f4", 1, 16), ("f8f6f4", 2, 32), ("mxf8f6f4", 1, 16)])
def test_a_transposed_8_bit_b_has_coarser_n(kind: str, cta_group: CtaGroup, step: int) -> None:
    for n in range(8 * cta_group, 257, 8 * cta_group):
        raw = bits_of(kind, 128, n) | 1 << 16
        if n % step == 0:
            assert decode_instruction_descriptor(raw, kind, cta_group).n == n
        else:
            with pytest.raises(Fault, match=rf"has N = {n}; .*B transposed"):
                decode_instruction_descriptor(raw, kind, cta_group)


F16 = plain(128, 128, 1, 0, 0)
MX8 = scaled(128, 128, 0, 0, 1)
FP4 = scaled(128, 128, 1, 1, 1)
REFUSED: list[tuple[int, str, dict[str, object], str]] = [
    (F16 | 1 << 6, "f16", {}, "0x1 in bit 6"),
    (F16 | 1 << 23, "f16", {}, "0x1 in bit 23"),
    (F16 | 1 << 29, "f16", {}, "0x1 in bit 29"),
    (F16 | 1 << 3, "f16", {}, "0x1 in bit 3"),
    (F16 | 1 << 5, "f16", {}, "D type 3 in bits 5..4"),
    (F16 ^ 3 << 4, "f16", {}, "D type 2 in bits 5..4"),
    (F16 | 2 << 7, "f16", {}, "A type 2 in bits 9..7"),
    (F16 | 7 << 10, "f16", {}, "B type 7 in bits 12..10"),
    (plain(128, 128, 0, 1, 1), "f16", {}, "bf16 into an f16 accumulator"),
    (plain(128, 128, 1, 0, 0), "tf32", {}, "A type 0"),
    (plain(128, 128, 1, 2, 0), "f8f6f4", {}, "A type 2"),
    (plain(128, 128, 2, 0, 0, 1 << 13), "i8", {}, "0x1 in bits 14..13"),
    (plain(128, 128, 1, 0, 0), "i8", {}, "D type 1"),
    (F16 | 1 << 2, "f16", {}, "sparsity 1 in bit 2, and the instruction is tcgen05.mma without .sp"),
    (F16, "f16", {"sparse": True}, "sparsity 0 in bit 2, and the instruction is tcgen05.mma.sp"),
    (F16, "f16", {"cta_group": 2, "weight_stationary": True}, ".ws and .cta_group::2"),
    (plain(128, 256, 1, 0, 0, 1 << 2), "f16", {"sparse": True, "weight_stationary": True}, "N = 256"),
    (MX8, "mxf8f6f4", {"weight_stationary": True}, ".ws"),
    (MX8 | 1, "mxf8f6f4", {}, "bits 1..0"),
    (MX8 | 1 << 24, "mxf8f6f4", {}, "bits 26..24"),
    (MX8 | 1 << 31, "mxf8f6f4", {}, "bit 31"),
    (MX8 ^ 1 << 23, "mxf8f6f4", {}, "scale type 0"),
    (MX8, "mxf8f6f4", {"scale_vectorsize": "scale_vec::4X"}, "this kind takes .scale_vec::1X, .block32"),
    (FP4 | 1 << 15, "mxf4", {}, "bits 16..15"),
    (FP4 | 1 << 31, "mxf4", {}, "K = 96"),
    (FP4 | 1 << 29, "mxf4", {}, "A scale factor id 1"),
    (FP4 | 3 << 4, "mxf4", {}, "B scale factor id 3"),
    (FP4 | 2 << 29, "mxf4nvf4", {"scale_vectorsize": "block16"}, "A scale factor id 2"),
    (FP4 ^ 1 << 23, "mxf4nvf4", {"scale_vectorsize": "block32"}, "scale type 0"),
    (FP4, "mxf4nvf4", {}, "no scale vector size"),
    (FP4 | 1 << 2, "mxf4", {"cta_group": 2, "sparse": True}, "M = 128"),
    (F16, "f64", {}, "the kinds are f16, tf32"),
]


@pytest.mark.parametrize(
    ("raw", "kind", "options", "names"), REFUSED, ids=[f"{i}-{kind}" for i, (_, kind, _, _) in enumerate(REFUSED)]
)
def test_forbidden_descriptors_are_refused_by_field(
    raw: int, kind: str, options: dict[str, object], names: str
) -> None:
    with pytest.raises(Fault) as refusal:
        decode_instruction_descriptor(raw, kind, **{"cta_group": 1, **options})  # type: ignore[arg-type]
    assert refusal.value.rule == "instruction-descriptor"
    assert names in refusal.value.detail, f"the refusal does not name what is wrong: {refusal.value.detail}"
    assert "PTX ISA 9.7.16" in refusal.value.detail, f"the refusal cites no section: {refusal.value.detail}"


@pytest.mark.parametrize("operand", ["a", "b"])
def test_transposition_and_swizzle_must_go_together(operand: str) -> None:
    bit = 15 if operand == "a" else 16
    f16 = decode_instruction_descriptor(F16 | 1 << bit, "f16", 1)
    tf32 = decode_instruction_descriptor(plain(128, 128, 1, 2, 2, 1 << bit), "tf32", 1)
    check_operand_swizzle(f16, operand, Swizzle.B128)  # type: ignore[arg-type]
    check_operand_swizzle(tf32, operand, Swizzle.B128_ATOM_32B)  # type: ignore[arg-type]
    check_operand_swizzle(decode_instruction_descriptor(F16, "f16", 1), operand, Swizzle.B32)  # type: ignore[arg-type]
    with pytest.raises(Fault, match=r"kind::f16 is transposed .* any other swizzle"):
        check_operand_swizzle(f16, operand, Swizzle.B128_ATOM_32B)  # type: ignore[arg-type]
    with pytest.raises(Fault, match=r"kind::tf32 is transposed .* needs the 128B swizzle with 32-byte atoms"):
        check_operand_swizzle(tf32, operand, Swizzle.B128)  # type: ignore[arg-type]
