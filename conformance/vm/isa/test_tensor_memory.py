"""tcgen05.ld, st and cp as instructions, against an independent copy of the formulas of facts.md 1.1 and 1.2."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.vm.kernel import FENCE, SYNC, Array, assert_clean, init, wait
from conformance.vm.tensor_kernel import CELLS, tmem_kernel

FORMS = [
    ("32x32b", 1),
    ("32x32b", 8),
    ("32x32b", 128),
    ("16x64b", 1),
    ("16x64b", 4),
    ("16x64b", 128),
    ("16x128b", 1),
    ("16x128b", 2),
    ("16x128b", 64),
    ("16x256b", 1),
    ("16x256b", 4),
    ("16x256b", 32),
    ("16x32bx2", 1),
    ("16x32bx2", 16),
]
REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
SPLIT = 40
SCHEDULES = ("eager", "lazy", "random:1")


def cell(shape: str, t: int, r: int) -> tuple[int, int]:
    """Lane and column, relative to the address, of register r of thread t."""
    return {
        "32x32b": (t, r),
        "16x64b": (t // 4 + 8 * (t % 2), 2 * r + t // 2 % 2),
        "16x128b": (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)),
        "16x256b": (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)),
        "16x32bx2": (t % 16, r + (SPLIT if t >= 16 else 0)),
    }[shape]


def spelt(instruction: str, shape: str, num: int, pack: str = "") -> tuple[str, str, int]:
    count = REGISTERS[shape] * num
    names = "{" + ", ".join(f"%v{index}" for index in range(count)) + "}"
    split = f", {SPLIT}" if shape == "16x32bx2" else ""
    head = f"tcgen05.{instruction}.sync.aligned.{shape}.x{num}{pack}.b32"
    text = f"{head} {names}, [%r44]{split};" if instruction == "ld" else f"{head} [%r44]{split}, {names};"
    return text, f".reg .b32 %v<{count}>;", count


def register_io(instruction: str, count: int, name: str) -> str:
    """Moves the registers of every thread to or from `name`, uint32 [threads, count]."""
    lines = [f"mul.wide.u32 %rd1, %tx, {4 * count}; add.u64 %rd1, %rd1, %{name};"]
    for index in range(count):
        place, register = f"[%rd1+{4 * index}]", f"%v{index}"
        lines.append(
            f"ld.global.b32 {register}, {place};" if instruction == "ld" else f"st.global.b32 {place}, {register};"
        )
    return "\n".join(lines)


@pytest.mark.parametrize("lane_offset", [0, 16])
@pytest.mark.parametrize(("shape", "num"), FORMS)
def test_each_register_is_loaded_from_its_cell(shape: str, num: int, lane_offset: int) -> None:
    if lane_offset and shape == "32x32b":
        pytest.skip("this shape takes all 32 lanes of a warp")
    load, declare, count = spelt("ld", shape, num)
    shift = f"add.u32 %r44, %r44, {lane_offset << 16};"
    kernel = tmem_kernel(
        f"{shift}\n{load}\n{register_io('st', count, 'out')}",
        {"out": np.zeros((128, count), np.uint32)},
        declare,
        dump=False,
    )
    expected = np.zeros((128, count), np.uint32)
    for thread in range(128):
        for r in range(count):
            lane, column = cell(shape, thread % 32, r)
            expected[thread, r] = CELLS[thread // 32 * 32 + lane + lane_offset, column]
    assert_clean(kernel, {"out": expected}, SCHEDULES)


@pytest.mark.parametrize(("shape", "num"), FORMS)
def test_each_register_is_stored_to_its_cell_and_no_other_changes(shape: str, num: int) -> None:
    store, declare, count = spelt("st", shape, num)
    given = (np.arange(128 * count, dtype=np.uint32) + 0x70000000).reshape(128, count)
    kernel = tmem_kernel(
        f"{register_io('ld', count, 'x')}\n{store}\ntcgen05.wait::st.sync.aligned;", {"x": given}, declare
    )
    expected = CELLS.copy()
    for thread in range(128):
        for r in range(count):
            lane, column = cell(shape, thread % 32, r)
            expected[thread // 32 * 32 + lane, column] = given[thread, r]
    assert_clean(kernel, {"cells": expected}, SCHEDULES)


@pytest.mark.parametrize(
    ("shape", "num"), [("32x32b", 4), ("16x64b", 2), ("16x128b", 2), ("16x256b", 1), ("16x32bx2", 4)]
)
def test_packed_registers_hold_the_low_halves_of_two_columns(shape: str, num: int) -> None:
    load, declare, count = spelt("ld", shape, num, ".pack::16b")
    kernel = tmem_kernel(
        f"{load}\n{register_io('st', count, 'out')}", {"out": np.zeros((128, count), np.uint32)}, declare, dump=False
    )
    expected = np.zeros((128, count), np.uint32)
    for thread in range(128):
        for r in range(count):
            lane, column = cell(shape, thread % 32, r)
            if shape == "16x32bx2":
                column = 2 * r + (SPLIT if thread % 32 >= 16 else 0)
            else:
                column *= 2
            row = CELLS[thread // 32 * 32 + lane]
            expected[thread, r] = row[column] & 0xFFFF | (row[column + 1] & 0xFFFF) << 16
    assert_clean(kernel, {"out": expected}, SCHEDULES)


COPIES: dict[str, tuple[int, int, list[list[int]]]] = {
    "128x256b": (128, 2, [list(range(128))]),
    "128x128b": (128, 1, [list(range(128))]),
    "64x128b.warpx2::02_13": (64, 1, [list(range(64)), list(range(64, 128))]),
    "64x128b.warpx2::01_23": (64, 1, [[*range(32), *range(64, 96)], [*range(32, 64), *range(96, 128)]]),
    "32x128b.warpx4": (32, 1, [list(range(32 * quarter, 32 * quarter + 32)) for quarter in range(4)]),
}
LBO, SBO = 2048, 128


def copied(form: str, image: Array, decompress: str = "") -> Array:
    """Tensor memory after the copy: row r is 16-byte units at (r%8)*16 + (r/8)*SBO + unit*LBO, no swizzle."""
    _, units, lanes_of_copies = COPIES[form]
    cells = CELLS.copy()
    for lanes in lanes_of_copies:
        for row, lane in enumerate(lanes):
            for unit in range(units):
                start = row % 8 * 16 + row // 8 * SBO + unit * LBO
                data = [int(value) for value in image[start : start + 16]]
                if decompress == "b4x16_p64":
                    data = [(data[i // 2] >> 4 * (i % 2) & 15) << 2 for i in range(16)]
                if decompress == "b6x16_p32":
                    bits = sum(value << 8 * index for index, value in enumerate(data[:12]))
                    data = [bits >> 6 * i & 63 for i in range(16)]
                cells[lane, 4 * unit : 4 * unit + 4] = np.array(data, np.uint8).view(np.uint32)
    return cells


@pytest.mark.parametrize("decompress", ["", "b4x16_p64", "b6x16_p32"])
@pytest.mark.parametrize("form", COPIES)
def test_copies_from_shared_memory(form: str, decompress: str) -> None:
    image = np.random.default_rng(8).integers(0, 256, 4096, dtype=np.uint8)
    suffix = f".b8x16.{decompress}" if decompress else ""
    action = f"""mov.u32 %r41, image;
    shl.b32 %r1, %tx, 5; add.u32 %r2, %r41, %r1; cvt.u64.u32 %rd1, %r1; add.u64 %rd1, %rd1, %x;
    ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%rd1]; st.shared.v4.b32 [%r2], {{%r3, %r4, %r5, %r6}};
    ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%rd1+16]; st.shared.v4.b32 [%r2+16], {{%r3, %r4, %r5, %r6}};
    {FENCE}
    {init("mbar")}
    shr.u32 %r46, %r41, 4; cvt.u64.u32 %rd10, %r46;
    or.b64 %rd10, %rd10, {1 << 46 | (SBO >> 4) << 32 | (LBO >> 4) << 16};
    @!%p13 bra ISSUED;
    tcgen05.cp.cta_group::1.{form}{suffix} [%r40], %rd10;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [mbar];
    ISSUED: {wait("mbar", 0)}"""
    declare = ".shared .align 1024 .b8 image[4096]; .shared .align 8 .b64 mbar;"
    assert SYNC in action
    assert_clean(tmem_kernel(action, {"x": image}, declare), {"cells": copied(form, image, decompress)}, SCHEDULES)
