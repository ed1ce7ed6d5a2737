"""Kernel parameters of a raw PTX launch: scalars, addresses and tensor maps as the bytes that the driver copies."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Final

from backends.gpu.tensor_map import encoded_map
from megamoe.contract import BufferArg, DeviceError, KernelArg, Launch, ScalarArg

SCALAR_FORMATS: Final[Mapping[str, str]] = {
    "bool": "<?", "u8": "<B", "s8": "<b", "u16": "<H", "s16": "<h", "u32": "<I", "s32": "<i", "b32": "<I", "f16": "<e",
    "f32": "<f", "u64": "<Q", "s64": "<q", "b64": "<Q", "f64": "<d",
}  # fmt: skip


class Parameters:
    """The parameters of one call in memory of this process. `address` is the void** that points to each of them."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        self.held = [ctypes.create_string_buffer(content, max(len(content), 1)) for content in contents]
        self._pointers = (ctypes.c_void_p * max(len(contents), 1))(*(ctypes.addressof(one) for one in self.held))
        self.address = ctypes.addressof(self._pointers)


def parameters_of(launch: Launch, addresses: Mapping[str, int]) -> Parameters:
    """The parameters of `launch`; `addresses` of tensors and scratch by name. DeviceError for what does not fit."""
    return Parameters([_encoded(arg, addresses) for arg in launch.args])


def _encoded(arg: KernelArg, addresses: Mapping[str, int]) -> bytes:
    if isinstance(arg, ScalarArg):
        return scalar_bytes(arg)
    address = address_of(arg.tensor, arg.offset, addresses)
    return struct.pack("<Q", address) if isinstance(arg, BufferArg) else encoded_map(arg, address)


def address_of(tensor: str, offset: int, addresses: Mapping[str, int]) -> int:
    """The address of byte `offset` of a tensor or scratch buffer. DeviceError if there is none of that name."""
    if tensor not in addresses:
        known = ", ".join(addresses) or "none"
        raise DeviceError(f"the program passes the tensor {tensor!r}, which was not given; there are: {known}")
    return addresses[tensor] + offset


def scalar_bytes(arg: ScalarArg) -> bytes:
    """The bytes of a scalar. DeviceError if its type is unknown or does not hold the value."""
    if arg.dtype not in SCALAR_FORMATS:
        raise DeviceError(f"a scalar argument of dtype {arg.dtype!r}; known are: {', '.join(SCALAR_FORMATS)}")
    try:
        return struct.pack(SCALAR_FORMATS[arg.dtype], arg.value)
    except (struct.error, OverflowError) as error:
        raise DeviceError(f"the value {arg.value!r} does not fit a scalar argument of {arg.dtype}: {error}") from None
