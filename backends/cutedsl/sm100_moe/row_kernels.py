# pyright: reportMissingImports=false
"""The kernels beside the GEMMs, over rows in global memory: gather, requantise.

Gather copies codes and block scales of tokens to expert rows, one warp per route, so that the GEMM can load A in plain
tiles. TMA could gather codes itself (tile::gather4, 32 instructions per ring stage instead of one) but not scales,
because a row's scales are in 4-byte pieces. The GEMM reads the copy back from L2; if experts have few rows, it is a few
per cent of the weights that a layer reads. Requantise quantises h as the epilogue of L1 does, but from memory; a thread
takes 64 columns of a row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from backends.cutedsl.moe.nvfp4 import VECTOR, Nvfp4, code_vector, scale_word
from backends.cutedsl.sm100_moe.nvfp4 import quantise, store_quantised
from backends.cutedsl.sm100_moe.plan import H_COLUMNS

GATHER_WARPS = 8


@cute.kernel
def gather_kernel(mTopkIds: cute.Tensor, mRowOfRoute: cute.Tensor, x: Nvfp4, a1: Nvfp4, topk: Int32):
    """Copy x, by token, to a1, by expert row."""
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
    """Quantise mH (rows, intermediate) f32 to a2 under mA2_gs (experts); only rows with a route."""
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
