"""Plans which bytes a TMA operation moves: one box of a tensor map, or a column of pixels, as pieces of equal size.

A piece is a run of bytes that no swizzle, padding or tensor edge splits: 16 bytes, or fewer where the inner edge of the
tensor cuts a 16-byte unit or the type is padded. The caller moves the pieces. The model is bit-exact against 37 dumps
from an H200: all swizzles, narrow boxes, offset destinations, every kind of overhang, ranks 1 to 5, element strides,
loads and stores (facts.md 6.4). The pixel order of im2col follows the ISA's text and has not been measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Literal

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from backends.vm.faults import Fault, counted
from backends.vm.numerics import half
from backends.vm.numerics.f32 import canonical
from backends.vm.tensor.swizzle import PATTERN_BYTES, UNIT_BYTES, IntArray, Swizzle, swizzled
from backends.vm.tensor.tensor_map import CORNER_BITS, ElementType, Im2col, TensorMap

Bytes = NDArray[np.uint8]
BoolArray = NDArray[np.bool_]
Direction = Literal["load", "store"]

SMEM_ALIGNMENT = 128
GATHER_ROWS = 4
MAX_ROWS = (227 << 10) // UNIT_BYTES
"""Limit of a box: a row takes at least one unit, and a CTA has at most 227 KiB (CUDA programming guide)."""

# NaN fill by element bits, as an H200 writes it (facts.md 6.4).
_NAN_FILL = {16: 0x7FF7, 32: 0x7FF77FF7, 64: 0x7FF77FF77FF77FF7}


@dataclass(frozen=True, slots=True)
class BoxPlan:
    """The pieces of one box, in the order of its rows.

    `global_addresses` and `smem_addresses`: int64 [pieces], first byte of each piece. `in_bounds`: bool [pieces]. A
    piece out of bounds has a meaningless global address; a load fills it with `fill` and a store skips it. `fill`:
    uint8 [piece_bytes]. `transaction_bytes`: the complete_tx that a load signals on its mbarrier.
    """

    piece_bytes: int
    global_addresses: IntArray
    smem_addresses: IntArray
    in_bounds: BoolArray
    all_in_bounds: bool
    fill: Bytes
    transaction_bytes: int


@dataclass(frozen=True, slots=True)
class _Row:
    """The pieces of one row, relative to its first byte in global memory and in unswizzled shared memory."""

    piece_bytes: int
    global_offsets: IntArray
    smem_offsets: IntArray


def plan_box(
    tensor_map: TensorMap, coordinates: Sequence[int], smem_address: int, direction: Direction = "load"
) -> BoxPlan:
    """The pieces of the box at `coordinates` (elements, dimension 0 first) in `.tile` mode.

    `smem_address` is the absolute shared address; its bits 9..7 enter the swizzle. Raises Fault where an H200 reports
    an illegal instruction and for what the ISA forbids (PTX ISA 9.7.9.25, 5.5.3).
    """
    if len(coordinates) != tensor_map.rank:
        raise Fault(
            "tensor-coordinates",
            f"{counted(len(coordinates), 'coordinate')} for a tensor map of {counted(tensor_map.rank, 'dimension')}",
        )
    if tensor_map.im2col is not None:
        raise Fault("tensor-map", "a copy of a tile with an im2col map; the map and the copy must be of one mode")
    starts = np.array(coordinates[1:], dtype=np.int64)
    rows = starts + _row_steps(tensor_map.box[1:], tensor_map.element_strides[1:])
    return _plan(tensor_map, coordinates[0], rows, smem_address, direction)


def plan_im2col(
    tensor_map: TensorMap,
    coordinates: Sequence[int],
    offsets: Sequence[int],
    smem_address: int,
    direction: Direction = "load",
) -> BoxPlan:
    """The pieces of a column of pixels in `.im2col` mode (or, for a store, `.im2col_no_offs`). Each pixel is one row of
    shared memory (PTX ISA 5.5.4).

    `coordinates` (channel, width, .., image) give the first position, inside the bounding box. The following ones
    advance along the width by the traversal stride, then along the other dimensions of the box, then to the next image.
    `offsets` (width first) are added to each.
    """
    box = tensor_map.im2col
    if box is None or len(coordinates) != tensor_map.rank:
        found = f"of {tensor_map.rank} dimensions" if box is not None else "that is a tiled one"
        raise Fault("tensor-map", f"an im2col copy of {len(coordinates)} dimensions with a map {found}")
    bits = CORNER_BITS[tensor_map.rank]
    if any(not 0 <= offset < 1 << bits for offset in offsets):
        raise Fault("tensor-coordinates", f"the im2col offsets are {list(offsets)}; with {tensor_map.rank} dimensions "
                    f"they are 0 to {(1 << bits) - 1}")  # fmt: skip
    positions = _pixels(tensor_map.dims[1:-1], box, tensor_map.element_strides[1:-1], tuple(coordinates[1:]))
    rows = positions + np.array([*offsets, 0], dtype=np.int64)
    return _plan(tensor_map, coordinates[0], rows, smem_address, direction, clipped=True)


@lru_cache(maxsize=512)
def _pixels(dims: tuple[int, ...], box: Im2col, steps: tuple[int, ...], first: tuple[int, ...]) -> IntArray:
    """Width, .., image of each pixel: int64 [pixels, rank - 1]. Fault if the bounding box does not have the first."""
    counts: list[int] = []
    at: list[int] = []
    for axis, (low, high, extent, step) in enumerate(zip(box.lower, box.upper, dims, steps, strict=True)):
        last = extent - 1 + high
        if not low <= first[axis] <= last:
            raise Fault("tensor-coordinates", f"coordinate {axis + 1} of an im2col copy is {first[axis]}; the bounding "
                        f"box goes from {low} to {last}")  # fmt: skip
        if (first[axis] - low) % step:
            raise Fault("tensor-coordinates", f"coordinate {axis + 1} of an im2col copy is {first[axis]}, which steps "
                        f"of {step} from the corner {low} do not reach; no text says which pixels follow")  # fmt: skip
        counts.append((last - low) // step + 1)
        at.append((first[axis] - low) // step)
    size = prod(counts)
    start = sum(position * prod(counts[:axis]) for axis, position in enumerate(at))
    number = start + np.arange(box.pixels, dtype=np.int64)
    inside, images = number % size, first[-1] + number // size
    columns: list[IntArray] = []
    for low, step, count in zip(box.lower, steps, counts, strict=True):
        columns.append(low + inside % count * step)
        inside = inside // count
    return np.stack([*columns, images], axis=1)


def plan_gather4(
    tensor_map: TensorMap, column: int, rows: Sequence[int], smem_address: int, direction: Direction = "load"
) -> BoxPlan:
    """The pieces of `.tile::gather4` (or, for a store, `.tile::scatter4`): four rows of a matrix (PTX ISA 5.5.3.4)."""
    if tensor_map.rank != 2 or tensor_map.box[1:] != (1,) or len(rows) != GATHER_ROWS:
        raise Fault(
            "tensor-map",
            f"gather4 and scatter4 move {GATHER_ROWS} rows of a 2-dimensional map whose box has 1 row; here the map "
            f"has {counted(tensor_map.rank, 'dimension')}, the box {tensor_map.box}, and {counted(len(rows), 'row')} "
            "are named",
        )
    return _plan(tensor_map, column, np.array(rows, dtype=np.int64)[:, None], smem_address, direction)


def transaction_bytes(tensor_map: TensorMap, rows: int) -> int:
    """Bytes of global memory for `rows` rows of a box. Padding inside 16-byte containers does not count.

    CuTeDSL documents the latter for TensorMap.global_tx_bytes, and its fp4 and fp6 kernels expect it. A box that
    overhangs the tensor counts in full, following library practice; this is not measured (facts.md 6.4).
    """
    return rows * tensor_map.box[0] * tensor_map.element.bits // 8


@lru_cache(maxsize=512)
def _row_steps(box: tuple[int, ...], element_strides: tuple[int, ...]) -> IntArray:
    """Coordinates of every row of a box relative to the first: int64 [rows, rank - 1], dimension 1 fastest."""
    counts = [-(-extent // step) for extent, step in zip(box, element_strides, strict=True)]
    if prod(counts) > MAX_ROWS:
        raise Fault("out-of-bounds", f"the box of a tensor copy has {prod(counts)} rows; the shared memory of a CTA "
                    f"has room for {MAX_ROWS} of {UNIT_BYTES} bytes")  # fmt: skip
    index = np.indices(counts[::-1], dtype=np.int64).reshape(len(counts), prod(counts))[::-1]
    return np.ascontiguousarray((index * np.array(element_strides, dtype=np.int64)[:, None]).T)


def _plan(
    tensor_map: TensorMap,
    column: int,
    rows: IntArray,
    smem_address: int,
    direction: Direction,
    *,
    clipped: bool = False,
) -> BoxPlan:
    """Plans all pieces. `clipped`: a store skips rows that are outside of the tensor on any side."""
    _check(tensor_map, column, smem_address)
    if direction == "store" and not clipped and (column < 0 or rows.min(initial=0) < 0):
        raise Fault(
            "tensor-coordinates",
            f"a tensor store has a negative coordinate ({column} in dimension 0, rows from {rows[0].tolist()}); "
            "only loads may start before the tensor",
        )
    element = tensor_map.element
    overhang = column < 0 or column + tensor_map.box[0] > tensor_map.dims[0]
    edge_bytes = tensor_map.dims[0] * element.bits // 8 % UNIT_BYTES if overhang else 0
    row = _row_pieces(tensor_map.box[0], element.bits, element.smem_bits, gcd(UNIT_BYTES, edge_bytes))
    positions = column * element.bits // 8 + row.global_offsets
    row_addresses = tensor_map.address + rows @ np.array(tensor_map.strides, dtype=np.int64)
    inside = _inside(tensor_map, rows, positions, overhang)
    all_inside = bool(inside.all())
    return BoxPlan(
        piece_bytes=row.piece_bytes,
        global_addresses=(row_addresses[:, None] + positions).reshape(-1),
        smem_addresses=_smem_addresses(tensor_map, len(rows), row, smem_address),
        in_bounds=inside,
        all_in_bounds=all_inside,
        fill=_fill(tensor_map, row.piece_bytes, needed=direction == "load" and not all_inside),
        transaction_bytes=transaction_bytes(tensor_map, len(rows)),
    )


def _inside(tensor_map: TensorMap, rows: IntArray, positions: IntArray, overhang: bool) -> BoolArray:
    """Whether each piece is inside the tensor, for rows at `rows` [rows, rank - 1] and byte `positions` in a row."""
    row_inside = np.ones(len(rows), dtype=np.bool_)
    for axis, extent in enumerate(tensor_map.dims[1:]):
        row_inside &= (rows[:, axis] >= 0) & (rows[:, axis] < extent)
    if not overhang:
        return row_inside.repeat(positions.size)
    column_inside = (positions >= 0) & (positions < tensor_map.dims[0] * tensor_map.element.bits // 8)
    return np.logical_and.outer(row_inside, column_inside).reshape(-1)


def _check(tensor_map: TensorMap, column: int, smem_address: int) -> None:
    if smem_address % SMEM_ALIGNMENT:
        raise Fault(
            "misaligned",
            f"the shared address {smem_address:#x} of a tensor copy is not a multiple of {SMEM_ALIGNMENT} bytes",
            address=smem_address,
        )
    element = tensor_map.element
    if element.smem_bits != element.bits and column % 128:
        raise Fault("tensor-coordinates", f"coordinate 0 is {column}; with {element.name} it must be a multiple of 128")
    if column * element.bits % (UNIT_BYTES * 8):
        raise Fault(
            "tensor-coordinates",
            f"coordinate 0 is {column}, {column * element.bits / 8:g} bytes of {element.name}; it must be a multiple "
            f"of {UNIT_BYTES} bytes (anything else is an illegal-instruction error on an H200)",
        )
    inner, span = tensor_map.box[0] * element.smem_bits // 8, tensor_map.swizzle.span
    if span and inner > span:
        raise Fault(
            "tensor-map",
            f"the box is {inner} bytes wide, more than the {span} bytes of its swizzle {tensor_map.swizzle.value}",
        )


@lru_cache(maxsize=512)
def _row_pieces(columns: int, bits: int, smem_bits: int, granule: int) -> _Row:
    """Pieces of a row of `columns` elements, cut at every multiple of `granule` bytes (a power of two, at most 16)."""
    if bits != smem_bits:
        # 16 elements in a 16-byte container: packed bits first, then padding that is never written.
        data_bytes = 2 * bits
        piece = gcd(granule, data_bytes)
        offsets = np.arange(0, columns * bits // 8, piece, dtype=np.int64)
        return _Row(piece, offsets, offsets // data_bytes * UNIT_BYTES + offsets % data_bytes)
    row_bytes = columns * bits // 8
    piece = gcd(granule, row_bytes)
    offsets = np.arange(0, row_bytes, piece, dtype=np.int64)
    return _Row(piece, offsets, offsets)


def _smem_addresses(tensor_map: TensorMap, rows: int, row: _Row, smem_address: int) -> IntArray:
    element, swizzle = tensor_map.element, tensor_map.swizzle
    pitch = swizzle.span or tensor_map.box[0] * element.smem_bits // 8
    phase = smem_address % PATTERN_BYTES
    pattern = _smem_pattern(
        tensor_map.box[0], element.bits, element.smem_bits, row.piece_bytes, rows, pitch, swizzle, phase
    )
    return pattern + (smem_address - phase)


@lru_cache(maxsize=512)
def _smem_pattern(
    columns: int, bits: int, smem_bits: int, piece_bytes: int, rows: int, pitch: int, swizzle: Swizzle, phase: int
) -> IntArray:
    row = _row_pieces(columns, bits, smem_bits, piece_bytes)
    linear = np.arange(rows, dtype=np.int64)[:, None] * pitch + row.smem_offsets
    return swizzled(swizzle, phase + linear.reshape(-1))


def _fill(tensor_map: TensorMap, piece_bytes: int, *, needed: bool) -> Bytes:
    if not needed or tensor_map.oob_fill == "zero":
        return np.zeros(piece_bytes, dtype=np.uint8)
    bits = tensor_map.element.bits
    element = np.frombuffer(_NAN_FILL[bits].to_bytes(bits // 8, "little"), dtype=np.uint8)
    return np.tile(element, piece_bytes * 8 // bits)


def rounded_to_tf32(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """float32 bits as a load of a tf32 map rounds them: to nearest at bit 13, NaN to 0x7FFFE000.

    Measured on an H200 except for exact ties. They go to even here, as in `cvt.rn.tf32.f32` (facts.md 6.4, 7.2).
    """
    magnitude = values & np.uint32(0x7FFFFFFF)
    is_nan = magnitude > 0x7F800000
    is_infinite = magnitude == 0x7F800000
    tie = values >> np.uint32(13) & np.uint32(1)
    rounded = (values + (np.uint32(0xFFF) + tie)) & np.uint32(0xFFFFE000)
    return np.where(is_nan, np.uint32(0x7FFFE000), np.where(is_infinite, values, rounded)).astype(np.uint32)


# How a bulk reduction combines arriving bytes with those in global memory (PTX ISA 9.7.9.25.4.2, 27.1.3).


REDUCED_TYPES = {
    "add": "u32 s32 u64 f16 bf16 f32 f64",
    **dict.fromkeys(("min", "max"), "u32 s32 u64 s64 f16 bf16"),
    **dict.fromkeys(("inc", "dec"), "u32"),
    **dict.fromkeys(("and", "or", "xor"), "b32 b64"),
}
"""Types in global memory that each operation of a bulk reduction accepts (PTX ISA 9.7.9.25.4.2). Reductions through a
tensor map (9.7.9.27.1.3) accept the same; bitwise ones accept integers of 32 or 64 bits. Triton asserts this for all
but f64, which an H200 adds (conformance/silicon/whole)."""
_NUMPY = {"u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8", "f32": "f4", "f64": "f8", "b32": "u4", "b64": "u8",
          "f32_ftz": "f4"}  # fmt: skip


def _wrapping_increment(old: npt.NDArray[np.uint32], limit: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    return np.where(old >= limit, np.zeros_like(old), old + 1)


def _wrapping_decrement(old: npt.NDArray[np.uint32], limit: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    return np.where((old == 0) | (old > limit), limit, old - 1)


_COMBINE: dict[str, Callable[..., npt.NDArray[np.generic]]] = {
    "add": np.add, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "inc": _wrapping_increment, "dec": _wrapping_decrement,
}  # fmt: skip


def check_reduction(operation: str, element: ElementType) -> None:
    """Fault for an operation that the element type of a map does not support."""
    bits = f"b{element.bits}" if element.name[0] in "us" else ""
    names = {element.name.removesuffix("_ftz"), bits}
    if names.isdisjoint(REDUCED_TYPES[operation].split()):
        raise Fault("bulk-copy", f".{operation} is for elements of {REDUCED_TYPES[operation]}, and those of the tensor "
                    f"map are {element.name}")  # fmt: skip


def reduced_bytes(element: str) -> int:
    """Bytes per element in `reduced`."""
    return 2 if element in half.FORMATS else np.dtype(_NUMPY[element]).itemsize


def reduced(
    old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8], operation: str, element: str
) -> npt.NDArray[np.uint8]:
    """Bytes of `old OP new`, elementwise. The type must support the operation. Rounds to nearest even; NaN is
    canonical."""
    if element in half.FORMATS:
        codes = half.REDUCTIONS[operation](old.view(np.uint16), new.view(np.uint16), half.FORMATS[element])
        return codes.view(np.uint8).reshape(new.shape)
    dtype = np.dtype(_NUMPY[element])
    found = _COMBINE[operation](old.view(dtype), new.view(dtype)).astype(dtype)
    return (canonical(found) if dtype == np.float32 else found).view(np.uint8).reshape(new.shape)
