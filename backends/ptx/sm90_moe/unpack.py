"""NVFP4 weights become f16 in registers: eight codes of a word become one A fragment of m64nNk16, times their scales.

A half of a word, for one of two neighbouring columns, of two blocks: the magnitudes of A, B, C and D lie in bits 11..9,
8..6, 5..3 and 2..0, their signs in 15, 12, 14 and 13. Where A's lie, they are the f16 code * 2^-14, a subnormal for
0.5. A block scale times 2^7 brings it to code * scale * 2^-7, exactly: six significant bits, a multiple of 2^-17.

15 instructions for eight codes. All shifts are to the left, so that the multiplying pipe of an H200 does them; the
logic pipe, which the masks fill, would be the bottleneck. In bf16 two of them must be to the right.
"""

from __future__ import annotations

from backends.ptx.builder import Builder
from backends.ptx.operands import Register, Vector

CODE_MASK, MAGNITUDE_MASK, SIGN_MASK = 0x8E00_8E00, 0x0E00_0E00, 0x8000_8000
MAGNITUDE_SHIFTS, SIGN_SHIFTS = (0, 3, 6, 9), (0, 3, 1, 2)
"""To the left, of A, B, C and D; where both are the same, one mask does."""
SCALE_SHIFT = 7
"""A byte of a block scale is bits 14 to 7 of the f16 scale * 2^7."""
BYTES_0_AND_2, BYTES_1_AND_3 = 0x4240, 0x4341
"""Selectors of prmt: each of the two bytes in a half of its own, a byte of the other, zero operand above it."""


def row_scales(x: Builder, word: Register) -> tuple[Register, Register]:
    """f16 pairs: of row g and of row g + 8, the block scales of two neighbouring blocks, times 2^7."""
    pairs: list[Register] = []
    for selector in (BYTES_0_AND_2, BYTES_1_AND_3):
        pair = x.reg("scale_pair", "b32")
        x.emit("prmt.b32", pair, word, 0, selector)
        x.emit("shl.b32", pair, pair, SCALE_SHIFT)
        pairs.append(pair)
    return pairs[0], pairs[1]


def unpack(x: Builder, word: Register, scales: tuple[Register, Register], fragment: Vector) -> None:
    """The four registers of `fragment` from eight codes and the `scales` of rows g and g + 8."""
    for index, (register, shift, sign_shift) in enumerate(zip(fragment, MAGNITUDE_SHIFTS, SIGN_SHIFTS, strict=True)):
        x.emit("shl.b32", register, word, shift)
        if sign_shift == shift:
            x.emit("and.b32", register, register, CODE_MASK)
        else:
            sign = x.reg("sign", "b32")
            x.emit("shl.b32", sign, word, sign_shift)
            x.emit("and.b32", sign, sign, SIGN_MASK)
            x.emit("and.b32", register, register, MAGNITUDE_MASK)
            x.emit("or.b32", register, register, sign)
        x.emit("mul.rn.f16x2", register, register, scales[index % 2])
