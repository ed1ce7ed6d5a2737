"""tcgen05.mma.ws and .sp: layouts, shares of the columns, zero columns and metadata, against plain products.

All values are small integers, so every order of summation gives the same float32.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.faults import Fault
from backends.vm.tensor.instruction_descriptor import decode_zero_columns
from conformance.vm.tensor_kernel import SCHEDULES, Image, core_matrices, descriptor, run_tensor

Array = npt.NDArray[np.generic]
Float = npt.NDArray[np.float32]
TYPES: dict[str, tuple[str, type, int, int]] = {
    "f16": ("f16", np.float16, 0, 1),
    "bf16": ("f16", ml_dtypes.bfloat16, 1, 1),
    "tf32": ("tf32", np.float32, 2, 1),
    "e4m3": ("f8f6f4", ml_dtypes.float8_e4m3fn, 0, 1),
    "s8": ("i8", np.int8, 1, 2),
}
"""Kind, NumPy type, code of A and B, code of D."""
AT = 256
"""First column of tensor memory for A or metadata."""


def integers(shape: tuple[int, ...], dtype: type, seed: int) -> Array:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def idesc(name: str, m: int, n: int, extra: int = 0) -> int:
    _, _, code, d = TYPES[name]
    return extra | d << 4 | code << 7 | code << 10 | (n >> 3) << 17 | (m >> 4) << 24


def operand(image: Image, values: Array) -> str:
    """The descriptor of `values` [rows, k] in the image."""
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    return descriptor(image.add(core_matrices(rows)), rows.shape[1])


def into_tensor_memory(image: Image, rows: npt.NDArray[np.uint8], column: int) -> str:
    """A copy of uint8 [128, 16 or 32] to tensor memory, row r to lane r, from `column` on."""
    at, width = image.add(core_matrices(rows)), rows.shape[1]
    shape = {16: "128x128b", 32: "128x256b"}[width]
    return f"tcgen05.cp.cta_group::1.{shape} [TM{column}], {descriptor(at, width)};"


def issue(*lines: str) -> str:
    """Instructions with `[TMcolumn]` as an address in tensor memory."""
    text = "\n".join(lines)
    for column in (0, AT, AT + 32, AT + 64, AT + 68):
        text = text.replace(f"[TM{column}]", f"[%w{column % 31}]")
    at = "\n".join(f"add.s32 %w{c % 31}, %tm, {c};" for c in (0, AT, AT + 32, AT + 64, AT + 68))
    return f"{at}\n{text}"


def columns(m: int, n: int) -> int:
    """Columns of tensor memory that D occupies."""
    return n * m // 128


def found_in(words: npt.NDArray[np.uint32], m: int, n: int, name: str) -> npt.NDArray[np.float64]:
    """D [m, n] of layouts D, E and G (PTX ISA 9.7.16.10.5): columns continue in the next `m` lanes."""
    shares = 128 // m
    d = words[0][:, : n // shares].reshape(shares, m, n // shares).transpose(1, 0, 2).reshape(m, n)
    return np.ascontiguousarray(d).view(np.int32 if name == "s8" else np.float32).astype(np.float64)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("m", "n"), [(32, 128), (64, 128), (128, 64)])
def test_weight_stationary_layouts(name: str, m: int, n: int) -> None:
    kind, dtype, _, _ = TYPES[name]
    k = 32 // np.dtype(dtype).itemsize
    a, b, image = integers((m, k), dtype, m), integers((n, k), dtype, n), Image()
    left, right = operand(image, a), operand(image, b)
    op = f"tcgen05.mma.ws.cta_group::1.kind::{kind}.collector::b1::fill"
    mma = f"{op} [TM0], {left}, {right}, {idesc(name, m, n)}, %no;"
    for schedule in SCHEDULES if name == "f16" else SCHEDULES[:1]:
        words = run_tensor(issue(mma), [image.data], columns(m, n), schedule=schedule)
        wanted = a.astype(np.float64) @ b.astype(np.float64).T
        assert np.array_equal(found_in(words, m, n, name), wanted), f"{name} {m}x{n} {schedule}"


@pytest.mark.parametrize("m", [32, 64, 128])
def test_each_share_of_the_columns_has_its_own_a(m: int) -> None:
    """A of 64 or 32 rows fills all lanes, so other rows can serve other columns ("implicit dual GEMM")."""
    n, image = 128, Image()
    rows, b = integers((128, 16), np.float16, m), integers((n, 16), np.float16, m + 1)
    copy = into_tensor_memory(image, rows.view(np.uint8).reshape(128, 32), AT)
    right = operand(image, b)
    mma = f"tcgen05.mma.ws.cta_group::1.kind::f16 [TM0], [TM{AT}], {right}, {idesc('f16', m, n)}, %no;"
    words = run_tensor(issue(copy, mma), [image.data], columns(m, n))
    shares = 128 // m
    wanted = np.concatenate(
        [rows[i * m : (i + 1) * m].astype(np.float64) @ b[i * n // shares : (i + 1) * n // shares].astype(np.float64).T
         for i in range(shares)], axis=1)  # fmt: skip
    assert np.array_equal(found_in(words, m, n, "f16"), wanted)


def mask_word(
    starts: tuple[int, ...], firsts: tuple[int, ...], skip: int, use: int, shift: int = 0, nonzero: int = 1
) -> int:
    """A zero-column mask descriptor, with starts and firsts in the ISA's order, sub-mask 0 last."""
    word = nonzero << 39 | skip << 40 | use << 48 | shift << 56
    for i, (start, first) in enumerate(zip(reversed(starts), reversed(firsts), strict=True)):
        word |= start << 8 * i | first << 32 + i
    return word


ISA_EXAMPLES = [
    (mask_word((0, 0, 0, 0), (0, 0, 0, 0), 4, 3, nonzero=0), 128, [""]),
    (mask_word((0, 0, 0, 0), (0, 0, 0, 0), 2, 3), 128, ["11100001110000"]),
    (mask_word((0, 0, 0, 0), (0, 0, 0, 1), 2, 3), 64, ["11100001110000111", "0000111000011100" + "00"]),
    (mask_word((1, 2, 1, 0), (0, 0, 1, 1), 2, 3, 2), 32,
     ["00001110000111", "0000111000011", "111000011100", "1110000111000"]),
]  # fmt: skip


@pytest.mark.parametrize(("word", "m", "masks"), ISA_EXAMPLES)
def test_the_masks_of_the_isa(word: int, m: int, masks: list[str]) -> None:
    """The four examples of PTX ISA 9.7.16.4.3, with the lowest column on the right."""
    n = 128
    zero = decode_zero_columns(word, m, n, 8).zero
    width = n // len(masks)
    for i, mask in enumerate(masks):
        got = zero[i * width : i * width + len(mask)]
        wanted = [bit == "1" for bit in reversed(mask)]
        assert got.tolist() == wanted, f"sub-mask {i}: {''.join('01'[x] for x in got[::-1])}, not {mask}"
    if masks == [""]:
        assert not zero.any(), "without the bit for a mask that is not zero, all columns are used"


def test_masked_and_shifted_columns() -> None:
    m, n, shift, image = 64, 64, 5, Image()
    a, b = integers((m, 16), np.float16, 1), integers((n + 8, 16), np.float16, 2)
    left, right = operand(image, a), operand(image, b)
    word = mask_word((0, 0, 0, 0), (0, 0, 0, 1), 2, 3, shift)
    instruction = idesc("f16", m, n, 1 << 30)
    mma = f"tcgen05.mma.ws.cta_group::1.kind::f16 [TM0], {left}, {right}, {instruction}, %no, {word:#x};"
    zero = decode_zero_columns(word, m, n, 8).zero
    wanted = a.astype(np.float64) @ np.where(zero, 0, b[shift : shift + n].astype(np.float64).T)
    assert np.array_equal(found_in(run_tensor(issue(mma), [image.data], columns(m, n)), m, n, "f16"), wanted)
    with pytest.raises(Fault, match="shifts by 5 columns; at most 0"):
        run_tensor(issue(mma.replace(str(instruction), str(idesc("f16", m, n)))), [image.data], columns(m, n))


CODES = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b0110, 0b1110)


def sparse_operand(name: str, rows: int, k: int, seed: int) -> tuple[Array, npt.NDArray[np.uint8], Float]:
    """Stored elements [rows, k / 2], codes [rows, chunks], and A [rows, k] with its zeros."""
    dtype = TYPES[name][1]
    draw = np.random.default_rng(seed)
    stored = integers((rows, k // 2), dtype, seed)
    dense = np.zeros((rows, k), np.float32)
    chunk = 2 if name == "tf32" else 4
    codes = draw.choice([0b0100, 0b1110] if name == "tf32" else CODES, (rows, k // chunk)).astype(np.uint8)
    for row in range(rows):
        for c in range(k // chunk):
            if chunk == 2:
                dense[row, 2 * c + (codes[row, c] == 0b1110)] = stored[row, c]
            else:
                for i, at in enumerate((codes[row, c] & 3, codes[row, c] >> 2)):
                    dense[row, 4 * c + int(at)] = stored[row, 2 * c + i]
    return stored, codes, dense


def metadata_rows(codes: npt.NDArray[np.uint8], bits: int, selector: int = 0) -> npt.NDArray[np.uint8]:
    """Lanes of 16 bytes that hold the codes of 128 rows, in the layout of CUTLASS's tmem_e_frg.

    8-bit types: row r in lane r. Others: rows r and r + 8 in both lanes of a pair of lanes 8 apart.
    """
    words = np.zeros((128, 4), np.uint64)
    for row, chunk in np.ndindex(*codes.shape):
        value = np.uint64(codes[row, chunk])
        if bits == 8:
            words[row, chunk // 8] |= value << np.uint64(4 * (chunk % 8))
        else:
            lane = (row // 16) * 16 + row % 8 + (8 if chunk >= 4 else 0)
            words[lane, selector] |= value << np.uint64(4 * (chunk % 4) + (16 if row % 16 >= 8 else 0))
    return words.astype(np.uint32).view(np.uint8).reshape(128, 16)


def sparse_run(
    name: str, *, selector: int = 0, from_tmem: bool = False, codes: npt.NDArray[np.uint8] | None = None,
    schedule: str = "eager", ws: str = "",
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:  # fmt: skip
    """D of one sparse mma of M = 128, N = 64, and its expected value."""
    kind, dtype, _, _ = TYPES[name]
    bits = np.dtype(dtype).itemsize * 8
    k, n, image = 512 // bits, 64, Image()
    stored, good, dense = sparse_operand(name, 128, k, 7 + selector)
    b = integers((n, k), dtype, 3)
    copies = [into_tensor_memory(image, metadata_rows(good if codes is None else codes, bits, selector), AT + 32)]
    if from_tmem:
        copies.append(into_tensor_memory(image, stored.view(np.uint8).reshape(128, 32), AT))
    left = f"[TM{AT}]" if from_tmem else operand(image, stored)
    mma = (f"tcgen05.mma{ws}.sp.cta_group::1.kind::{kind} [TM0], {left}, {operand(image, b)}, [TM{AT + 32}], "
           f"{idesc(name, 128, n, 4 | selector)}, %no;")  # fmt: skip
    words = run_tensor(issue(*copies, mma), [image.data], n, schedule=schedule)
    return found_in(words, 128, n, name), dense.astype(np.float64) @ b.astype(np.float64).T


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("from_tmem", [False, True], ids=["smem", "tmem"])
def test_sparse_products(name: str, from_tmem: bool) -> None:
    for schedule in SCHEDULES if name == "f16" else SCHEDULES[:1]:
        found, wanted = sparse_run(name, from_tmem=from_tmem, schedule=schedule)
        assert np.array_equal(found, wanted), f"{name} {schedule}: {np.argwhere(found != wanted)[:3].tolist()}"


@pytest.mark.parametrize("name", ["f16", "tf32"])
def test_the_selector_takes_the_next_column(name: str) -> None:
    found, wanted = sparse_run(name, selector=1)
    assert np.array_equal(found, wanted)


def test_sparse_and_weight_stationary() -> None:
    found, wanted = sparse_run("f16", ws=".ws")
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("code", [0b0000, 0b0101, 0b1010, 0b1111])
def test_metadata_that_names_one_element_twice(code: int) -> None:
    codes = np.full((128, 8), 0b0100, np.uint8)
    codes[37, 5] = code
    with pytest.raises(Fault, match="the metadata of row 37, chunk 5 of A") as fault:
        sparse_run("f16", codes=codes)
    assert fault.value.rule == "sparsity-metadata"


def _fault_of_metadata_at(place: str, *ahead: str) -> Fault:
    """The fault of an mma that takes its metadata at `place`, behind the instructions `ahead`."""
    image = Image()
    a, b = integers((128, 16), np.float16, 1), integers((64, 32), np.float16, 2)
    mma = (f"tcgen05.mma.sp.cta_group::1.kind::f16 [TM0], {operand(image, a)}, {operand(image, b)}, [{place}], "
           f"{idesc('f16', 128, 64, 4)}, %no;")  # fmt: skip
    with pytest.raises(Fault) as fault:
        run_tensor(issue(*ahead, mma), [image.data], 64)
    return fault.value


def test_metadata_that_nobody_wrote_leaves_nothing_defined() -> None:
    """D depends on the metadata row by row, and is stored as the result."""
    fault = _fault_of_metadata_at(f"TM{AT + 32}")
    assert fault.rule == "uninitialised-tmem", str(fault)


def test_metadata_behind_the_last_lane() -> None:
    fault = _fault_of_metadata_at("%w30", "add.s32 %w30, %tm, 0x00800000;")
    assert fault.rule == "tmem-out-of-bounds", str(fault)


def test_sparse_and_block_scaled() -> None:
    """mxf4: chunks of eight elements, stored in pairs; all scale factors are 1."""
    k, n, image = 128, 64, Image()
    draw = np.random.default_rng(5)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    stored, b = draw.integers(0, 8, (128, k // 2)), draw.integers(0, 8, (n, k))
    codes = draw.choice(CODES, (128, k // 8)).astype(np.uint8)
    dense = np.zeros((128, k), np.float32)
    for row in range(128):
        for c in range(k // 8):
            for i, at in enumerate((int(codes[row, c]) & 3, int(codes[row, c]) >> 2)):
                dense[row, 8 * c + 2 * at : 8 * c + 2 * at + 2] = grid[stored[row, 4 * c + 2 * i : 4 * c + 2 * i + 2]]

    def packed(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        return (values[:, 0::2] | values[:, 1::2] << 4).astype(np.uint8)

    ones = np.full((128, 16), 127, np.uint8)
    copies = [into_tensor_memory(image, metadata_rows(codes, 8), AT + 32),
              into_tensor_memory(image, ones, AT + 64), into_tensor_memory(image, ones, AT + 68)]  # fmt: skip
    instruction = 4 | 1 << 7 | 1 << 10 | (n >> 3) << 17 | 1 << 23 | (128 >> 7) << 27
    left, right = operand(image, packed(stored)), operand(image, packed(b))
    mma = (f"tcgen05.mma.sp.cta_group::1.kind::mxf4.block_scale.block32 [TM0], {left}, {right}, [TM{AT + 32}], "
           f"{instruction}, [TM{AT + 64}], [TM{AT + 68}], %no;")  # fmt: skip
    words = run_tensor(issue(*copies, mma), [image.data], n)
    assert np.array_equal(found_in(words, 128, n, "f16"), dense.astype(np.float64) @ grid[b].astype(np.float64).T)
