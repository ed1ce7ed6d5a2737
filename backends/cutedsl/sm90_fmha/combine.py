# pyright: reportMissingImports=false
"""The combine kernel of split keys: O = sum_i w_i O_i with w_i = exp(lse_i - lse), a CTA for 128 columns of a row."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, memory

from backends.cutedsl.sm90_fmha.plan import MAX_SPLITS

THREADS = 256
WARPS = THREADS // 32
VECTOR = 4
"""fp32 of a 16-byte load."""
AHEAD = 4
"""Loads of partials that a thread has under way."""
LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634


def columns_of(hd: int) -> int:
    """Columns of a row that a CTA combines."""
    return min(hd, 128)


@cute.jit
def block_reduced(value: Float32, sWarp: cute.Tensor, operation: cutlass.Constexpr) -> Float32:
    """`operation` over all threads of the CTA, in a fixed order."""
    thread, _, _ = cute.arch.thread_idx()
    value = cute.arch.warp_reduction(value, operation)
    if thread % 32 == 0:
        sWarp[thread // 32] = value
    cute.arch.sync_threads()
    result = sWarp[0]
    for warp in cutlass.range_constexpr(1, WARPS):
        result = operation(result, sWarp[warp])
    return result


@cute.kernel
def combine_kernel(
    hd: cutlass.Constexpr,
    mO: cute.Tensor,
    mLSE: cute.Tensor,
    mO_part: cute.Tensor,
    mLSE_part: cute.Tensor,
    rows: Int32,
    splits: Int32,
):
    """mO (row, hd) bf16 and mLSE (row) f32 from mO_part (split, row, hd) f32 and mLSE_part (split, row) f32.

    Thread i holds the weight of split i. A part that saw no key has lse = -inf, so weight 0, and may have no O at all:
    it is not read. Lanes take columns, the rest of the thread index takes every so many-th split.
    """
    columns = cutlass.const_expr(columns_of(hd))
    lanes = cutlass.const_expr(columns // VECTOR)
    groups = cutlass.const_expr(THREADS // lanes)
    smem = memory.SmemAllocator()
    sMax = smem.allocate_tensor(Float32, cute.make_layout(WARPS))
    sTotal = smem.allocate_tensor(Float32, cute.make_layout(WARPS))
    sWeight = smem.allocate_tensor(Float32, cute.make_layout(MAX_SPLITS))
    sSum = smem.allocate_tensor(Float32, cute.make_layout((VECTOR, lanes, groups)), byte_alignment=16)
    thread, _, _ = cute.arch.thread_idx()
    row, chunk, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_wait()

    part_lse = -Float32.inf
    if thread < splits:
        part_lse = mLSE_part[Int64(thread) * rows + row]
    top = block_reduced(part_lse, sMax, cute.arch.fmax)
    base = cutlass.select_(top == -Float32.inf, Float32(0.0), top)
    weight = cute.math.exp2((part_lse - base) * LOG2_E, fastmath=True)
    total = block_reduced(weight, sTotal, lambda a, b: a + b)
    inverse = Float32(0.0)
    lse = -Float32.inf
    if total > Float32(0.0):
        inverse = Float32(1.0) / total
        lse = base + cute.math.log2(total, fastmath=True) * LN2
    sWeight[thread] = weight * inverse
    cute.arch.sync_threads()

    lane, group = thread % lanes, thread // lanes
    rSum = cute.make_rmem_tensor(VECTOR, Float32)
    rPart = cute.make_rmem_tensor((VECTOR, AHEAD), Float32)
    rWeight = cute.make_rmem_tensor(AHEAD, Float32)
    rSum.fill(0.0)
    for first in cutlass.range(group, splits, groups * AHEAD, unroll=1):
        rPart.fill(0.0)
        for k in cutlass.range_constexpr(AHEAD):
            split = first + k * groups
            rWeight[k] = Float32(0.0)
            if split < splits:
                rWeight[k] = sWeight[split]
                if rWeight[k] > Float32(0.0):
                    offset = (Int64(split) * rows + row) * hd + chunk * columns + lane * VECTOR
                    pointer = mO_part.iterator + cute.assume(offset, divby=VECTOR)
                    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(VECTOR)), rPart[None, k])
        for k in cutlass.range_constexpr(AHEAD):
            rSum.store(rSum.load() + rPart[None, k].load() * rWeight[k])
    cute.autovec_copy(rSum, sSum[None, lane, group])
    cute.arch.sync_threads()
    if group == 0:
        for other in cutlass.range_constexpr(1, groups):
            rSum.store(rSum.load() + sSum[None, lane, other].load())
        rO = cute.make_rmem_tensor(VECTOR, BFloat16)
        rO.store(rSum.load().to(BFloat16))
        offset = cute.assume(Int64(row) * hd + chunk * columns + lane * VECTOR, divby=VECTOR)
        cute.autovec_copy(rO, cute.make_tensor(mO.iterator + offset, cute.make_layout(VECTOR)))
    if Boolean(thread == 0) and Boolean(chunk == 0):
        mLSE[row] = lse


assert MAX_SPLITS <= THREADS
