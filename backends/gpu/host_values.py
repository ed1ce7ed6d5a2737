"""Arguments of a compiled host function: TVM FFI values, or pointers to packed descriptors.

Structures are those of TVM FFI's public C header (tvm/ffi/c_api.h) and of DLPack 1.x.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from backends.gpu.arguments import address_of, scalar_bytes
from megamoe.contract import (
    BufferArg,
    DeviceError,
    HostArg,
    ScalarArg,
    ShapeArg,
    StreamArg,
    TensorArg,
)

NONE, INT, BOOL, FLOAT, POINTER, DLTENSOR, ARRAY = 0, 1, 2, 3, 4, 7, 71
CUDA: Final = 2
"""kDLCUDA"""

# dtype -> DLDataTypeCode, bits, lanes. A packed pair of 4-bit floats is one element of two lanes.
DL_TYPES: Final[Mapping[str, tuple[int, int, int]]] = {
    "s8": (0, 8, 1), "s16": (0, 16, 1), "s32": (0, 32, 1), "s64": (0, 64, 1),
    "u8": (1, 8, 1), "u16": (1, 16, 1), "u32": (1, 32, 1), "u64": (1, 64, 1),
    "f16": (2, 16, 1), "f32": (2, 32, 1), "f64": (2, 64, 1), "bf16": (4, 16, 1), "bool": (6, 8, 1),
    "e4m3": (10, 8, 1), "e5m2": (12, 8, 1), "ue8m0": (14, 8, 1), "e2m1x2": (17, 4, 2),
}  # fmt: skip


class DLTensor(ctypes.Structure):
    """DLPack's tensor: sizes and strides in elements."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Payload(ctypes.Union):
    """The value of an FfiAny, by type_index."""

    _fields_ = (("integer", ctypes.c_int64), ("real", ctypes.c_double), ("pointer", ctypes.c_uint64))


class FfiAny(ctypes.Structure):
    """TVMFFIAny, 16 bytes."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", Payload))


class FfiArray(ctypes.Structure):
    """TVMFFIObject (24 bytes) followed by a TVMFFISeqCell of FfiAny."""

    _fields_ = (
        ("references", ctypes.c_uint64),
        ("type_index", ctypes.c_int32),
        ("padding", ctypes.c_uint32),
        ("deleter", ctypes.c_uint64),
        ("data", ctypes.POINTER(FfiAny)),
        ("size", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("data_deleter", ctypes.c_uint64),
    )


@dataclass(slots=True)
class HostValues:
    """`slots` go to the function; `kept` holds everything that their addresses lead to."""

    slots: ctypes.Array[FfiAny] | ctypes.Array[ctypes.c_uint64]
    kept: list[object] = field(default_factory=list[object])


def ffi_values(args: Sequence[HostArg], addresses: Mapping[str, int], device: int, stream: int) -> HostValues:
    """One TVMFFIAny an argument; tensors become DLTensors on `device`. DeviceError for a tensor that was not given."""
    kept: list[object] = []
    values = [_ffi(arg, addresses, device, stream, kept) for arg in args]
    return HostValues((FfiAny * max(len(values), 1))(*values), kept)


def packed_values(args: Sequence[HostArg], addresses: Mapping[str, int], stream: int) -> HostValues:
    """Pointers to descriptors, as CuTeDSL's generated header declares them; the last slot points to the error code."""
    kept: list[object] = []
    for arg in args:
        kept += [ctypes.create_string_buffer(content) for content in _packed(arg, addresses, stream)]
    code = ctypes.c_int32(0)
    kept.append(code)
    places = [ctypes.addressof(one) for one in kept]  # pyright: ignore[reportArgumentType]
    return HostValues((ctypes.c_uint64 * len(places))(*places), kept)


def _ffi(arg: HostArg, addresses: Mapping[str, int], device: int, stream: int, kept: list[object]) -> FfiAny:
    match arg:
        case None:
            return FfiAny(NONE, 0)
        case TensorArg():
            tensor = _dl_tensor(arg, addresses, device, kept)
            return FfiAny(DLTENSOR, 0, Payload(pointer=ctypes.addressof(tensor)))
        case BufferArg():
            return FfiAny(POINTER, 0, Payload(pointer=address_of(arg.tensor, arg.offset, addresses)))
        case StreamArg():
            return FfiAny(POINTER, 0, Payload(pointer=stream))
        case ShapeArg():
            return FfiAny(ARRAY, 0, Payload(pointer=_array(arg.sizes, kept)))
        case ScalarArg(dtype="bool"):
            return FfiAny(BOOL, 0, Payload(integer=int(bool(arg.value))))
        case ScalarArg():
            scalar_bytes(arg)
            if arg.dtype.startswith("f"):
                return FfiAny(FLOAT, 0, Payload(real=float(arg.value)))
            return FfiAny(INT, 0, Payload(integer=int(arg.value)))


def _packed(arg: HostArg, addresses: Mapping[str, int], stream: int) -> list[bytes]:
    match arg:
        case None:
            return []
        case TensorArg():
            strides, fields = _strides(arg), arg.packed
            dims = [arg.shape[axis] for axis in fields.dims]
            steps = [strides[axis] for axis in fields.strides]
            # "@" pads between 4- and 8-byte members as the C struct does.
            form = f"@P{len(dims)}{_integer(fields.dim_bits)}{len(steps)}{_integer(fields.stride_bits)}"
            return [struct.pack(form, address_of(arg.tensor, arg.offset, addresses), *dims, *steps)]
        case BufferArg():
            return [struct.pack("<Q", address_of(arg.tensor, arg.offset, addresses))]
        case StreamArg():
            return [struct.pack("<Q", stream)]
        case ShapeArg():
            return [struct.pack(f"<{_integer(arg.bits)}", size) for size in arg.sizes]
        case ScalarArg():
            return [scalar_bytes(arg)]


def _integer(bits: int) -> str:
    return "i" if bits == 32 else "q"


def _strides(arg: TensorArg) -> tuple[int, ...]:
    if arg.strides is not None:
        return arg.strides
    strides: list[int] = []
    step = 1
    for size in reversed(arg.shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _array(sizes: Sequence[int], kept: list[object]) -> int:
    count = len(sizes)
    values = (FfiAny * max(count, 1))(*(FfiAny(INT, 0, Payload(integer=size)) for size in sizes))
    array = FfiArray(1, ARRAY, 0, 0, values, count, count, 0)
    kept += [values, array]
    return ctypes.addressof(array)


def _dl_tensor(arg: TensorArg, addresses: Mapping[str, int], device: int, kept: list[object]) -> DLTensor:
    if arg.dtype not in DL_TYPES:
        raise DeviceError(f"tensor argument {arg.tensor!r} has dtype {arg.dtype!r}; known are: {', '.join(DL_TYPES)}")
    rank = len(arg.shape)
    shape, strides = (ctypes.c_int64 * rank)(*arg.shape), (ctypes.c_int64 * rank)(*_strides(arg))
    address = address_of(arg.tensor, arg.offset, addresses)
    tensor = DLTensor(address, CUDA, device, rank, *DL_TYPES[arg.dtype], shape, strides, 0)
    kept += [shape, strides, tensor]
    return tensor
