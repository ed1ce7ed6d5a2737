"""The grouped GEMMs of an NVFP4 MoE layer for sm_90a, as PTX: wgmma with weights from registers and tokens as columns.

wgmma takes its second operand only from shared memory, and sm_90a has no FP4 tensor core: weights are unpacked to f16
in registers, so they are the first operand and the tokens of an expert the second, 8 to 256 of them. While an expert
has few tokens all memory traffic is weights, and unpacking must keep up with it. The product of a code and its block
scale has six significant bits and a range of 2^22: f16 holds it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from backends.ptx.builder import Builder
from backends.ptx.sm90_moe.frame import ColumnGemmParams, open_frame
from backends.ptx.sm90_moe.geometry import ColumnTiling, widths_up_to
from backends.ptx.sm90_moe.multiply import emit_multiply
from backends.ptx.sm90_moe.producer import emit_producer
from backends.ptx.sm90_moe.rows import ExpertRowsParams, RowsEpilogue
from backends.ptx.sm90_moe.swiglu import SwigluColumns, SwigluColumnsParams, SwigluForm

PTX_VERSION = (8, 0)
"""wgmma appeared in PTX ISA 8.0."""


@dataclass(frozen=True, slots=True)
class ColumnKernel:
    """A grouped GEMM."""

    builder: Builder
    tiling: ColumnTiling


@cache
def l1_kernel(variant: SwigluForm, tiling: ColumnTiling) -> ColumnKernel:
    """The first GEMM: SwiGLU, requantisation."""
    entry = "_".join([f"moe_swiglu_m{tiling.tile_m}n{tiling.widest}"] + ["clamped"] * variant.clamped)
    entry += "_bf16" * tiling.bf16
    x = _gemm(entry + "_weighted" * variant.weighted, tiling, "SwiGLU and requantisation in the epilogue.")
    gemm, params = ColumnGemmParams.declare(x), SwigluColumnsParams.declare(x)
    frame = open_frame(x, gemm, tiling)
    emit_producer(frame)
    emit_multiply(frame, widths_up_to(tiling.widest), SwigluColumns(frame, params, variant))
    x.emit("ret")
    return ColumnKernel(x, tiling)


@cache
def l2_kernel(tiling: ColumnTiling) -> ColumnKernel:
    """The second GEMM: writes expert rows."""
    x = _gemm(f"moe_rows_m{tiling.tile_m}n{tiling.widest}" + "_bf16" * tiling.bf16, tiling, "bf16 rows out.")
    gemm, params = ColumnGemmParams.declare(x), ExpertRowsParams.declare(x)
    frame = open_frame(x, gemm, tiling)
    emit_producer(frame)
    emit_multiply(frame, widths_up_to(tiling.widest), RowsEpilogue(frame, params))
    x.emit("ret")
    return ColumnKernel(x, tiling)


def _gemm(entry: str, tiling: ColumnTiling, what: str) -> Builder:
    x = Builder(entry, target="sm_90a", version=PTX_VERSION, block=tiling.threads, ctas_per_sm=1)
    lines = [
        f"Grouped GEMM, tiles of {tiling.tile_m} rows of NVFP4 weights by up to {tiling.widest} tokens of an expert.",
        f"{what} {tiling.warpgroups} warpgroups unpack and multiply, one loads.",
        "Persistent: CTA c takes tiles c, c + grid, ...",
        f"{tiling.stages} stages of {tiling.units} units of 64 along K. Dynamic shared memory, in bytes:",
    ]
    x.header(lines + tiling.smem.described())
    return x
