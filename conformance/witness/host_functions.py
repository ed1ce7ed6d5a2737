"""The host functions that call FA4's kernels and quack's GEMMs. Needs CuTeDSL and the extra `witness`.

CuTeDSL reads annotations at compile time from the module's own names, so the imports are at the top.
"""

# These imports need the extra `witness`.
# pyright: reportMissingImports=false

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32
from quack.gemm_default_epi import GemmDefaultEpiMixin
from quack.tile_scheduler import TileSchedulerOptions


def forward_of(kernel: Callable[..., object], window: tuple[int | None, int | None]) -> Callable[..., object]:
    """A function of q, k, v, o, lse, scale and stream that launches `kernel` without its other arguments."""

    @cute.jit
    def forward(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        scale: Float32,
        stream: cuda.CUstream,
    ) -> None:
        kernel(q, k, v, o, lse, scale, window_size_left=window[0], window_size_right=window[1], stream=stream)

    return forward


def combine_of(kernel: Callable[..., object]) -> Callable[..., object]:
    """A function of o_part, lse_part, o, lse and stream that launches `kernel`, which combines the splits."""

    @cute.jit
    def combine(
        o_part: cute.Tensor, lse_part: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, stream: cuda.CUstream
    ) -> None:
        kernel(o_part, lse_part, o, lse, stream=stream)

    return combine


def gemm_of(kernel: Callable[..., object], active_clusters: int) -> Callable[..., object]:
    """A function of a, b, d and stream that launches `kernel` with the default epilogue."""

    @cute.jit
    def gemm(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stream: cuda.CUstream) -> None:
        epilogue = GemmDefaultEpiMixin.EpilogueArguments()
        scheduler = TileSchedulerOptions(max_active_clusters=Int32(active_clusters))
        kernel(a, b, d, None, epilogue, scheduler, None, stream)

    return gemm


def scaled_gemm_of(kernel: Callable[..., object], active_clusters: int) -> Callable[..., object]:
    """Same as gemm_of, with block scales sfa and sfb of the operands."""

    @cute.jit
    def scaled_gemm(
        a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, sfa: cute.Tensor, sfb: cute.Tensor, stream: cuda.CUstream
    ) -> None:
        epilogue = GemmDefaultEpiMixin.EpilogueArguments()
        scheduler = TileSchedulerOptions(max_active_clusters=Int32(active_clusters))
        kernel(a, b, d, None, epilogue, scheduler, None, stream, sfa, sfb)

    return scaled_gemm
