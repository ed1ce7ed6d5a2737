"""Tensor-memory layouts against the tables of facts.md 1 and 2, lane by lane, and against each other.

Not measured on Blackwell: the sources are PTX ISA 9.7.16 and the layouts of CUTLASS.
"""

from __future__ import annotations

import numpy as np
import pytest

from backends.vm.faults import Fault
from backends.vm.tensor.tmem_layout import (
    COLUMNS,
    LANES,
    CtaGroup,
    accumulator_patches,
    column_extent,
    copy_map,
    decompressed,
    load_matrix,
    load_registers,
    load_scale_factors,
    load_split_scale_factors,
    operand_a_patches,
    register_map,
    split_address,
    split_scale_address,
    store_copied_rows,
    store_matrix,
    store_registers,
)


def labelled() -> np.ndarray:
    """Tensor memory with its own address in every word: lane in bits 24..16, column in bits 15..0."""
    lane, column = np.indices((LANES, COLUMNS), dtype=np.uint32)
    return lane << 16 | column


@pytest.mark.parametrize(
    ("taddr", "lane", "column"), [(0, 0, 0), (0x00200010, 32, 16), (0x007F01FF, 127, 511), (0x40800100, 0x4080, 256)]
)
def test_addresses_split_into_lane_and_column(taddr: int, lane: int, column: int) -> None:
    assert split_address(taddr) == (lane, column), f"{taddr:#010x} is lane {lane}, column {column}"


def test_the_address_of_scale_factors_has_their_id() -> None:
    assert split_scale_address(0xC0000100) == (0, 256), "bits 31..30 are no part of the lane"
    assert split_scale_address(0x20000100) == (0x2000, 256), "bit 29 is part of the lane"


# Lane and column, relative to the address, of register r of thread t (facts.md 1.1).
CASES = [
    ("32x32b", 8, 0, 0, 0, 0),
    ("32x32b", 8, 31, 5, 31, 5),
    ("16x64b", 4, 0, 3, 0, 6),
    ("16x64b", 4, 1, 0, 8, 0),
    ("16x64b", 4, 2, 0, 0, 1),
    ("16x64b", 4, 31, 3, 15, 7),
    ("16x128b", 2, 5, 0, 1, 1),
    ("16x128b", 2, 5, 1, 9, 1),
    ("16x128b", 2, 5, 2, 1, 5),
    ("16x128b", 2, 31, 3, 15, 7),
    ("16x256b", 2, 5, 0, 1, 2),
    ("16x256b", 2, 5, 1, 1, 3),
    ("16x256b", 2, 5, 2, 9, 2),
    ("16x256b", 2, 5, 4, 1, 10),
    ("16x256b", 2, 31, 7, 15, 15),
]


@pytest.mark.parametrize(("shape", "num", "thread", "register", "lane", "column"), CASES)
def test_registers_come_from_the_lane_and_column_of_the_table(
    shape: str, num: int, thread: int, register: int, lane: int, column: int
) -> None:
    word = int(load_registers(labelled(), 32, 64, register_map(shape, num))[register, thread])
    found = (word >> 16) - 32, (word & 0xFFFF) - 64
    assert found == (lane, column), f"{shape}.x{num}: register {register} of thread {thread} comes from {found}"


def test_the_two_halves_of_16x32bx2_are_split_as_asked() -> None:
    words = load_registers(labelled(), 0, 8, register_map("16x32bx2", 4, half_split=100))
    for thread in range(32):
        for register in range(4):
            lane, column = thread % 16, 8 + register + (100 if thread >= 16 else 0)
            assert words[register, thread] == lane << 16 | column, f"thread {thread}, register {register}"
    assert register_map("16x32bx2", 4, half_split=100).column_span == ((0, 4), (100, 104))


SHAPES = [("32x32b", 32, 1), ("16x64b", 16, 2), ("16x128b", 16, 4), ("16x256b", 16, 8)]


@pytest.mark.parametrize(("shape", "lanes", "columns"), SHAPES)
@pytest.mark.parametrize("num", [1, 2, 16, 32])
@pytest.mark.parametrize("packed", [False, True])
def test_a_store_is_undone_by_a_load_and_touches_its_rectangle_only(
    shape: str, lanes: int, columns: int, num: int, packed: bool
) -> None:
    layout = register_map(shape, num, packed)
    width = columns * num * (2 if packed else 1)
    registers = np.arange(layout.lanes.size, dtype=np.uint32).reshape(layout.lanes.shape) * np.uint32(0x10001 * 7)
    tmem = np.full((LANES, COLUMNS), 0xDEADBEEF, dtype=np.uint32)
    store_registers(tmem, 64, 0, layout, registers)
    assert np.array_equal(load_registers(tmem, 64, 0, layout), registers), f"{shape}.x{num}: not what was stored"
    touched = tmem != 0xDEADBEEF
    assert touched[64 : 64 + lanes, :width].all(), f"{shape}.x{num} leaves holes in {lanes} lanes by {width} columns"
    assert touched.sum() == lanes * width, f"{shape}.x{num} writes outside {lanes} lanes by {width} columns"
    assert layout.column_span == ((0, width),), f"{shape}.x{num}: the span says {layout.column_span}"


def test_packing_puts_two_neighbouring_columns_into_one_register() -> None:
    tmem = labelled()
    words = load_registers(tmem, 0, 0, register_map("32x32b", 4, packed=True))
    for register in range(4):
        assert words[register, 9] == 2 * register | (2 * register + 1) << 16, (
            f"register {register}: {words[register, 9]:#x}"
        )
    store_registers(tmem, 0, 0, register_map("32x32b", 1, packed=True), np.full((1, 32), 0x12345678, np.uint32))
    assert (int(tmem[3, 0]), int(tmem[3, 1])) == (0x5678, 0x1234), "unpacking swaps the halves"


@pytest.mark.parametrize(
    ("shape", "num"), [("16x128b", 128), ("16x256b", 64), ("32x32b", 3), ("32x32b", 256), ("8x8b", 1)]
)
def test_forms_that_the_isa_does_not_have_are_refused(shape: str, num: int) -> None:
    with pytest.raises(Fault, match=r"tcgen05\.ld and st") as refusal:
        register_map(shape, num)
    assert refusal.value.rule == "tmem-shape"


# Destination lanes of source row r of a tcgen05.cp (facts.md 1.2).
COPIES = [
    ("128x256b", "", 2, 100, {100}),
    ("128x128b", "", 1, 127, {127}),
    ("64x128b", "warpx2::02_13", 1, 5, {5, 69}),
    ("64x128b", "warpx2::02_13", 1, 40, {40, 104}),
    ("64x128b", "warpx2::01_23", 1, 5, {5, 37}),
    ("64x128b", "warpx2::01_23", 1, 40, {72, 104}),
    ("32x128b", "warpx4", 1, 7, {7, 39, 71, 103}),
]


@pytest.mark.parametrize(("shape", "multicast", "units", "row", "lanes"), COPIES)
def test_copied_rows_land_in_the_lanes_of_the_table(
    shape: str, multicast: str, units: int, row: int, lanes: set[int]
) -> None:
    layout = copy_map(shape, multicast)
    source = np.zeros((layout.rows, units, 16), dtype=np.uint8)
    source[row] = np.arange(1, 16 * units + 1).reshape(units, 16)
    tmem = np.zeros((LANES, COLUMNS), dtype=np.uint32)
    store_copied_rows(tmem, 0, 12, layout, source)
    assert set(np.flatnonzero(tmem.any(axis=1)).tolist()) == lanes, f"{shape} {multicast}: row {row} goes elsewhere"
    for lane in lanes:
        found = tmem[lane, 12 : 12 + 4 * units].copy().view(np.uint8)
        assert np.array_equal(found, source[row].reshape(-1)), f"{shape}: lane {lane} holds other bytes"


@pytest.mark.parametrize(("shape", "multicast"), [("4x256b", ""), ("64x128b", ""), ("32x128b", "warpx2::02_13")])
def test_copies_without_a_known_destination_are_refused(shape: str, multicast: str) -> None:
    with pytest.raises(Fault, match=r"tcgen05\.cp"):
        copy_map(shape, multicast)


def test_decompression_spreads_elements_over_bytes() -> None:
    fp4 = np.zeros((1, 16), dtype=np.uint8)
    fp4[0, :8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]  # elements 0, 1, 2, .. 15, low nibble first
    assert decompressed(fp4, "b4x16_p64").tolist() == [[code << 2 for code in range(16)]], "e2m1 belongs in bits 5..2"
    packed = sum(code << 6 * index for index, code in enumerate(range(40, 56)))
    fp6 = np.frombuffer(packed.to_bytes(12, "little") + b"\xff" * 4, dtype=np.uint8)[None, :]
    assert decompressed(fp6, "b6x16_p32").tolist() == [list(range(40, 56))], "6-bit types belong in bits 5..0"


def expected_place(m: int, n_total: int, cta_group: int, ws: bool, row: int, n: int) -> tuple[int, int]:
    """Lane and column of D(row, n) in its CTA, by the table of facts.md 2.3."""
    if ws and m == 64:
        return (row, n) if n < n_total // 2 else (64 + row, n - n_total // 2)
    if ws and m == 32:
        return row + 32 * (n // (n_total // 4)), n % (n_total // 4)
    if m == 128 and cta_group == 2:
        return (row, n) if n < n_total // 2 else (64 + row, n - n_total // 2)
    if m == 64:
        return row % 16 + 32 * (row // 16), n
    return row, n


@pytest.mark.parametrize(
    ("m", "n", "cta_group", "ws"),
    [
        (128, 96, 1, False),
        (64, 24, 1, False),
        (256, 64, 2, False),
        (128, 32, 2, False),
        (64, 64, 1, True),
        (32, 128, 1, True),
        (128, 64, 1, True),
    ],
)
def test_accumulators_lie_where_the_table_says(m: int, n: int, cta_group: CtaGroup, ws: bool) -> None:
    rows = m // cta_group
    patches = accumulator_patches(m, n, cta_group, ws)
    found = load_matrix(labelled(), 0, 16, patches)
    assert found.shape == (rows, n), f"M={m} N={n}: a CTA holds {found.shape}"
    extent = max(expected_place(m, n, cta_group, ws, row, column)[1] for row in range(rows) for column in range(n)) + 1
    assert column_extent(patches) == extent, f"M={m} N={n}: {extent} columns are used, not {column_extent(patches)}"
    for row in range(rows):
        for column in range(n):
            lane, at = expected_place(m, n, cta_group, ws, row, column)
            assert found[row, column] == lane << 16 | at + 16, (
                f"M={m} N={n}: D({row}, {column}) is at {found[row, column]:#x}"
            )
    tmem = np.zeros((LANES, COLUMNS), dtype=np.uint32)
    values = np.arange(1, rows * n + 1, dtype=np.uint32).reshape(rows, n)
    store_matrix(tmem, 0, 16, patches, values)
    assert np.array_equal(load_matrix(tmem, 0, 16, patches), values), f"M={m} N={n}: not what was stored"
    assert np.count_nonzero(tmem) == rows * n, f"M={m} N={n}: {np.count_nonzero(tmem)} words written for {rows * n}"


def test_m_64_can_use_the_other_half_of_every_quarter() -> None:
    found = load_matrix(labelled(), 16, 0, accumulator_patches(64, 8, 1))
    assert [int(word) >> 16 for word in found[::16, 0]] == [16, 48, 80, 112], (
        "lane alignment 16 moves every row by 16 lanes"
    )


def test_sparse_m_128_on_two_ctas_uses_layout_c() -> None:
    found = load_matrix(labelled(), 0, 0, accumulator_patches(128, 32, 2, sparse=True))
    assert [int(word) >> 16 for word in found[::16, 0]] == [0, 32, 64, 96], (
        "layout C fills half of the lanes, as M = 64"
    )
    assert found.shape == (64, 32), f"a CTA holds 64 rows of 32 columns, not {found.shape}"


def test_a_in_tensor_memory_is_packed_along_k() -> None:
    (plain,) = operand_a_patches(128, 16, 16, 1)
    assert load_matrix(labelled(), 0, 4, plain)[9].tolist() == [9 << 16 | column for column in range(4, 12)]
    first, second = operand_a_patches(128, 16, 16, 2)
    halves = [load_matrix(labelled(), 0, 0, patches) for patches in (first, second)]
    assert [int(half[5, 0]) >> 16 for half in halves] == [5, 69], "M = 128 on two CTAs keeps A twice, 64 lanes apart"
    shares = operand_a_patches(32, 16, 16, 1, weight_stationary=True)
    lanes = [int(load_matrix(labelled(), 0, 0, patches)[5, 0]) >> 16 for patches in shares]
    assert lanes == [5, 37, 69, 101], "with .ws each share of the columns has an A of its own"


def test_shapes_without_a_layout_are_refused() -> None:
    with pytest.raises(Fault, match=r"M = 96, cta_group::1"):
        accumulator_patches(96, 16, 1)


def scale_atom(rows: int) -> np.ndarray:
    """Scale-factor codes [rows, 4], each different from its neighbours."""
    return (np.arange(rows * 4, dtype=np.uint32) * 37 % 251).astype(np.uint8).reshape(rows, 4)


def copied_scale_factors(codes: np.ndarray, column: int) -> np.ndarray:
    """Tensor memory after tcgen05.cp.32x128b.warpx4 of the library's 512-byte atoms (facts.md 2.4)."""
    tmem = np.zeros((LANES, COLUMNS), dtype=np.uint32)
    for block, start in enumerate(range(0, len(codes), 128)):
        atom = np.zeros(512, dtype=np.uint8)
        for row in range(128):
            atom[row % 32 * 16 + row // 32 * 4 :][:4] = codes[start + row]
        store_copied_rows(tmem, 0, column + 4 * block, copy_map("32x128b", "warpx4"), atom.reshape(32, 1, 16))
    return tmem


@pytest.mark.parametrize(("rows", "blocks", "sf_id"), [(128, 4, 0), (256, 4, 0), (128, 2, 2), (128, 1, 3)])
def test_scale_factors_copied_as_the_library_does_are_found(rows: int, blocks: int, sf_id: int) -> None:
    codes = scale_atom(rows)
    found = load_scale_factors(copied_scale_factors(codes, 40), 40, rows, blocks, sf_id)
    assert np.array_equal(found, codes[:, sf_id : sf_id + blocks]), (
        f"{rows} rows, {blocks} blocks from byte {sf_id}: others"
    )


def test_scale_factors_of_a_split_b_come_from_two_halves() -> None:
    codes = scale_atom(256)
    tmem = copied_scale_factors(codes[:128], 0)
    tmem[64:] = copied_scale_factors(codes[128:], 0)[64:]
    assert np.array_equal(load_split_scale_factors(tmem, 0, 256, 4, 0), codes), "N >= 128 comes from quarters 2 and 3"


def test_a_quarter_that_was_forgotten_is_a_fault() -> None:
    tmem = copied_scale_factors(scale_atom(128), 0)
    tmem[64:96] = 0
    with pytest.raises(Fault, match=r"differ between quarters: row .* in quarter 2"):
        load_scale_factors(tmem, 0, 128, 4, 0)
    with pytest.raises(Fault, match=r"in quarter 2 and .* in quarter 3"):
        load_split_scale_factors(tmem, 0, 256, 4, 0)
