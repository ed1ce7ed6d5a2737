# pyright: reportMissingImports=false
"""The requantisation kernel: what the epilogue of L1 does to h, from memory. A thread takes 64 columns of a row."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from backends.cutedsl.sm100_moe.nvfp4 import Nvfp4, quantise, store_quantised
from backends.cutedsl.sm100_moe.plan import H_COLUMNS

THREADS = 128


@cute.kernel
def requantise_kernel(
    mTopkIds: cute.Tensor,
    mRowOfRoute: cute.Tensor,
    mH: cute.Tensor,
    mA2_gs: cute.Tensor,
    a2: Nvfp4,
):
    """mH (rows, intermediate) f32 to a2 under mA2_gs (experts); only rows that are routes."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    groups = mH.shape[1] // H_COLUMNS
    rH = cute.make_rmem_tensor(H_COLUMNS, Float32)
    rCodes = cute.make_rmem_tensor(H_COLUMNS // 8, Uint32)
    start, step = block * THREADS + thread, blocks * THREADS
    for index in cutlass.range(start, cute.size(mTopkIds) * groups, step, unroll=1):
        route, group = index // groups, index % groups
        expert = mTopkIds[route]
        if expert >= 0:
            row = mRowOfRoute[route]
            offset = cute.assume(Int64(row) * mH.shape[1] + group * H_COLUMNS, divby=H_COLUMNS)
            cute.autovec_copy(cute.make_tensor(mH.iterator + offset, cute.make_layout(H_COLUMNS)), rH)
            scales = quantise(rH, mA2_gs[expert], rCodes)
            store_quantised(a2, row, group, rCodes, scales)
