# pyright: reportMissingImports=false
"""Combine: the expert rows of a token summed in ascending k, fp32.

A CTA takes a token and COLUMNS of its columns. Each lane of a warp looks up the row of one of at most 16 choices, so
all look-ups together take the time of two loads. A thread that looked them up one by one would wait for each.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

THREADS = 128
VECTOR = 8
"""Columns per thread: 16 bytes of bf16."""
COLUMNS = THREADS * VECTOR


def row_vector(mRows: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
    """(VECTOR): the elements of a row from `column` on; 64-bit offsets."""
    pointer = mRows.iterator + cute.assume(Int64(row) * mRows.shape[1] + column, divby=VECTOR)
    return cute.make_tensor(pointer, cute.make_layout(VECTOR))


@cute.kernel
def combine_kernel(
    mTopkIds: cute.Tensor,
    mTopkWeights: cute.Tensor,
    mRowOfRoute: cute.Tensor,
    mRows: cute.Tensor,
    mY: cute.Tensor,
    topk: Int32,
    weighted: Int32,
):
    """mY (tokens, hidden) bf16 from mRows (rows, hidden) bf16, times mTopkWeights unless `weighted` is 0. Grid: tokens,
    then COLUMNS of hidden."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    token, part, _ = cute.arch.block_idx()
    lane = cute.arch.lane_idx()
    column = part * COLUMNS + thread * VECTOR
    exists = column < mY.shape[1]
    rSum = cute.make_rmem_tensor(VECTOR, Float32)
    rRow = cute.make_rmem_tensor(VECTOR, BFloat16)
    rSum.fill(0.0)
    row, weight = Int32(-1), Float32(1.0)
    if lane < topk:
        route = token * topk + lane
        if mTopkIds[route] >= 0:
            row = mRowOfRoute[route]
            if weighted != 0:
                weight = mTopkWeights[route]
    for k in cutlass.range(topk, unroll=1):
        row_k, weight_k = cute.arch.shuffle_sync(row, k), cute.arch.shuffle_sync(weight, k)
        if exists & (row_k >= 0):
            cute.autovec_copy(row_vector(mRows, row_k, column), rRow)
            rSum.store(rSum.load() + rRow.load().to(Float32) * weight_k)
    if exists:
        rRow.store(rSum.load().to(BFloat16))
        cute.autovec_copy(rRow, row_vector(mY, token, column))
