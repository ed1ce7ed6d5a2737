# ruff: noqa: N815
# pyright: reportMissingImports=false
"""The epilogues of the grouped GEMMs, from accumulators in registers.

Register 4 b + 2 r + c of a thread has weight row 16 warp + lane / 4 + 8 r of a block of 64 and column 8 b +
2 (lane % 4) + c. repack.py puts the gate of an output in row g and its up in row g + 8, and two neighbouring rows of w2
likewise.

L1: SwiGLU in registers. A block of 16 outputs is in two warps, so activations go through shared memory, 64 tokens at a
time; then a thread has a whole block. L2: a store has two neighbouring bf16 of a row; eight lanes store 32 bytes of a
token.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

from backends.cutedsl.device import LOG2_E, WARPGROUP
from backends.cutedsl.moe.layout import SF_VEC_SIZE
from backends.cutedsl.moe.nvfp4 import Nvfp4
from backends.cutedsl.sm90_moe.expand import RowsOf
from backends.cutedsl.sm90_moe.plan import BLOCK_ROWS, Sm90MoePlan, result_factor
from backends.cutedsl.sm90_moe.requantise import CODE_WORDS, quantise_block, round_block, store_block
from backends.cutedsl.sm90_moe.schedule import ColumnPiece

OUTPUTS = BLOCK_ROWS // 2
"""Activations of a token from a block of weight rows."""
SCALED = OUTPUTS // SF_VEC_SIZE
"""Blocks of 16 of these activations, each with a scale."""
STAGING_BARRIER = 1
"""Named barriers: warpgroup g meets at STAGING_BARRIER + g."""


class ColumnActivations(NamedTuple):
    """Factors and weights by column tile and column (expand.py), global scales of a2 by expert, a2 by expert row.

    `clamp`: +inf for none. mA2_gs is None for bf16 a2.
    """

    mFactor: cute.Tensor
    mWeight: cute.Tensor
    mA2_gs: cute.Tensor | None
    a2: RowsOf
    clamp: Float32


class ColumnRows(NamedTuple):
    """Expert rows bf16 (rows, hidden), and the global scales of experts; mA2_gs is None for bf16 a2."""

    mRows: cute.Tensor
    mA2_gs: cute.Tensor | None
    mW2_gs: cute.Tensor


class ColumnConsumer(NamedTuple):
    """A consumer thread: its number among the consumers, its warpgroup, its number in it.

    `quad` and `quad_lane`: its lane's row and column pair in an 8 x 8 part of an accumulator. `leads`: whether it is
    the first lane of its warp. `codes_at`, `scales_at`: byte offsets, in the weights of a stage, of its codes and block
    scales of its warpgroup's first block.
    """

    thread: Int32
    group: Int32
    in_group: Int32
    quad: Int32
    quad_lane: Int32
    leads: Boolean
    codes_at: Int32
    scales_at: Int32


def here(value: Int32) -> Int32:
    """`value`, which the compiler knows only from here on.

    Offsets that follow from sizes alone are the same for all tiles. The compiler would compute them once, one for every
    column, and leave too few registers for the products.
    """
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def swiglu(gate: Float32, up: Float32, clamp: Float32) -> Float32:
    """silu(min(gate, clamp)) * clip(up, clamp)."""
    gate = cute.arch.fmin(gate, clamp)
    up = cute.arch.fmax(cute.arch.fmin(up, clamp), -clamp)
    sigmoid = cute.arch.rcp_approx(cute.math.exp2(gate * Float32(-LOG2_E), fastmath=True) + Float32(1.0))
    return gate * sigmoid * up


@cute.jit
def store_activations(
    plan: Sm90MoePlan,
    tensors: ColumnActivations,
    piece: ColumnPiece,
    gs: Float32,
    rAcc: cute.Tensor,
    sStaged: cute.Tensor,
    rows: Int32,
    consumer: ColumnConsumer,
):
    """Finish block `rows` of w1 in a tile. sStaged (token, output, warpgroup) f32. w1 has an even number of panels, so
    no tile extends past it."""
    rH = cute.make_rmem_tensor(SF_VEC_SIZE, Float32)
    rCodes = cute.make_rmem_tensor(CODE_WORDS, Uint32)
    in_group, pair = here(consumer.in_group), here(2 * consumer.quad_lane)
    output = in_group // 32 * 8 + consumer.quad
    token, block = in_group // SCALED, in_group % SCALED
    for start in cutlass.range_constexpr(0, plan.width, plan.staged_tokens):
        cute.arch.barrier(barrier_id=STAGING_BARRIER + consumer.group, number_of_threads=WARPGROUP)
        for part in cutlass.range_constexpr(start // 8, min(start + plan.staged_tokens, plan.width) // 8):
            for c in cutlass.range_constexpr(2):
                column = 8 * part + pair + c
                factor, weight = tensors.mFactor[piece.column, column], tensors.mWeight[piece.column, column]
                gate, up = rAcc[4 * part + c] * factor, rAcc[4 * part + 2 + c] * factor
                sStaged[column - start, output, consumer.group] = swiglu(gate, up, tensors.clamp) * weight
        cute.arch.barrier(barrier_id=STAGING_BARRIER + consumer.group, number_of_threads=WARPGROUP)
        if token < plan.staged_tokens and start + token < piece.rows:
            sBlock = cute.logical_divide(sStaged[token, None, consumer.group], cute.make_layout(SF_VEC_SIZE))
            cute.autovec_copy(sBlock[None, block], rH)
            of_row = rows * SCALED + block
            if cutlass.const_expr(isinstance(tensors.a2, Nvfp4)):
                sf = quantise_block(rH, gs, rCodes)
                store_block(tensors.a2, piece.first_row + start + token, of_row, rCodes, sf)
            else:
                round_block(tensors.a2, piece.first_row + start + token, of_row, rH)


class ExpertScales(NamedTuple):
    """Global scales of an expert, as they are in memory: of a2 (1 if it is bf16) and of w2 (1 in L1).

    They are loaded before the products of a tile and first used after them. Multiplying the two earlier would wait for
    memory, 400 to 600 cycles per tile (results/attempts.md).
    """

    a2: Float32
    w2: Float32


def scales_of(tensors: ColumnActivations | ColumnRows, expert: Int32) -> ExpertScales:
    """The scales of `expert` that the end of a tile needs."""
    one = Float32(1.0)
    a2 = one if tensors.mA2_gs is None else Float32(tensors.mA2_gs[expert])
    return ExpertScales(a2, one if isinstance(tensors, ColumnActivations) else Float32(tensors.mW2_gs[expert]))


@cute.jit
def store_rows(
    plan: Sm90MoePlan,
    tensors: ColumnRows,
    piece: ColumnPiece,
    scales: ExpertScales,
    rAcc: cute.Tensor,
    rows: Int32,
    consumer: ColumnConsumer,
):
    """Finish block `rows` of w2 in a tile. If the tile extends past the last row of W, those rows are not stored."""
    scale = scales.a2 * scales.w2 * result_factor(plan.bf16)
    hidden, pair = here(tensors.mRows.shape[1]), here(2 * consumer.quad_lane)
    element = rows * BLOCK_ROWS + consumer.in_group // 32 * 16 + consumer.quad * 2
    limit = cutlass.select_(element < hidden, piece.rows - pair, Int32(0))
    first = Int64(piece.first_row + pair) * hidden + element
    rPair = cute.make_rmem_tensor(2, Float32)
    rRounded = cute.make_rmem_tensor(2, BFloat16)
    for part in cutlass.range_constexpr(cute.size(rAcc) // 4):
        for c in cutlass.range_constexpr(2):
            row = cutlass.const_expr(8 * part + c)
            if row < limit:
                for r in cutlass.range_constexpr(2):
                    rPair[r] = rAcc[4 * part + 2 * r + c] * scale
                rRounded.store(rPair.load().to(BFloat16))
                pointer = tensors.mRows.iterator + cute.assume(first + Int64(hidden) * row, divby=2)
                cute.autovec_copy(rRounded, cute.make_tensor(pointer, cute.make_layout(2)))
