# pyright: reportMissingImports=false
"""Combine: the expert rows of a token summed in ascending k, fp32; a thread takes eight columns."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64

COMBINE_THREADS = 256
COLUMNS = 8
"""Columns a thread: 16 bytes of bf16."""


def row_vector(mRows: cute.Tensor, row: Int32, vectors: Int32, vector: Int32) -> cute.Tensor:
    """Eight columns of one row."""
    pointer = mRows.iterator + cute.assume((Int64(row) * vectors + vector) * COLUMNS, divby=COLUMNS)
    return cute.make_tensor(pointer, cute.make_layout(COLUMNS))


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
    """mY (tokens, hidden) bf16 from mRows (rows, hidden) bf16, times mTopkWeights unless `weighted` is 0."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    vectors = mY.shape[1] // COLUMNS
    index = block * COMBINE_THREADS + thread
    token, vector = index // vectors, index % vectors
    if token < mY.shape[0]:
        rSum = cute.make_rmem_tensor(COLUMNS, Float32)
        rRow = cute.make_rmem_tensor(COLUMNS, BFloat16)
        rSum.fill(0.0)
        for k in cutlass.range(topk, unroll=1):
            route = token * topk + k
            if mTopkIds[route] >= 0:
                weight = cutlass.select_(Boolean(weighted != 0), mTopkWeights[route], Float32(1.0))
                cute.autovec_copy(row_vector(mRows, mRowOfRoute[route], vectors, vector), rRow)
                rSum.store(rSum.load() + rRow.load().to(Float32) * weight)
        rY = cute.make_rmem_tensor(COLUMNS, BFloat16)
        rY.store(rSum.load().to(BFloat16))
        cute.autovec_copy(rY, row_vector(mY, token, vectors, vector))
