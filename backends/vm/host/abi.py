"""The C structures that a compiled host function exchanges with the CUDA runtime and with TVM FFI (64-bit).

backends/gpu/host_program.py repeats the TVM FFI and DLPack structures on purpose: the VM shares no code with the
device executor, so that one mistake cannot hide in both.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Mapping
from typing import Final

from backends.vm.faults import counted


class HostError(Exception):
    """The host function, its object or its arguments do not fit this runtime. The message says which and what would."""


class LaunchAttribute(ctypes.Structure):
    """cudaLaunchAttribute: 72 bytes with the value at byte 8 (facts.md 0.2)."""

    _fields_ = (("id", ctypes.c_uint32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t: 56 bytes (facts.md 0.2)."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_smem", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("attributes", ctypes.c_uint64),
        ("attribute_count", ctypes.c_uint32),
    )


class DLTensor(ctypes.Structure):
    """DLPack 1.x DLTensor: sizes and strides in elements, `byte_offset` relative to `data`."""

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


class FfiPayload(ctypes.Union):
    """The value of a TVMFFIAny. Its type_index selects the member."""

    _fields_ = (("integer", ctypes.c_int64), ("real", ctypes.c_double), ("pointer", ctypes.c_uint64))


class FfiAny(ctypes.Structure):
    """TVMFFIAny: 16 bytes, one argument of a TVM FFI function (its public C header, tvm/ffi/c_api.h)."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", FfiPayload))


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


FFI_NONE, FFI_INT, FFI_BOOL, FFI_FLOAT, FFI_POINTER, FFI_DLTENSOR, FFI_ARRAY = 0, 1, 2, 3, 4, 7, 71
DEVICE_CUDA: Final = 2

# DLDataTypeCode (dlpack.h), bits and lanes. A packed pair of 4-bit floats is one element of two lanes.
DL_TYPES: Final[Mapping[str, tuple[int, int, int]]] = {
    "s8": (0, 8, 1), "s16": (0, 16, 1), "s32": (0, 32, 1), "s64": (0, 64, 1),
    "u8": (1, 8, 1), "u16": (1, 16, 1), "u32": (1, 32, 1), "u64": (1, 64, 1),
    "f16": (2, 16, 1), "f32": (2, 32, 1), "f64": (2, 64, 1), "bf16": (4, 16, 1), "bool": (6, 8, 1),
    "e4m3": (10, 8, 1), "e5m2": (12, 8, 1), "ue8m0": (14, 8, 1), "e2m1x2": (17, 4, 2),
}  # fmt: skip


SCALAR_FORMATS: Final[Mapping[str, str]] = {
    "bool": "<?", "u8": "<B", "s8": "<b", "u16": "<H", "s16": "<h", "u32": "<I", "s32": "<i", "b32": "<I", "f16": "<e",
    "f32": "<f", "u64": "<Q", "s64": "<q", "b64": "<Q", "f64": "<d",
}  # fmt: skip


def scalar_bytes(dtype: str, value: float) -> bytes:
    """The bytes of a parameter passed by value. HostError for an unknown dtype or a value that does not fit it."""
    if dtype not in SCALAR_FORMATS:
        raise HostError(f"a scalar argument of dtype {dtype!r}; known are {', '.join(SCALAR_FORMATS)}")
    try:
        return struct.pack(SCALAR_FORMATS[dtype], value)
    except (struct.error, OverflowError) as error:
        raise HostError(f"the value {value!r} does not fit a scalar argument of {dtype}: {error}") from None


def copy_from(address: int, size: int, what: str) -> bytes:
    """`size` bytes at `address` of this process. HostError instead of a crash where nothing is mapped."""
    if size == 0:
        return b""
    if address == 0:
        raise HostError(f"{what} is a null pointer; {counted(size, 'byte')} were to be read there")
    reader, writer = os.pipe()
    try:
        # write(2) fails on an unmapped address; reading it here would kill the process.
        parts = [_through(reader, writer, address + at, min(4096, size - at)) for at in range(0, size, 4096)]
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        raise HostError(f"{what} points to {address:#x}, where {counted(size, 'byte')} cannot be read") from None
    finally:
        os.close(reader)
        os.close(writer)
    return b"".join(parts)


def _through(reader: int, writer: int, address: int, size: int) -> bytes:
    os.write(writer, (ctypes.c_char * size).from_address(address))
    return os.read(reader, size)
