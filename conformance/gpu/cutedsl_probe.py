"""Probes that CuTeDSL compiles for sm_90a, as host objects in both calling conventions."""

from __future__ import annotations

import torch

from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.compile.compile import compile_host_function
from conformance.gpu.probe import Probe
from megamoe.contract import PackedFields, ScalarArg, StreamArg, TensorArg

N = 4099
M, K = 64, 192


def compiled_scale_add() -> Artifact:
    """y += alpha * x. It needs CuTeDSL but no device; UnsupportedError without CuTeDSL."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from conformance.vm.host.cutedsl_kernels import scale_add

    n = cute.sym_int32()
    x, y = (make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16) for _ in range(2))
    return compile_host_function(scale_add, x, y, cutlass.Float32(1), make_fake_stream(), target="sm_90a")


def compiled_product() -> Artifact:
    """c = a b^T by TMA and wgmma; k is known at run time only. As compiled_scale_add."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from conformance.gpu.cutedsl_kernel import product

    k = cute.sym_int32(divisibility=64)
    a, b = (make_fake_compact_tensor(cutlass.BFloat16, (M, k), stride_order=(1, 0), assumed_align=16) for _ in range(2))
    c = make_fake_compact_tensor(cutlass.Float32, (M, M), stride_order=(1, 0), assumed_align=16)
    return compile_host_function(product, a, b, c, make_fake_stream(), target="sm_90a")


def scale_add_probe() -> Probe:
    """N elements, no multiple of 128 a CTA. A product with 2 is exact: fused or not, the sum has the same bits."""
    generator = torch.Generator().manual_seed(7)
    tensors = {name: torch.randn(N, generator=generator) for name in "xy"}
    vectors = {name: TensorArg(name, "f32", (N,), packed=PackedFields(dims=(0,))) for name in "xy"}
    arguments = {**vectors, "alpha": ScalarArg("f32", 2.0), "stream": StreamArg()}
    program = compiled_scale_add().program(arguments, convention="packed")
    return Probe("cutedsl-packed", program, tensors, ("y",))


def product_probe() -> Probe:
    """One tile over three blocks of k. The host function encodes two tensor maps with the device's driver."""
    generator = torch.Generator().manual_seed(8)
    operands = {name: torch.randn(M, K, generator=generator).to(torch.bfloat16) for name in "ab"}
    arguments = {name: TensorArg(name, "bf16", (M, K)) for name in "ab"}
    program = compiled_product().program({**arguments, "c": TensorArg("c", "f32", (M, M)), "stream": StreamArg()})
    return Probe("cutedsl-tvm_ffi", program, {**operands, "c": torch.full((M, M), float("nan"))}, ("c",))
