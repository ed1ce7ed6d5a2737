"""A CuTeDSL function with its kernel, on CPU tensors: y = a*x + y."""

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import cute

import megamoe.cutedsl


@cute.kernel
def axpy_kernel(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if i < cute.size(x):
        y[i] = a * x[i] + y[i]


@cute.jit
def axpy(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, stream: cuda.CUstream = cuda.CUstream(0)):  # noqa: B008
    cute.printf("%d elements", cute.size(x))
    axpy_kernel(x, y, a).launch(grid=[cute.ceil_div(cute.size(x), 128), 1, 1], block=[128, 1, 1], stream=stream)


x, y = torch.arange(1000.0), torch.ones(1000)
megamoe.cutedsl.run(axpy, x, y, 3.0, target="sm_100a")
assert torch.equal(y, 3 * x + 1)
