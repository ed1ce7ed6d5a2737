"""The kernels of an NVFP4 MoE layer as PTX text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from backends.ptx.builder import Builder
from backends.ptx.moe.layout import TILE_M
from backends.ptx.moe.shape import SwigluVariant
from backends.ptx.shared_memory import SmemLayout
from backends.ptx.sm100_moe.epilogue import (
    ExpertRow,
    RowEpilogue,
    RowsParams,
    SwigluParams,
    SwigluRow,
    emit_epilogue,
)
from backends.ptx.sm100_moe.frame import GemmFrame, GemmParams, open_frame
from backends.ptx.sm100_moe.geometry import ROLES, THREADS, TILE_N, smem_layout
from backends.ptx.sm100_moe.issue import emit_mma, emit_producer
from backends.ptx.tcgen05 import tear_down

PTX_VERSION = (8, 7)
"""kind::mxf4nvf4 with .scale_vec::4X appeared in PTX ISA 8.7; the kernels use nothing newer."""
L2_ENTRY = "moe_rows"
L1_SMEM = smem_layout(staged=False)
L2_SMEM = smem_layout(staged=True)


@dataclass(frozen=True, slots=True)
class GemmKernel:
    """A grouped GEMM; `smem` in bytes."""

    builder: Builder
    smem: int


def l1_entry(variant: SwigluVariant) -> str:
    """The entry name of the first GEMM."""
    parts = ["moe_swiglu", f"interleave{variant.interleave}"]
    return "_".join(parts + ["clamped"] * variant.clamped + ["weighted"] * variant.weighted)


@cache
def l1_kernel(variant: SwigluVariant) -> GemmKernel:
    """The first GEMM: gathers tokens, applies SwiGLU, requantises."""
    x = _gemm(l1_entry(variant), L1_SMEM, "A gathered from the tokens; SwiGLU and requantisation in the epilogue.")
    gemm, params = GemmParams.declare(x), SwigluParams.declare(x)
    frame = open_frame(x, gemm, L1_SMEM)
    emit_producer(frame, params.token_of_row)
    return _finished(frame, SwigluRow(frame, params, variant))


@cache
def l2_kernel() -> GemmKernel:
    """The second GEMM: writes expert rows."""
    x = _gemm(L2_ENTRY, L2_SMEM, "A in the order of the expert rows; bf16 rows out.")
    gemm, params = GemmParams.declare(x), RowsParams.declare(x)
    frame = open_frame(x, gemm, L2_SMEM)
    emit_producer(frame, None)
    return _finished(frame, ExpertRow(frame, params))


def _finished(frame: GemmFrame, rows: RowEpilogue) -> GemmKernel:
    emit_mma(frame)
    emit_epilogue(frame, rows)
    tear_down(frame.x, frame.threads, ROLES, frame.tmem)
    return GemmKernel(frame.x, frame.smem.layout.size)


def _gemm(entry: str, layout: SmemLayout, what: str) -> Builder:
    x = Builder(entry, target="sm_100a", version=PTX_VERSION, block=THREADS)
    lines = [
        f"Grouped NVFP4 GEMM, tiles of {TILE_M} rows of one expert by {TILE_N} rows of its weights. {what}",
        "Warps 0-3 epilogue, 4 MMA issuer, 5 TMA producer. Persistent: CTA c takes tiles c, c + grid, ...",
        "TMEM columns: accumulators 0-255 and 128-383, scale factors 384-479. Dynamic shared memory, in bytes:",
    ]
    x.header(lines + layout.described())
    return x
