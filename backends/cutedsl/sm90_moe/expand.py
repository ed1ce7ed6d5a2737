# ruff: noqa: N815
# pyright: reportMissingImports=false
"""Activations are expanded to 16 bits once, in the order of the column tiles and swizzled for wgmma.

Two blocks of 16 codes and their block scales become 64 bytes, interleaved element by element: code * scale * 2^-7 in
f16, exact. bf16 elements keep their values and are interleaved the same way. The rows of the first GEMM are gathered
from the tokens here, with a table of factors: row r of its accumulators is multiplied by x_gs * w1_gs * 2^14, or by
w1_gs * 2^7 if tokens are bf16. Rows that only fill up a column tile are not written: nothing reads their columns of the
product.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from backends.cutedsl.moe.layout import SF_VEC_SIZE
from backends.cutedsl.moe.nvfp4 import Nvfp4, scale_offset
from backends.cutedsl.sm90_moe.plan import ROW_BYTES, UNIT_K, result_factor
from backends.cutedsl.sm90_moe.schedule import count_and_entry
from backends.cutedsl.sm90_moe.unpack import times

THREADS = 128
CTAS_PER_SM = 24
"""More than are resident at a time: with few rows, each CTA has one row, and an SM that is done takes the next CTA."""
AT_ONCE = 4
"""Chunks that a thread loads before it uses the first: all of its chunks in a row of 7168 or less."""
CHUNK_BYTES = 16
"""The bytes that the swizzle moves together: four elements of each of two blocks."""
CHUNKS = ROW_BYTES // CHUNK_BYTES
UNITS = THREADS // CHUNKS
"""Units that the threads of a CTA take at a time."""


class Expanded(NamedTuple):
    """The destination of expanded rows: u8, column tiles of `pitch` bytes, `width` rows each; the table of column
    tiles; units along K."""

    mRows: cute.Tensor
    mColumns: cute.Tensor
    pitch: Int64
    width: Int32
    units: Int32


class Factors(NamedTuple):
    """For gathered rows: routes of rows, scales, weights of routes, and the tables f32 (column tiles, columns).

    mWeight holds 1 if `weighted` is 0. mX_gs is None for bf16 tokens.
    """

    mRouteOfRow: cute.Tensor
    mX_gs: cute.Tensor | None
    mW1_gs: cute.Tensor
    mTopkWeights: cute.Tensor
    mFactor: cute.Tensor
    mWeight: cute.Tensor
    topk: Int32
    weighted: Int32


def scale_pair(pair: Uint32) -> Uint32:
    """The two block scales in the low half of `pair` as f16."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, low; }",
        write_only_types=[Uint32],
        read_only_args=[pair],
    )


def times_two_to_7(pair: Uint32) -> Uint32:
    """A pair of f16 times 2^7. The instruction takes no immediate."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 two_to_7; mov.b32 two_to_7, 0x58005800; mul.rn.f16x2 {$w0}, {$r0}, two_to_7; }",
        write_only_types=[Uint32],
        read_only_args=[pair],
    )


def half_word(mBytes: cute.Tensor, offset: Int64) -> Uint32:
    """Two bytes at an even offset."""
    pointer = cute.recast_ptr(mBytes.iterator + cute.assume(offset, divby=2), dtype=Uint16)
    return Uint32(cute.make_tensor(pointer, cute.make_layout(1))[0])


RowsOf = Nvfp4 | cute.Tensor
"""NVFP4 rows, or bf16 (rows, K)."""
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632
"""Selectors of prmt: the low halves of two words, and their high halves."""


@cute.jit
def load_chunk(x: RowsOf, source: Int32, unit: Int32, inside: Int32, rLoaded: cute.Tensor):
    """Load the parts of chunk `inside` of a unit of row `source` into rLoaded (4) u32. Nothing here waits for it."""
    if cutlass.const_expr(isinstance(x, Nvfp4)):
        row_bytes, atoms = x.codes.shape[1], x.sf.shape[1]
        pair, part = inside // 4, inside % 4
        codes = Int64(source) * row_bytes + unit * (UNIT_K // 2) + pair * 16 + part * 2
        rLoaded[0] = half_word(x.codes, codes)
        rLoaded[1] = half_word(x.codes, codes + 8)
        rLoaded[2] = half_word(x.sf, scale_offset(source, atoms, unit) + pair * 2)
    else:
        first = Int64(source) * x.shape[1] + unit * UNIT_K + inside // 4 * (2 * SF_VEC_SIZE) + inside % 4 * 4
        for block in cutlass.range_constexpr(2):
            pointer = x.iterator + cute.assume(first + block * SF_VEC_SIZE, divby=4)
            words = cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), cute.make_layout(2))
            for word in cutlass.range_constexpr(2):
                rLoaded[2 * block + word] = words[word]


@cute.jit
def make_chunk(x: RowsOf, rLoaded: cute.Tensor, rChunk: cute.Tensor):
    """Make rChunk (4) u32, the chunk, with the elements of its two blocks interleaved."""
    if cutlass.const_expr(isinstance(x, Nvfp4)):
        word = rLoaded[0] | rLoaded[1] << 16
        scales = times_two_to_7(scale_pair(rLoaded[2]))
        for element in cutlass.range_constexpr(4):
            code = word >> 4 * element & Uint32(0x000F_000F)
            value = (code & Uint32(0x0008_0008)) << 12 | (code & Uint32(0x0007_0007)) << 9
            rChunk[element] = times(value, scales)
    else:
        for word in cutlass.range_constexpr(2):
            for half, halves in enumerate((LOW_HALVES, HIGH_HALVES)):
                rChunk[2 * word + half] = Uint32(cute.arch.prmt(rLoaded[word], rLoaded[2 + word], halves))


@cute.jit
def expand_row(x: RowsOf, expanded: Expanded, source: Int32, column: Int32, row: Int32, thread: Int32):
    """Expand a whole row, 16 bytes per thread at a time, so that a warp writes whole rows of a unit.

    Chunk c of a unit has four elements from 4 (c % 4) on of blocks 2 (c / 4) and 2 (c / 4) + 1. It is stored at
    c ^ row % 8. A thread has the same chunk of each of its units.
    """
    rLoaded = cute.make_rmem_tensor((CHUNK_BYTES // 4, AT_ONCE), Uint32)
    rChunk = cute.make_rmem_tensor(CHUNK_BYTES // 4, Uint32)
    inside = thread % CHUNKS
    first = Int64(column) * expanded.pitch + row * ROW_BYTES + (inside ^ row % CHUNKS) * CHUNK_BYTES
    for begin in cutlass.range(thread // CHUNKS, expanded.units, AT_ONCE * UNITS, unroll=1):
        for turn in cutlass.range_constexpr(AT_ONCE):
            unit = begin + turn * UNITS
            if unit < expanded.units:
                load_chunk(x, source, unit, inside, rLoaded[None, turn])
        for turn in cutlass.range_constexpr(AT_ONCE):
            unit = begin + turn * UNITS
            if unit < expanded.units:
                make_chunk(x, rLoaded[None, turn], rChunk)
                place = first + unit * expanded.width * ROW_BYTES
                target = cute.recast_ptr(expanded.mRows.iterator + cute.assume(place, divby=CHUNK_BYTES), dtype=Uint32)
                cute.autovec_copy(rChunk, cute.make_tensor(target, cute.make_layout(CHUNK_BYTES // 4)))


@cute.kernel
def gather_kernel(x: RowsOf, expanded: Expanded, factors: Factors):
    """Write tokens `x` as the rows of column tiles, and their factors. A CTA takes one row after another."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    mFactor, mWeight = factors.mFactor, factors.mWeight
    columns, entry = count_and_entry(expanded.mColumns, block // expanded.width)
    # One by one: the compiler silently drops assignments in the loop to a name within parentheses.
    expert, first_row, rows = entry.expert, entry.first_row, entry.rows
    for index in cutlass.range(block, columns * expanded.width, blocks, unroll=1):
        column, row = index // expanded.width, index % expanded.width
        if index != block:
            expert, first_row, rows = (expanded.mColumns[1 + column, field] for field in range(3))
        factor, weight = Float32(0.0), Float32(0.0)
        if row < rows:
            route = factors.mRouteOfRow[first_row + row]
            token = route // factors.topk
            if thread == 0:
                if cutlass.const_expr(factors.mX_gs is None):
                    factor = factors.mW1_gs[expert] * result_factor(True)
                else:
                    x_gs = factors.mX_gs[token]  # pyright: ignore[reportOptionalSubscript] (const_expr narrows nothing)
                    factor = x_gs * factors.mW1_gs[expert] * result_factor(False)
                weight = Float32(1.0)
                if factors.weighted != 0:
                    weight = factors.mTopkWeights[route]
            expand_row(x, expanded, token, column, row, thread)
        if thread == 0:
            mFactor[column, row] = factor
            mWeight[column, row] = weight


@cute.kernel
def expand_kernel(a: RowsOf, expanded: Expanded):
    """Write expert rows `a` as the rows of column tiles. A CTA takes one row after another."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    columns, entry = count_and_entry(expanded.mColumns, block // expanded.width)
    first_row, rows = entry.first_row, entry.rows
    for index in cutlass.range(block, columns * expanded.width, blocks, unroll=1):
        column, row = index // expanded.width, index % expanded.width
        if index != block:
            first_row, rows = (expanded.mColumns[1 + column, field] for field in range(1, 3))
        if row < rows:
            expand_row(a, expanded, first_row + row, column, row, thread)
