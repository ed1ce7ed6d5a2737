"""The fields of a tensor map that tensormap.replace writes, by bit (PTX ISA 9.7.9.28; facts.md 6.3, from an H200)."""

from __future__ import annotations

from backends.vm.tensor.tensor_map import MAP_BYTES

_TF32 = {11: 7, 12: 8}
"""Element types that are stored as another code and the tf32 bit."""
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
"""Fields that have one value a dimension, with how many; strides begin with dimension 1."""


def replace_field(raw: bytes, field: str, ordinal: int, value: int) -> bytes:
    """`raw` (128 bytes) with one field set, everything else as it was.

    `value` as tensormap.replace takes it: dimensions and boxes as they are, the rank less one, strides in bytes,
    element types by their number in Table 33 (13 to 15 are taken to be stored as 11 to 13). Bits beyond the field are
    dropped, as an H200 does.
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
    return word.to_bytes(MAP_BYTES, "little")


def _set(word: int, low: int, width: int, value: int) -> int:
    mask = (1 << width) - 1
    return word & ~(mask << low) | (value & mask) << low
