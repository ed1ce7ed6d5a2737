# pyright: reportMissingImports=false
"""The kernels beside the GEMMs, all over rows in global memory: gather, requantise, combine.

Gather moves tokens to expert rows, codes and block scales, a warp a route. The GEMM can then load A in plain tiles. TMA
could gather codes itself (tile::gather4, 32 instructions a ring stage in place of one) but not scales: those of a row
lie in 4-byte pieces. The GEMM reads this back from L2; where experts have few rows it is a few per cent of the weights
that a layer reads. Requantise does what the epilogue of L1 does to h, from memory; a thread takes 64 columns of a row.
Combine sums the expert rows of a token in ascending k, fp32; a thread takes eight columns.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

from backends.cutedsl.sm100_moe.nvfp4 import VECTOR, Nvfp4, code_vector, quantise, scale_word, store_quantised
from backends.cutedsl.sm100_moe.plan import H_COLUMNS

GATHER_WARPS = 8


@cute.kernel
def gather_kernel(mTopkIds: cute.Tensor, mRowOfRoute: cute.Tensor, x: Nvfp4, a1: Nvfp4, topk: Int32):
    """x, by token, to a1, by expert row."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    lane = thread % 32
    row_bytes, atoms = x.codes.shape[1], x.sf.shape[1]
    for route in cutlass.range(
        block * GATHER_WARPS + thread // 32, cute.size(mTopkIds), blocks * GATHER_WARPS, unroll=1
    ):
        if mTopkIds[route] >= 0:
            row, token = mRowOfRoute[route], route // topk
            for vector in cutlass.range(lane, row_bytes // VECTOR, 32, unroll=4):
                source = code_vector(x.codes, token, row_bytes, vector)
                cute.autovec_copy(source, code_vector(a1.codes, row, row_bytes, vector))
            for atom in cutlass.range(lane, atoms, 32, unroll=4):
                scale_word(a1.sf, row, atoms, atom)[0] = scale_word(x.sf, token, atoms, atom)[0]


REQUANTISE_THREADS = 128


@cute.kernel
def requantise_kernel(mTopkIds: cute.Tensor, mRowOfRoute: cute.Tensor, mH: cute.Tensor, mA2_gs: cute.Tensor, a2: Nvfp4):
    """mH (rows, intermediate) f32 to a2 under mA2_gs (experts); only rows that are routes."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    groups = mH.shape[1] // H_COLUMNS
    rH = cute.make_rmem_tensor(H_COLUMNS, Float32)
    rCodes = cute.make_rmem_tensor(H_COLUMNS // 8, Uint32)
    start, step = block * REQUANTISE_THREADS + thread, blocks * REQUANTISE_THREADS
    for index in cutlass.range(start, cute.size(mTopkIds) * groups, step, unroll=1):
        route, group = index // groups, index % groups
        expert = mTopkIds[route]
        if expert >= 0:
            row = mRowOfRoute[route]
            offset = cute.assume(Int64(row) * mH.shape[1] + group * H_COLUMNS, divby=H_COLUMNS)
            cute.autovec_copy(cute.make_tensor(mH.iterator + offset, cute.make_layout(H_COLUMNS)), rH)
            scales = quantise(rH, mA2_gs[expert], rCodes)
            store_quantised(a2, row, group, rCodes, scales)


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
