# pyright: reportMissingImports=false
"""Weights are repacked into the order in which wgmma reads A, once, before the first call.

A thread makes the 16 bytes of codes of one lane in one unit: for each of four k-steps the eight codes of its A fragment
of m64nNk16, rows g and g + 8, columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 (PTX ISA, "Register Fragments for
wgmma.mma_async.m64nNk16"). Even columns belong to one block of 16, odd columns to the next. The eight codes are placed
so that shifts, masks and exclusive ors turn them into f16 (unpack.py). Rows g of w1 are gates and rows g + 8 the ups of
the same outputs, whatever the interleave. Rows g and g + 8 of w2 are neighbours in memory, so an epilogue thread has
two neighbouring elements of rows.

Lane 0 of each row pair also makes 8 bytes of block scales. A scale has 5 bits of exponent and 3 of mantissa, which hold
every e4m3 number without subnormals: bits 14 to 7 of the f16 scale * 2^7. The scales of row g are at these bits, one
block in each half of a word. The scales of row g + 8 are in the same word, rotated to the right by eight bits. There is
no zero, so codes under a zero scale become zeros.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from backends.cutedsl.moe.nvfp4 import Nvfp4, scale_word
from backends.cutedsl.sm90_moe.expand import scale_pair
from backends.cutedsl.sm90_moe.plan import BLOCK_BYTES, BLOCKS, CODES_BYTES, LANE_BYTES, PAIR_BYTES, PANEL_ROWS, UNIT_K
from backends.cutedsl.sm90_moe.unpack import OTHER_ROW, SCALE_MASK, turned

THREADS = 2 * PANEL_ROWS
UNIT_WORDS = UNIT_K // 8
FIELDS = (((0x8, 6), (0x7, 3)), ((0x8, 3), (0x7, 0)), ((0x8, 10), (0x4, 9), (0x3, 7)), ((0xD, 12), (0x2, 9)))
"""For A, B, C and D: which bits of a code move left by how much, in its half of the word."""
COMBINED = (
    *((-3, 0x0000_8000), (-2, 0x2080_2080), (2, 0x0800_0800)),
    *((3, 0x5000_5000), (-3, 0x0400_0400), (-2, 0x0100_0100)),
)
"""Exclusive ors that undo those of unpack.py, in this order: how far the word moves to the left, which bits change."""
SCALE_REBIAS = 0x1C00_1C00
"""Adds 7 to the exponent, above 10 bits of mantissa."""


@cute.jit
def load_row(w: Nvfp4, row: Int32, unit: Int32, rWords: cute.Tensor) -> Uint32:
    """Load the codes of a unit of `row` into rWords (8) u32, zeros under a zero scale; returns the scales."""
    row_bytes = w.codes.shape[-1]
    offset = cute.assume(Int64(row) * row_bytes + unit * (UNIT_K // 2), divby=UNIT_K // 2)
    words = cute.recast_ptr(w.codes.iterator + offset, dtype=Uint32)
    cute.autovec_copy(cute.make_tensor(words, cute.make_layout(UNIT_WORDS)), rWords)
    scales = Uint32(scale_word(w.sf, row, w.sf.shape[-2], unit)[0])
    for word in cutlass.range_constexpr(UNIT_WORDS):
        scale = scales >> (8 * (word // 2)) & Uint32(0xFF)
        rWords[word] = cutlass.select_(scale == Uint32(0), Uint32(0), rWords[word])
    return scales


def code_pair(rWords: cute.Tensor, first: int, element: Uint32) -> Uint32:
    """Code `element` of word `first` and, in the upper half, of the same word of the next block."""
    low, high = rWords[first] >> (element << 2) & Uint32(0xF), rWords[first + 2] >> (element << 2) & Uint32(0xF)
    return low | high << 16


def placed(pair: Uint32, field: int) -> Uint32:
    """Two codes, moved to the bits of A, B, C or D."""
    word = Uint32(0)
    for bits, shift in FIELDS[field]:
        word = word | (pair & Uint32(bits << 16 | bits)) << shift
    return word


def uncombined(word: Uint32) -> Uint32:
    """`word` with the bits that unpack.py combines changed so that the combination gives the original bits."""
    for shift, changed in COMBINED:
        word = word ^ (word << shift if shift > 0 else word >> -shift) & Uint32(changed)
    return word


def scale_words(scales: Uint32) -> tuple[Uint32, Uint32]:
    """Four block scales as two words of two neighbouring blocks each, the bits of unpack.SCALE_MASK."""
    low, high = (scale_pair(half) + Uint32(SCALE_REBIAS) & Uint32(SCALE_MASK) for half in (scales, scales >> 16))
    return low, high


@cute.kernel
def repack_kernel(w: Nvfp4, mPacked: cute.Tensor, interleave_log2: Int32):
    """Write mPacked u8 from `w`. Grid: panels of all experts, units of 64 along K.

    `interleave_log2`: log2 of w1's interleave of gate and up; 0 for w2.
    """
    thread, _, _ = cute.arch.thread_idx()
    panel, unit, _ = cute.arch.block_idx()
    _, units, _ = cute.arch.grid_dim()
    group, lane = thread // 32, thread % 32
    quad, quad_lane = lane // 4, Uint32(lane % 4)
    output = panel * (PANEL_ROWS // 2) + group * 8 + quad
    row = output + (output >> interleave_log2 << interleave_log2)
    rRow, rOther = (cute.make_rmem_tensor(UNIT_WORDS, Uint32) for _ in range(2))
    scales = load_row(w, row, unit, rRow)
    other_scales = load_row(w, row + (1 << interleave_log2), unit, rOther)
    rPacked = cute.make_rmem_tensor(LANE_BYTES // 4, Uint32)
    for step in cutlass.range_constexpr(LANE_BYTES // 4):
        first = step // 2 * 4 + step % 2
        word = Uint32(0)
        for field in cutlass.range_constexpr(4):
            words = rRow if field % 2 == 0 else rOther
            word = word | placed(code_pair(words, first, quad_lane + 4 * (field // 2)), field)
        rPacked[step] = uncombined(word)
    block = (Int64(panel) * units + unit) * BLOCKS + group // 4
    place = block * BLOCK_BYTES + (group % 4 * 32 + lane) * LANE_BYTES
    target = cute.recast_ptr(mPacked.iterator + cute.assume(place, divby=LANE_BYTES), dtype=Uint32)
    cute.autovec_copy(rPacked, cute.make_tensor(target, cute.make_layout(LANE_BYTES // 4)))
    if lane % 4 == 0:
        rScales = cute.make_rmem_tensor(2, Uint32)
        for half in cutlass.range_constexpr(2):
            rScales[half] = scale_words(scales)[half] | turned(scale_words(other_scales)[half], -OTHER_ROW)
        pair = block * BLOCK_BYTES + CODES_BYTES + (group % 4 * 8 + quad) * PAIR_BYTES
        pairs = cute.recast_ptr(mPacked.iterator + cute.assume(pair, divby=PAIR_BYTES), dtype=Uint32)
        cute.autovec_copy(rScales, cute.make_tensor(pairs, cute.make_layout(2)))
