# pyright: reportMissingImports=false
"""The gather kernel: tokens to expert rows, codes and block scales, a warp a route.

The GEMM can then load A in plain tiles. TMA could gather codes itself (tile::gather4, 32 instructions a ring stage in
place of one) but not scales: those of a row lie in 4-byte pieces. The GEMM reads this back from L2; where experts have
few rows it is a few per cent of the weights that a layer reads.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from backends.cutedsl.sm100_moe.nvfp4 import VECTOR, Nvfp4, code_vector, scale_word

WARPS = 8


@cute.kernel
def gather_kernel(
    mTopkIds: cute.Tensor,
    mRowOfRoute: cute.Tensor,
    x: Nvfp4,
    a1: Nvfp4,
    topk: Int32,
):
    """x, by token, to a1, by expert row."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    lane = thread % 32
    row_bytes, atoms = x.codes.shape[1], x.sf.shape[1]
    for route in cutlass.range(block * WARPS + thread // 32, cute.size(mTopkIds), blocks * WARPS, unroll=1):
        if mTopkIds[route] >= 0:
            row, token = mRowOfRoute[route], route // topk
            for vector in cutlass.range(lane, row_bytes // VECTOR, 32, unroll=4):
                source = code_vector(x.codes, token, row_bytes, vector)
                cute.autovec_copy(source, code_vector(a1.codes, row, row_bytes, vector))
            for atom in cutlass.range(lane, atoms, 32, unroll=4):
                scale_word(a1.sf, row, atoms, atom)[0] = scale_word(x.sf, token, atoms, atom)[0]
