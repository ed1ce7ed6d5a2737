"""The host functions through which quack's GEMMs are called. Imported only where CuTeDSL is installed.

CuTeDSL reads annotations at compile time from the module's own names, so the imports are at the top.
"""

# What is imported here comes with the extra `witness` only.
# pyright: reportMissingImports=false

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32
from quack.gemm_default_epi import GemmDefaultEpiMixin
from quack.tile_scheduler import TileSchedulerOptions


def gemm_of(kernel: Callable[..., object], active_clusters: int) -> Callable[..., object]:
    """A function of a, b, d and stream that launches `kernel` without an epilogue of its own."""

    @cute.jit
    def gemm(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stream: cuda.CUstream) -> None:
        epilogue = GemmDefaultEpiMixin.EpilogueArguments()
        scheduler = TileSchedulerOptions(max_active_clusters=Int32(active_clusters))
        kernel(a, b, d, None, epilogue, scheduler, None, stream)

    return gemm


def scaled_gemm_of(kernel: Callable[..., object], active_clusters: int) -> Callable[..., object]:
    """As gemm_of, of operands with block scales sfa and sfb."""

    @cute.jit
    def scaled_gemm(
        a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, sfa: cute.Tensor, sfb: cute.Tensor, stream: cuda.CUstream
    ) -> None:
        epilogue = GemmDefaultEpiMixin.EpilogueArguments()
        scheduler = TileSchedulerOptions(max_active_clusters=Int32(active_clusters))
        kernel(a, b, d, None, epilogue, scheduler, None, stream, sfa, sfb)

    return scaled_gemm
