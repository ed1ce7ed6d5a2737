"""A probe compiled by CuTeDSL for sm_90a: y += 2 x by a host function, in both of its calling conventions."""

from __future__ import annotations

from typing import Literal

import torch

from backends.cutedsl.artifact import Artifact
from backends.cutedsl.compile import compile_host_function
from conformance.gpu.probe import Probe
from megamoe.backend import PackedFields, ScalarArg, StreamArg, TensorArg

N = 4099


def compiled() -> Artifact:
    """The artifact, which needs CuTeDSL but no device. UnsupportedError without CuTeDSL."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from conformance.isa.cutedsl_kernels import scale_add

    n = cute.sym_int32()
    x, y = (make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16) for _ in range(2))
    return compile_host_function(scale_add, x, y, cutlass.Float32(1), make_fake_stream(), target="sm_90a")


def scale_add_probe(artifact: Artifact, convention: Literal["tvm_ffi", "packed"]) -> Probe:
    """N elements, not a multiple of a CTA's 128. A product with 2 is exact: fused or not, the sum has the same bits."""
    generator = torch.Generator().manual_seed(7)
    tensors = {name: torch.randn(N, generator=generator) for name in "xy"}
    vectors = {name: TensorArg(name, "f32", (N,), packed=PackedFields(dims=(0,))) for name in "xy"}
    arguments = {**vectors, "alpha": ScalarArg("f32", 2.0), "stream": StreamArg()}
    program = artifact.program(arguments, convention=convention)
    return Probe(f"cutedsl-{convention}", program, tensors, ("y",))
