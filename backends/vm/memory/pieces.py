"""Pieces of one size at many places of a memory: copying whole elements costs a quarter of copying their bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.vm.numpy_calls import count_nonzero

_ELEMENTS = {size: np.dtype(name) for size, name in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"), (16, "V16"))}


def read_pieces(memory: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.uint8]:
    """The `size` bytes of `memory` (uint8, contiguous) at each of `offsets` [n]: uint8 [n, size].

    Fastest for 1 to 16 bytes when the length of `memory` and all offsets are multiples of `size`. The caller has
    checked bounds.
    """
    element = _element(memory, offsets, size)
    if element is None:
        return memory[offsets[:, None] + np.arange(size)]
    return memory.view(element)[offsets // size].view(np.uint8).reshape(-1, size)


def write_pieces(memory: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], pieces: npt.NDArray[np.uint8]) -> None:
    """Write uint8 [n, size] (contiguous) to `memory` at `offsets` [n]; the inverse of `read_pieces`."""
    size = pieces.shape[1]
    element = _element(memory, offsets, size)
    if element is None:
        memory[offsets[:, None] + np.arange(size)] = pieces
    else:
        memory.view(element)[offsets // size] = pieces.view(element)[:, 0]


def _element(memory: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], size: int) -> np.dtype[np.generic] | None:
    """The element type to read `memory` with; None if only bytes work."""
    element = _ELEMENTS.get(size)
    return None if element is None or memory.size % size or count_nonzero(offsets & size - 1) else element
