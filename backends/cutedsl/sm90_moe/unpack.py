# pyright: reportMissingImports=false
"""NVFP4 weights become f16 in registers: eight codes of a word become one A fragment of m64nNk16, times their scales.

A half of a word, for one of two neighbouring columns, of two blocks: the magnitudes of A, B, C and D lie in bits 11..9,
8..6, 5..3 and 2..0, their signs in 15, 12, 14 and 13. Where A's lie, they are the f16 code * 2^-14, a subnormal for
0.5. A block scale times 2^7 brings it to code * scale * 2^-7, exactly: six significant bits, a multiple of 2^-17.

All shifts are to the left, so that the multiplying pipe of an H200 does them; the logic pipe, which the masks fill,
would be the bottleneck.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

CODE_MASK, MAGNITUDE_MASK, SIGN_MASK = 0x8E00_8E00, 0x0E00_0E00, 0x8000_8000
MAGNITUDE_SHIFTS, SIGN_SHIFTS = (0, 3, 6, 9), (0, 3, 1, 2)
"""To the left, of A, B, C and D; where both are the same, one mask does."""
SCALE_SHIFT = 7
"""A byte of a block scale is bits 14 to 7 of the f16 scale * 2^7."""
BYTES_0_AND_2, BYTES_1_AND_3 = 0x4240, 0x4341
"""Selectors of prmt: each of the two bytes in a half of its own, a byte of the other, zero operand above it."""


def row_scales(word: Uint32) -> tuple[Uint32, Uint32]:
    """f16 pairs: of row g and of row g + 8, the block scales of two neighbouring blocks, times 2^7."""
    picked = tuple(Uint32(cute.arch.prmt(word, 0, selector)) for selector in (BYTES_0_AND_2, BYTES_1_AND_3))
    return picked[0] << SCALE_SHIFT, picked[1] << SCALE_SHIFT


def times(a: Uint32, b: Uint32) -> Uint32:
    """The product of two pairs of f16."""
    return cute.arch.inline_ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def fragment_word(word: Uint32, index: int) -> Uint32:
    """Two codes of `word`, those of A, B, C or D, as f16 * 2^-14."""
    shift, sign_shift = MAGNITUDE_SHIFTS[index], SIGN_SHIFTS[index]
    if shift == sign_shift:
        return (word << shift) & Uint32(CODE_MASK)
    return (word << shift) & Uint32(MAGNITUDE_MASK) | (word << sign_shift) & Uint32(SIGN_MASK)


@cute.jit
def unpack(rCodes: cute.Tensor, rScales: cute.Tensor, rA: cute.Tensor):
    """rA (4, k-step) u32, the A fragments of a unit, from rCodes (k-step) u32 and rScales (k-step / 2) u32."""
    for pair in cutlass.range_constexpr(cute.size(rScales)):
        scales = row_scales(rScales[pair])
        for step in cutlass.range_constexpr(2 * pair, 2 * pair + 2):
            for index in cutlass.range_constexpr(4):
                rA[index, step] = times(fragment_word(rCodes[step], index), scales[index % 2])
