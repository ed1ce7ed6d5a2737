"""NVFP4 weights become f16 in registers: eight codes of a word become one A fragment of m64nNk16, times their scales.

Each half of a word belongs to one of two neighbouring columns, so to one of two blocks, and holds a code of each of the
fragment's registers A, B, C and D. CODE_MASK picks sign and magnitude, bits 15 and 11..9, of the word or of two words
combined by exclusive or; in those bits they are the f16 code * 2^-14, a subnormal for 0.5. A block scale times 2^7
makes that code * scale * 2^-7, exactly: six significant bits, a multiple of 2^-17.

    A = word << 6,  B = word << 9,  C = word ^ word << 2,  D = word ^ word >> 3

That is 12 instructions for eight codes. Fields of a sign and, four bits lower, three bits of magnitude do not tile 16
bits by shifts alone: two signs would need shifts and masks of their own, 15 instructions. The exclusive ors are free
because LOP3 takes three operands, and repack.py undoes them beforehand.
"""

from __future__ import annotations

from backends.ptx.builder import Builder
from backends.ptx.operands import Register, Vector

CODE_MASK = 0x8E00_8E00
SHIFTS = ((6, False), (9, False), (2, True), (-3, True))
"""For A, B, C and D: how far the word moves left, and whether the word itself is combined with that."""
XOR_THEN_MASK = 0x28
"""lop3: (a ^ b) & c (PTX ISA, "lop3")."""
SCALE_SHIFT = 7
"""A byte of a block scale is bits 14 to 7 of the f16 scale * 2^7."""
BYTES_0_AND_2, BYTES_1_AND_3 = 0x4240, 0x4341
"""Selectors of prmt: each of the two bytes in its own half, with a byte of the other, zero operand above it."""


BF16_MASK, BF16_SHIFT = 0x81C0_81C0, 3
"""Sign and magnitude of a bf16 code * 2^-126, whose magnitude is 3 bits below f16's. A block scale times 2^119 makes it
the same number as in f16; times 2^126 it would exceed bf16."""
BF16_SCALE_SHIFT, BF16_SCALE_BITS = 4, 0x7000_7000
"""The same byte is bits 11 to 4 of the bf16 scale * 2^119, below three bits that are set."""


def row_scales(x: Builder, word: Register, operand: str) -> tuple[Register, Register]:
    """Pairs, for row g and for row g + 8: the block scales of two neighbouring blocks, f16 * 2^7 or bf16 * 2^119."""
    pairs: list[Register] = []
    for selector in (BYTES_0_AND_2, BYTES_1_AND_3):
        pair = x.reg("scale_pair", "b32")
        x.emit("prmt.b32", pair, word, 0, selector)
        x.emit("shl.b32", pair, pair, BF16_SCALE_SHIFT if operand == "bf16" else SCALE_SHIFT)
        if operand == "bf16":
            x.emit("or.b32", pair, pair, BF16_SCALE_BITS)
        pairs.append(pair)
    return pairs[0], pairs[1]


def unpack(x: Builder, word: Register, scales: tuple[Register, Register], fragment: Vector, operand: str) -> None:
    """Unpacks eight codes into the four registers of `fragment`, pairs of `operand`. `scales`: of rows g and g + 8."""
    for index, (register, (shift, combined)) in enumerate(zip(fragment, SHIFTS, strict=True)):
        x.emit("shl.b32" if shift > 0 else "shr.u32", register, word, abs(shift))
        if combined:
            x.emit("lop3.b32", register, register, word, CODE_MASK, XOR_THEN_MASK)
        else:
            x.emit("and.b32", register, register, CODE_MASK)
        if operand == "bf16":
            lower = x.let("lower", "shr.u32", register, BF16_SHIFT)
            x.emit("or.b32", register, register, lower)
            x.emit("and.b32", register, register, BF16_MASK)
        x.emit(f"mul.rn.{operand}x2", register, register, scales[index % 2])
