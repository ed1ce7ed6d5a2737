# pyright: reportMissingImports=false
"""NVFP4 weights become f16 in registers: eight codes of a word become one A fragment of m64nNk16, times their scales.

Each half of a word is for one of two neighbouring columns, and so for one of two blocks. It holds a code for each of
the fragment's registers A, B, C and D. CODE_MASK picks sign and magnitude, bits 15 and 11..9, of the word or of two
words combined by exclusive or. At these bits they are the f16 code * 2^-14, a subnormal for 0.5. Multiplying by block
scale * 2^7 gives code * scale * 2^-7, exactly: six significant bits, a multiple of 2^-17.

    A = word << 6,  B = word << 9,  C = word ^ word << 2,  D = word ^ word >> 3

This takes 12 instructions for eight codes. Four fields of a sign and three bits of magnitude cannot tile 16 bits by
shifts alone: two signs would need shifts and masks of their own, 15 instructions. The exclusive ors cost nothing,
because LOP3 takes three operands, and repack.py undoes them beforehand.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

CODE_MASK = 0x8E00_8E00
SHIFTS = ((6, False), (9, False), (2, True), (-3, True))
"""For A, B, C and D: how far the word moves to the left, and whether the word itself is combined with the result."""
SCALE_MASK = 0x7F80_7F80
"""The scales of row g in a word of block scales: bits 14 to 7 of the f16 scale * 2^7, one block in each half."""
OTHER_ROW = 8
"""Rotating the word to the left by so many bits brings the scales of row g + 8 there."""

BF16_MASK = 0x81C0_81C0
"""Sign and magnitude of a bf16 code * 2^-126. Multiplying by block scale * 2^119 gives the same number as in f16; block
scale * 2^126 would be more than bf16 holds."""
BF16_SCALE_SHIFT, BF16_SCALE_MASK, BF16_SCALE_BITS = 3, 0x0FF0_0FF0, 0x7000_7000
"""The same eight bits, shifted right, are bits 11 to 4 of the bf16 scale * 2^119, below three bits that are set."""


def row_scales(word: Uint32, bf16: bool) -> tuple[Uint32, Uint32]:
    """A pair for row g and a pair for row g + 8: block scales of two neighbouring blocks, f16 * 2^7 or bf16 * 2^119."""
    if bf16:
        row, other = (
            turned(word, turn - BF16_SCALE_SHIFT) & Uint32(BF16_SCALE_MASK) | Uint32(BF16_SCALE_BITS)
            for turn in (0, OTHER_ROW)
        )
        return row, other
    return word & Uint32(SCALE_MASK), turned(word, OTHER_ROW) & Uint32(SCALE_MASK)


def turned(word: Uint32, turn: int) -> Uint32:
    """`word` rotated to the left by `turn` bits, to the right if it is negative."""
    text = f"shf.l.wrap.b32 {{$w0}}, {{$r0}}, {{$r0}}, {turn % 32};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[word])


def times(a: Uint32, b: Uint32, kind: str = "f16x2") -> Uint32:
    """The product of two pairs of f16, or of bf16 if `kind` is bf16x2."""
    text = f"mul.rn.{kind} {{$w0}}, {{$r0}}, {{$r1}};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[a, b])


def fragment_word(word: Uint32, index: int) -> Uint32:
    """The two codes of `word` for A, B, C or D, as f16 * 2^-14."""
    shift, combined = SHIFTS[index]
    moved = word << shift if shift > 0 else word >> -shift
    return (moved ^ word if combined else moved) & Uint32(CODE_MASK)


def bf16_word(fragment: Uint32) -> Uint32:
    """The result of fragment_word with the magnitudes three bits lower: bf16 * 2^-126."""
    return (fragment | fragment >> 3) & Uint32(BF16_MASK)


@cute.jit
def unpack(rCodes: cute.Tensor, rScales: cute.Tensor, rA: cute.Tensor, bf16: cutlass.Constexpr):
    """Make rA (4, k-step) u32, the A fragments of a unit, from rCodes (k-step) u32 and rScales (k-step / 2) u32."""
    for pair in cutlass.range_constexpr(cute.size(rScales)):
        scales = row_scales(rScales[pair], bf16)
        for step in cutlass.range_constexpr(2 * pair, 2 * pair + 2):
            for index in cutlass.range_constexpr(4):
                fragment = fragment_word(rCodes[step], index)
                if cutlass.const_expr(bf16):
                    rA[index, step] = times(bf16_word(fragment), scales[index % 2], "bf16x2")
                else:
                    rA[index, step] = times(fragment, scales[index % 2])
