"""wmma, mma.sp, and mma.sync of FP6, FP4 and block scales against NumPy; byte matrices to and from shared memory.

Small integers make every sum exact. silicon/lanewise compares mma.sync of f64, s4 to s8, b1 and m8n8k4 with an H200.
"""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from backends.vm.faults import Fault, UnknownInstructionError
from conformance.vm.kernel import Kernel

GENERATOR = np.random.default_rng(3)
NUMPY = {"f16": np.float16, "f32": np.float32, "f64": np.float64, "s8": np.int8, "u8": np.uint8, "s32": np.int32}
WMMA = [
    ("m16n16k16", "f16", "f16.f32", "f16", "f32", (8, 8, 4, 8)),
    ("m16n16k16", "f16", "f32.f32", "f32", "f32", (8, 8, 8, 8)),
    ("m32n8k16", "f16", "f32.f32", "f32", "f32", (8, 8, 8, 8)),
    ("m8n32k16", "f16", "f16.f16", "f16", "f16", (8, 8, 4, 4)),
    ("m16n16k16", "s8", "s32.s8.s8.s32", "s32", "s32", (2, 2, 8, 8)),
    ("m32n8k16", "u8", "s32.u8.u8.s32", "s32", "s32", (4, 1, 8, 8)),
    ("m8n8k4", "f64", "f64.f64.f64.f64", "f64", "f64", (1, 1, 2, 2)),
]  # fmt: skip


def registers(name: str, count: int) -> str:
    return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"


@pytest.mark.parametrize(("shape", "kind", "types", "c_type", "d_type", "counts"), WMMA)
@pytest.mark.parametrize("layouts", ["row.col", "col.row"])
def test_wmma_multiplies(
    shape: str, kind: str, types: str, c_type: str, d_type: str, counts: tuple[int, ...], layouts: str
) -> None:
    if types == "f16.f32":
        types, c_type, d_type, counts = "f32.f16", "f16", "f32", (8, 8, 4, 8)
    m, n, k = (int(one) for one in shape.replace("m", "").replace("n", " ").replace("k", " ").split())
    low = 0 if kind == "u8" else -3
    a, b, c = (GENERATOR.integers(low, 4, size) for size in ((m, k), (k, n), (m, n)))
    a_layout, b_layout = layouts.split(".")
    stored = [a if a_layout == "row" else a.T, b if b_layout == "row" else b.T, c]
    buffers = {name: np.ascontiguousarray(one).astype(NUMPY[of]).reshape(-1)
               for name, one, of in zip("abc", stored, (kind, kind, c_type), strict=True)}  # fmt: skip
    strides = [stored[0].shape[1], stored[1].shape[1], n]
    register = ".b64" if kind == "f64" else ".b32"
    body = f"""
.reg {register} %xa<8>; .reg {register} %xb<8>; .reg {register} %xc<8>; .reg {register} %xd<8>;
wmma.load.a.sync.aligned.{a_layout}.{shape}.global.{kind} {registers("xa", counts[0])}, [%a], {strides[0]};
wmma.load.b.sync.aligned.{b_layout}.{shape}.{kind} {registers("xb", counts[1])}, [%b], {strides[1]};
wmma.load.c.sync.aligned.row.{shape}.global.{c_type} {registers("xc", counts[2])}, [%c];
wmma.mma.sync.aligned.{layouts}.{shape}.{types} {registers("xd", counts[3])}, {registers("xa", counts[0])},
 {registers("xb", counts[1])}, {registers("xc", counts[2])};
wmma.store.d.sync.aligned.col.{shape}.global.{d_type} [%out], {registers("xd", counts[3])}, {m};
ret;"""
    found, _ = Kernel(body, {**buffers, "out": np.zeros(m * n, NUMPY[d_type])}).run()
    wrong = np.argwhere(a @ b + c != found["out"].reshape(n, m).T)
    assert not wrong.size, f"{len(wrong)} elements differ, first at {wrong[0]}"


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def fragments(k: int, bits: int) -> tuple[np.ndarray, ...]:
    """Rows and columns of A and of B in registers [register, lane, element], as in PTX ISA 9.7.14.5.10 and .11."""
    per = 32 // bits
    a = np.indices((4, 32, per))
    rows, columns = a[1] // 4 + 8 * (a[0] % 2), per * (a[1] % 4) + a[2] + 4 * per * (a[0] // 2)
    b = np.indices((2, 32, per))
    return rows, columns, per * (b[1] % 4) + b[2] + 4 * per * b[0], b[1] // 4


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    return (codes.astype(np.uint32) << (bits * np.arange(codes.shape[2], dtype=np.uint32))).sum(2).astype(np.uint32)


def product(instruction: str, words: list[np.ndarray], tail: str = "") -> np.ndarray:
    """D [16, 8] of an mma with C = 0 on the registers [count, 32] of A, B and the scales."""
    names = ["%xa0", "%xa1", "%xa2", "%xa3", "%xb0", "%xb1", "%sa", "%sb"]
    loads = "\n".join(f"ld.global.b32 {name}, [%w+{128 * i}];"
                      for i, name in enumerate(names[: sum(map(len, words))]))  # fmt: skip
    body = f""".reg .b32 %xa<4>; .reg .b32 %xb<2>; .reg .b32 %sa; .reg .b32 %sb; .reg .b32 %xd<4>; .reg .b32 %z;
mov.b32 %z, 0; mul.wide.u32 %rd1, %tx, 4; add.u64 %w, %w, %rd1;
{loads}
{instruction} {registers("xd", 4)}, {registers("xa", 4)}, {registers("xb", 2)}, {{%z, %z, %z, %z}}{tail};
mul.wide.u32 %rd1, %tx, 16; add.u64 %out, %out, %rd1; st.global.v4.b32 [%out], {registers("xd", 4)}; ret;"""
    data = np.concatenate([one.reshape(-1, 32) for one in words]).reshape(-1)
    found, _ = Kernel(body, {"w": data, "out": np.zeros(128, np.uint32)}, target="sm_120a").run()
    d = found["out"].view(np.float32).reshape(32, 4)
    matrix = np.zeros((16, 8), np.float32)
    lane, i = np.indices((32, 4))
    matrix[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = d
    return matrix


def test_fp4_in_bytes_times_fp8() -> None:
    """FP4 lies in bits 5 to 2 of its byte."""
    rows, columns, b_rows, b_columns = fragments(32, 8)
    a, b = GENERATOR.integers(0, 16, (16, 32)), GENERATOR.integers(0, 2, (32, 8))
    one = 0x38  # 1.0 in e4m3
    words = [pack((a << 2)[rows, columns], 8), pack((b * one)[b_rows, b_columns], 8)]
    found = product("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e4m3.f32", words)
    values = np.where(a & 8, -E2M1[a & 7], E2M1[a & 7])
    assert np.array_equal(found, values @ b)


@pytest.mark.parametrize(("kind", "blocks"), [("mxf4", 2), ("mxf4nvf4", 4)])
def test_blocks_of_fp4_are_scaled(kind: str, blocks: int) -> None:
    """The pair of lanes that the selector names has the scales of rows l / 4 and l / 4 + 8; one lane has the
    columns'."""
    rows, columns, b_rows, b_columns = fragments(64, 4)
    a, b = GENERATOR.integers(0, 8, (16, 64)), GENERATOR.integers(0, 8, (64, 8))
    sfa, sfb = GENERATOR.integers(126, 130, (16, blocks)), GENERATOR.integers(126, 130, (8, blocks))
    shift = 8 * (np.arange(blocks) + (2 if blocks == 2 else 0))
    scale_a, scale_b = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    for row in range(16):
        scale_a[4 * (row % 8) + 2 + row // 8] = (sfa[row] << shift).sum()
    for column in range(8):
        scale_b[4 * column + 3] = (sfb[column] << shift).sum()
    byte = 2 if blocks == 2 else 0
    words = [pack(a[rows, columns], 4), pack(b[b_rows, b_columns], 4), scale_a, scale_b]
    opcode = f"mma.sync.aligned.m16n8k64.row.col.kind::{kind}.block_scale.scale_vec::{blocks}X.f32.e2m1.e2m1.f32.ue8m0"
    found = product(opcode, words, f", %sa, {{{byte}, 1}}, %sb, {{{byte}, 3}}")
    left = E2M1[a] * np.repeat(2.0 ** (sfa - 127), 64 // blocks, axis=1)
    right = E2M1[b] * np.repeat(2.0 ** (sfb - 127), 64 // blocks, axis=1).T
    assert np.array_equal(found, left @ right)


SELECTORS = [
    (2, "1, 1", "0, 0", "A is {1, 1}; with 2 blocks the byte is one of 0, 2 and the thread below 2"),
    (2, "2, 2", "0, 0", "A is {2, 2}"),
    (2, "0, 0", "4, 0", "B is {4, 0}"),
    (4, "0, 0", "0, 200", "B is {0, 200}; with 4 blocks the byte is one of 0 and the thread below 4"),
    (4, "2, 0", "0, 0", "A is {2, 0}"),
]


@pytest.mark.parametrize(("blocks", "of_a", "of_b", "sentence"), SELECTORS)
def test_a_selector_of_scale_factors_that_are_not_there_is_a_fault(
    blocks: int, of_a: str, of_b: str, sentence: str
) -> None:
    rows, columns, b_rows, b_columns = fragments(64, 4)
    words = [pack((rows + columns) * 0, 4), pack((b_rows + b_columns) * 0, 4), *np.zeros((2, 32), np.uint32)]
    opcode = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec"
    with pytest.raises(Fault, match=re.escape(sentence)) as caught:
        product(f"{opcode}::{blocks}X.f32.e2m1.e2m1.f32.ue8m0", words, f", %sa, {{{of_a}}}, %sb, {{{of_b}}}")
    assert caught.value.rule == "scale-selector"


BYTES = np.arange(512, dtype=np.uint16).astype(np.uint8)
ROWS = """.shared .align 16 .b8 s[512]; .reg .b32 %y<4>;
shl.b32 %r1, %tx, 4; mov.u32 %r2, s; add.u32 %r2, %r2, %r1; cvt.u64.u32 %rd1, %r1; add.u64 %rd2, %x, %rd1;
ld.global.v4.b32 {%y0, %y1, %y2, %y3}, [%rd2]; st.shared.v4.b32 [%r2], {%y0, %y1, %y2, %y3}; bar.warp.sync -1;
"""
STORE = "mul.wide.u32 %rd3, %tx, 16; add.u64 %out, %out, %rd3; st.global.v4.b32 [%out], {%y0, %y1, %y2, %y3}; ret;"


def loaded(instruction: str) -> np.ndarray:
    """Registers [lane, register, byte] after an ldmatrix of 16-byte rows; lane i has the address of row i."""
    found, _ = Kernel(ROWS + instruction + STORE, {"x": BYTES, "out": np.zeros(512, np.uint8)}).run()
    return found["out"].reshape(32, 4, 4)


def test_a_square_of_bytes_arrives_transposed() -> None:
    """Lane l has column l / 4 of the four rows from 4 (l % 4) on in one register, column l / 4 + 8 in the next.

    CuTeDSL's layout of the atom says so, and NVIDIA's decode attention with 8-bit V relies on it for the right result.
    """
    found = loaded("ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%y0, %y1, %y2, %y3}, [%r2];")
    rows = BYTES.reshape(2, 16, 16)
    for lane in range(32):
        for matrix in range(2):
            column, row = lane // 4, 4 * (lane % 4)
            for half in range(2):
                wanted = rows[matrix, row : row + 4, column + 8 * half].tolist()
                assert found[lane, 2 * matrix + half].tolist() == wanted, f"lane {lane}"


def test_four_bit_rows_become_bytes() -> None:
    found = loaded("ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64 {%y0, %y1, %y2, %y3}, [%r2];")
    nibbles = np.stack([BYTES.reshape(32, 16)[:, :8] & 15, BYTES.reshape(32, 16)[:, :8] >> 4], -1).reshape(32, 16)
    for lane in range(32):
        for matrix in range(4):
            row, column = 8 * matrix + lane // 4, 4 * (lane % 4)
            assert found[lane, matrix].tolist() == (nibbles[row, column : column + 4] << 2).tolist()


def test_what_stmatrix_stores_ldmatrix_loads() -> None:
    """Two registers of ldmatrix, with their bytes paired as in CUTLASS's SM100_U8x8_LDSM_T, equal those of stmatrix."""
    body = (
        ROWS
        + """stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r2], {%y0, %y1}; bar.warp.sync -1;
and.b32 %r4, %tx, 1; shr.u32 %r5, %tx, 1; and.b32 %r6, %r5, 1; shr.u32 %r5, %tx, 2; and.b32 %r5, %r5, 3;
shl.b32 %r5, %r5, 1; add.u32 %r4, %r4, %r5; shl.b32 %r6, %r6, 3; add.u32 %r4, %r4, %r6; shl.b32 %r4, %r4, 4;
mov.u32 %r7, s; add.u32 %r7, %r7, %r4; mov.b32 %y2, %y0; mov.b32 %y3, %y1;
ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r4, %r5}, [%r7];
prmt.b32 %y0, %r4, %r5, 0x5410; prmt.b32 %y1, %r4, %r5, 0x7632;
"""
        + STORE
    )
    found, _ = Kernel(body, {"x": BYTES, "out": np.zeros(512, np.uint8)}).run()
    words = found["out"].reshape(32, 4, 4)
    assert np.array_equal(words[:, :2], words[:, 2:])


def test_matrices_of_bytes_lie_in_shared_memory() -> None:
    body = "ldmatrix.sync.aligned.m16n16.x1.trans.b8 {%r1, %r2}, [%x]; ret;"
    with pytest.raises(Fault, match="wrong-space"):
        Kernel(body, {"x": BYTES}).run()


SPARSE = [
    ("m16n8k16", "f16", 16), ("m16n8k32", "f16", 16), ("m16n8k32", "bf16", 16), ("m16n8k8", "tf32", 32),
    ("m16n8k16", "tf32", 32), ("m16n8k32", "s8", 8), ("m16n8k64", "s8", 8), ("m16n8k64", "e4m3", 8),
    ("m16n8k64", "s4", 4), ("m16n8k128", "u4", 4),
]  # fmt: skip
ORDERED = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)


def sparse_words(shape: str, kind: str, bits: int, selector: int, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Registers of A, B and the metadata, and A B.

    The metadata is laid out as in CUTLASS's layouts for wgmma (the figures are the same): lane 4 g + s has 16 bits of
    each of rows g and g + 8, or, for types of 8 bits or fewer, of one of the rows; the next lanes continue along K.
    """
    k = int(shape.partition("k")[2])
    draw = np.random.default_rng(seed)
    chunk = {32: 2, 4: 8}.get(bits, 4)
    per = 2 if bits == 4 else 1
    codes = draw.choice([0b0100, 0b1110] if chunk == 2 else ORDERED, (16, k // chunk))
    stored, b = draw.integers(0, 4, (16, k // 2)), draw.integers(0, 4, (k, 8))
    a = np.zeros((16, k), np.int64)
    for row, c in np.ndindex(*codes.shape):
        code = int(codes[row, c])
        places = (
            [int(code == 0b1110)] if chunk == 2 else [per * i + j for i in (code & 3, code >> 2) for j in range(per)]
        )
        a[row, [chunk * c + at for at in places]] = stored[row, chunk // 2 * c : chunk // 2 * (c + 1)]
    words = np.zeros(32, np.uint64)
    for row, c in np.ndindex(*codes.shape):
        lane = 4 * (row % 8)
        if bits > 8:
            lane += c // 4 + selector * (2 if codes.shape[1] == 8 else 1)
            place = 4 * (c % 4) + 16 * (row // 8)
        else:
            lane += row // 8 + 2 * (c // 8) + 2 * selector
            place = 4 * (c % 8)
        words[lane] |= np.uint64(int(codes[row, c]) << place)
    width = 32 // bits
    ra = np.indices((16 * (k // 2) * bits // 1024, 32, width))
    rb = np.indices((8 * k * bits // 1024, 32, width))
    a_rows, a_columns = ra[1] // 4 + 8 * (ra[0] % 2), width * (ra[1] % 4) + ra[2] + 4 * width * (ra[0] // 2)
    b_rows, b_columns = width * (rb[1] % 4) + rb[2] + 4 * width * rb[0], rb[1] // 4

    def bit_patterns(values: np.ndarray) -> np.ndarray:
        if kind in ("f16", "bf16", "tf32", "e4m3"):
            dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn}
            return values.astype(dtype[kind]).view(f"u{bits // 8}").astype(np.int64)
        return values

    packed = [pack(bit_patterns(stored)[a_rows, a_columns], bits), pack(bit_patterns(b)[b_rows, b_columns], bits)]
    return [*packed, words.astype(np.uint32)], a @ b


def sparse_product(instruction: str, words: list[np.ndarray], selector: int, result: type) -> np.ndarray:
    counts = [one.reshape(-1, 32).shape[0] for one in words[:2]]
    names = [f"%xa{i}" for i in range(counts[0])] + [f"%xb{i}" for i in range(counts[1])] + ["%meta"]
    loads = "\n".join(f"ld.global.b32 {name}, [%w+{128 * i}];" for i, name in enumerate(names))
    body = f""".reg .b32 %xa<4>; .reg .b32 %xb<4>; .reg .b32 %meta; .reg .b32 %xd<4>; .reg .b32 %z;
mov.b32 %z, 0; mul.wide.u32 %rd1, %tx, 4; add.u64 %w, %w, %rd1;
{loads}
{instruction} {registers("xd", 4)}, {registers("xa", counts[0])}, {registers("xb", counts[1])},
  {{%z, %z, %z, %z}}, %meta, {selector};
mul.wide.u32 %rd1, %tx, 16; add.u64 %out, %out, %rd1; st.global.v4.b32 [%out], {registers("xd", 4)}; ret;"""
    data = np.concatenate([one.reshape(-1, 32) for one in words]).reshape(-1)
    found, _ = Kernel(body, {"w": data, "out": np.zeros(128, np.uint32)}, target="sm_90a").run()
    d = found["out"].view(result).reshape(32, 4)
    matrix = np.zeros((16, 8), result)
    lane, i = np.indices((32, 4))
    matrix[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = d
    return matrix


@pytest.mark.parametrize(("shape", "kind", "bits"), SPARSE)
@pytest.mark.parametrize("spelling", ["sp", "sp::ordered_metadata"])
def test_sparse_products_of_a_warp(shape: str, kind: str, bits: int, spelling: str) -> None:
    integers = kind[0] in "us"
    types = f"s32.{kind}.{kind}.s32" if integers else f"f32.{kind}.{kind}.f32"
    count = 16 // (int(shape.partition("k")[2]) // {32: 2, 4: 8}.get(bits, 4))
    for selector in range(count):
        words, wanted = sparse_words(shape, kind, bits, selector, 11 + selector)
        instruction = f"mma.{spelling}.sync.aligned.{shape}.row.col.{types}"
        found = sparse_product(instruction, words, selector, np.int32 if integers else np.float32)
        assert np.array_equal(found, wanted), f"{instruction}, selector {selector}"
    words, _ = sparse_words(shape, kind, bits, 0, 11)
    with pytest.raises(UnknownInstructionError, match=f"the sparsity selector is {count}; it must be below {count}"):
        sparse_product(f"mma.{spelling}.sync.aligned.{shape}.row.col.{types}", words, count, np.int32)


def test_metadata_in_descending_order() -> None:
    """0b0110 names the third element, then the second. mma.sp accepts it; with ::ordered_metadata it means nothing."""
    words, _ = sparse_words("m16n8k16", "f16", 16, 0, 1)
    words[2] = np.full(32, 0x66666666, np.uint32)
    instruction = "mma.sp{}.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    assert sparse_product(instruction.format(""), words, 0, np.float32).any()
    with pytest.raises(Fault, match="in ascending order") as fault:
        sparse_product(instruction.format("::ordered_metadata"), words, 0, np.float32)
    assert fault.value.rule == "sparsity-metadata"
