"""Swizzles: the tables of PTX ISA 5.5.7, and the laws that their users rely on."""

from __future__ import annotations

import numpy as np
import pytest

from backends.vm.tensor.swizzle import PATTERN_BYTES, UNIT_BYTES, Swizzle, swizzled

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
