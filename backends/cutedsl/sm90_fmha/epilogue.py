# pyright: reportMissingImports=false
"""The end of a work item: merge the warpgroups' halves of the keys, normalise O and store it."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64

from backends.cutedsl.attention_tiles import AttentionItem, Outputs, Problem
from backends.cutedsl.device import LN2, WARPGROUP
from backends.cutedsl.sm90_fmha.operands import Consumer, Registers, Sm90Smem, first_row
from backends.cutedsl.sm90_fmha.plan import MERGE_REGISTERS, Sm90FmhaPlan
from backends.cutedsl.sm90_fmha.softmax import ROWS, fma, quad_reduced, row_values

MERGE_BARRIER = 1


def add(a: Float32, b: Float32) -> Float32:
    """a + b."""
    return a + b


@cute.jit
def merge_groups(
    registers: Registers, sMerge: cute.Tensor, sStat: cute.Tensor, scale_log2: Float32, consumer: Consumer
):
    """Merge the O, maxima and sums (reduced over quads) of both warpgroups into warpgroup 0.

    The two have seen different keys. Thread i of either holds the same elements, so O goes over by thread, 16 bytes at
    a time, MERGE_REGISTERS a pass.
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
def pair_at(mTensor: cute.Tensor, offset: Int64) -> cute.Tensor:
    """The two elements from `offset` on, an even number."""
    return cute.make_tensor(mTensor.iterator + cute.assume(offset, divby=2), cute.make_layout(2))


@cute.jit
def store_row(rRow: cute.Tensor, outputs: Outputs, problem: Problem, offset: Int64, part_offset: Int64):
    """Store this thread's columns of one row: of each block of 8, the two at 2 (lane % 4)."""
    blocks = cutlass.const_expr(cute.size(rRow, mode=[1]))
    if problem.splits == 1:
        for block in cutlass.range_constexpr(blocks):
            rPair = cute.make_rmem_tensor(2, BFloat16)
            rPair.store(rRow[None, block].load().to(BFloat16))
            cute.autovec_copy(rPair, pair_at(outputs.mO, offset + 8 * block))
    else:
        for block in cutlass.range_constexpr(blocks):
            rPart = cute.make_rmem_tensor(2, Float32)
            rPart.store(rRow[None, block].load())
            cute.autovec_copy(rPart, pair_at(outputs.mO_part, part_offset + 8 * block))


@cute.jit
def store_item(
    plan: Sm90FmhaPlan,
    problem: Problem,
    outputs: Outputs,
    item: AttentionItem,
    registers: Registers,
    consumer: Consumer,
):
    """Store normalised O and the log-sum-exp of this thread's rows, but no row past the end of the problem.

    A part that saw no key is zeros, its log-sum-exp -inf.
    """
    rO, state = registers.rO, registers.rows
    lane = consumer.thread % 32
    own_row = first_row(plan, item, consumer)
    column = 2 * (lane % 4)
    writes_lse = lane % 4 == 0
    if cutlass.const_expr(plan.share == "columns"):
        column = column + consumer.group * plan.o_columns
        writes_lse = writes_lse and consumer.group == 0
    kv_batches = outputs.mO.shape[0]
    for i in cutlass.range_constexpr(ROWS):
        row = own_row + 8 * i
        flat_row = Int64(item.kv_batch) * problem.rows + row
        part_row = (Int64(item.split) * kv_batches) * problem.rows + flat_row
        total = state.rSum[i]
        seen = total > Float32(0.0)
        inverse = Float32(0.0)
        lse = -Float32.inf
        if seen:
            inverse = Float32(1.0) / total
            lse = fma(state.rMax[i], problem.scale_log2, cute.math.log2(total, fastmath=True)) * LN2
        rRow = row_values(rO, i)
        for block in cutlass.range_constexpr(cute.size(rRow, mode=[1])):
            for j in cutlass.range_constexpr(2):
                rRow[j, block] = rRow[j, block] * inverse
        if row < problem.rows:
            store_row(rRow, outputs, problem, flat_row * plan.hd + column, part_row * plan.hd + column)
            if writes_lse:
                if problem.splits == 1:
                    outputs.mLSE[flat_row] = lse
                else:
                    outputs.mLSE_part[part_row] = lse


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
    """Sum the exponentials over quads, merge what warpgroups that share keys did apart, and store."""
    state = registers.rows
    for i in cutlass.range_constexpr(ROWS):
        state.rSum[i] = quad_reduced(state.rSum[i], add)
    if cutlass.const_expr(plan.share == "keys"):
        merge_groups(registers, smem.sMerge, smem.sStat, problem.scale_log2, consumer)
        if consumer.group == 0:
            store_item(plan, problem, outputs, item, registers, consumer)
    else:
        store_item(plan, problem, outputs, item, registers, consumer)
