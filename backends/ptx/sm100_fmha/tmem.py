"""Tensor memory addresses and the double buffers that live there."""

from __future__ import annotations

from backends.ptx.builder import Builder
from backends.ptx.operands import Register

LANE_QUARTER_SHIFT = 21
"""Warp w of a warpgroup reaches lanes 32 w to 32 w + 31; the lane is in bits 31..16 of an address (facts.md 1)."""


def buffer_of(x: Builder, tile: Register, role: str) -> tuple[Register, Register]:
    """Index and parity of the double buffer that `tile` uses: (tile & 1, tile >> 1 & 1)."""
    index = x.let(f"{role}_buffer", "and.b32", tile, 1)
    lap = x.let(f"{role}_lap", "shr.u32", tile, 1)
    return index, x.let(f"{role}_parity", "and.b32", lap, 1)


def tmem_address(x: Builder, name: str, base: Register, index: Register | int, stride: int) -> Register:
    """The tensor memory address `base + index * stride`, in the .b32 register that tcgen05.mma insists on."""
    address = x.reg(name, "b32")
    x.emit("mad.lo.u32", address, index, stride, base)
    return address
