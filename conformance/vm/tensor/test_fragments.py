"""Register fragments against an H200: products, and moves of registers with known bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from backends.vm.tensor.fragments import (
    Fragment,
    load_matrices,
    matrix_fragment,
    mma_fragment,
    store_matrices,
    to_matrix,
    to_registers,
    transposed_matrix,
    wgmma_accumulator,
    wgmma_operand_a,
)
from backends.vm.tensor.matrix_descriptor import (
    decode_matrix_descriptor,
    gather_units,
    operand_elements,
    unit_addresses,
)
from conformance import SILICON

FOLDER = SILICON / "movement"
WARP = np.load(FOLDER / "fragments.npz")
WGMMA = np.load(FOLDER / "wgmma.npz")
DTYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "tf32": np.dtype(np.float32),
}
SMEM_BASE = 0x400


def values(matrix: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(matrix).view(DTYPES[dtype]).astype(np.float64)


@pytest.mark.parametrize(("run", "dtype"), [(0, "f16"), (1, "bf16"), (2, "e4m3")])
def test_mma_of_fragments_gives_an_h200s_registers(run: int, dtype: str) -> None:
    bits = DTYPES[dtype].itemsize * 8
    a, b, c, d = (WARP[f"mma{run}_{name}"].T for name in "abco")
    product = values(to_matrix(a, mma_fragment("a", bits)), dtype) @ values(
        to_matrix(b, mma_fragment("b", bits)), dtype
    )
    accumulator = to_matrix(c, mma_fragment("c", bits)).view(np.float32)
    result = (product + accumulator).astype(np.float32).view(np.uint32)
    assert np.array_equal(to_registers(result, mma_fragment("c", bits)), d), f"mma.sync of {dtype}: other registers"


def b_operand(dtype: str, raw: int, rows: int) -> np.ndarray:
    smem = np.zeros(232448, dtype=np.uint8)
    image = WGMMA[f"img_{dtype}"]
    smem[SMEM_BASE : SMEM_BASE + image.size] = image
    bits = DTYPES[dtype].itemsize * 8
    addresses = unit_addresses(decode_matrix_descriptor(raw, "sm_90a"), rows, 256 // bits, bits, "k", "sm_90a")
    return values(operand_elements(gather_units(smem, addresses), rows, bits, "k"), dtype)


@pytest.mark.parametrize(("case", "dtype"), [("wf16_rs", "f16"), ("we4m3_rs", "e4m3"), ("wtf32_rs", "tf32")])
def test_wgmma_with_a_in_registers_gives_an_h200s_accumulators(case: str, dtype: str) -> None:
    bits = DTYPES[dtype].itemsize * 8
    for number, (_, b_raw) in enumerate(WGMMA[f"{case}_desc"].tolist()):
        a = values(to_matrix(WGMMA[f"{case}_areg"][number].T, wgmma_operand_a(bits)), dtype)
        result = (a @ b_operand(dtype, b_raw, 64).T).astype(np.float32).view(np.uint32)
        found = to_registers(result, wgmma_accumulator(64))
        assert np.array_equal(found, WGMMA[f"{case}_out"][number].T), f"{case} number {number}: other accumulators"


def a_from_smem(number: int, case: str) -> np.ndarray:
    return b_operand("f16", int(WGMMA[f"{case}_desc"][number, 0]), 64)


def test_wgmma_adds_to_accumulators_in_the_layout_of_its_results() -> None:
    for number, (_, b_raw) in enumerate(WGMMA["wf16_c_desc"].tolist()):
        before = to_matrix(WGMMA["wf16_c_cin"][number].T, wgmma_accumulator(64)).view(np.float32)
        result = a_from_smem(number, "wf16_c") @ b_operand("f16", b_raw, 64).T + before
        found = to_registers(result.astype(np.float32).view(np.uint32), wgmma_accumulator(64))
        assert np.array_equal(found, WGMMA["wf16_c_out"][number].T), f"number {number}: other accumulators"


def test_wgmma_f16_accumulators_are_two_to_a_register() -> None:
    for number, (_, b_raw) in enumerate(WGMMA["wf16d16_desc"].tolist()):
        result = a_from_smem(number, "wf16d16") @ b_operand("f16", b_raw, 64).T
        found = to_registers(result.astype(np.float16).view(np.uint16), wgmma_accumulator(64, 16))
        assert np.array_equal(found, WGMMA["wf16d16_out"][number].T), f"number {number}: other accumulators"


IMAGE = np.arange(2048, dtype=np.uint16)
ROW_OFFSETS = WARP["ldm_off"]
# ldmatrix in this order: .x4, .x4.trans, .x2, .x1, each 32 lanes of 4 registers.
LDMATRIX = WARP["ldm_o"][:512].reshape(4, 32, 4)
STORED_REGISTERS = WARP["ldm_sr"].reshape(32, 4).T


def rows_at(count: int) -> np.ndarray:
    return np.stack([IMAGE.view(np.uint8)[offset : offset + 16] for offset in ROW_OFFSETS[: 8 * count]])


@pytest.mark.parametrize(("run", "count", "transposed"), [(0, 4, False), (1, 4, True), (2, 2, False), (3, 1, False)])
def test_ldmatrix_loads_as_an_h200_does(run: int, count: int, transposed: bool) -> None:
    found = load_matrices(rows_at(count), transposed=transposed)
    assert np.array_equal(found, LDMATRIX[run].T[:count]), f"ldmatrix.x{count} trans={transposed}: other registers"


def test_stmatrix_stores_as_an_h200_does() -> None:
    memory = IMAGE.view(np.uint8).copy()
    for run, transposed in enumerate((False, True)):
        for offset, row in zip(ROW_OFFSETS, store_matrices(STORED_REGISTERS, transposed=transposed), strict=True):
            memory[offset : offset + 16] = row
        measured = WARP["ldm_st"].view(np.uint8).reshape(2, -1)[run]
        assert np.array_equal(memory, measured), f"stmatrix.x4 trans={transposed}: other bytes"


def test_movmatrix_transposes_as_an_h200_does() -> None:
    found = transposed_matrix(STORED_REGISTERS[0])
    assert np.array_equal(found, WARP["ldm_o"][512:]), "movmatrix.trans: other registers"


FRAGMENTS = {
    "wgmma d f32 n8": wgmma_accumulator(8),
    "wgmma d f32 n256": wgmma_accumulator(256),
    "wgmma d f16 n24": wgmma_accumulator(24, 16),
    **{f"wgmma a {bits}": wgmma_operand_a(bits) for bits in (8, 16, 32)},
    **{f"mma {operand} {bits}": mma_fragment(operand, bits) for operand in ("a", "b", "c") for bits in (8, 16)},
    **{f"matrices x{count}": matrix_fragment(count, False) for count in (1, 2, 4)},
}


@pytest.mark.parametrize("name", FRAGMENTS)
def test_a_fragment_holds_every_element_exactly_once(name: str) -> None:
    fragment: Fragment = FRAGMENTS[name]
    rows, columns = fragment.shape
    held = np.bincount((fragment.rows * columns + fragment.columns).reshape(-1), minlength=rows * columns)
    assert held.size == rows * columns, f"{name}: elements outside {fragment.shape}"
    assert (held == 1).all(), f"{name}: elements are held {sorted(set(held.tolist()))} times"


def test_two_swapped_registers_do_not_pass_for_an_operand() -> None:
    planted = WARP["mma0_a"].T[[0, 2, 1, 3]]
    a = values(to_matrix(planted, mma_fragment("a", 16)), "f16")
    b = values(to_matrix(WARP["mma0_b"].T, mma_fragment("b", 16)), "f16")
    c = to_matrix(WARP["mma0_c"].T, mma_fragment("c", 16)).view(np.float32)
    result = (a @ b + c).astype(np.float32).view(np.uint32)
    assert not np.array_equal(to_registers(result, mma_fragment("c", 16)), WARP["mma0_o"].T), "swapped registers pass"
