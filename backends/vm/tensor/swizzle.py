"""Shared-memory swizzles: bijections on byte addresses that TMA and the matrix descriptors have in common.

A swizzle XORs some of the address bits 9..7 into bits 6..4. It acts on the absolute shared address, so it does not
matter where a tile starts (measured on an H200 with starts at every multiple of 16 bytes; facts.md 3.1 and 3.2).
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

UNIT_BYTES = 16
"""No swizzle separates the bytes of an aligned 16-byte unit."""

PATTERN_BYTES = 1024
"""Every swizzle pattern repeats after this many bytes of shared memory."""


class Swizzle(Enum):
    """A swizzle mode (PTX ISA 5.5.7). The value is its spelling in specs and tensor maps.

    The 32-byte-atom mode with an 8-byte flip is omitted: the flipped lines are not documented.
    """

    NONE = "none"
    B32 = "32B"
    B64 = "64B"
    B128 = "128B"
    B128_ATOM_32B = "128B_ATOM_32B"
    B128_ATOM_64B = "128B_ATOM_64B"

    @property
    def span(self) -> int:
        """Bytes of shared memory within which units are permuted; 0 for no swizzle."""
        return _SPAN[self]


_SPAN = {
    Swizzle.NONE: 0,
    Swizzle.B32: 32,
    Swizzle.B64: 64,
    Swizzle.B128: 128,
    Swizzle.B128_ATOM_32B: 128,
    Swizzle.B128_ATOM_64B: 128,
}

# Mode -> (mask on the 128-byte line number, left shift of what it selects). PTX ISA 5.5.7, tables of each mode.
_LINE_MASK_AND_SHIFT = {
    Swizzle.NONE: (0, 4),
    Swizzle.B32: (1, 4),
    Swizzle.B64: (3, 4),
    Swizzle.B128: (7, 4),
    Swizzle.B128_ATOM_32B: (3, 5),
    Swizzle.B128_ATOM_64B: (1, 6),
}


def swizzled(mode: Swizzle, addresses: IntArray, base_offset: int = 0) -> IntArray:
    """The swizzled addresses of the bytes at linear `addresses` (absolute shared addresses, any shape).

    `base_offset` is the field of a matrix descriptor: it is subtracted from the 128-byte line number before the line
    selects a pattern (measured on an H200, facts.md 3.1). With `base_offset` 0 the map is its own inverse.
    """
    mask, shift = _LINE_MASK_AND_SHIFT[mode]
    if mask == 0:
        return addresses
    return addresses ^ ((((addresses >> 7) - base_offset) & mask) << shift)
