"""How a bulk reduction combines the bytes in global memory with those that arrive (PTX ISA 9.7.9.25.4.2, 27.1.3)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault

_NUMPY = {"u8": "u1", "u16": "u2", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8", "f16": "f2", "f32": "f4",
          "f64": "f8", "b32": "u4", "b64": "u8", "f32_ftz": "f4"}  # fmt: skip


def _wrapping_increment(old: npt.NDArray[np.uint32], limit: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    return np.where(old >= limit, np.zeros_like(old), old + 1)


def _wrapping_decrement(old: npt.NDArray[np.uint32], limit: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    return np.where((old == 0) | (old > limit), limit, old - 1)


_COMBINE: dict[str, Callable[..., npt.NDArray[np.generic]]] = {
    "add": np.add, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "inc": _wrapping_increment, "dec": _wrapping_decrement,
}  # fmt: skip


def reduced(
    old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8], operation: str, element: str
) -> npt.NDArray[np.uint8]:
    """Bytes of `old OP new`, elementwise in the type of the tensor map; rounding is to nearest even."""
    if element == "bf16":
        wide = [np.left_shift(part.view(np.uint16).astype(np.uint32), 16).view(np.float32) for part in (old, new)]
        bits = _COMBINE[operation](*wide).astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8).reshape(new.shape)
    if element not in _NUMPY:
        raise Fault("bulk-copy", f"a reduction on elements of type {element} is not implemented")
    dtype = np.dtype(_NUMPY[element])
    return _COMBINE[operation](old.view(dtype), new.view(dtype)).astype(dtype).view(np.uint8).reshape(new.shape)
