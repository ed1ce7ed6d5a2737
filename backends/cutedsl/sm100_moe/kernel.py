# pyright: reportMissingImports=false
"""NVFP4 MoE on sm_100a in CuTeDSL: host functions of the layer and of its stages, each a queue of a few kernels.

    layer        routing, gather, L1 (swiglu_kernel), L2 (rows_kernel), combine
    l1           routing, gather, L1
    requantise   routing, requantise
    l2           routing, L2
    combine      routing, combine

Nothing returns to the host in between: the routing kernel leaves on the device which route is which row and what the
grouped GEMMs have to do (sm100_moe_routing). Sizes are run-time values; compile-time is whether pairs of CTAs work
together and, where there is an L1, the interleave of gate and up.

Each kernel but the first may be launched while the one before it still runs (programmatic dependent launch): it sets
up its barriers and tensor memory, then waits until that kernel is complete, which had waited for its own predecessor.
"""

from collections.abc import Callable

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from backends.cutedsl.sm100_moe import combine as sm100_moe_combine
from backends.cutedsl.sm100_moe import gather as sm100_moe_gather
from backends.cutedsl.sm100_moe import requantise as sm100_moe_requantise
from backends.cutedsl.sm100_moe import routing as sm100_moe_routing
from backends.cutedsl.sm100_moe.combine import combine_kernel
from backends.cutedsl.sm100_moe.gather import gather_kernel
from backends.cutedsl.sm100_moe.gemm import launch_shape, rows_kernel, swiglu_kernel
from backends.cutedsl.sm100_moe.operands import layout_a, layout_w, make_operand
from backends.cutedsl.sm100_moe.plan import H_COLUMNS, TILE_K, TILE_M, Sm100MoePlan
from backends.cutedsl.sm100_moe.requantise import requantise_kernel
from backends.cutedsl.sm100_moe.routing import routing_kernel
from backends.cutedsl.sm100_moe.rows import RowsTensors, make_rows_store
from backends.cutedsl.sm100_moe.swiglu import SwigluTensors


def ceil_div(a: Int32, b: int) -> Int32:
    """a / b, rounded up."""
    return (a + b - 1) // b


@cute.jit
def route(cta_group: cutlass.Constexpr, mTopkIds, mRowOfRoute, mRouteOfRow, mUnits, experts: Int32, stream):
    """Queue the routing kernel."""
    routing_kernel.set_name_prefix("sm100_moe_routing", remove_cutlass_symbol=True, keep_mangled_name=False)
    routing_kernel(cta_group, flat(mTopkIds), mRowOfRoute, mRouteOfRow, mUnits, experts).launch(
        grid=[ceil_div(experts, sm100_moe_routing.WARPS), 1, 1],
        block=[sm100_moe_routing.THREADS, 1, 1],
        stream=stream,
    )


def flat(mTensor: cute.Tensor) -> cute.Tensor:
    """A compact tensor of rank 2 as one of rank 1."""
    return cute.make_tensor(mTensor.iterator, cute.make_layout(mTensor.shape[0] * mTensor.shape[1]))


@cute.jit
def l1(
    plan: cutlass.Constexpr,
    interleave: cutlass.Constexpr,
    mTopkIds: cute.Tensor,
    mX_codes: cute.Tensor,
    mX_sf: cute.Tensor,
    mRowOfRoute: cute.Tensor,
    mUnits: cute.Tensor,
    mA1_codes: cute.Tensor,
    mA1_sf: cute.Tensor,
    mW1_codes: cute.Tensor,
    mW1_sf: cute.Tensor,
    tensors: SwigluTensors,
    max_ctas: Int32,
    stream: cuda.CUstream,
):
    """Queue the gather and L1."""
    gather_kernel.set_name_prefix("sm100_moe_gather", remove_cutlass_symbol=True, keep_mangled_name=False)
    mIds = flat(mTopkIds)
    routes = cute.size(mIds)
    gather_kernel(mIds, mRowOfRoute, mX_codes, mX_sf, mA1_codes, mA1_sf, tensors.topk).launch(
        grid=[cutlass.min(ceil_div(routes, sm100_moe_gather.WARPS), 8 * max_ctas), 1, 1],
        block=[32 * sm100_moe_gather.WARPS, 1, 1],
        stream=stream,
        use_pdl=True,
    )
    a = make_operand(plan, mA1_codes, mA1_sf, 1, layout_a(plan))
    w = make_operand(plan, mW1_codes, mW1_sf, plan.cta_group, layout_w(plan))
    w_rows = mW1_codes.shape[1]
    swiglu_kernel.set_name_prefix("sm100_moe_swiglu", remove_cutlass_symbol=True, keep_mangled_name=False)
    swiglu_kernel(
        plan, interleave, a, w, mUnits, w_rows, ceil_div(mA1_codes.shape[1] * 2, TILE_K), tensors
    ).launch(
        stream=stream, **launch_shape(plan, mA1_codes.shape[0] // TILE_M, ceil_div(w_rows, plan.tile_n), max_ctas)
    )  # fmt: skip


@cute.jit
def l2(
    plan: cutlass.Constexpr,
    mRouteOfRow: cute.Tensor,
    mUnits: cute.Tensor,
    mA2_codes: cute.Tensor,
    mA2_sf: cute.Tensor,
    mA2_gs: cute.Tensor,
    mW2_codes: cute.Tensor,
    mW2_sf: cute.Tensor,
    mW2_gs: cute.Tensor,
    mRows: cute.Tensor,
    max_ctas: Int32,
    stream: cuda.CUstream,
):
    """Queue L2."""
    a = make_operand(plan, mA2_codes, mA2_sf, 1, layout_a(plan))
    w = make_operand(plan, mW2_codes, mW2_sf, plan.cta_group, layout_w(plan))
    tensors = RowsTensors(*make_rows_store(mRows), mRouteOfRow, mA2_gs, mW2_gs)
    w_rows = mW2_codes.shape[1]
    rows_kernel.set_name_prefix("sm100_moe_rows", remove_cutlass_symbol=True, keep_mangled_name=False)
    rows_kernel(plan, a, w, mUnits, w_rows, ceil_div(mA2_codes.shape[1] * 2, TILE_K), tensors).launch(
        stream=stream, **launch_shape(plan, mRows.shape[0] // TILE_M, ceil_div(w_rows, plan.tile_n), max_ctas)
    )


@cute.jit
def combine(mTopkIds, mTopkWeights, mRowOfRoute, mRows, mY, weighted: Int32, stream: cuda.CUstream):
    """Queue the combine kernel. `weighted`: not 0 if rows are multiplied by the top-k weights."""
    combine_kernel.set_name_prefix("sm100_moe_combine", remove_cutlass_symbol=True, keep_mangled_name=False)
    vectors = mY.shape[0] * (mY.shape[1] // sm100_moe_combine.VECTOR)
    combine_kernel(flat(mTopkIds), flat(mTopkWeights), mRowOfRoute, mRows, mY, mTopkIds.shape[1], weighted).launch(
        grid=[ceil_div(vectors, sm100_moe_combine.THREADS), 1, 1],
        block=[sm100_moe_combine.THREADS, 1, 1],
        stream=stream,
        use_pdl=True,
    )


class Sm100Moe:
    """Host functions for one way to compute: `cta_group` CTAs a tile, gate and up in turns of `interleave` rows."""

    def __init__(self, cta_group: int, interleave: int) -> None:
        self.interleave = interleave
        self.l1_plan, self.l2_plan = Sm100MoePlan(cta_group, swiglu=True), Sm100MoePlan(cta_group, swiglu=False)
        self.cta_group = cta_group

    @cute.jit
    def layer(
        self,
        x_codes: cute.Tensor,
        x_sf: cute.Tensor,
        x_gs: cute.Tensor,
        w1_codes: cute.Tensor,
        w1_sf: cute.Tensor,
        w1_gs: cute.Tensor,
        w2_codes: cute.Tensor,
        w2_sf: cute.Tensor,
        w2_gs: cute.Tensor,
        a2_gs: cute.Tensor,
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        row_of_route: cute.Tensor,
        route_of_row: cute.Tensor,
        units: cute.Tensor,
        a1_codes: cute.Tensor,
        a1_sf: cute.Tensor,
        a2_codes: cute.Tensor,
        a2_sf: cute.Tensor,
        rows: cute.Tensor,
        y: cute.Tensor,
        weight_before: Int32,
        clamp: Float32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Queue the layer. Tensors as in specs/nvfp4_moe.yaml; row_of_route to rows are workspaces."""
        route(self.cta_group, topk_ids, row_of_route, route_of_row, units, w1_codes.shape[0], stream)
        tensors = SwigluTensors(
            route_of_row, x_gs, w1_gs, a2_gs, flat(topk_weights), a2_codes, a2_sf,
            topk_ids.shape[1], weight_before, clamp,
        )  # fmt: skip
        l1(
            self.l1_plan, self.interleave, topk_ids, x_codes, x_sf, row_of_route, units, a1_codes, a1_sf,
            w1_codes, w1_sf, tensors, max_ctas, stream,
        )  # fmt: skip
        l2(
            self.l2_plan, route_of_row, units, a2_codes, a2_sf, a2_gs, w2_codes, w2_sf, w2_gs, rows, max_ctas, stream,
        )  # fmt: skip
        combine(topk_ids, topk_weights, row_of_route, rows, y, 1 - weight_before, stream)

    @cute.jit
    def l1(
        self,
        x_codes: cute.Tensor,
        x_sf: cute.Tensor,
        x_gs: cute.Tensor,
        w1_codes: cute.Tensor,
        w1_sf: cute.Tensor,
        w1_gs: cute.Tensor,
        a2_gs: cute.Tensor,
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        row_of_route: cute.Tensor,
        route_of_row: cute.Tensor,
        units: cute.Tensor,
        a1_codes: cute.Tensor,
        a1_sf: cute.Tensor,
        a2_codes: cute.Tensor,
        a2_sf: cute.Tensor,
        weight_before: Int32,
        clamp: Float32,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Queue the stage l1."""
        route(self.cta_group, topk_ids, row_of_route, route_of_row, units, w1_codes.shape[0], stream)
        tensors = SwigluTensors(
            route_of_row, x_gs, w1_gs, a2_gs, flat(topk_weights), a2_codes, a2_sf,
            topk_ids.shape[1], weight_before, clamp,
        )  # fmt: skip
        l1(
            self.l1_plan, self.interleave, topk_ids, x_codes, x_sf, row_of_route, units, a1_codes, a1_sf,
            w1_codes, w1_sf, tensors, max_ctas, stream,
        )  # fmt: skip

    @cute.jit
    def requantise(
        self,
        h: cute.Tensor,
        a2_gs: cute.Tensor,
        topk_ids: cute.Tensor,
        row_of_route: cute.Tensor,
        route_of_row: cute.Tensor,
        units: cute.Tensor,
        a2_codes: cute.Tensor,
        a2_sf: cute.Tensor,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Queue the stage requantise."""
        route(self.cta_group, topk_ids, row_of_route, route_of_row, units, a2_gs.shape[0], stream)
        requantise_kernel.set_name_prefix("sm100_moe_requantise", remove_cutlass_symbol=True, keep_mangled_name=False)
        groups = topk_ids.shape[0] * topk_ids.shape[1] * (h.shape[1] // H_COLUMNS)
        requantise_kernel(flat(topk_ids), row_of_route, h, a2_gs, a2_codes, a2_sf).launch(
            grid=[cutlass.min(ceil_div(groups, sm100_moe_requantise.THREADS), 8 * max_ctas), 1, 1],
            block=[sm100_moe_requantise.THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.jit
    def l2(
        self,
        a2_codes: cute.Tensor,
        a2_sf: cute.Tensor,
        a2_gs: cute.Tensor,
        w2_codes: cute.Tensor,
        w2_sf: cute.Tensor,
        w2_gs: cute.Tensor,
        topk_ids: cute.Tensor,
        row_of_route: cute.Tensor,
        route_of_row: cute.Tensor,
        units: cute.Tensor,
        rows: cute.Tensor,
        max_ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Queue the stage l2."""
        route(self.cta_group, topk_ids, row_of_route, route_of_row, units, w2_codes.shape[0], stream)
        l2(
            self.l2_plan, route_of_row, units, a2_codes, a2_sf, a2_gs, w2_codes, w2_sf, w2_gs, rows, max_ctas, stream,
        )  # fmt: skip

    @cute.jit
    def combine(
        self,
        rows: cute.Tensor,
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        row_of_route: cute.Tensor,
        route_of_row: cute.Tensor,
        units: cute.Tensor,
        y: cute.Tensor,
        num_experts: Int32,
        weight_before: Int32,
        stream: cuda.CUstream,
    ):
        """Queue the stage combine."""
        route(self.cta_group, topk_ids, row_of_route, route_of_row, units, num_experts, stream)
        combine(topk_ids, topk_weights, row_of_route, rows, y, 1 - weight_before, stream)

    def host_function(self, stage: str) -> Callable[..., object]:
        """The host function of a stage, or of the layer."""
        functions: dict[str, Callable[..., object]] = {
            "layer": self.layer,
            "l1": self.l1,
            "requantise": self.requantise,
            "l2": self.l2,
            "combine": self.combine,
        }
        return functions[stage]
