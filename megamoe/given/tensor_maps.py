"""`tensor_map`: a TMA descriptor of a torch tensor or NumPy array, encoded when a launch passes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from reprlib import repr as shown
from typing import Any, Literal

import numpy as np

from megamoe.contract.machine import PixelBox
from megamoe.given.host_memory import view_of

Swizzle = Literal["none", "32B", "64B", "128B", "128B_ATOM_32B", "128B_ATOM_64B"]

_MAP_DTYPES = {
    "uint8": "u8", "int8": "u8", "bool": "u8", "uint16": "u16", "int16": "u16", "uint32": "u32", "int32": "s32",
    "uint64": "u64", "int64": "s64", "float16": "f16", "float32": "f32", "float64": "f64", "bfloat16": "bf16",
    "float8_e4m3fn": "u8", "float8_e5m2": "u8", "float8_e8m0fnu": "u8", "float4_e2m1fn_x2": "u8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorMapOf:
    """A TMA descriptor that is encoded when it is passed. `tensor_map` makes it and documents its fields."""

    tensor: Any
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str
    element_strides: tuple[int, ...] | None
    oob_fill: Literal["zero", "nan"]
    im2col: PixelBox | None


def tensor_map(
    tensor: object, box: Sequence[int], swizzle: Swizzle = "none", *, dtype: str | None = None,
    element_strides: Sequence[int] | None = None, oob_fill: Literal["zero", "nan"] = "zero",
    im2col: PixelBox | None = None,
) -> TensorMapOf:  # fmt: skip
    """A tensor map (cuTensorMapEncodeTiled) of a torch tensor or NumPy array, to pass by value or in memory.

    `box` and `element_strides` are in elements, in the order of the tensor's own dimensions (the last one is
    contiguous). `dtype`: the map's, where it differs from the tensor's ("tf32", "b4x16", ...; a b4x16 map of uint8
    bytes counts two elements per byte in its last dimension). ValueError for a tensor whose last dimension is strided,
    and for a value of a wrong type. Values that the driver refuses are refused at the launch.

    With `im2col` it is a cuTensorMapEncodeIm2col map for a tensor [images, .., width, channels]. `box` is then the
    number of channels, and the corners of the PixelBox follow the order of the tensor's own dimensions.
    """
    for option, text in (("swizzle", swizzle), ("oob_fill", oob_fill), ("dtype", dtype or "")):
        if not isinstance(text, str):
            raise ValueError(f"{option} of a tensor map is {text!r}; it must be a name, as {_EXAMPLES[option]!r}")
    corners = None if im2col is None else _corners(im2col)
    sizes = _whole("box", box)
    steps = None if element_strides is None else _whole("element_strides", element_strides)
    shape, strides, bytes_each, name = _layout(tensor)
    if strides and strides[-1] != 1 and shape[-1] != 1:
        raise ValueError(f"a tensor map needs a last dimension of stride 1; the tensor has the strides {strides}")
    chosen = dtype or _MAP_DTYPES.get(name)
    if chosen is None:
        raise ValueError(f"no tensor map has elements of {name}; name the type with dtype=, e.g. dtype='u8'")
    dims = list(reversed(shape))
    if chosen.startswith("b4x16"):
        dims[0] *= 2
    elif chosen.startswith("b6x16"):
        dims[0] = dims[0] * 4 // 3
    return TensorMapOf(
        tensor,
        chosen,
        tuple(dims),
        tuple(stride * bytes_each for stride in reversed(strides[:-1])),
        sizes[::-1],
        swizzle,
        None if steps is None else steps[::-1],
        oob_fill,
        corners,
    )


_EXAMPLES = {"swizzle": "128B", "oob_fill": "zero", "dtype": "bf16"}


def _corners(im2col: object) -> PixelBox:
    """`im2col` with its corners in the order of the map's dimensions."""
    if not isinstance(im2col, PixelBox):
        raise ValueError(f"im2col of a tensor map is {shown(im2col)}; it must be a PixelBox(lower, upper, pixels)")
    (pixels,) = _whole("pixels", (im2col.pixels,))
    return PixelBox(_whole("lower", im2col.lower)[::-1], _whole("upper", im2col.upper)[::-1], pixels)


def _whole(option: str, given: object) -> tuple[int, ...]:
    """The whole numbers of a parameter; ValueError for anything else. True is no number of elements."""
    try:
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise TypeError
        return tuple(_whole_number(one) for one in given)
    except TypeError:
        raise ValueError(f"{option} of a tensor map is {shown(given)}; it must be whole numbers of elements") from None


def _whole_number(one: Any) -> int:
    if isinstance(one, bool | np.bool_):
        raise TypeError
    return index(one)


def _layout(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], int, str]:
    """Shape, strides in elements, bytes per element, and the dtype's name."""
    if isinstance(tensor, np.ndarray):
        each = tensor.itemsize
        if any(stride % each for stride in tensor.strides):
            raise ValueError(f"a tensor map counts in elements; the array's strides are {tensor.strides} bytes, with "
                             f"{each} bytes an element")  # fmt: skip
        return tensor.shape, tuple(stride // each for stride in tensor.strides), each, tensor.dtype.name
    if view_of(tensor) is None:
        raise ValueError(f"a tensor map is of a torch tensor or a NumPy array, not of {type(tensor).__name__}")
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), str(tensor.dtype).partition(".")[2]


def array_behind(given: object) -> object:
    """The array of a tensor map; anything else as it is."""
    return given.tensor if isinstance(given, TensorMapOf) else given
