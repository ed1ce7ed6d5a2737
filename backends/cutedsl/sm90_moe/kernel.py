# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""NVFP4 MoE on sm_90a in CuTeDSL: the host function of the layer or of one of its stages, a queue of a few kernels.

    layer        routing, gather, L1 (swiglu_kernel), expand, L2 (rows_kernel), combine
    l1           routing, gather, L1
    requantise   routing, requantise
    l2           routing, expand, L2
    combine      routing, combine

Called to prepare, it repacks the weights of its stage instead. sm_90a has no FP4 tensor core. Weights stay NVFP4 in
memory, which saves bandwidth, and become f16 in registers, or bf16 if the activations are bf16. In both, a code times
its block scale is exact.

Each kernel but the first may be launched while the one before it still runs (programmatic dependent launch).
"""

from functools import partial
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from backends.cutedsl.moe.call import ceil_div, flat, launch_combine
from backends.cutedsl.moe.call import named as kernel_named
from backends.cutedsl.moe.layout import SF_VEC_SIZE
from backends.cutedsl.moe.nvfp4 import Nvfp4
from backends.cutedsl.sm90_moe import expand, repack, requantise, routing
from backends.cutedsl.sm90_moe.epilogue import ColumnActivations, ColumnRows
from backends.cutedsl.sm90_moe.gemm import rows_kernel, swiglu_kernel
from backends.cutedsl.sm90_moe.plan import PANEL_ROWS, PANELS, ROW_BYTES, UNIT_K, Sm90MoePlan
from backends.cutedsl.sm90_moe.schedule import ColumnGemm

FAMILY = "sm90_moe"
named = partial(kernel_named, FAMILY)


class Sm90Moe:
    """The host function for GEMMs of `width` columns per tile, with bf16 activations or NVFP4 ones.

    `call` in all methods: the arguments, named as in program.PARAMETERS.
    """

    def __init__(self, width: int, bf16: bool) -> None:
        self.width, self.bf16 = width, bf16

    @cute.jit
    def __call__(self, stage: cutlass.Constexpr, **arguments):
        """Queue the kernels of `stage`, or of its preparation. `arguments`: those that program.STAGES names for it."""
        call = SimpleNamespace(**arguments)
        if call.prepares != 0:
            self._prepare(stage, call)
        else:
            self._compute(stage, call)

    def _prepare(self, stage, call: SimpleNamespace) -> None:
        if stage in ("layer", "l1"):
            self._repack(call, Nvfp4(call.w1_codes, call.w1_sf), call.w1_packed, call.interleave_log2)
        if stage in ("layer", "l2"):
            self._repack(call, Nvfp4(call.w2_codes, call.w2_sf), call.w2_packed, Int32(0))

    def _compute(self, stage, call: SimpleNamespace) -> None:
        self._route(call)
        if stage in ("layer", "l1"):
            self._l1(call)
        if stage == "requantise":
            self._requantise(call)
        if stage in ("layer", "l2"):
            self._l2(call)
        if stage in ("layer", "combine"):
            self._combine(call)

    def _repack(self, call: SimpleNamespace, w: Nvfp4, m_packed: cute.Tensor, interleave_log2: Int32) -> None:
        panels, units = w.codes.shape[0] * (w.codes.shape[1] // PANEL_ROWS), w.codes.shape[2] // (UNIT_K // 2)
        named(repack.repack_kernel, "repack")(w, m_packed, interleave_log2).launch(
            grid=[panels, units, 1], block=[repack.THREADS, 1, 1], stream=call.stream
        )

    def _route(self, call: SimpleNamespace) -> None:
        columns = routing.Columns(call.row_of_route, call.route_of_row, call.columns, flat(call.flags))
        named(routing.routing_kernel, "routing")(flat(call.topk_ids), columns, self.width).launch(
            grid=[call.num_experts, 1, 1], block=[routing.THREADS, 1, 1], stream=call.stream
        )

    def _x(self, call: SimpleNamespace) -> expand.RowsOf:
        return call.x if self.bf16 else Nvfp4(call.x_codes, call.x_sf)

    def _a2(self, call: SimpleNamespace) -> expand.RowsOf:
        return call.a2 if self.bf16 else Nvfp4(call.a2_codes, call.a2_sf)

    def _a2_gs(self, call: SimpleNamespace) -> cute.Tensor | None:
        return None if self.bf16 else call.a2_gs

    def _expanded(self, call: SimpleNamespace, w: Nvfp4, m_rows: cute.Tensor) -> expand.Expanded:
        units = w.codes.shape[2] // (UNIT_K // 2)
        return expand.Expanded(m_rows, call.columns, Int64(units) * self.width * ROW_BYTES, Int32(self.width), units)

    def _expand_shape(self, call: SimpleNamespace) -> dict[str, object]:
        rows = (call.columns.shape[0] - 1) * self.width
        grid = [cutlass.min(rows, expand.CTAS_PER_SM * call.max_ctas), 1, 1]
        return {"grid": grid, "block": [expand.THREADS, 1, 1], "stream": call.stream, "use_pdl": True}

    def _gemm(self, call: SimpleNamespace, plan: Sm90MoePlan, w: Nvfp4, packed: cute.Tensor, expanded):
        """The operands and sizes of a product, and its launch parameters."""
        flags = 0 if plan.swiglu else 1
        panels = w.codes.shape[1] // PANEL_ROWS
        m_flags = cute.make_tensor(call.flags.iterator + flags * call.flags.shape[1], call.flags[0, None].layout)
        gemm = ColumnGemm(
            mPacked=packed,
            mTokens=expanded.mRows,
            mColumns=call.columns,
            mPartials=call.partials,
            mFlags=m_flags,
            panels=panels,
            turns=expanded.units // 2,
            pitch=expanded.pitch,
        )
        tiles = (call.columns.shape[0] - 1) * ceil_div(panels, PANELS)
        grid = [cutlass.min(tiles, call.max_ctas), 1, 1]
        block = [plan.threads, 1, 1]
        return gemm, {"grid": grid, "block": block, "stream": call.stream, "min_blocks_per_mp": 1, "use_pdl": True}

    def _l1(self, call: SimpleNamespace) -> None:
        x, w = self._x(call), Nvfp4(call.w1_codes, call.w1_sf)
        expanded = self._expanded(call, w, call.w1_tokens)
        factors = expand.Factors(
            mRouteOfRow=call.route_of_row,
            mX_gs=None if self.bf16 else call.x_gs,
            mW1_gs=call.w1_gs,
            mTopkWeights=flat(call.topk_weights),
            mFactor=call.row_factor,
            mWeight=call.row_weight,
            topk=call.topk_ids.shape[1],
            weighted=call.weight_before,
        )
        named(expand.gather_kernel, "gather")(x, expanded, factors).launch(**self._expand_shape(call))
        plan = Sm90MoePlan(self.width, swiglu=True, bf16=self.bf16)
        gemm, shape = self._gemm(call, plan, w, call.w1_packed, expanded)
        a2, a2_gs = self._a2(call), self._a2_gs(call)
        tensors = ColumnActivations(call.row_factor, call.row_weight, a2_gs, a2, call.clamp)
        named(swiglu_kernel, "swiglu")(plan, gemm, tensors).launch(**shape)

    def _requantise(self, call: SimpleNamespace) -> None:
        blocks = call.topk_ids.shape[0] * call.topk_ids.shape[1] * (call.h.shape[1] // SF_VEC_SIZE)
        kernel = named(requantise.requantise_kernel, "requantise")
        kernel(flat(call.topk_ids), call.row_of_route, call.h, self._a2_gs(call), self._a2(call)).launch(
            grid=[ceil_div(blocks, requantise.THREADS), 1, 1],
            block=[requantise.THREADS, 1, 1],
            stream=call.stream,
            use_pdl=True,
        )

    def _l2(self, call: SimpleNamespace) -> None:
        a2, w = self._a2(call), Nvfp4(call.w2_codes, call.w2_sf)
        expanded = self._expanded(call, w, call.w2_tokens)
        named(expand.expand_kernel, "expand")(a2, expanded).launch(**self._expand_shape(call))
        plan = Sm90MoePlan(self.width, swiglu=False, bf16=self.bf16)
        gemm, shape = self._gemm(call, plan, w, call.w2_packed, expanded)
        tensors = ColumnRows(call.rows, self._a2_gs(call), call.w2_gs)
        named(rows_kernel, "rows")(plan, gemm, tensors).launch(**shape)

    def _combine(self, call: SimpleNamespace) -> None:
        launch_combine(FAMILY, call)
