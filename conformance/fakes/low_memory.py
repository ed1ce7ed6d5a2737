"""Memory below 2 ** 32. Debian's Python is no position-independent executable, so that its heap lies there."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

_READ_AND_WRITE, _PRIVATE, _ANONYMOUS, _BELOW_2_GIB = 3, 0x02, 0x20, 0x40


def low_memory(elements: int) -> npt.NDArray[np.float32]:
    """An array of zeros. It is never given back."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_size_t
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    size = -(-4 * elements // mmap.PAGESIZE) * mmap.PAGESIZE
    address = libc.mmap(None, size, _READ_AND_WRITE, _PRIVATE | _ANONYMOUS | _BELOW_2_GIB, -1, 0)
    assert address < 1 << 32, f"no memory below 2 ** 32: {address:#x}"
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.float32)[:elements]
