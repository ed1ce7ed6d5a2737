"""Converts raw elements and scale factors of MMA operands to numbers. All are exact in float32."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from backends.vm.numerics.formats import FORMATS, decode

Float32 = npt.NDArray[np.float32]
_BITS = {"e5m2": 8, "e4m3": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4}
_E2M1_SHIFT = 2
"""An e2m1 element in an 8-bit f8f6f4 container is in bits 5..2 (facts.md 1.2), both in tensor memory and after
unpacking the padded containers of shared memory."""


@cache
def _table(type_name: str) -> Float32:
    shift = _E2M1_SHIFT if type_name == "e2m1" else 0
    codes = np.array([byte >> shift & (1 << _BITS[type_name]) - 1 for byte in range(256)], np.uint8)
    return decode(codes, FORMATS[type_name]).astype(np.float32)


def to_float32(elements: npt.NDArray[np.unsignedinteger], type_name: str) -> Float32:
    """Raw elements (uint8, uint16 or uint32, any shape) of an operand type as float32 of the same shape.

    Only C can be f32."""
    if type_name == "bf16":
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if type_name == "f16":
        return np.ascontiguousarray(elements, np.uint16).view(np.float16).astype(np.float32)
    if type_name == "f32":
        return elements.astype(np.uint32, copy=False).view(np.float32)
    if type_name == "tf32":
        return (elements & np.uint32(0xFFFFE000)).astype(np.uint32).view(np.float32)
    if type_name in ("u8", "s8"):
        return np.ascontiguousarray(elements).view(np.int8 if type_name == "s8" else np.uint8).astype(np.float32)
    return _table(type_name)[elements]


@cache
def _nibble_pairs() -> Float32:
    """The two e2m1 elements of every byte, the low nibble first: float32 [256, 2]."""
    codes = np.arange(256, dtype=np.uint8)
    return decode(np.stack([codes & 15, codes >> 4], axis=-1).astype(np.uint8), FORMATS["e2m1"]).astype(np.float32)


def packed_to_float32(elements: npt.NDArray[np.unsignedinteger]) -> Float32:
    """[rows, k] from raw bytes [rows, k / 2] of two e2m1 elements each, the low half first."""
    return _nibble_pairs().take(elements, axis=0).reshape(len(elements), -1)


@cache
def _scales(type_name: str) -> Float32:
    codes = np.arange(256, dtype=np.uint8)
    if type_name == "ue8m0":
        return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127)).astype(np.float32)
    return decode((codes & 0x7F).astype(np.uint8), FORMATS["e4m3"]).astype(np.float32)


def scale_factors(codes: npt.NDArray[np.unsignedinteger], type_name: str) -> Float32:
    """Scale factors from ue8m0 or ue4m3 codes; NaN for 0xFF and 0x7F. The unused top bit of ue4m3 is dropped."""
    return _scales(type_name)[codes]
