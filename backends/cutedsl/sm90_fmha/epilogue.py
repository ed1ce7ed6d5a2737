# pyright: reportMissingImports=false
"""The end of a work item: merge the warpgroups' halves of the keys, normalise O and store it."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64

from backends.cutedsl.attention_tiles import AttentionItem, Outputs, Problem
from backends.cutedsl.device import LN2, WARPGROUP
from backends.cutedsl.sm90_fmha.operands import Consumer, Registers, Sm90Smem, first_row
from backends.cutedsl.sm90_fmha.plan import MERGE_REGISTERS, Sm90FmhaPlan
from backends.cutedsl.sm90_fmha.softmax import ROWS, RowState, bf16_pair, fma, quad_reduced, row_values

MERGE_BARRIER = 1


def add(a: Float32, b: Float32) -> Float32:
    """a + b."""
    return a + b


@cute.jit
def merge_groups(
    registers: Registers, sMerge: cute.Tensor, sStat: cute.Tensor, scale_log2: Float32, consumer: Consumer
):
    """Merge the O, maxima and sums (reduced over quads) of both warpgroups into warpgroup 0.

    The two have seen different keys. Thread i of either holds the same elements, so O is handed over thread by thread,
    16 bytes at a time, MERGE_REGISTERS a pass.
    """
    barrier = cute.arch.barrier
    rO, state = registers.rO, registers.rows
    group, thread = consumer
    if group == 1:
        for i in cutlass.range_constexpr(ROWS):
            sStat[thread, i] = state.rMax[i]
            sStat[thread, ROWS + i] = state.rSum[i]
    own = cute.make_rmem_tensor(ROWS, Float32)
    other = cute.make_rmem_tensor(ROWS, Float32)
    for start in cutlass.range_constexpr(0, cute.size(rO), MERGE_REGISTERS):
        rPass = cute.make_tensor(rO.iterator + start, cute.make_layout((4, MERGE_REGISTERS // 4)))
        if group == 1:
            for vector in cutlass.range_constexpr(MERGE_REGISTERS // 4):
                cute.autovec_copy(rPass[None, vector], sMerge[None, thread, vector])
        barrier(barrier_id=MERGE_BARRIER, number_of_threads=2 * WARPGROUP)
        if group == 0:
            if cutlass.const_expr(start == 0):
                for i in cutlass.range_constexpr(ROWS):
                    other_max = sStat[thread, i]
                    top = cute.arch.fmax(state.rMax[i], other_max)
                    base = cutlass.select_(top == -Float32.inf, Float32(0.0), top) * scale_log2
                    own[i] = cute.math.exp2(fma(state.rMax[i], scale_log2, -base), fastmath=True)
                    other[i] = cute.math.exp2(fma(other_max, scale_log2, -base), fastmath=True)
                    state.rMax[i] = top
                    state.rSum[i] = fma(state.rSum[i], own[i], sStat[thread, ROWS + i] * other[i])
            for vector in cutlass.range_constexpr(MERGE_REGISTERS // 4):
                rOther = cute.make_rmem_tensor(4, Float32)
                cute.autovec_copy(sMerge[None, thread, vector], rOther)
                for k in cutlass.range_constexpr(4):
                    rPass[k, vector] = fma(rPass[k, vector], own[k // 2], rOther[k] * other[k // 2])
        barrier(barrier_id=MERGE_BARRIER, number_of_threads=2 * WARPGROUP)


@cute.jit
def quad_transposed(rWords: cute.Tensor, lane: Int32):
    """Transpose four words a lane within each quad: word j of lane q becomes word q of lane j."""
    for distance in cutlass.range_constexpr(1, 3):
        upper = (lane & distance) != 0
        for k in cutlass.range_constexpr(2):
            low = cutlass.const_expr(2 * k if distance == 1 else k)
            given = cutlass.select_(upper, rWords[low], rWords[low + distance])
            taken = cute.arch.shuffle_sync_bfly(given, offset=distance)
            rWords[low] = cutlass.select_(upper, taken, rWords[low])
            rWords[low + distance] = cutlass.select_(upper, rWords[low + distance], taken)


@cute.jit
def store_row(
    rRow: cute.Tensor, outputs: Outputs, splits: Int32, offset: Int64, part_offset: Int64, lane: Int32, exists: Boolean
):
    """Store this thread's part of one row, if it exists. The offsets point to this warpgroup's first column of the row.

    A thread has two columns of each block of 8. For O in bf16 a quad transposes four blocks, so that each lane stores
    one block, 16 bytes. All lanes take part in that, whether or not their row exists.
    """
    if cutlass.const_expr(outputs.mO_part.element_type is BFloat16):
        if splits == 1:
            store_short(rRow, outputs.mO, offset, lane, exists)
        else:
            store_short(rRow, outputs.mO_part, part_offset, lane, exists)
    elif splits == 1:
        store_short(rRow, outputs.mO, offset, lane, exists)
    elif exists:
        for block in cutlass.range_constexpr(cute.size(rRow, mode=[1])):
            rPart = cute.make_rmem_tensor(2, Float32)
            rPart.store(rRow[None, block].load())
            cute.autovec_copy(rPart, elements_at(outputs.mO_part, part_offset + 8 * block + 2 * (lane % 4), 2))


@cute.jit
def store_short(rRow: cute.Tensor, mO: cute.Tensor, offset: Int64, lane: Int32, exists: Boolean):
    """Store this thread's part of one row in bf16 from `offset` on, transposed as in store_row."""
    for group in cutlass.range_constexpr(cute.size(rRow, mode=[1]) // 4):
        rWords = cute.make_rmem_tensor(4, Int32)
        for k in cutlass.range_constexpr(4):
            rWords[k] = bf16_pair(rRow[0, 4 * group + k], rRow[1, 4 * group + k])
        quad_transposed(rWords, lane)
        if exists:
            rBlock = cute.make_tensor(cute.recast_ptr(rWords.iterator, dtype=BFloat16), cute.make_layout(8))
            cute.autovec_copy(rBlock, elements_at(mO, offset + 8 * (4 * group + lane % 4), 8))


@cute.jit
def elements_at(mTensor: cute.Tensor, offset: Int64, count: cutlass.Constexpr) -> cute.Tensor:
    """The `count` elements from `offset` on; `offset` is a multiple of `count`."""
    return cute.make_tensor(mTensor.iterator + cute.assume(offset, divby=count), cute.make_layout(count))


class RowPlace(NamedTuple):
    """Where a row of a thread lies: whether the row exists, and its number in o and lse and in the partials."""

    exists: Boolean
    flat: Int64
    part: Int64


def row_place(
    plan: Sm90FmhaPlan, problem: Problem, outputs: Outputs, item: AttentionItem, consumer: Consumer, i: int
) -> RowPlace:
    """The place of row `i` of this thread."""
    row = first_row(plan, item, consumer) + 8 * i
    if item.sequence is not None:
        head, token = problem.head_and_token(row, same=False)
        _, heads, _ = outputs.mO.shape
        flat = Int64(item.sequence.first_q + token) * heads + item.sequence.kv_head * problem.group + head
        part = (Int64(item.split) * outputs.mO.shape[0]) * heads + flat
        return RowPlace(Boolean(row < problem.rows), flat, part)
    flat = Int64(item.kv_batch) * problem.rows + row
    part = (Int64(item.split) * outputs.mO.shape[0]) * problem.rows + flat
    return RowPlace(Boolean(row < problem.rows), flat, part)


@cute.jit
def row_results(state: RowState, scale_log2: Float32, i: cutlass.Constexpr):
    """The reciprocal of the sum of row `i`, and its log-sum-exp; 0 and -inf for a row that saw no key."""
    total = state.rSum[i]
    inverse = Float32(0.0)
    lse = -Float32.inf
    if total > Float32(0.0):
        inverse = Float32(1.0) / total
        lse = fma(state.rMax[i], scale_log2, cute.math.log2(total, fastmath=True)) * LN2
    return inverse, lse


@cute.jit
def store_lse(outputs: Outputs, splits: Int32, place: RowPlace, lse: Float32, lane: Int32):
    """Store the log-sum-exp of a row; the first lane of its quad does it."""
    if place.exists and lane % 4 == 0:
        if splits == 1:
            outputs.mLSE[place.flat] = lse
        else:
            outputs.mLSE_part[place.part] = lse


@cute.jit
def store_o(
    plan: Sm90FmhaPlan,
    problem: Problem,
    outputs: Outputs,
    place: RowPlace,
    rRow: cute.Tensor,
    inverse: Float32,
    column: Int32 | int,
    lane: Int32,
):
    """Store a row of O times `inverse`. `column`: this warpgroup's first column."""
    for block in cutlass.range_constexpr(cute.size(rRow, mode=[1])):
        for j in cutlass.range_constexpr(2):
            rRow[j, block] = rRow[j, block] * inverse
    offset, part_offset = place.flat * plan.hd + column, place.part * plan.hd + column
    store_row(rRow, outputs, problem.splits, offset, part_offset, lane, place.exists)


@cute.jit
def store_item(
    plan: Sm90FmhaPlan,
    problem: Problem,
    outputs: Outputs,
    item: AttentionItem,
    registers: Registers,
    consumer: Consumer,
):
    """Store normalised O and the log-sum-exp of this thread's rows, except rows past the end of the problem.

    A part that saw no key is zeros, with log-sum-exp -inf.
    """
    lane = consumer.thread % 32
    for i in cutlass.range_constexpr(ROWS):
        place = row_place(plan, problem, outputs, item, consumer, i)
        inverse, lse = row_results(registers.rows, problem.scale_log2, i)
        store_o(plan, problem, outputs, place, row_values(registers.rO, i), inverse, 0, lane)
        store_lse(outputs, problem.splits, place, lse, lane)


@cute.jit
def sum_over_quads(state: RowState):
    """Sum the exponentials of each row over its four lanes."""
    for i in cutlass.range_constexpr(ROWS):
        state.rSum[i] = quad_reduced(state.rSum[i], add)


@cute.jit
def finish_item(
    plan: Sm90FmhaPlan,
    problem: Problem,
    outputs: Outputs,
    smem: Sm90Smem,
    item: AttentionItem,
    registers: Registers,
    consumer: Consumer,
):
    """Sum the exponentials over quads, merge the results of warpgroups that share keys, and store."""
    sum_over_quads(registers.rows)
    if cutlass.const_expr(plan.share == "keys"):
        merge_groups(registers, smem.sMerge, smem.sStat, problem.scale_log2, consumer)
        if consumer.group == 0:
            store_item(plan, problem, outputs, item, registers, consumer)
    else:
        store_item(plan, problem, outputs, item, registers, consumer)
