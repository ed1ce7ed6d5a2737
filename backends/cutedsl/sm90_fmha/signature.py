# pyright: reportMissingImports=false
"""The types that the attention kernel is compiled for: fake tensors with run-time sizes. Imports CuTeDSL."""

from __future__ import annotations

from collections.abc import Callable

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from backends.cutedsl.sm90_fmha.kernel import Sm90Fmha
from backends.cutedsl.sm90_fmha.plan import Sm90FmhaPlan

ALIGNMENT = 16
"""Bytes that tensors are aligned to: what TMA asks of a global address, and a 16-byte vector store."""


def fmha_signature(plan: Sm90FmhaPlan) -> tuple[Callable[..., object], tuple[object, ...]]:
    """The host function of `plan` and an argument of each parameter's type, as compile_host_function takes them."""
    kv_batches, rows, s_k = cute.sym_int32(), cute.sym_int32(), cute.sym_int32()

    def matrices(count: object) -> object:
        return make_fake_compact_tensor(
            BFloat16, (kv_batches, count, plan.hd), stride_order=(2, 1, 0), assumed_align=ALIGNMENT
        )

    def vector(alignment: int) -> object:
        return make_fake_compact_tensor(Float32, (cute.sym_int32(),), assumed_align=alignment)

    tensors = (matrices(rows), matrices(s_k), matrices(s_k), matrices(rows), vector(4), vector(ALIGNMENT), vector(4))
    t, left, right, splits, max_ctas = (Int32(1) for _ in range(5))
    return Sm90Fmha(plan), (*tensors, t, left, right, Float32(1.0), splits, max_ctas, make_fake_stream())
