"""Kernel parameters of a raw PTX launch, as the bytes that the driver copies: scalars, addresses and tensor maps.

The driver itself encodes tensor maps: cuTensorMapEncodeTiled (CUDA driver API, tensor map object management).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Final

from backends.gpu.driver import described, driver, driver_library
from megamoe.contract import BufferArg, DeviceError, KernelArg, Launch, ScalarArg, TensorMapArg

SCALAR_FORMATS: Final[Mapping[str, str]] = {
    "bool": "<?", "u8": "<B", "s8": "<b", "u16": "<H", "s16": "<h", "u32": "<I", "s32": "<i", "b32": "<I", "f16": "<e",
    "f32": "<f", "u64": "<Q", "s64": "<q", "b64": "<Q", "f64": "<d",
}  # fmt: skip
MAP_BYTES: Final = 128
ALIGNMENT: Final = 64
# dtype of the spec -> CUtensorMapDataType. b4x16 and its like are the packed types of PTX ISA, section 5.5.1.
_TYPES: Final[Mapping[str, str]] = {
    "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "s32": "INT32", "u64": "UINT64", "s64": "INT64",
    "f16": "FLOAT16", "f32": "FLOAT32", "f32_ftz": "FLOAT32_FTZ", "f64": "FLOAT64", "bf16": "BFLOAT16",
    "tf32": "TFLOAT32", "tf32_ftz": "TFLOAT32_FTZ", "b4x16": "16U4_ALIGN8B", "b4x16_p64": "16U4_ALIGN16B",
    "b6x16_p32": "16U6_ALIGN16B",
}  # fmt: skip
_SWIZZLES: Final = ("none", "32B", "64B", "128B")
_FILLS: Final[Mapping[str, str]] = {"zero": "NONE", "nan": "NAN_REQUEST_ZERO_FMA"}


class PackedParameters:
    """The parameters of one call, in host memory. `address` is the void** that points to each of them."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        self.held = [ctypes.create_string_buffer(content, max(len(content), 1)) for content in contents]
        self._pointers = (ctypes.c_void_p * max(len(contents), 1))(*(ctypes.addressof(one) for one in self.held))
        self.address = ctypes.addressof(self._pointers)


def parameters_of(launch: Launch, addresses: Mapping[str, int]) -> PackedParameters:
    """The parameters of `launch`. `addresses`: of tensors and scratch, by name. DeviceError for a value that does not
    fit or a tensor that was not given."""
    return PackedParameters([_encoded(arg, addresses) for arg in launch.args])


def _encoded(arg: KernelArg, addresses: Mapping[str, int]) -> bytes:
    if isinstance(arg, ScalarArg):
        return scalar_bytes(arg)
    address = address_of(arg.tensor, arg.offset, addresses)
    return struct.pack("<Q", address) if isinstance(arg, BufferArg) else encoded_map(arg, address)


def address_of(tensor: str, offset: int, addresses: Mapping[str, int]) -> int:
    """The address of byte `offset` of a tensor or scratch buffer. DeviceError for an unknown name."""
    if tensor not in addresses:
        known = ", ".join(addresses) or "none"
        raise DeviceError(f"the program passes the tensor {tensor!r}, which was not given; there are: {known}")
    return addresses[tensor] + offset


def scalar_bytes(arg: ScalarArg) -> bytes:
    """The bytes of a scalar. DeviceError for an unknown type or a value that the type does not hold."""
    if arg.dtype not in SCALAR_FORMATS:
        raise DeviceError(f"a scalar argument of dtype {arg.dtype!r}; known are: {', '.join(SCALAR_FORMATS)}")
    try:
        return struct.pack(SCALAR_FORMATS[arg.dtype], arg.value)
    except (struct.error, OverflowError) as error:
        raise DeviceError(f"the value {arg.value!r} does not fit a scalar argument of {arg.dtype}: {error}") from None


def encoded_map(arg: TensorMapArg, address: int) -> bytes:
    """The 128-byte tensor map of `arg` at `address`. DeviceError, with all that was asked, if the driver refuses."""
    types, swizzle, promotion, fill, interleave = _codes(arg)
    rank = len(arg.dims)
    if len(arg.strides) != rank - 1 or len(arg.box) != rank:
        raise DeviceError(f"{_asked(arg, address)}: dims and box need one entry a dimension, strides one fewer")
    # cuda.bindings aligns its CUtensorMap to 16 bytes; the driver wants 64.
    room = ctypes.create_string_buffer(MAP_BYTES + ALIGNMENT)
    place = -(-ctypes.addressof(room) // ALIGNMENT) * ALIGNMENT
    code = driver_library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        ctypes.c_int(types),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*arg.dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*arg.strides),
        (ctypes.c_uint32 * rank)(*arg.box),
        (ctypes.c_uint32 * rank)(*(arg.element_strides or (1,) * rank)),
        ctypes.c_int(interleave),
        ctypes.c_int(swizzle),
        ctypes.c_int(promotion),
        ctypes.c_int(fill),
    )
    if code:
        returned = described(driver().CUresult(code))
        raise DeviceError(f"cuTensorMapEncodeTiled returned {returned} while encoding {_asked(arg, address)}")
    return ctypes.string_at(place, MAP_BYTES)


def _codes(arg: TensorMapArg) -> tuple[int, int, int, int, int]:
    if arg.dtype not in _TYPES:
        raise DeviceError(f"a tensor map of {arg.tensor!r} with dtype {arg.dtype!r}; known are: {', '.join(_TYPES)}")
    if arg.swizzle not in _SWIZZLES:
        raise DeviceError(f"a tensor map of {arg.tensor!r} with swizzle {arg.swizzle!r}; known are: {_SWIZZLES}")
    cu = driver()
    return (
        int(getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[arg.dtype]}")),
        int(getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{arg.swizzle.upper()}")),
        int(cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B),
        int(getattr(cu.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{_FILLS[arg.oob_fill]}")),
        int(cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
    )


def _asked(arg: TensorMapArg, address: int) -> str:
    return (
        f"the tensor map of {arg.tensor!r} at {address:#x}: {arg.dtype}, dims {arg.dims}, strides {arg.strides} bytes, "
        f"box {arg.box}, element strides {arg.element_strides or 'of one'}, swizzle {arg.swizzle}"
    )
