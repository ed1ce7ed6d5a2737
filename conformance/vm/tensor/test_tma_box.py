"""TMA boxes: every load and store measured on an H200, byte for byte, and the refusals of PTX ISA 5.5."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.vm.faults import Fault
from backends.vm.memory.pieces import read_pieces, write_pieces
from backends.vm.tensor.tensor_map import TensorMap, decode_tensor_map, encode_tensor_map
from backends.vm.tensor.tma_box import (
    BoxPlan,
    plan_box,
    plan_gather4,
    rounded_to_tf32,
)
from conformance import SILICON

GOLDEN = np.load(SILICON / "movement" / "tma.npz")
LOADS = {str(n).split("|")[0]: dump for n, dump in zip(GOLDEN["tma_names"], GOLDEN["tma_dump"], strict=True)}
STORES = {str(n).split("|")[0]: dump for n, dump in zip(GOLDEN["st_names"], GOLDEN["st_dump"], strict=True)}
REFUSED_BY_DRIVER = {str(n).split("|")[0] for n in GOLDEN["tma_names"] if not str(n).endswith("rc=0")}

GMEM_BASE = 0x7F0000000000
SMEM_BASE = 0x400  # where the measured kernels' dynamic shared memory began
COUNTING = (np.arange(1 << 19) & 0xFFFF).astype(np.uint16).view(np.uint8)
SWIZZLES = ["none", "32B", "64B", "128B"]
FILLS = ["zero", "nan"]

Load = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int, str, tuple[int, ...], str]


def load(
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    at: tuple[int, ...],
    dtype: str = "u16",
    offset: int = 0,
    swizzle: str = "none",
    steps: tuple[int, ...] = (),
    fill: str = "zero",
) -> Load:
    return dtype, dims, strides, box, at, offset, swizzle, steps or (1,) * len(dims), fill


def matrix(box: tuple[int, int], at: tuple[int, int], **options: object) -> Load:
    return load((200, 100), (400,), box, at, **options)  # type: ignore[arg-type]


def loads() -> dict[str, Load]:
    """The loads of the measuring program, by name of the dump."""
    table: dict[str, Load] = {}
    for code, swizzle in enumerate(SWIZZLES):
        for inner in (8, 16, 32, 64):
            table[f"sw{code}_in{inner}"] = matrix((inner, 16), (0, 0), swizzle=swizzle)
        width = 16 << max(code - 1, 0)
        table[f"sw{code}_soff"] = matrix((width, 16), (8, 3), swizzle=swizzle, offset=640)
        table[f"sw{code}_soff384"] = matrix((width, 20), (8, 3), swizzle=swizzle, offset=384)
    for code, dtype in ((1, "u16"), (6, "f16"), (9, "bf16")):
        for fill in range(2 if code != 1 else 1):
            table[f"oob_dt{code}_f{fill}"] = matrix((64, 16), (168, 92), dtype=dtype, fill=FILLS[fill])
            table[f"neg_dt{code}_f{fill}"] = matrix((64, 16), (-8, -3), dtype=dtype, fill=FILLS[fill])
    table["alloob"] = matrix((64, 16), (1000, 1000))
    table["alloobneg"] = matrix((64, 16), (-64, 0))
    table["es2"] = matrix((64, 16), (0, 1), steps=(1, 2))
    table["es3"] = matrix((64, 16), (0, 1), steps=(1, 3))
    table["r1"] = load((5000,), (), (128,), (96,))
    table["r3"] = load((64, 10, 12), (128, 1280), (16, 4, 3), (8, 8, 10))
    table["r4"] = load((64, 10, 6, 5), (128, 1280, 7680), (16, 2, 3, 2), (8, 8, 4, 4))
    table["r5"] = load((64, 4, 3, 5, 3), (128, 512, 1536, 7680), (16, 2, 2, 2, 2), (8, 3, 2, 4, 2), swizzle="32B")
    table["u8_256"] = load((400, 100), (800,), (256, 4), (96, 1), dtype="u8")
    table["f64"] = load((50, 100), (400,), (8, 4), (2, 1), dtype="f64")
    for code, dtype in ((7, "f32"), (10, "f32_ftz"), (11, "tf32"), (12, "tf32_ftz")):
        for fill in range(2):
            at = (80, 90) if fill else (0, 0)
            table[f"f32_dt{code}_f{fill}"] = load((96, 100), (400,), (32, 32), at, dtype=dtype, fill=FILLS[fill])
    return table


MEASURED_LOADS = loads()
NOT_MODELLED = {"il1", "il2"}


def tensor_map(item: Load) -> TensorMap:
    dtype, dims, strides, box, _, _, swizzle, steps, fill = item
    raw = encode_tensor_map(
        GMEM_BASE,
        dtype,
        dims,
        strides,
        box,
        swizzle=swizzle,
        element_strides=steps,
        oob_fill="nan" if fill == "nan" else "zero",
    )
    return decode_tensor_map(raw)


def perform_load(plan: BoxPlan, gmem: np.ndarray, smem: np.ndarray, smem_base: int) -> None:
    pieces = np.tile(plan.fill, (plan.in_bounds.size, 1))
    inside = plan.in_bounds
    pieces[inside] = read_pieces(gmem, plan.global_addresses[inside] - GMEM_BASE, plan.piece_bytes)
    write_pieces(smem, plan.smem_addresses - smem_base, pieces)


def test_every_measured_dump_is_judged() -> None:
    assert set(MEASURED_LOADS) | NOT_MODELLED == set(LOADS), "the table of loads does not match the measured names"
    for name in sorted(REFUSED_BY_DRIVER):
        with pytest.raises(ValueError, match="wider than"):
            tensor_map(MEASURED_LOADS[name])


@pytest.mark.parametrize("name", [name for name in MEASURED_LOADS if name not in REFUSED_BY_DRIVER])
def test_a_load_leaves_an_h200s_bytes(name: str) -> None:
    item = MEASURED_LOADS[name]
    dtype, at, offset = item[0], item[4], item[5]
    gmem = COUNTING
    if name.startswith("f32"):
        source = GOLDEN["tma_f32src"]
        gmem = (rounded_to_tf32(source) if dtype.startswith("tf32") else source).view(np.uint8)
    smem = np.full(65536, 0xEE, dtype=np.uint8)
    perform_load(plan_box(tensor_map(item), at, SMEM_BASE + offset), gmem, smem, SMEM_BASE)
    measured = LOADS[name].view(np.uint8)
    wrong = np.flatnonzero(smem != measured)
    assert not wrong.size, (
        f"{name}: {wrong.size} bytes differ from the H200, first at offset {wrong[0]}: "
        f"{smem[wrong[0]]:#04x} instead of {measured[wrong[0]]:#04x}"
    )


MEASURED_STORES: dict[str, tuple[tuple[int, int], tuple[int, int], str, int, tuple[int, int]]] = {
    "st_sw3": ((64, 16), (8, 3), "128B", 0, (1, 1)),
    "st_clip": ((64, 16), (168, 92), "none", 0, (1, 1)),
    "st_sw1_soff": ((16, 16), (8, 3), "32B", 640, (1, 1)),
    "st_es2": ((64, 16), (0, 1), "none", 0, (1, 2)),
}


@pytest.mark.parametrize("name", MEASURED_STORES)
def test_a_store_leaves_the_bytes_that_an_h200_left(name: str) -> None:
    box, at, swizzle, offset, steps = MEASURED_STORES[name]
    plan = plan_box(tensor_map(matrix(box, at, swizzle=swizzle, steps=steps)), at, SMEM_BASE + offset, "store")
    image = GOLDEN["tma_stimg"].view(np.uint8)
    gmem = np.full(20000, 0x11111111, dtype=np.uint32).view(np.uint8)
    inside = plan.in_bounds
    pieces = read_pieces(image, plan.smem_addresses[inside] - SMEM_BASE, plan.piece_bytes)
    write_pieces(gmem, plan.global_addresses[inside] - GMEM_BASE, pieces)
    wrong = np.flatnonzero(gmem != STORES[name].view(np.uint8))
    assert not wrong.size, f"{name}: {wrong.size} bytes of global memory differ from the H200, first at {wrong[:1]}"


@pytest.mark.parametrize("swizzle", ["none", "32B", "64B"])
def test_a_load_with_the_wrong_swizzle_does_not_match(swizzle: str) -> None:
    box = (16, 16)
    smem = np.full(65536, 0xEE, dtype=np.uint8)
    plan = plan_box(tensor_map(matrix(box, (0, 0), swizzle=swizzle)), (0, 0), SMEM_BASE)
    perform_load(plan, COUNTING, smem, SMEM_BASE)
    assert not np.array_equal(smem, LOADS["sw3_in16"].view(np.uint8)), f"{swizzle} passes for the 128B swizzle"


def element_by_element(item: Load, gmem: np.ndarray, smem: np.ndarray, smem_base: int) -> None:
    """Applies the rules of facts.md 6.4 to one 16-bit element at a time, for two-dimensional maps."""
    _, dims, strides, box, at, offset, swizzle, steps, _ = item
    mask = {"none": 0, "32B": 1, "64B": 3, "128B": 7}[swizzle]
    pitch = {"none": box[0] * 2, "32B": 32, "64B": 64, "128B": 128}[swizzle]
    for row in range(-(-box[1] // steps[1])):
        for column in range(box[0]):
            x, y = at[0] + column, at[1] + row * steps[1]
            value = b"\0\0"
            if 0 <= x < dims[0] and 0 <= y < dims[1]:
                value = gmem[y * strides[0] + 2 * x :][:2].tobytes()
            address = smem_base + offset + row * pitch + 2 * column
            address ^= (address >> 7 & mask) << 4
            smem[address - smem_base :][:2] = np.frombuffer(value, dtype=np.uint8)


@st.composite
def ragged_boxes(draw: st.DrawFn) -> Load:
    swizzle = draw(st.sampled_from(SWIZZLES))
    inner = draw(st.sampled_from([8, 16, 32, 64]).filter(lambda n: swizzle == "none" or n * 2 <= int(swizzle[:-1])))
    dims = draw(st.integers(1, 90)), draw(st.integers(1, 20))
    at = 8 * draw(st.integers(-3, 12)), draw(st.integers(-5, 22))
    box = inner, draw(st.integers(1, 12))
    return load(
        dims,
        (192,),
        box,
        at,
        offset=128 * draw(st.integers(0, 9)),
        swizzle=swizzle,
        steps=(1, draw(st.integers(1, 4))),
    )


@settings(max_examples=120, deadline=None, derandomize=True)
@given(item=ragged_boxes())
def test_any_box_of_any_matrix_moves_as_its_elements_do(item: Load) -> None:
    expected, found = (np.full(16384, 0xEE, dtype=np.uint8) for _ in range(2))
    element_by_element(item, COUNTING, expected, SMEM_BASE)
    perform_load(plan_box(tensor_map(item), item[4], SMEM_BASE + item[5]), COUNTING, found, SMEM_BASE)
    wrong = np.flatnonzero(expected != found)
    assert not wrong.size, f"{wrong.size} bytes differ, first at {wrong[:1]}: {item}"


def test_gather4_takes_four_rows_in_the_order_named() -> None:
    item = matrix((64, 1), (0, 0), swizzle="128B")
    smem = np.full(4096, 0xEE, dtype=np.uint8)
    rows = (7, 200, 0, 99)  # the second one lies outside
    plan = plan_gather4(tensor_map(item), 8, rows, SMEM_BASE)
    perform_load(plan, COUNTING, smem, SMEM_BASE)
    for place, row in enumerate(rows):
        line = smem[place * 128 :][:128].reshape(8, 16)
        unswizzled = line[np.arange(8) ^ place].reshape(-1).view(np.uint16)  # 0x400 starts a pattern: line = place
        wanted = np.zeros(64, np.uint16) if row >= 100 else COUNTING.view(np.uint16)[row * 200 + 8 :][:64]
        assert np.array_equal(unswizzled, wanted), f"row {row}, at place {place}, is {unswizzled[:4]}.."
    assert plan.transaction_bytes == 4 * 128, f"gather4 completes {plan.transaction_bytes} bytes"


def test_padded_types_leave_gaps_in_their_containers() -> None:
    for dtype, data_bytes in (("b4x16_p64", 8), ("b6x16_p32", 12)):
        raw = encode_tensor_map(GMEM_BASE, dtype, (256, 4), (192,), (128, 2))
        smem = np.full(4096, 0xEE, dtype=np.uint8)
        gmem = np.arange(1024, dtype=np.uint32).astype(np.uint8)
        plan = plan_box(decode_tensor_map(raw), (128, 1), SMEM_BASE)
        perform_load(plan, gmem, smem, SMEM_BASE)
        for row in range(2):
            containers = smem[row * 128 :][:128].reshape(8, 16)
            start = (row + 1) * 192 + 8 * data_bytes
            wanted = gmem[start : start + 8 * data_bytes].reshape(8, data_bytes)
            assert np.array_equal(containers[:, :data_bytes], wanted), f"{dtype}: row {row} holds other elements"
            assert (containers[:, data_bytes:] == 0xEE).all(), f"{dtype}: the padding of row {row} was written"
        assert plan.transaction_bytes == 2 * 8 * data_bytes, f"{dtype}: {plan.transaction_bytes} bytes are completed"


@pytest.mark.parametrize(
    ("name", "count"), [("sw3_in64", 2048), ("oob_dt1_f0", 2048), ("alloob", 2048), ("es3", 768), ("r5", 512)]
)
def test_a_box_completes_all_its_bytes_in_bounds_or_not(name: str, count: int) -> None:
    item = MEASURED_LOADS[name]
    found = plan_box(tensor_map(item), item[4], SMEM_BASE).transaction_bytes
    assert found == count, f"{name} completes {found} bytes; the box takes {count} bytes of shared memory"


def test_bad_coordinates_and_addresses_are_faults() -> None:
    plain, narrow = tensor_map(matrix((64, 16), (0, 0))), tensor_map(matrix((64, 1), (0, 0)))
    with pytest.raises(Fault, match=r"coordinate 0 is 3, 6 bytes of u16; it must be a multiple of 16 bytes"):
        plan_box(plain, (3, 0), SMEM_BASE)
    with pytest.raises(Fault, match=r"3 coordinates for a tensor map of 2 dimensions"):
        plan_box(plain, (0, 0, 0), SMEM_BASE)
    with pytest.raises(Fault, match=r"shared address 0x440 .* not a multiple of 128 bytes"):
        plan_box(plain, (0, 0), 0x440)
    with pytest.raises(Fault, match=r"a tensor store has a negative coordinate"):
        plan_box(plain, (0, -1), SMEM_BASE, "store")
    with pytest.raises(Fault, match=r"whose box has 1 row"):
        plan_gather4(plain, 0, (0, 1, 2, 3), SMEM_BASE)
    with pytest.raises(Fault, match=r"3 rows are named"):
        plan_gather4(narrow, 0, (0, 1, 2), SMEM_BASE)
    padded = decode_tensor_map(encode_tensor_map(GMEM_BASE, "b4x16_p64", (256, 4), (192,), (128, 2)))
    with pytest.raises(Fault, match=r"coordinate 0 is 64; with b4x16_p64 it must be a multiple of 128"):
        plan_box(padded, (64, 0), SMEM_BASE)


def test_a_device_made_map_that_is_wider_than_its_swizzle_is_a_fault() -> None:
    raw = bytearray(encode_tensor_map(GMEM_BASE, "bf16", (200, 100), (400,), (64, 16), swizzle="128B"))
    raw[55] = 127  # box[0] = 128 elements, 256 bytes
    with pytest.raises(Fault, match=r"256 bytes wide, more than the 128 bytes"):
        plan_box(decode_tensor_map(bytes(raw)), (0, 0), SMEM_BASE)
