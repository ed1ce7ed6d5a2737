"""Memory that nobody has written since torch.empty handed it out: it still holds the noise that it was filled with.

The noise is random, so that whoever writes changes it: torch in place or through a view, NumPy, a copy, a kernel.
Nobody has to be asked. Memory of which one byte has changed counts as written, all of it: correct programs read the
padding of a buffer that they have filled in part, and drop what they compute from it.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

SMALLEST: Final = 8
"""Bytes. In less memory, what somebody writes may be the noise by chance: here with a probability of 2^-64."""
LARGEST: Final = 16 << 20
"""Bytes. Larger allocations are left alone: filling would commit memory that may never be used."""
_KEPT: Final = 4096
"""Allocations that are remembered. The oldest is forgotten, and then counts as written."""
_NOISE: Final = np.frombuffer(np.random.default_rng(0x6D656761).bytes(1 << 16), np.uint8)
_HANDED_OUT = OrderedDict[int, int]()
"""Sizes in bytes by address. A stale entry does no harm: memory that holds the noise was not written by its next owner
either."""


def hand_out(address: int, size: int) -> None:
    """Fills a new allocation of `size` bytes at `address` with noise, and remembers it."""
    if not SMALLEST <= size <= LARGEST:
        return
    memory = _memory(address, size)
    for start in range(0, size, _NOISE.size):
        memory[start : start + _NOISE.size] = _NOISE[: size - start]
    _HANDED_OUT[address] = size
    _HANDED_OUT.move_to_end(address)
    if len(_HANDED_OUT) > _KEPT:
        _HANDED_OUT.popitem(last=False)


def is_unwritten(address: int, size: int) -> bool:
    """Whether the allocation of `size` bytes at `address` was handed out and holds nothing but its noise."""
    if _HANDED_OUT.get(address) != size:
        return False
    memory = _memory(address, size)
    blocks = (memory[start : start + _NOISE.size] for start in range(0, size, _NOISE.size))
    if all(np.array_equal(block, _NOISE[: block.size]) for block in blocks):
        return True
    del _HANDED_OUT[address]
    return False


def _memory(address: int, size: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)
