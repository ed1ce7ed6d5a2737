# ruff: noqa: N815
# pyright: reportMissingImports=false
"""Exponentials that do not wait for their tile's maxima, and the correction where the earlier maxima are too low.

A tile's exponentials P are taken relative to the maxima of the tiles before it. That is as good while P stays below
2^RESCALE_THRESHOLD, the bound that lagging maxima have anyway. The sums of P, needed in any case, show it: while no
thread's sum is above the bound, no P is. So most tiles have no maxima, no shuffles, and nothing that waits for them. If
a sum is above the bound, the warp checks its rows:

- A row whose largest P is at most the bound stays as it is, bit for bit. So its result does not depend on the rows
  beside it.
- If a row's largest P is above the bound, its maximum is raised by the exponent of that P. P, the sums and O are scaled
  down.
- A row with a P above 2^OVERFLOW_EXPONENT, which may be infinite, is computed again: its scores from Q and K in shared
  memory, their maximum, the exponentials. K stays in its ring until then.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from backends.cutedsl.attention_tiles import RESCALE_THRESHOLD, AttentionItem, Problem
from backends.cutedsl.sm90_fmha.operands import Consumer, Registers, Sm90Smem, visible_keys
from backends.cutedsl.sm90_fmha.plan import Sm90FmhaPlan
from backends.cutedsl.sm90_fmha.softmax import (
    ROWS,
    RowState,
    bf16_pair,
    block_exponentials,
    fma,
    mask_row,
    pair_words,
    quad_reduced,
    rescale,
    row_values,
    total,
)

MAX_P = 2.0**RESCALE_THRESHOLD
OVERFLOW_EXPONENT = 100
"""Rows with a P above 2^100 are computed again, not scaled. So no factor is subnormal, and infinity is covered."""
FRACTION_BITS = 23
EXPONENT_BIAS = 127


class TrustedTile(NamedTuple):
    """The source of the scores in registers: stages of sQ and sK, and the tile of keys.

    `rKeys` (row, begin or end): the keys that rows see; None: to be computed. `rSum` (row): this thread's sums of the
    tile's exponentials.
    """

    q_tile: Int32
    k_stage: Int32
    tile: Int32
    rKeys: cute.Tensor | None
    rSum: cute.Tensor


@dsl_user_op
def exponent(value: Float32, *, loc=None, ip=None) -> Int32:
    """floor(log2 value) of a positive normal number."""
    bits = Int32(llvm.bitcast(T.i32(), value.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
    return (bits >> FRACTION_BITS) - EXPONENT_BIAS


@cute.jit
def settle(
    plan: Sm90FmhaPlan,
    problem: Problem,
    item: AttentionItem,
    smem: Sm90Smem,
    registers: Registers,
    tile: TrustedTile,
    consumer: Consumer,
):
    """Add the tile's sums to the earlier ones. If a sum is above MAX_P, first correct P, sums, maxima and O.

    P is in rS as f32 and in rP as bf16. No MMA is in flight.
    """
    rows, rSum = registers.rows, tile.rSum
    if cute.arch.vote_any_sync(Boolean(rSum[0] > Float32(MAX_P)) | Boolean(rSum[1] > Float32(MAX_P))):
        rows.rFactor.fill(1.0)
        for i in cutlass.range_constexpr(ROWS):
            scale_down(problem, registers, rSum, i)
        # After both rows are rounded, because their registers are free then.
        for i in cutlass.range_constexpr(ROWS):
            overflows = Boolean(quad_reduced(rSum[i], cute.arch.fmax) > Float32(2.0**OVERFLOW_EXPONENT))
            if cute.arch.vote_any_sync(overflows):
                compute_again(plan, problem, item, smem, registers, tile, consumer, i, overflows)
            rows.rSum[i] = rows.rSum[i] * rows.rFactor[i]
        rescale(registers.rO, rows.rFactor)
    for i in cutlass.range_constexpr(ROWS):
        rows.rSum[i] = rows.rSum[i] + rSum[i]


def scale_down(problem: Problem, registers: Registers, rSum: cute.Tensor, i: int) -> None:
    """If row `i` has a P above MAX_P, but none above 2^OVERFLOW_EXPONENT, raise its maximum and scale P and its sum."""
    rows, rRow = registers.rows, row_values(registers.rS, i)
    top = quad_reduced(largest(rRow), cute.arch.fmax)
    raised = Boolean(top > Float32(MAX_P)) & Boolean(top <= Float32(2.0**OVERFLOW_EXPONENT))
    take(rows, problem, i, raised, (rows.rBase[i] + Float32(exponent(top))) / problem.scale_log2)
    for block in range(cute.size(rRow, mode=[1])):
        for j in range(2):
            rRow[j, block] = rRow[j, block] * rows.rFactor[i]
    rSum[i] = rSum[i] * rows.rFactor[i]
    round_row(registers, i, Boolean(True))


def take(rows: RowState, problem: Problem, i: int, where: Boolean, maximum: Float32) -> None:
    """If `where`, make `maximum` the maximum of row `i`, and rFactor the factor for O and the earlier sums."""
    old = rows.rBase[i]
    base = cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum) * problem.scale_log2
    rows.rMax[i] = cutlass.select_(where, maximum, rows.rMax[i])
    rows.rBase[i] = cutlass.select_(where, base, old)
    rows.rFactor[i] = cutlass.select_(where, cute.math.exp2(old - base, fastmath=True), rows.rFactor[i])


def largest(rRow: cute.Tensor) -> Float32:
    """The largest of a row's values in this thread."""
    top = Float32(rRow[0, 0])
    for block in range(cute.size(rRow, mode=[1])):
        for j in range(2):
            top = cute.arch.fmax(top, rRow[j, block])
    return top


def round_row(registers: Registers, i: int, where: Boolean) -> None:
    """If `where`, round row `i` of P to bf16, in the order of round_p."""
    words, rRow = pair_words(registers.rP), row_values(registers.rS, i)
    for block in range(cute.size(rRow, mode=[1])):
        word = bf16_pair(rRow[0, block], rRow[1, block])
        words[2 * block + i] = cutlass.select_(where, word, words[2 * block + i])


@cute.jit
def compute_again(
    plan: Sm90FmhaPlan,
    problem: Problem,
    item: AttentionItem,
    smem: Sm90Smem,
    registers: Registers,
    tile: TrustedTile,
    consumer: Consumer,
    i: cutlass.Constexpr,
    where: Boolean,
):
    """Compute row `i` of P and its sum again, relative to the row's own maximum. Keep them if `where`.

    All lanes compute: with a branch per lane, ptxas 13.5 serialises the MMAs of three warpgroups.
    """
    rRow = row_values(registers.rS, i)
    blocks = cutlass.const_expr(cute.size(rRow, mode=[1]))
    row = (consumer.thread // 32) * 16 + (consumer.thread % 32) // 4 + 8 * i
    column = 2 * (consumer.thread % 4)
    for block in cutlass.range_constexpr(blocks):
        for j in cutlass.range_constexpr(2):
            rRow[j, block] = Float32(0.0)
    for d in cutlass.range(plan.hd, unroll=1):
        q = Float32(smem.sQ[row, d, tile.q_tile])
        for block in cutlass.range_constexpr(blocks):
            for j in cutlass.range_constexpr(2):
                k = Float32(smem.sK[8 * block + column + j, d, tile.k_stage])
                rRow[j, block] = fma(q, k, rRow[j, block])
    rKeys = visible_keys(plan, problem, item, consumer) if tile.rKeys is None else tile.rKeys
    mask_row(rRow, i, tile.tile * plan.tile_n + column, rKeys)
    take(registers.rows, problem, i, where, quad_reduced(largest(rRow), cute.arch.fmax))
    sums = [Float32(0.0)]
    block_exponentials(rRow, sums, -registers.rows.rBase[i], problem.scale_log2, range(blocks))
    tile.rSum[i] = cutlass.select_(where, total(sums), tile.rSum[i])
    round_row(registers, i, where)
