# pyright: reportMissingImports=false
"""Accumulators as the epilogue's threads see them, and the fences around handing them from thread to thread."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.experimental.primitives import nvvm_wrapper

from backends.cutedsl.sm100_moe.plan import HALF_N, TILE_M

CHUNK = 32
"""Columns of one tcgen05.ld."""


def fence_before_sync() -> None:
    """Order what this thread did in tensor memory, and waited for, before its next arrive (PTX ISA 9.7.16.6.4.4)."""
    nvvm_wrapper.tcgen05_fence("before_thread_sync")


def fence_after_sync() -> None:
    """Order what this thread does in tensor memory from here on after the wait that it has just done."""
    nvvm_wrapper.tcgen05_fence("after_thread_sync")


@cute.jit
def load_half(tmem_ptr: cute.Pointer, rAcc: cute.Tensor, thread: Int32):
    """rAcc (128) f32: 128 columns from `tmem_ptr` on, of the row that is this thread's.

    32x32b: thread t of the warpgroup has lane t, register r column r. A lane is 2^16 addresses on (facts.md 1).
    """
    for column in cutlass.range_constexpr(0, HALF_N, CHUNK):
        tAcc = cute.make_tensor(tmem_ptr + column, cute.make_layout((TILE_M, CHUNK), stride=(1 << 16, 1)))
        atom = cute.make_copy_atom(tcgen05.copy.Ld32x32bOp(tcgen05.copy.Repetition(CHUNK)), Float32)
        load = tcgen05.make_tmem_copy(atom, tAcc).get_slice(thread)
        shape = load.partition_D(cute.make_identity_tensor((TILE_M, CHUNK))).shape
        cute.copy(load, load.partition_S(tAcc), cute.make_tensor(rAcc.iterator + column, cute.make_layout(shape)))
    cute.arch.fence_view_async_tmem_load()
