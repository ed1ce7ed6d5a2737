"""The host function through which an FA4 kernel is called. Imported only where CuTeDSL is installed.

CuTeDSL reads annotations at compile time from the module's own names, so the imports are at the top.
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32


def forward_of(kernel: Callable[..., object], window: tuple[int | None, int | None]) -> Callable[..., object]:
    """A function of q, k, v, o, lse, scale and stream that launches `kernel` with everything else left out."""

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
    """A function of o_part, lse_part, o, lse and stream that launches the kernel that puts splits together."""

    @cute.jit
    def combine(
        o_part: cute.Tensor, lse_part: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, stream: cuda.CUstream
    ) -> None:
        kernel(o_part, lse_part, o, lse, stream=stream)

    return combine
