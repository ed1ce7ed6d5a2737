# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""NVFP4 MoE on sm_100a in CuTeDSL: the host function of the layer or of one of its stages, a queue of a few kernels.

    layer        routing, gather, L1 (swiglu_kernel), L2 (rows_kernel), combine
    l1           routing, gather, L1
    requantise   routing, requantise
    l2           routing, L2
    combine      routing, combine

Nothing returns to the host in between: the routing kernel leaves the rows of all routes and the schedule of the grouped
GEMMs on the device (routing.py). Sizes are run-time values. Compiled in are the choice between single CTAs and pairs
and, for stages with L1, the interleave of gate and up.

Each kernel but the first may be launched while the one before it still runs (programmatic dependent launch). It sets up
its barriers and tensor memory, then waits until that kernel, which waited for its own predecessor, is complete.
"""

from functools import partial
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from backends.cutedsl.moe.call import ceil_div, flat, launch_combine
from backends.cutedsl.moe.call import named as kernel_named
from backends.cutedsl.moe.layout import TILE_M
from backends.cutedsl.moe.nvfp4 import Nvfp4
from backends.cutedsl.sm100_moe import routing, row_kernels
from backends.cutedsl.sm100_moe.epilogue import RowsTensors, SwigluTensors, make_rows_store
from backends.cutedsl.sm100_moe.gemm import launch_shape, rows_kernel, swiglu_kernel
from backends.cutedsl.sm100_moe.operands import GroupedGemm, layout_a, layout_w, make_operand
from backends.cutedsl.sm100_moe.plan import H_COLUMNS, TILE_K, Sm100MoePlan

FAMILY = "sm100_moe"
named = partial(kernel_named, FAMILY)


class Sm100Moe:
    """The host function for `cta_group` CTAs per tile, with gate and up in turns of `interleave` rows.

    `call` in all methods: the arguments, named as in program.PARAMETERS.
    """

    def __init__(self, cta_group: int, interleave: int) -> None:
        self.cta_group, self.interleave = cta_group, interleave

    @cute.jit
    def __call__(self, stage: cutlass.Constexpr, **arguments):
        """Queue the kernels of `stage`. `arguments`: those that program.STAGES names for it."""
        call = SimpleNamespace(**arguments)
        self._route(call, call.num_experts if stage == "combine" else call.a2_gs.shape[0])
        if cutlass.const_expr(stage in ("layer", "l1")):
            self._gather(call)
            self._l1(call)
        if cutlass.const_expr(stage == "requantise"):
            self._requantise(call)
        if cutlass.const_expr(stage in ("layer", "l2")):
            self._l2(call)
        if cutlass.const_expr(stage in ("layer", "combine")):
            self._combine(call)

    def _route(self, call: SimpleNamespace, experts: Int32) -> None:
        kernel = named(routing.routing_kernel, "routing")
        schedule = routing.GemmSchedule(call.row_of_route, call.route_of_row, call.units)
        kernel(self.cta_group, flat(call.topk_ids), schedule, experts).launch(
            grid=[ceil_div(experts, routing.WARPS), 1, 1], block=[routing.THREADS, 1, 1], stream=call.stream
        )

    def _gather(self, call: SimpleNamespace) -> None:
        ids, topk = flat(call.topk_ids), call.topk_ids.shape[1]
        source, target = Nvfp4(call.x_codes, call.x_sf), Nvfp4(call.a1_codes, call.a1_sf)
        named(row_kernels.gather_kernel, "gather")(ids, call.row_of_route, source, target, topk).launch(
            grid=[cutlass.min(ceil_div(cute.size(ids), row_kernels.GATHER_WARPS), 8 * call.max_ctas), 1, 1],
            block=[32 * row_kernels.GATHER_WARPS, 1, 1],
            stream=call.stream,
            use_pdl=True,
        )

    def _gemm(self, call: SimpleNamespace, plan: Sm100MoePlan, a: Nvfp4, w: Nvfp4):
        """The operands and sizes of a product, and its launch parameters."""
        w_rows = w.codes.shape[1]
        operands = (make_operand(plan, a, 1, layout_a(plan)), make_operand(plan, w, plan.cta_group, layout_w(plan)))
        gemm = GroupedGemm(*operands, call.units, w_rows, ceil_div(a.codes.shape[1] * 2, TILE_K))
        shape = launch_shape(plan, a.codes.shape[0] // TILE_M, ceil_div(w_rows, plan.tile_n), call.max_ctas)
        return gemm, {"stream": call.stream, **shape}

    def _l1(self, call: SimpleNamespace) -> None:
        plan = Sm100MoePlan(self.cta_group, swiglu=True)
        a, w = Nvfp4(call.a1_codes, call.a1_sf), Nvfp4(call.w1_codes, call.w1_sf)
        gemm, shape = self._gemm(call, plan, a, w)
        tensors = SwigluTensors(
            mRouteOfRow=call.route_of_row,
            mX_gs=call.x_gs,
            mW1_gs=call.w1_gs,
            mA2_gs=call.a2_gs,
            mTopkWeights=flat(call.topk_weights),
            a2=Nvfp4(call.a2_codes, call.a2_sf),
            topk=call.topk_ids.shape[1],
            weighted=call.weight_before,
            clamp=call.clamp,
        )
        named(swiglu_kernel, "swiglu")(plan, self.interleave, gemm, tensors).launch(**shape)

    def _requantise(self, call: SimpleNamespace) -> None:
        groups = call.topk_ids.shape[0] * call.topk_ids.shape[1] * (call.h.shape[1] // H_COLUMNS)
        kernel, a2 = named(row_kernels.requantise_kernel, "requantise"), Nvfp4(call.a2_codes, call.a2_sf)
        kernel(flat(call.topk_ids), call.row_of_route, call.h, call.a2_gs, a2).launch(
            grid=[cutlass.min(ceil_div(groups, row_kernels.REQUANTISE_THREADS), 8 * call.max_ctas), 1, 1],
            block=[row_kernels.REQUANTISE_THREADS, 1, 1],
            stream=call.stream,
            use_pdl=True,
        )

    def _l2(self, call: SimpleNamespace) -> None:
        plan = Sm100MoePlan(self.cta_group, swiglu=False)
        a, w = Nvfp4(call.a2_codes, call.a2_sf), Nvfp4(call.w2_codes, call.w2_sf)
        gemm, shape = self._gemm(call, plan, a, w)
        tensors = RowsTensors(make_rows_store(call.rows), call.route_of_row, call.a2_gs, call.w2_gs)
        named(rows_kernel, "rows")(plan, gemm, tensors).launch(**shape)

    def _combine(self, call: SimpleNamespace) -> None:
        launch_combine(FAMILY, call)
