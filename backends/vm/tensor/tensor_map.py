"""The 128-byte TMA tensor map: encodes as the driver does (tiled and im2col mode), decodes what the TMA unit reads.

The hardware uses only the first 64 bytes. The format was derived from the driver's encoder, tensormap.replace on an
H200 and CuTeDSL's own maps (facts.md 6.3); only the latter show the im2col format. Kernels build maps in device code
too, so decoding takes raw bits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NoReturn

from backends.vm.faults import Fault, counted
from backends.vm.tensor.swizzle import Swizzle

MAX_RANK = 5
Target = Literal["sm_90a", "sm_100a"]
OobFill = Literal["zero", "nan"]


class TensorMapError(ValueError):
    """Parameters that the driver's encoder refuses. The message names the parameter, its value and what is allowed."""


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type of a tensor map: `bits` in global memory, `smem_bits` in shared memory with padding."""

    name: str
    code: int
    tf32: bool
    bits: int
    smem_bits: int
    floating: bool


def _element(name: str, code: int, bits: int, *, tf32: bool = False, smem_bits: int = 0, floating: bool = False):
    return ElementType(name, code, tf32, bits, smem_bits or bits, floating)


ELEMENT_TYPES = {
    element.name: element
    for element in (
        _element("u8", 0, 8),
        _element("u16", 1, 16),
        _element("u32", 2, 32),
        _element("s32", 3, 32),
        _element("u64", 4, 64),
        _element("s64", 5, 64),
        _element("f16", 6, 16, floating=True),
        _element("f32", 7, 32, floating=True),
        _element("f32_ftz", 8, 32, floating=True),
        _element("f64", 9, 64, floating=True),
        _element("bf16", 10, 16, floating=True),
        _element("tf32", 7, 32, tf32=True, floating=True),
        _element("tf32_ftz", 8, 32, tf32=True, floating=True),
        _element("b4x16", 11, 4),
        _element("b4x16_p64", 12, 4, smem_bits=8),
        _element("b6x16_p32", 13, 6, smem_bits=8),
    )
}
_BY_CODE = {(element.code, element.tf32): element for element in ELEMENT_TYPES.values()}
_PADDED = ("b4x16_p64", "b6x16_p32")
_PACKED = ("b4x16", *_PADDED)

# Swizzle -> (code in bits 14..13, atomicity in bits 20..19).
_SWIZZLE_CODE = {
    Swizzle.NONE: (0, 0),
    Swizzle.B32: (1, 0),
    Swizzle.B64: (2, 0),
    Swizzle.B128: (3, 0),
    Swizzle.B128_ATOM_32B: (3, 1),
    Swizzle.B128_ATOM_64B: (3, 3),
}
_SWIZZLE_OF_CODE = {code: mode for mode, code in _SWIZZLE_CODE.items()}


@dataclass(frozen=True, slots=True)
class Im2col:
    """The bounding box of an im2col map, in the dimensions between channels and images, width first. It spans the
    coordinates from `lower` to the tensor's last one plus `upper`, inclusive. A copy takes `pixels` of its pixels."""

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    pixels: int


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor map. Dimension 0 is contiguous. `strides` (dimensions 1 and up) are in bytes, the rest in elements.

    `box` has a size per dimension in a tiled map, and only the channels of a pixel in an im2col map.
    """

    address: int
    element: ElementType
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: Swizzle
    oob_fill: OobFill
    im2col: Im2col | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions, 1 to 5."""
        return len(self.dims)


def encode_tensor_map(
    address: int,
    dtype: str,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    swizzle: str = "none",
    element_strides: Sequence[int] | None = None,
    oob_fill: OobFill = "zero",
    target: Target = "sm_100a",
    im2col: Im2col | None = None,
) -> bytes:
    """A tensor map of 128 bytes. The first 64 equal those of the driver's encoder.

    `dtype` and `swizzle` are names in ELEMENT_TYPES and Swizzle. Raises TensorMapError for what
    cuTensorMapEncodeTiled or, with `im2col`, cuTensorMapEncodeIm2col refuses (CUDA driver API, Tensor Map Object
    Management).
    """
    if dtype not in ELEMENT_TYPES:
        _refuse(f"the dtype {dtype!r} is none of {', '.join(ELEMENT_TYPES)}")
    modes = {mode.value: mode for mode in Swizzle}
    if swizzle not in modes:
        _refuse(f"the swizzle {swizzle!r} is none of {', '.join(modes)}")
    element, mode = ELEMENT_TYPES[dtype], modes[swizzle]
    steps = tuple(element_strides) if element_strides is not None else (1,) * len(dims)
    tensor_map = TensorMap(address, element, tuple(dims), tuple(strides), tuple(box), steps, mode, oob_fill, im2col)
    _check_lengths(tensor_map)
    if im2col is not None:
        _check_pixels(tensor_map, im2col)
    _check_global(tensor_map)
    _check_box(tensor_map)
    _check_types(tensor_map, target)
    return _pack(tensor_map)


def _refuse(what: str) -> NoReturn:
    raise TensorMapError(f"tensor map: {what}")


def _check_lengths(tensor_map: TensorMap) -> None:
    rank = tensor_map.rank
    if not 1 <= rank <= MAX_RANK:
        _refuse(f"{rank} dimensions; 1 to {MAX_RANK} are possible")
    for name, values, wanted in (
        ("strides", tensor_map.strides, rank - 1),
        ("box", tensor_map.box, rank if tensor_map.im2col is None else 1),
        ("element_strides", tensor_map.element_strides, rank),
    ):
        if len(values) != wanted:
            _refuse(f"{name} has {len(values)} entries; a map of {counted(rank, 'dimension')} needs {wanted}")


CORNER_BITS = {3: 16, 4: 8, 5: 5}
"""Bits of one coordinate of a corner, and of one im2col offset of a copy, by the rank of the map (PTX ISA 5.5.4.1)."""
MIN_IM2COL_RANK = min(CORNER_BITS)
MAX_PIXELS = 1024


def _check_pixels(tensor_map: TensorMap, im2col: Im2col) -> None:
    if tensor_map.rank not in CORNER_BITS:
        _refuse(f"{counted(tensor_map.rank, 'dimension')}; an im2col map has 3 to 5")
    if not 1 <= im2col.pixels <= MAX_PIXELS:
        _refuse(f"pixels is {im2col.pixels}; 1 to {MAX_PIXELS} are possible")
    half = 1 << CORNER_BITS[tensor_map.rank] - 1
    for name, corner in (("lower", im2col.lower), ("upper", im2col.upper)):
        if len(corner) != tensor_map.rank - 2:
            _refuse(f"{name} has {len(corner)} entries; a map of {tensor_map.rank} dimensions needs "
                    f"{tensor_map.rank - 2}")  # fmt: skip
        for axis, value in enumerate(corner):
            if not -half <= value < half:
                _refuse(
                    f"{name}[{axis}] is {value}; {-half} to {half - 1} are possible with {tensor_map.rank} dimensions"
                )
    for axis, (low, high) in enumerate(zip(im2col.lower, im2col.upper, strict=True)):
        if tensor_map.dims[axis + 1] - 1 + high < low:
            _refuse(f"the bounding box is empty in dimension {axis + 1}: it begins at {low} and ends at "
                    f"{tensor_map.dims[axis + 1] - 1 + high}")  # fmt: skip


def _check_global(tensor_map: TensorMap) -> None:
    dtype = tensor_map.element.name
    alignment = 32 if dtype in _PADDED else 16
    if tensor_map.address % alignment or not 0 <= tensor_map.address < 1 << 64:
        _refuse(f"the base address {tensor_map.address:#x} is not a multiple of {alignment} bytes (dtype {dtype})")
    for axis, extent in enumerate(tensor_map.dims):
        if not 1 <= extent <= 1 << 32:
            _refuse(f"dims[{axis}] is {extent}; 1 to 2^32 elements are possible")
    multiple = 128 if dtype in _PADDED else 2 if dtype == "b4x16" else 1
    if tensor_map.dims[0] % multiple:
        _refuse(f"dims[0] is {tensor_map.dims[0]}; dtype {dtype} needs a multiple of {multiple}")
    for axis, stride in enumerate(tensor_map.strides):
        if stride % alignment or not 0 <= stride < 1 << 40:
            _refuse(f"strides[{axis}] is {stride} bytes; it must be a multiple of {alignment} below 2^40")


def _check_box(tensor_map: TensorMap) -> None:
    dtype, box = tensor_map.element.name, tensor_map.box
    for axis, extent in enumerate(box):
        if not 1 <= extent <= 256:
            _refuse(f"box[{axis}] is {extent}; 1 to 256 elements are possible")
    for axis, step in enumerate(tensor_map.element_strides):
        if not 1 <= step <= 8:
            _refuse(f"element_strides[{axis}] is {step}; 1 to 8 are possible")
    if dtype in _PADDED and box[0] != 128:
        _refuse(f"box[0] is {box[0]}; dtype {dtype} needs 128")
    inner = box[0] * tensor_map.element.smem_bits // 8
    if box[0] * tensor_map.element.bits % 128:
        _refuse(f"box[0] is {box[0]} elements of {dtype}, {counted(inner, 'byte')}; it must be a multiple of 16 bytes")
    span = tensor_map.swizzle.span
    if span and inner > span:
        _refuse(f"box[0] is {inner} bytes, wider than the {span} bytes of swizzle {tensor_map.swizzle.value}")


def _check_types(tensor_map: TensorMap, target: Target) -> None:
    element, swizzle = tensor_map.element, tensor_map.swizzle
    if tensor_map.oob_fill not in ("zero", "nan"):
        _refuse(f"oob_fill is {tensor_map.oob_fill!r}; it is zero or nan")
    if tensor_map.oob_fill == "nan" and not element.floating:
        _refuse(f"oob_fill nan with dtype {element.name}, which is no floating-point type")
    atoms = (Swizzle.B128_ATOM_32B, Swizzle.B128_ATOM_64B)
    if target == "sm_90a" and (element.name in _PACKED or swizzle in atoms):
        what = f"dtype {element.name}" if element.name in _PACKED else f"swizzle {swizzle.value}"
        _refuse(f"{what} needs sm_100a; on sm_90a the driver refuses it")
    if element.name == "b4x16_p64" and swizzle is Swizzle.B128_ATOM_64B:
        _refuse("swizzle 128B_ATOM_64B with dtype b4x16_p64, which takes none, 128B or 128B_ATOM_32B")


def _pack(tensor_map: TensorMap) -> bytes:
    absent = MAX_RANK - tensor_map.rank
    strides = [stride >> 4 for stride in tensor_map.strides] + [0] * absent
    dims = [extent - 1 for extent in tensor_map.dims] + [0] * absent
    box = [extent - 1 for extent in tensor_map.box] + [0] * (MAX_RANK - len(tensor_map.box))
    # Dimension 0 cannot be strided. The driver accepts and ignores its element stride.
    steps = [step - 1 for step in tensor_map.element_strides] + [0] * absent
    code, atom = _SWIZZLE_CODE[tensor_map.swizzle]
    flags = (tensor_map.rank - 1) << 4 | tensor_map.element.code << 7 | code << 13
    flags |= (tensor_map.oob_fill == "nan") << 15 | tensor_map.element.tf32 << 16 | atom << 19
    high_strides = sum((stride >> 32) << 4 * axis for axis, stride in enumerate(strides))
    step_bits = sum(step << 3 * axis for axis, step in enumerate(steps))
    low = [stride & 0xFFFFFFFF for stride in strides]
    words = [flags, *low, high_strides, *dims, step_bits | box[0] << 24]
    words += _box_words(box) if tensor_map.im2col is None else _pixel_words(tensor_map.im2col)
    words[0] |= tensor_map.im2col is not None
    return struct.pack("<Q14I64x", tensor_map.address, *words)


def _box_words(box: Sequence[int]) -> tuple[int, int]:
    return box[1] | box[2] << 8 | box[3] << 16 | box[4] << 24, 0


def _pixel_words(im2col: Im2col) -> tuple[int, int]:
    """Two words: the lower corner in the low half with the upper corner above it, and the pixel count minus one."""
    bits = CORNER_BITS[len(im2col.lower) + 2]
    halves = [
        sum((value & (1 << bits) - 1) << bits * axis for axis, value in enumerate(corner))
        for corner in (im2col.lower, im2col.upper)
    ]
    return halves[0] | halves[1] << 16, im2col.pixels - 1


def _im2col(rank: int, corners: int, pixels: int) -> Im2col:
    bits = CORNER_BITS[rank]
    lower, upper = (
        tuple(((half >> bits * axis & (1 << bits) - 1) ^ 1 << bits - 1) - (1 << bits - 1) for axis in range(rank - 2))
        for half in (corners & 0xFFFF, corners >> 16)
    )
    return Im2col(lower, upper, (pixels & MAX_PIXELS - 1) + 1)


@lru_cache(maxsize=1024)
def decode_tensor_map(raw: bytes) -> TensorMap:
    """The map in `raw`; the upper 64 of its 128 bytes are ignored. Raises Fault `tensor-map` for an invalid map."""
    address, flags, *words = struct.unpack("<Q14I", raw[:64])
    low, high_strides, dims, step_word, box_word, pixel_word = words[0:4], words[4], words[5:10], *words[10:13]
    rank, pixels = (flags >> 4 & 7) + 1, bool(flags & 1)
    if rank > MAX_RANK:
        raise _unusable(f"has {rank} dimensions in bits 70..68; at most {MAX_RANK} exist")
    if pixels and rank < MIN_IM2COL_RANK:
        raise _unusable(f"is an im2col one (bit 64) of {rank} dimensions; those have {MIN_IM2COL_RANK} or more")
    if flags >> 11 & 3:
        raise _unusable("has an interleaved layout (bits 76..75); this machine moves only layouts without interleave")
    element = _BY_CODE.get((flags >> 7 & 15, bool(flags >> 16 & 1)))
    if element is None:
        raise _unusable(f"has element type {flags >> 7 & 15}, tf32 bit {flags >> 16 & 1}; no type has that code")
    swizzle = _SWIZZLE_OF_CODE.get((flags >> 13 & 3, flags >> 19 & 3))
    if swizzle is None:
        raise _unusable(f"has swizzle {flags >> 13 & 3} with atomicity {flags >> 19 & 3}, unknown to this machine")
    if address >> 63:
        raise _unusable(f"has the base address {address:#x}, where no memory is")
    if address % 16:
        raise _unusable(f"has the base address {address:#x}, which is not a multiple of 16 bytes")
    strides = [(stride | (high_strides >> 4 * axis & 15) << 32) << 4 for axis, stride in enumerate(low)]
    box = [step_word >> 24, *(box_word >> 8 * axis & 255 for axis in range(4))]
    steps = [1, *((step_word >> 3 * axis & 7) + 1 for axis in range(1, MAX_RANK))]
    return TensorMap(
        address=address,
        element=element,
        dims=tuple(extent + 1 for extent in dims[:rank]),
        strides=tuple(strides[: rank - 1]),
        box=tuple(extent + 1 for extent in box[: 1 if pixels else rank]),
        element_strides=tuple(steps[:rank]),
        swizzle=swizzle,
        oob_fill="nan" if flags >> 15 & 1 else "zero",
        im2col=_im2col(rank, box_word, pixel_word) if pixels else None,
    )


def _unusable(what: str) -> Fault:
    return Fault("tensor-map", f"the tensor map {what}; was this memory encoded as a tensor map?")


# Fields of a tensor map that tensormap.replace writes, by bit (PTX ISA 9.7.9.28; facts.md 6.3, from an H200).


_TF32 = {11: 7, 12: 8}
"""Element types that are stored as another code plus the tf32 bit."""
_TF32_BIT = 64 + 16

# Field -> (lowest bit, bits, bits from one ordinal to the next).
_PLAIN = {
    "global_address": (0, 64, 0),
    "rank": (64 + 4, 3, 0),
    "interleave_layout": (64 + 11, 2, 0),
    "swizzle_mode": (64 + 13, 2, 0),
    "swizzle_atomicity": (64 + 19, 2, 0),
    "fill_mode": (64 + 15, 1, 0),
}
_LESS_ONE = {
    "global_dim": (4 * 64, 32, 32),
    "element_stride": (6 * 64 + 32, 3, 3),
    "box_dim": (6 * 64 + 56, 8, 8),
}
_ELEMENT_TYPE = (64 + 7, 4)
_STRIDE_LOW, _STRIDE_HIGH = (64 + 32, 32), (3 * 64 + 32, 4)

ORDINALS = {"box_dim": 5, "global_dim": 5, "element_stride": 5, "global_stride": 4}
"""Fields with one value per dimension, and how many. Strides begin at dimension 1."""


def replace_field(raw: bytes, field: str, ordinal: int, value: int) -> bytes:
    """`raw`, all of a map or its lower half, with one field replaced.

    `value` as in tensormap.replace: dimensions and boxes as they are, the rank minus one, strides in bytes, element
    types by their number in Table 33 (13 to 15 are assumed to be stored as 11 to 13). Bits beyond the field are
    dropped, as on an H200.
    """
    word = int.from_bytes(raw, "little")
    if field == "elemtype":
        code = _TF32.get(value, value - 2 if value > max(_TF32) else value)
        word = _set(word, _TF32_BIT, 1, value in _TF32)
        word = _set(word, *_ELEMENT_TYPE, code)
    elif field == "global_stride":
        units = value >> 4
        word = _set(word, _STRIDE_LOW[0] + 32 * ordinal, _STRIDE_LOW[1], units)
        word = _set(word, _STRIDE_HIGH[0] + 4 * ordinal, _STRIDE_HIGH[1], units >> 32)
    else:
        low, width, step = _PLAIN.get(field) or _LESS_ONE[field]
        word = _set(word, low + step * ordinal, width, value - (field in _LESS_ONE))
    return word.to_bytes(len(raw), "little")


def _set(word: int, low: int, width: int, value: int) -> int:
    mask = (1 << width) - 1
    return word & ~(mask << low) | (value & mask) << low
