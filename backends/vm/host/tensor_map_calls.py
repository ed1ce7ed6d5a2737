"""cuTensorMapEncodeTiled as a runtime call: the driver's enumerations put into this machine's names."""

from __future__ import annotations

import ctypes
import struct

from backends.vm.host.abi import copy_from
from backends.vm.host.host_error import HostError
from backends.vm.host.runtime import Runtime
from backends.vm.host.symbols import INT, POINTER, UINT, answers
from backends.vm.tensor.tensor_map import MAP_BYTES, MAX_RANK, TensorMapError, encode_tensor_map

# CUtensorMapDataType and CUtensorMapSwizzle, in their order; measured on an H200 up to 12 (facts.md 6.3).
_DTYPES = (
    "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz", "b4x16",
    "b4x16_p64", "b6x16_p32",
)  # fmt: skip
_SWIZZLES = ("none", "32B", "64B", "128B", "128B_ATOM_32B", "128B_ATOM_32B_FLIP_8B", "128B_ATOM_64B")


@answers(
    "_cuTensorMapEncodeTiled",
    POINTER, INT, UINT, POINTER, POINTER, POINTER, POINTER, POINTER, INT, INT, INT, INT,
)  # fmt: skip
def encode_tiled(
    runtime: Runtime, tensor_map: int, dtype: int, rank: int, address: int, dims: int, strides: int, box: int,
    element_strides: int, interleave: int, swizzle: int, l2_promotion: int, oob_fill: int,
) -> None:  # fmt: skip
    """Write 128 bytes at `tensor_map`. HostError, as a sentence, for what the driver's encoder refuses."""
    if not 1 <= rank <= MAX_RANK:
        raise HostError(f"cuTensorMapEncodeTiled is asked for {rank} dimensions; 1 to {MAX_RANK} are possible")
    if interleave:
        raise HostError(f"cuTensorMapEncodeTiled is asked for interleave {interleave}; the VM has layouts without only")
    if not (0 <= dtype < len(_DTYPES) and 0 <= swizzle < len(_SWIZZLES) and oob_fill in (0, 1)):
        raise HostError(
            f"cuTensorMapEncodeTiled is called with data type {dtype}, swizzle {swizzle} and out-of-bounds fill "
            f"{oob_fill}; the VM knows types 0 to {len(_DTYPES) - 1}, swizzles 0 to {len(_SWIZZLES) - 1}, fills 0 and 1"
        )
    try:
        encoded = encode_tensor_map(
            address,
            _DTYPES[dtype],
            _numbers("Q", dims, rank, "dims"),
            _numbers("Q", strides, rank - 1, "strides"),
            _numbers("I", box, rank, "box"),
            swizzle=_SWIZZLES[swizzle],
            element_strides=_numbers("I", element_strides, rank, "element strides"),
            oob_fill="nan" if oob_fill else "zero",
            target="sm_100a" if runtime.device.target == "sm_100a" else "sm_90a",
        )
    except TensorMapError as refused:
        raise HostError(f"cuTensorMapEncodeTiled refuses: {refused}") from None
    ctypes.memmove(tensor_map, encoded, MAP_BYTES)


def _numbers(code: str, address: int, count: int, what: str) -> tuple[int, ...]:
    layout = struct.Struct(f"<{count}{code}")
    return layout.unpack(copy_from(address, layout.size, f"the {what} given to cuTensorMapEncodeTiled"))
