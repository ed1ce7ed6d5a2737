"""Layouts of tensor memory: 128 lanes of 512 32-bit columns, here always a uint32 array [128, 512].

Three views: registers of a warp (tcgen05.ld and st, PTX ISA 9.7.16.2.3), rows copied from shared memory (tcgen05.cp,
9.7.16.9) and matrices of an MMA (9.7.16.10.5). The closed forms come from the ISA and agree with CUTLASS's layouts
(facts.md 1 and 2). None has been compared with Blackwell silicon.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from backends.vm.faults import Fault
from backends.vm.tensor.swizzle import IntArray

Words = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
Replicas = tuple[tuple["Patch", ...], ...]

LANES = 128
COLUMNS = 512
WARP_LANES = 32
CtaGroup = Literal[1, 2]

# Shape -> (registers, columns, largest .num) of its x1 form (PTX ISA 9.7.16.8.3, Table 49).
_LD_ST_SHAPES = {
    "32x32b": (1, 1, 128),
    "16x64b": (1, 2, 128),
    "16x128b": (2, 4, 64),
    "16x256b": (4, 8, 32),
    "16x32bx2": (1, 1, 128),
}


def split_address(taddr: int) -> tuple[int, int]:
    """(lane, column) of a tensor-memory address: bits 31..16 and 15..0. Either may lie outside tensor memory."""
    return taddr >> 16 & 0xFFFF, taddr & 0xFFFF


def split_scale_address(taddr: int) -> tuple[int, int]:
    """As split_address, for scale factors: bits 31..30 repeat the scale-factor id (facts.md 1) and are dropped."""
    return split_address(taddr & 0x3FFFFFFF)


@dataclass(frozen=True, slots=True)
class RegisterMap:
    """The cell of each register of each thread, relative to the address: `lanes`, `columns` int64 [registers, 32].

    `packed`: a register holds the low halves of two neighbouring columns; `columns` gives the lower one.
    `transposed`: register r of thread t is lane t, column r (32x32b). `column_span`: first and one-past-last column of
    each run of columns touched (two runs for 16x32bx2).
    """

    lanes: IntArray
    columns: IntArray
    packed: bool
    transposed: bool
    column_span: tuple[tuple[int, int], ...]


@lru_cache(maxsize=256)
def register_map(shape: str, num: int, packed: bool = False, half_split: int = 0) -> RegisterMap:
    """The map of `tcgen05.ld` and `.st` with `.SHAPE.xNUM`, and `.pack::16b` or `.unpack::16b` when `packed`.

    `half_split` is 16x32bx2's immHalfSplitoff, in columns. Raises Fault `tmem-shape` if the ISA has no such form.
    """
    if shape not in _LD_ST_SHAPES:
        raise Fault("tmem-shape", f"tcgen05.ld and st have no shape {shape}; they have {', '.join(_LD_ST_SHAPES)}")
    registers, _, most = _LD_ST_SHAPES[shape]
    if num not in (1, 2, 4, 8, 16, 32, 64, 128) or num > most:
        raise Fault("tmem-shape", f"tcgen05.ld and st .{shape} have no .x{num}; .num is a power of two up to x{most}")
    if not 0 <= half_split < COLUMNS:
        raise Fault("tmem-shape", f"the second half of .16x32bx2 lies {half_split} columns on, of {COLUMNS}")
    register, thread = np.indices((registers * num, WARP_LANES), dtype=np.int64)
    lanes, columns = _closed_form(shape, register, thread)
    width = 2 if packed else 1
    columns = columns * width
    if shape == "16x32bx2":
        columns = columns + (thread >= 16) * half_split
    lanes.setflags(write=False)
    columns.setflags(write=False)
    transposed = shape == "32x32b" and not packed
    return RegisterMap(lanes, columns, packed, transposed, _spans(shape, num * width, half_split))


def _closed_form(shape: str, register: IntArray, thread: IntArray) -> tuple[IntArray, IntArray]:
    row = thread >> 2
    if shape == "32x32b":
        return thread, register
    if shape == "16x32bx2":
        return thread & 15, register
    if shape == "16x64b":
        return row + 8 * (thread & 1), 2 * register + (thread >> 1 & 1)
    if shape == "16x128b":
        return row + 8 * (register & 1), (thread & 3) + 4 * (register >> 1)
    return row + 8 * (register >> 1 & 1), 2 * (thread & 3) + (register & 1) + 8 * (register >> 2)


def _spans(shape: str, repeats: int, half_split: int) -> tuple[tuple[int, int], ...]:
    width = _LD_ST_SHAPES[shape][1] * repeats
    if shape == "16x32bx2":
        return (0, width), (half_split, half_split + width)
    return ((0, width),)


def load_registers(tmem: Words, lane: int, column: int, layout: RegisterMap) -> Words:
    """Registers uint32 [registers, 32] of a warp from `tmem`. The caller checks ownership and bounds."""
    if layout.transposed:
        return tmem[lane : lane + WARP_LANES, column : column + len(layout.lanes)].T.copy()
    lanes, columns = layout.lanes + lane, layout.columns + column
    if layout.packed:
        return tmem[lanes, columns] & np.uint32(0xFFFF) | tmem[lanes, columns + 1] << np.uint32(16)
    return tmem[lanes, columns]


def store_registers(tmem: Words, lane: int, column: int, layout: RegisterMap, registers: Words) -> None:
    """Write registers uint32 [registers, 32].

    Unpacking puts each half into the low bits of its column. The ISA does not define the upper bits; they become 0.
    """
    if layout.transposed:
        tmem[lane : lane + WARP_LANES, column : column + len(registers)] = registers.T
        return
    lanes, columns = layout.lanes + lane, layout.columns + column
    if layout.packed:
        tmem[lanes, columns] = registers & np.uint32(0xFFFF)
        tmem[lanes, columns + 1] = registers >> np.uint32(16)
    else:
        tmem[lanes, columns] = registers


@dataclass(frozen=True, slots=True)
class CopyMap:
    """A tcgen05.cp of `rows` source rows of `units` 16-byte units. Row r goes to every lane of `lanes[:, r]`.

    `lanes` int64 [copies, rows], relative to the address. A row fills 4 * `units` columns.
    """

    rows: int
    units: int
    lanes: IntArray


@lru_cache(maxsize=16)
def copy_map(shape: str, multicast: str = "") -> CopyMap:
    """The map of `tcgen05.cp.SHAPE.MULTICAST`. Raises Fault `tmem-shape` if the ISA has no such form."""
    row = np.arange(128, dtype=np.int64)
    quarter = row[:32]
    maps = {
        ("128x256b", ""): (2, [row]),
        ("128x128b", ""): (1, [row]),
        ("64x128b", "warpx2::02_13"): (1, [row[:64], row[:64] + 64]),
        ("64x128b", "warpx2::01_23"): (1, [np.r_[quarter, quarter + 64], np.r_[quarter + 32, quarter + 96]]),
        ("32x128b", "warpx4"): (1, [quarter + 32 * warp for warp in range(4)]),
    }
    if (shape, multicast) not in maps:
        known = ", ".join(".".join(filter(None, key)) for key in maps)
        asked = ".".join(filter(None, (shape, multicast)))
        raise Fault("tmem-shape", f"there is no tcgen05.cp.{asked}; the forms are {known}")
    units, copies = maps[shape, multicast]
    lanes = np.stack(copies)
    lanes.setflags(write=False)
    return CopyMap(lanes.shape[1], units, lanes)


def store_copied_rows(tmem: Words, lane: int, column: int, layout: CopyMap, units: Bytes) -> None:
    """Write the source rows of a tcgen05.cp, uint8 [rows, units, 16], to all their lanes."""
    words = np.ascontiguousarray(units).reshape(layout.rows, -1).view(np.uint32)
    for lanes in layout.lanes:
        tmem[lanes + lane, column : column + words.shape[1]] = words


def decompressed(units: Bytes, source_format: str) -> Bytes:
    """`.b8x16` from `.b4x16_p64` or `.b6x16_p32`: uint8 [..., 16] containers to uint8 [..., 16] elements.

    A 4-bit element goes to bits 5..2 of its byte, a 6-bit one to bits 5..0 (PTX ISA 9.7.16.9.1).
    """
    if source_format == "b4x16_p64":
        data = units[..., :8]
        return (np.stack([data & 15, data >> 4], axis=-1).reshape(*units.shape[:-1], 16) << 2).astype(np.uint8)
    bits = np.unpackbits(units[..., :12], axis=-1, bitorder="little").reshape(*units.shape[:-1], 16, 6)
    return np.packbits(bits, axis=-1, bitorder="little").reshape(units.shape)


@dataclass(frozen=True, slots=True)
class Patch:
    """A block of a matrix that occupies one block of tensor memory.

    It has `rows` by `columns` elements from (`row`, `column`) of the matrix, in lanes from `lane` and tensor-memory
    columns from `tmem_column`, relative to the address.
    """

    row: int
    rows: int
    column: int
    columns: int
    lane: int
    tmem_column: int


@lru_cache(maxsize=1024)
def accumulator_patches(
    m: int, n: int, cta_group: CtaGroup, weight_stationary: bool = False, sparse: bool = False
) -> tuple[Patch, ...]:
    """The layout of D [rows of this CTA, n] in a CTA's tensor memory. With cta_group 2 a CTA holds m / 2 rows.

    Each element takes one 32-bit column (PTX ISA 9.7.16.10.5, layouts A to G; facts.md 2.3).
    """
    rows = m // cta_group
    if weight_stationary and m in (32, 64):
        parts = 128 // m
        width = n // parts
        return tuple(Patch(0, m, part * width, width, part * m, 0) for part in range(parts))
    if m == 128 and cta_group == 2 and not sparse:
        return Patch(0, 64, 0, n // 2, 0, 0), Patch(0, 64, n // 2, n // 2, 64, 0)
    if rows == 64:
        return tuple(Patch(16 * part, 16, 0, n, 32 * part, 0) for part in range(4))
    if rows == 128:
        return (Patch(0, 128, 0, n, 0, 0),)
    raise Fault("tmem-shape", f"no layout of an accumulator with M = {m}, cta_group::{cta_group} exists")


@lru_cache(maxsize=256)
def operand_a_patches(
    m: int, k: int, element_bits: int, cta_group: CtaGroup, weight_stationary: bool = False, sparse: bool = False
) -> Replicas:
    """The layout of A [rows of this CTA, k] in tensor memory, as 32-bit words along k. A replica is a tuple of patches.

    M = 128 with cta_group 2 has two replicas: the first serves columns n < N/2 of D, the second the rest. .ws has two
    for M = 64 and four for M = 32, each for its share of the columns. The ISA does not describe this. FlashMLA keeps
    different parts of a matrix in the two ("implicit dual GEMM"). Elements are packed little-endian along k; 4- and
    6-bit types of the f8f6f4 kinds count as 8 bits (facts.md 2.3).
    """
    words = k * element_bits // 32
    if weight_stationary and m != 128:
        return tuple((Patch(0, m, 0, words, lane, 0),) for lane in range(0, LANES, m))
    if m == 128 and cta_group == 2 and not sparse:
        return (Patch(0, 64, 0, words, 0, 0),), (Patch(0, 64, 0, words, 64, 0),)
    return (accumulator_patches(m, words, cta_group, weight_stationary, sparse),)


def column_extent(patches: tuple[Patch, ...]) -> int:
    """Number of tensor-memory columns, from the address on, that `patches` span."""
    return max(patch.tmem_column + patch.columns for patch in patches)


def load_matrix(tmem: Words, lane: int, column: int, patches: tuple[Patch, ...]) -> Words:
    """The matrix that `patches` describe, uint32 [rows, columns]. One block gives a view.

    The caller checks that lane and column plus the extents stay inside tensor memory.
    """
    first = patches[0]
    if len(patches) == 1:
        return _block(tmem, lane, column, first)
    rows = max(patch.row + patch.rows for patch in patches)
    columns = max(patch.column + patch.columns for patch in patches)
    matrix = np.empty((rows, columns), dtype=np.uint32)
    for patch in patches:
        _part(matrix, patch)[...] = _block(tmem, lane, column, patch)
    return matrix


def store_matrix(tmem: Words, lane: int, column: int, patches: tuple[Patch, ...], matrix: Words) -> None:
    """Write the matrix uint32 [rows, columns] that `patches` describe."""
    for patch in patches:
        _block(tmem, lane, column, patch)[...] = _part(matrix, patch)


def _block(tmem: Words, lane: int, column: int, patch: Patch) -> Words:
    top, left = lane + patch.lane, column + patch.tmem_column
    return tmem[top : top + patch.rows, left : left + patch.columns]


def _part(matrix: Words, patch: Patch) -> Words:
    return matrix[patch.row : patch.row + patch.rows, patch.column : patch.column + patch.columns]


def load_scale_factors(tmem: Words, column: int, rows: int, blocks: int, sf_id: int) -> Bytes:
    """Scale factors uint8 [rows, blocks] (raw codes) of A (rows = M of this CTA) or B (rows = N).

    Row r is in lane r % 32 of every 32-lane quarter, column r / 32, bytes sf_id .. sf_id + blocks (facts.md 2.4).
    Raises Fault `scale-factor-replicas` unless the four quarters hold the same copy.
    """
    selected = _quarters(tmem, column, rows)[..., sf_id : sf_id + blocks]
    _check_replicas(selected, column, (0, 1, 2, 3))
    return selected[0]


def load_split_scale_factors(tmem: Words, column: int, n: int, blocks: int, sf_id: int) -> Bytes:
    """Scale factors of B uint8 [n, blocks] for M = 128 with cta_group 2.

    Rows n < N/2 are in quarters 0 and 1, the others in quarters 2 and 3, both from `column` on (facts.md 2.4).
    """
    selected = _quarters(tmem, column, n // 2)[..., sf_id : sf_id + blocks]
    _check_replicas(selected[:2], column, (0, 1))
    _check_replicas(selected[2:], column, (2, 3))
    return np.concatenate([selected[0], selected[2]])


def scale_factors_hidden(tmem: Words, column: int, rows: int, blocks: int, sf_id: int, split: bool) -> Bytes:
    """As load_scale_factors, or load_split_scale_factors if `split`, for the undefined bits in `tmem`. A bit is
    undefined if it is so in any copy."""
    selected = _quarters(tmem, column, rows // 2 if split else rows)[..., sf_id : sf_id + blocks]
    if split:
        return np.concatenate([selected[0] | selected[1], selected[2] | selected[3]])
    return np.bitwise_or.reduce(selected, axis=0)


def _quarters(tmem: Words, column: int, rows: int) -> Bytes:
    """The four copies of a scale-factor table, uint8 [4, rows, 4]."""
    columns = -(-rows // WARP_LANES)
    quarters = tmem[:, column : column + columns].reshape(4, WARP_LANES, columns).transpose(0, 2, 1)
    return np.ascontiguousarray(quarters).view(np.uint8).reshape(4, columns * WARP_LANES, 4)[:, :rows]


def _check_replicas(copies: Bytes, column: int, quarters: tuple[int, ...]) -> None:
    wrong = np.argwhere(copies != copies[0])
    if wrong.size:
        copy, row, block = wrong[0].tolist()
        raise Fault(
            "scale-factor-replicas",
            f"the scale factors at tensor-memory column {column} differ between quarters: row {row}, block {block} is "
            f"{copies[0, row, block]:#04x} in quarter {quarters[0]} and {copies[copy, row, block]:#04x} in quarter "
            f"{quarters[copy]}; each quarter needs the same copy (tcgen05.cp.32x128b.warpx4 writes all four)",
        )
