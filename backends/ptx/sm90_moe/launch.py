"""From a case to a Program: workspaces, scalars and grids for the launches of its stage."""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.builder import Builder
from backends.ptx.moe import routing
from backends.ptx.moe.combine import combine_kernel
from backends.ptx.moe.layer import (
    WORD_BYTES,
    Step,
    a2_arguments,
    combine_step,
    layer_program,
    requantise_step,
    routing_tables,
)
from backends.ptx.moe.requantise import integer_code_word, requantise_kernel
from backends.ptx.moe.shape import MoeShape
from backends.ptx.sm90_moe import expand, repack
from backends.ptx.sm90_moe.frame import ColumnGemmParams
from backends.ptx.sm90_moe.geometry import (
    PANEL_ROWS,
    ROW_BYTES,
    SM_COUNT,
    UNIT_BYTES,
    UNIT_K,
    ColumnTiling,
    max_columns,
    widest_for,
    widths_up_to,
)
from backends.ptx.sm90_moe.kernel import PTX_VERSION, ColumnKernel, l1_kernel, l2_kernel
from backends.ptx.sm90_moe.rows import ExpertRowsParams
from backends.ptx.sm90_moe.swiglu import SwigluColumnsParams, SwigluForm
from megamoe.contract import Case, KernelArg, Launch, Program

NO_INTERLEAVE = 8
"""For w2: rows g and g + 8 of each 16, in their original order."""


@dataclass(frozen=True, slots=True)
class _Gemm:
    """One of the two GEMMs: `name` of its weights, `rows` by `k` per expert, and of its expanded tokens."""

    name: str
    rows: int
    k: int
    interleave: int

    @property
    def units(self) -> int:
        return self.k // UNIT_K

    @property
    def panels(self) -> int:
        return self.rows // PANEL_ROWS


def moe_program(case: Case) -> Program:
    """The program of an nvfp4_moe case on sm_90a: the routing, then one stage or the whole layer."""
    stages = {
        "l1": (_repack_w1, _expand_tokens, _l1),
        "requantise": (_requantise,),
        "l2": (_repack_w2, _expand_rows, _l2),
        "combine": (_combine,),
    }
    return layer_program(MoeShape.of(case, "sm_90a"), "sm_90a", _route, stages)


def widest(shape: MoeShape) -> int:
    """The widest column tile of the case's kernels."""
    return widest_for(shape.expected_routes, shape.num_experts)


def _columns(shape: MoeShape) -> int:
    return max_columns(shape.routes, shape.num_experts, widest(shape))


def _route(shape: MoeShape) -> Step:
    columns = {"columns": routing.COLUMN_WORDS * _columns(shape) * WORD_BYTES, "column_count": WORD_BYTES}
    launch = Launch(
        entry=routing.ENTRY,
        grid=(shape.num_experts, 1, 1),
        block=(routing.COLUMN_THREADS, 1, 1),
        args=routing.ColumnRoutingParams.arguments(tokens=shape.tokens, topk=shape.topk, num_experts=shape.num_experts),
        dynamic_smem=routing.smem_bytes(shape.num_experts, columns=True),
    )
    entry = routing.routing_kernel(PTX_VERSION, "sm_90a", widths_up_to(widest(shape)))
    return Step(entry, launch, routing_tables(shape) | columns)


def _l1_gemm(shape: MoeShape) -> _Gemm:
    return _Gemm("w1", 2 * shape.intermediate, shape.hidden, shape.variant.interleave)


def _l2_gemm(shape: MoeShape) -> _Gemm:
    return _Gemm("w2", shape.hidden, shape.intermediate, NO_INTERLEAVE)


def _repack(shape: MoeShape, gemm: _Gemm) -> Step:
    panels = shape.num_experts * gemm.panels
    launch = Launch(
        entry=repack.ENTRY,
        grid=(panels, gemm.units, 1),
        block=(repack.THREADS, 1, 1),
        args=repack.RepackParams.arguments(
            codes=f"{gemm.name}_codes",
            sf=f"{gemm.name}_sf",
            packed=f"{gemm.name}_packed",
            row_bytes=gemm.k // 2,
            units=gemm.units,
            interleave_log2=gemm.interleave.bit_length() - 1,
        ),
    )
    scratch = {f"{gemm.name}_packed": panels * gemm.units * UNIT_BYTES}
    return Step(repack.repack_kernel(PTX_VERSION), launch, scratch, prepares=True)


def _repack_w1(shape: MoeShape) -> Step:
    return _repack(shape, _l1_gemm(shape))


def _repack_w2(shape: MoeShape) -> Step:
    return _repack(shape, _l2_gemm(shape))


def _pitch(shape: MoeShape, gemm: _Gemm) -> int:
    """Bytes of a column tile of expanded rows."""
    return gemm.units * widest(shape) * ROW_BYTES


def _expand(shape: MoeShape, gemm: _Gemm, entry: Builder, args: tuple[KernelArg, ...]) -> Step:
    launch = Launch(
        entry=entry.entry,
        grid=(_columns(shape), widest(shape), 1),
        block=(expand.THREADS, 1, 1),
        args=args,
    )
    return Step(entry, launch, {f"{gemm.name}_rows": _columns(shape) * _pitch(shape, gemm)})


def _expand_tokens(shape: MoeShape) -> Step:
    gemm, weighted = _l1_gemm(shape), shape.variant.weighted
    kind = expand.ExpandWeightedParams if weighted else expand.ExpandGatherParams
    source = {"codes": "x", "sf": None, "x_gs": None} if shape.bf16 else {"codes": "x_codes", "sf": "x_sf"}
    args = kind.arguments(**source, expanded="w1_rows", units=gemm.units, pitch=_pitch(shape, gemm))
    kernel = expand.expand_kernel(PTX_VERSION, gathered=True, weighted=weighted, bf16=shape.bf16)
    step = _expand(shape, gemm, kernel, args)
    step.scratch["row_factor"] = _columns(shape) * widest(shape) * WORD_BYTES
    if weighted:
        step.scratch["row_weight"] = step.scratch["row_factor"]
    return step


def _expand_rows(shape: MoeShape) -> Step:
    gemm = _l2_gemm(shape)
    source = {"codes": "a2", "sf": None} if shape.bf16 else {"codes": "a2_codes", "sf": "a2_sf"}
    args = expand.ExpandParams.arguments(**source, expanded="w2_rows", units=gemm.units, pitch=_pitch(shape, gemm))
    return _expand(shape, gemm, expand.expand_kernel(PTX_VERSION, gathered=False, bf16=shape.bf16), args)


def _tiling(shape: MoeShape, gemm: _Gemm) -> ColumnTiling:
    visited = min(shape.expected_routes, shape.num_experts)
    return ColumnTiling.of(widest(shape), gemm.rows, shape.bf16, visited)


def _multiply(shape: MoeShape, gemm: _Gemm, kernel: ColumnKernel, own: tuple[KernelArg, ...]) -> Step:
    """The launch of `kernel`. `own`: the epilogue's arguments."""
    tiles_m = gemm.rows // kernel.tiling.tile_m
    common = ColumnGemmParams.arguments(
        weights=f"{gemm.name}_packed",
        activations=f"{gemm.name}_rows",
        tiles_m=tiles_m,
        units=gemm.units,
        weight_pitch=gemm.units * UNIT_BYTES,
        column_pitch=_pitch(shape, gemm),
    )
    launch = Launch(
        entry=kernel.builder.entry,
        grid=(min(shape.sms or SM_COUNT, _columns(shape) * tiles_m), 1, 1),
        block=(kernel.tiling.threads, 1, 1),
        args=(*common, *own),
        dynamic_smem=kernel.tiling.smem.size,
    )
    return Step(kernel.builder, launch)


def _l1(shape: MoeShape) -> Step:
    variant = SwigluForm(shape.variant.clamped, shape.variant.weighted)
    weights = "row_weight" if variant.weighted else None
    own = SwigluColumnsParams.arguments(
        row_weight=weights, intermediate=shape.intermediate, clamp=shape.clamp, **a2_arguments(shape)
    )
    gemm = _l1_gemm(shape)
    return _multiply(shape, gemm, l1_kernel(variant, _tiling(shape, gemm)), own)


def _l2(shape: MoeShape) -> Step:
    gemm = _l2_gemm(shape)
    own = ExpertRowsParams.arguments(hidden=shape.hidden, **({"a2_gs": None} if shape.bf16 else {}))
    return _multiply(shape, gemm, l2_kernel(_tiling(shape, gemm)), own)


def _requantise(shape: MoeShape) -> Step:
    encode = None if shape.bf16 else integer_code_word
    return requantise_step(shape, requantise_kernel(PTX_VERSION, "sm_90a", encode))


def _combine(shape: MoeShape) -> Step:
    return combine_step(shape, combine_kernel(PTX_VERSION, "sm_90a"))
