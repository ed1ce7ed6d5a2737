# pyright: reportMissingImports=false
"""Tensor memory as threads see it: rows of 32-bit words, and the fences around handing it from thread to thread."""

import cutlass.cute as cute
from cutlass.experimental.primitives import nvvm_wrapper

from backends.cutedsl.sm100_fmha.plan import TILE_M


def tmem_rows(tmem_ptr: cute.Pointer, columns: int) -> cute.Tensor:
    """(128, columns) fp32 words of tensor memory from `tmem_ptr`: a lane is 2^16 addresses on (facts.md 1)."""
    return cute.make_tensor(tmem_ptr, cute.make_layout((TILE_M, columns), stride=(1 << 16, 1)))


def fence_before_sync() -> None:
    """Order what this thread did in tensor memory, and waited for, before its next arrive.

    PTX ISA 9.7.16.6.4.4. CuTeDSL's pipelines leave this fence and the next to their user.
    """
    nvvm_wrapper.tcgen05_fence("before_thread_sync")


def fence_after_sync() -> None:
    """Order what this thread does in tensor memory from here on after the wait that it has just done."""
    nvvm_wrapper.tcgen05_fence("after_thread_sync")
