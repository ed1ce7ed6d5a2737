"""Matrix descriptors: addresses against wgmma on an H200, decoding and refusals against the tables of the ISA."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from backends.vm.faults import Fault
from backends.vm.tensor.matrix_descriptor import (
    Major,
    MatrixDescriptor,
    Target,
    decode_matrix_descriptor,
    gather_units,
    operand_elements,
    unit_addresses,
)
from backends.vm.tensor.swizzle import PATTERN_BYTES, UNIT_BYTES, Swizzle, swizzled
from conformance import SILICON

SMEM_BASE = 0x400
GOLDEN = np.load(SILICON / "movement" / "wgmma.npz")
DTYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "tf32": np.dtype(np.float32),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "s8": np.dtype(np.int8),
}
K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "s8": 32}
SS_CASES: list[tuple[str, str, int, Major, Major]] = [
    ("wf16_00", "f16", 64, "k", "k"),
    ("wf16_01", "f16", 64, "k", "mn"),
    ("wf16_10", "f16", 64, "mn", "k"),
    ("wf16_11", "f16", 64, "mn", "mn"),
    ("wtf32", "tf32", 64, "k", "k"),
    ("we4m3", "e4m3", 64, "k", "k"),
    ("ws8", "s8", 64, "k", "k"),
    ("wbf16", "bf16", 64, "k", "k"),
    ("wf16n8", "f16", 8, "k", "k"),
]


def shared_memory(dtype: str) -> np.ndarray:
    image = GOLDEN[f"img_{dtype}"]
    smem = np.zeros(232448, dtype=np.uint8)
    smem[SMEM_BASE : SMEM_BASE + image.size] = image
    return smem


def operand(smem: np.ndarray, raw: int, dtype: str, rows: int, major: Major) -> np.ndarray:
    bits = DTYPES[dtype].itemsize * 8
    addresses = unit_addresses(decode_matrix_descriptor(raw, "sm_90a"), rows, K[dtype], bits, major, "sm_90a")
    elements = operand_elements(gather_units(smem, addresses), rows, bits, major)
    return np.ascontiguousarray(elements).view(DTYPES[dtype]).astype(np.float64)


def accumulator(registers: np.ndarray, dtype: str) -> np.ndarray:
    """[64, n] from the registers [128, n / 2] of a warpgroup, by the fragment table of facts.md 4."""
    thread, register = np.indices(registers.shape)
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + 2 * (thread % 4) + register % 2
    matrix = np.empty((64, registers.shape[1] * 2))
    matrix[row, column] = registers.view(np.int32 if dtype == "s8" else np.float32)
    return matrix


@pytest.mark.parametrize(("case", "dtype", "n", "a_major", "b_major"), SS_CASES, ids=[case[0] for case in SS_CASES])
def test_a_wgmma_of_gathered_operands_gives_an_h200s_product(
    case: str, dtype: str, n: int, a_major: Major, b_major: Major
) -> None:
    smem = shared_memory(dtype)
    for number, (a_raw, b_raw) in enumerate(GOLDEN[f"{case}_desc"].tolist()):
        a = operand(smem, a_raw, dtype, 64, a_major)
        b = operand(smem, b_raw, dtype, n, b_major)
        measured = accumulator(GOLDEN[f"{case}_out"][number], dtype)
        wrong = np.argwhere(a @ b.T != measured)
        assert not wrong.size, (
            f"{case} number {number}, descriptors {a_raw:#018x} and {b_raw:#018x}: {len(wrong)} of {measured.size} "
            f"elements differ from the H200, first at {wrong[0].tolist()}"
        )


def test_the_silicon_cases_cover_every_swizzle_and_base_offsets() -> None:
    raws = [raw for case in SS_CASES for raw in GOLDEN[f"{case[0]}_desc"].reshape(-1).tolist()]
    decoded = [decode_matrix_descriptor(raw, "sm_90a") for raw in raws]
    swizzles = {item.swizzle for item in decoded}
    assert swizzles == {Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128}, f"only {swizzles} occur"
    offsets = {item.base_offset for item in decoded if item.swizzle is not Swizzle.NONE}
    assert len(offsets) > 4, f"only the base offsets {offsets} occur with a swizzle"
    assert any(item.start % 1024 for item in decoded), "every start is aligned to the pattern"


@pytest.mark.parametrize("field", [(0, 1), (32, 1), (49, 1), (62, 1)], ids=["start", "sbo", "base_offset", "swizzle"])
def test_a_descriptor_with_one_field_off_does_not_give_the_h200s_answer(field: tuple[int, int]) -> None:
    low, delta = field
    smem = shared_memory("f16")
    agreed = 0
    swizzling = [pair for pair in enumerate(GOLDEN["wf16_00_desc"].tolist()) if pair[1][0] >> 62 == 1]
    for number, (a_raw, b_raw) in swizzling:
        planted = a_raw ^ delta << low
        product = operand(smem, planted, "f16", 64, "k") @ operand(smem, b_raw, "f16", 64, "k").T
        agreed += np.array_equal(product, accumulator(GOLDEN["wf16_00_out"][number], "f16"))
    assert swizzling, "no case has a 128B swizzle on A"
    assert agreed == 0, (
        f"{agreed} of {len(swizzling)} products are unchanged although bit {low} of A's descriptor is wrong"
    )


# Constants of CuTeDSL and of the ISA's examples (facts.md 3.1): value, target, fields.
KNOWN: list[tuple[int, Target, MatrixDescriptor]] = [
    (0x4000404000010000, "sm_100a", MatrixDescriptor(0, 16, 1024, 0, Swizzle.B128)),
    (0x4000004000010000, "sm_90a", MatrixDescriptor(0, 16, 1024, 0, Swizzle.B128)),
    (0x8000402000010000, "sm_100a", MatrixDescriptor(0, 16, 512, 0, Swizzle.B64)),
    (0x0000400800010000, "sm_100a", MatrixDescriptor(0, 16, 128, 0, Swizzle.NONE)),
    (0x2000400000000000, "sm_100a", MatrixDescriptor(0, 0, 0, 0, Swizzle.B128_ATOM_32B)),
    (0xC000400000000000, "sm_100a", MatrixDescriptor(0, 0, 0, 0, Swizzle.B32)),
    (0xC00E000000003FFF, "sm_90a", MatrixDescriptor(0x3FFF0, 0, 0, 7, Swizzle.B32)),
]


@pytest.mark.parametrize(("raw", "target", "fields"), KNOWN, ids=[f"{raw:#x}" for raw, _, _ in KNOWN])
def test_known_constants_decode_to_their_fields(raw: int, target: Target, fields: MatrixDescriptor) -> None:
    assert decode_matrix_descriptor(raw, target) == fields, f"{raw:#018x} decodes to other fields on {target}"


FORBIDDEN: list[tuple[int, Target, str]] = [
    (0x4000004000010000, "sm_100a", "constant 0b001"),
    (0x4000C04000010000, "sm_100a", "constant 0b001"),
    (0x4010404000010000, "sm_100a", "bit 52"),
    (0x6000404000010000, "sm_100a", "swizzle code 3"),
    (0xA000404000010000, "sm_100a", "swizzle code 5"),
    (0xE000404000010000, "sm_100a", "swizzle code 7"),
    (0x4020404000010000, "sm_100a", "bits 60..53"),
    (0x4000404000014000, "sm_100a", "bits 15..14"),
    (0x4000404040010000, "sm_100a", "bits 31..30"),
    (0x4000404000010000, "sm_90a", "bits 48..46"),
    (0x4010004000010000, "sm_90a", "bits 61..52"),
    (0x2000004000010000, "sm_90a", "bits 61..52"),
]


@pytest.mark.parametrize(("raw", "target", "names"), FORBIDDEN, ids=[f"{raw:#x}" for raw, _, _ in FORBIDDEN])
def test_forbidden_values_are_refused_by_field(raw: int, target: Target, names: str) -> None:
    with pytest.raises(Fault) as refusal:
        decode_matrix_descriptor(raw, target)
    assert refusal.value.rule == "matrix-descriptor"
    assert names in refusal.value.detail, f"the refusal does not name what is wrong: {refusal.value.detail}"
    assert f"{raw:#018x}" in refusal.value.detail, "the refusal does not give the value"


REFUSED_OPERANDS: list[tuple[Swizzle, int, Major, Target]] = [
    (Swizzle.B128_ATOM_32B, 32, "k", "sm_100a"),
    (Swizzle.B128_ATOM_32B, 16, "mn", "sm_100a"),
    (Swizzle.B128, 32, "mn", "sm_100a"),
    (Swizzle.B128, 4, "mn", "sm_100a"),
    (Swizzle.B128, 8, "mn", "sm_90a"),
    (Swizzle.NONE, 32, "mn", "sm_90a"),
]


@pytest.mark.parametrize(("swizzle", "bits", "major", "target"), REFUSED_OPERANDS)
def test_operands_that_no_layout_serves_are_refused(swizzle: Swizzle, bits: int, major: Major, target: Target) -> None:
    with pytest.raises(Fault) as refusal:
        unit_addresses(MatrixDescriptor(0, 16, 1024, 0, swizzle), 64, 256 // bits, bits, major, target)
    assert "PTX ISA 9.7.1" in refusal.value.detail, f"the refusal cites no section: {refusal.value.detail}"


# The ISA's own examples (9.7.16.3.3): element offsets of (row, k) in the layout before swizzling.
def isa_offset(index: tuple[int, int], shape: tuple[tuple[int, ...], ...], stride: tuple[tuple[int, ...], ...]) -> int:
    total = 0
    for coordinate, extents, steps in zip(index, shape, stride, strict=True):
        for extent, step in zip(extents, steps, strict=True):
            total += coordinate % extent * step
            coordinate //= extent
    return total


ISA_EXAMPLES: list[
    tuple[str, Swizzle, Major, int, int, int, tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
] = [
    ("tf32 K none", Swizzle.NONE, "k", 32, 64, 32, ((8, 2), (4, 4)), ((4, 32), (1, 64))),
    ("bf16 MN none", Swizzle.NONE, "mn", 16, 128, 64, ((8, 1, 2), (8, 2)), ((1, 8, 64), (8, 128))),
    ("bf16 MN 32B", Swizzle.B32, "mn", 16, 128, 256, ((8, 2, 2), (8, 2)), ((1, 8, 128), (16, 256))),
    ("bf16 MN 64B", Swizzle.B64, "mn", 16, 256, 512, ((8, 4, 2), (8, 2)), ((1, 8, 256), (32, 512))),
]


@pytest.mark.parametrize(("name", "swizzle", "major", "bits", "lbo", "sbo", "shape", "stride"), ISA_EXAMPLES)
def test_the_isas_layout_examples_come_out(
    name: str,
    swizzle: Swizzle,
    major: Major,
    bits: int,
    lbo: int,
    sbo: int,
    shape: tuple[tuple[int, ...], ...],
    stride: tuple[tuple[int, ...], ...],
) -> None:
    rows, k = (int(np.prod(extents)) for extents in shape)
    element_bytes = bits // 8
    # Each position holds the number of its element, row * k + column + 1.
    mask = {Swizzle.NONE: 0, Swizzle.B32: 1, Swizzle.B64: 3}[swizzle]
    memory = np.zeros(1 << 14, dtype={16: np.uint16, 32: np.uint32}[bits])
    expected = np.zeros((rows, k), dtype=memory.dtype)
    for row in range(rows):
        for column in range(k):
            linear = isa_offset((row, column), shape, stride) * element_bytes
            address = linear ^ (linear >> 7 & mask) << 4
            memory[address // element_bytes] = expected[row, column] = row * k + column + 1
    descriptor = MatrixDescriptor(0, lbo * element_bytes, sbo * element_bytes, 0, swizzle)
    units = gather_units(memory.view(np.uint8), unit_addresses(descriptor, rows, k, bits, major))
    found = operand_elements(units, rows, bits, major)
    assert np.array_equal(found, expected), f"{name}: other elements than the ISA's layout gives"


# Swizzles: the tables of PTX ISA 5.5.7, and the laws that their users rely on.


# PTX ISA 5.5.7: line i lists the 16-byte unit of the source at each place of line i of the pattern.
TABLES = {
    Swizzle.B32: ["01234567", "10325476"],
    Swizzle.B64: ["01234567", "10325476", "23016745", "32107654"],
    Swizzle.B128: [
        "01234567",
        "10325476",
        "23016745",
        "32107654",
        "45670123",
        "54761032",
        "67452301",
        "76543210",
    ],
    Swizzle.B128_ATOM_32B: ["01234567", "23016745", "45670123", "67452301"],
    Swizzle.B128_ATOM_64B: ["01234567", "45670123"],
}


@pytest.mark.parametrize("mode", TABLES, ids=lambda mode: mode.value)
def test_units_lie_where_the_isa_table_puts_them(mode: Swizzle) -> None:
    for line in range(32):
        table = TABLES[mode][line % len(TABLES[mode])]
        linear = line * 128 + np.arange(8, dtype=np.int64) * UNIT_BYTES
        placed = swizzled(mode, linear)
        for place, unit in enumerate(table):
            at = line * 128 + place * UNIT_BYTES
            assert placed[int(unit)] == at, (
                f"{mode.value}: line {line}, unit {unit} lies at {placed[int(unit)]}, not {at}"
            )


@pytest.mark.parametrize("mode", Swizzle, ids=lambda mode: mode.value)
def test_a_swizzle_is_an_involution_that_keeps_lines_and_units_whole(mode: Swizzle) -> None:
    linear = np.arange(4 * PATTERN_BYTES, dtype=np.int64)
    placed = swizzled(mode, linear)
    assert np.array_equal(swizzled(mode, placed), linear), (
        f"{mode.value}: applied twice, it does not give back the address"
    )
    assert np.array_equal(placed >> 7, linear >> 7), f"{mode.value} moves bytes to another 128-byte line"
    assert np.array_equal(placed % UNIT_BYTES, linear % UNIT_BYTES), f"{mode.value} tears a 16-byte unit"


@pytest.mark.parametrize("mode", Swizzle, ids=lambda mode: mode.value)
def test_base_offset_shifts_the_pattern_back_by_as_many_lines(mode: Swizzle) -> None:
    linear = np.arange(2 * PATTERN_BYTES, dtype=np.int64)
    for base_offset in range(8):
        shift = base_offset * 128
        assert np.array_equal(swizzled(mode, linear + shift, base_offset) - shift, swizzled(mode, linear)), (
            f"{mode.value}: the pattern from line {base_offset}, with that base offset, is not the one from line 0"
        )


def test_a_wrong_swizzle_is_told_from_the_right_one() -> None:
    linear = np.arange(0, PATTERN_BYTES, UNIT_BYTES, dtype=np.int64)
    patterns = {mode: tuple(swizzled(mode, linear).tolist()) for mode in Swizzle}
    assert len(set(patterns.values())) == len(Swizzle), "two swizzle modes give the same pattern"
