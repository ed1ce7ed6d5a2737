"""Reorders weights as the first operand of wgmma reads them, once, before the first call.

A thread makes the 16 bytes of codes of one lane in one unit: for each of four k-steps the eight codes of its A fragment
of m64nNk16, rows g and g + 8, columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 (PTX ISA, "Register Fragments for
wgmma.mma_async.m64nNk16"). Even columns belong to one block of 16, odd ones to the next. The eight codes are placed so
that shifts, masks and exclusive ors turn them into f16 (unpack.py). Rows g are gates and rows g + 8 the ups of the same
outputs, whatever the interleave of w1; w2 keeps its order.

Lane 0 of each row pair also makes 8 bytes of block scales. A byte has 5 bits of exponent and 3 of mantissa, which hold
every nonzero e4m3 without subnormals: bits 14 to 7 of the f16 scale * 2^7. There is no byte for zero, so codes under a
zero scale become zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from backends.ptx.builder import CTAID_X, CTAID_Y, TID_X, Builder
from backends.ptx.moe.layout import ATOM_BYTES
from backends.ptx.moe.requantise import word_in_atom
from backends.ptx.operands import Register, Vector, at
from backends.ptx.parameters import U32, Parameters, Pointer
from backends.ptx.sm90_moe.expand import HALVES
from backends.ptx.sm90_moe.geometry import (
    BLOCK_BYTES,
    CODES_BYTES,
    LANE_BYTES,
    PANEL_ROWS,
    SCALE_BYTES,
    UNIT_BYTES,
    UNIT_K,
    UNIT_STEPS,
)

ENTRY = "moe_repack"
THREADS = 256
SEGMENT_WORDS = UNIT_K // 8
PER_VECTOR = 4
XOR_OF_MASKED = 0x78
"""lop3: a ^ (b & c) (PTX ISA, "lop3")."""
SCALE_REBIAS = 0x0038_0038
"""Adds 7 to the exponent, which starts above 3 bits of mantissa."""


@dataclass(frozen=True, slots=True)
class RepackParams(Parameters):
    """`codes`, `sf`: weights in the spec's layout. `packed`: see geometry.py. `row_bytes`: bytes of codes per row.
    `units`: along K. `interleave_log2`: of gate and up, 3 without an interleave."""

    codes: Pointer
    sf: Pointer
    packed: Pointer
    row_bytes: U32
    units: U32
    interleave_log2: U32


@dataclass(frozen=True, slots=True)
class _Row:
    """One of the two rows of a thread in a unit: eight words of codes, one word of block scales."""

    words: Vector
    scales: Register


@cache
def repack_kernel(version: tuple[int, int]) -> Builder:
    """Grid: (panels of all experts, units). An expert has whole panels, so panels are numbered across all experts."""
    x = Builder(ENTRY, target="sm_90a", version=version, block=THREADS)
    x.header(["Weights in the order of wgmma's A fragments, codes and block scales; one CTA a panel and unit."])
    params = RepackParams.declare(x)
    x.section("which rows")
    thread = x.let("thread", "mov.u32", TID_X)
    panel, unit = x.let("panel", "mov.u32", CTAID_X), x.let("unit", "mov.u32", CTAID_Y)
    group = x.let("group", "shr.u32", thread, 5, note="16 rows of the panel")
    lane = x.let("lane", "and.b32", thread, 31)
    quad, quad_lane = x.let("quad", "shr.u32", lane, 2), x.let("quad_lane", "and.b32", lane, 3)
    gate, up = _rows_of(x, params, panel, x.let("output", "mad.lo.u32", group, 8, quad))
    rows = [_load(x, params, row, unit) for row in (gate, up)]
    x.section("codes")
    words = _code_words(x, rows, quad_lane)
    block = _block_of(x, params, panel, unit, group)
    warp = x.let("warp", "and.b32", group, 3)
    lane_at = x.let("warp_lane", "mad.lo.u32", warp, 32, lane)
    x.emit("st.global.v4.b32", at(x.indexed_wide("codes_at", block, lane_at, LANE_BYTES)), words)
    x.section("block scales")
    pairs = [_scale_bytes(x, row.scales) for row in rows]
    scales = [_interleaved(x, low, high) for low, high in zip(*pairs, strict=True)]
    pair_at = x.let("row_pair", "mad.lo.u32", warp, 8, quad)
    is_first = x.let("is_first", "setp.eq.u32", quad_lane, 0)
    place = at(x.indexed_wide("pair_at", block, pair_at, SCALE_BYTES), CODES_BYTES)
    x.emit("st.global.v2.b32", place, tuple(scales), guard=is_first)
    x.emit("ret")
    return x


def _rows_of(x: Builder, params: RepackParams, panel: Register, output: Register) -> tuple[Register, Register]:
    """The rows, numbered across all experts, of gate and up of an output of this panel."""
    x.comment("Output j of gate and up at interleave i: rows 2 i (j / i) + j % i and i more.")
    x.emit("mad.lo.u32", output, panel, PANEL_ROWS // 2, output)
    turn = x.let("turn", "shr.u32", output, params.interleave_log2)
    x.emit("shl.b32", turn, turn, params.interleave_log2)
    gate = x.let("gate_row", "add.u32", output, turn)
    width = x.let("width", "mov.b32", 1)
    x.emit("shl.b32", width, width, params.interleave_log2)
    return gate, x.let("up_row", "add.u32", gate, width)


def _load(x: Builder, params: RepackParams, row: Register, unit: Register) -> _Row:
    codes = x.let("row_at", "mul.wide.u32", row, params.row_bytes)
    x.emit("add.s64", codes, codes, params.codes)
    x.emit("mad.wide.u32", codes, unit, UNIT_K // 2, codes)
    words = x.regs("word", "b32", SEGMENT_WORDS)
    for first in range(0, SEGMENT_WORDS, PER_VECTOR):
        x.emit("ld.global.v4.b32", words[first : first + PER_VECTOR], at(codes, 4 * first))
    atom = x.let("atom", "shr.u32", row, 7)
    x.emit("mad.lo.u32", atom, atom, params.units, unit)
    scale = x.indexed_wide("atom_at", params.sf, atom, ATOM_BYTES)
    inside = word_in_atom(x, x.let("row_in_atom", "and.b32", row, 127))
    x.emit("add.s64", scale, scale, inside)
    return _Row(words, x.let("scales", "ld.global.b32", at(scale)))


def _code_words(x: Builder, rows: list[_Row], quad_lane: Register) -> Vector:
    """One word per k-step. A, B, C, D are rows g, g + 8, g, g + 8. A and B are elements t, C and D elements t + 4 of
    the eight that two neighbouring blocks have in a k-step."""
    shift = x.let("element_shift", "shl.b32", quad_lane, 2)
    for row in rows:
        _drop_zero_blocks(x, row)
    words: list[Register] = []
    for step in range(UNIT_STEPS):
        first = step // 2 * 4 + step % 2
        word = x.let("packed_word", "mov.b32", 0)
        for index, row in enumerate(rows):
            blocks = [x.let("eight", "shr.u32", row.words[first + 2 * block], shift) for block in range(2)]
            for half in range(2):
                _place(x, word, _pair(x, blocks, half), 2 * half + index)
        _combine(x, word)
        words.append(word)
    return tuple(words)


def _drop_zero_blocks(x: Builder, row: _Row) -> None:
    """Clears the codes of blocks whose scale is zero."""
    scale, is_zero = x.reg("block_scale", "b32"), x.reg("is_zero", "pred")
    for block in range(len(row.words) // 2):
        x.emit("and.b32", scale, row.scales, 0xFF << 8 * block)
        x.emit("setp.eq.u32", is_zero, scale, 0)
        for word in row.words[2 * block : 2 * block + 2]:
            x.emit("selp.b32", word, 0, word, is_zero)


def _pair(x: Builder, blocks: list[Register], half: int) -> Register:
    """Half 0 or 1 of two words: the first word's half in bits 0 to 15, the other's in bits 16 to 31. The code is the
    lowest four bits of each; no field reads the bits above it."""
    return x.let("pair", "prmt.b32", *blocks, HALVES[half])


_FIELDS = (((0x8, 6), (0x7, 3)), ((0x8, 3), (0x7, 0)), ((0x8, 10), (0x4, 9), (0x3, 7)), ((0xD, 12), (0x2, 9)))
"""For A, B, C and D: which bits of a code move left by how much, in its half of the word."""
_COMBINED = (
    *((-3, 0x0000_8000), (-2, 0x2080_2080), (2, 0x0800_0800)),
    *((3, 0x5000_5000), (-3, 0x0400_0400), (-2, 0x0100_0100)),
)
"""Exclusive ors that undo those of unpack.py, in this order: how far the word moves left, which bits change."""


def _place(x: Builder, word: Register, pair: Register, fragment: int) -> None:
    """Adds two codes to `word`, one to each half."""
    for bits, shift in _FIELDS[fragment]:
        field = x.let("field", "and.b32", pair, bits << 16 | bits)
        x.emit("mad.lo.u32", word, field, 1 << shift, word)


def _combine(x: Builder, word: Register) -> None:
    """Pre-distorts the bits that unpack.py combines with others, so that the combination gives the intended bit."""
    moved = x.reg("moved", "b32")
    for shift, changed in _COMBINED:
        x.emit("shl.b32" if shift > 0 else "shr.u32", moved, word, abs(shift))
        x.emit("lop3.b32", word, word, moved, changed, XOR_OF_MASKED)


def _scale_bytes(x: Builder, scales: Register) -> Vector:
    """Four block scales as two words: bytes 0 and 2 hold the scales of two neighbouring blocks."""
    pairs = x.regs("sf_pair", "b16", 2)
    x.emit("mov.b32", pairs, scales)
    words: list[Register] = []
    for pair in pairs:
        word = x.let("sf_bytes", "cvt.rn.f16x2.e4m3x2", pair)
        x.emit("shr.u32", word, word, 7)
        x.emit("and.b32", word, word, 0x00FF_00FF)
        x.emit("add.u32", word, word, SCALE_REBIAS)
        words.append(word)
    return tuple(words)


def _interleaved(x: Builder, row: Register, row_8: Register) -> Register:
    return x.let("sf_word", "mad.lo.u32", row_8, 256, row)


def _block_of(x: Builder, params: RepackParams, panel: Register, unit: Register, group: Register) -> Register:
    """The address of the block of BLOCK_BYTES that contains this group of rows."""
    index = x.let("unit_index", "mul.wide.u32", panel, params.units)
    x.emit("add.s64", index, index, x.let("unit_wide", "cvt.u64.u32", unit))
    x.emit("mad.lo.u64", index, index, UNIT_BYTES, params.packed)
    warpgroup = x.let("warpgroup", "shr.u32", group, 2)
    return x.indexed_wide("block", index, warpgroup, BLOCK_BYTES)
