# pyright: reportMissingImports=false
"""The TMA producer warp: Q once a work item, K and V slab by slab through one ring, in the order of the MMA warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineProducer

from backends.cutedsl.attention_tiles import AttentionItem, Inputs, Problem, attention_item
from backends.cutedsl.sm100_fmha.operands import FmhaSmem, make_pv_mma, make_qk_mma, pv_tiler
from backends.cutedsl.sm100_fmha.plan import SLAB_COLUMNS, TILE_M, TILE_N, Sm100FmhaPlan
from backends.cutedsl.tma import TmaTensor, TmaViews, tma_views


def slab_views(plan: Sm100FmhaPlan, inputs: Inputs, smem: FmhaSmem) -> tuple[TmaViews, TmaViews, TmaViews]:
    """The views of Q, K and V. Tiles are (rows, column, kv_batch); of V (column, keys, kv_batch)."""
    qk_thread, pv_thread = make_qk_mma().get_slice(0), make_pv_mma(plan).get_slice(0)

    def views(tensor: TmaTensor, tiler: tuple[int, int], partition, sX: cute.Tensor) -> TmaViews:
        return tma_views(tensor.atom, partition(cute.flat_divide(tensor.coordinates, tiler)), sX, 3)

    return (
        views(inputs.q, (TILE_M, SLAB_COLUMNS), qk_thread.partition_A, smem.sQ),
        views(inputs.k, (TILE_N, SLAB_COLUMNS), qk_thread.partition_B, smem.sK),
        views(inputs.v, pv_tiler(plan)[1:], pv_thread.partition_B, smem.sV),
    )


@cute.jit
def load_k_tile(plan: Sm100FmhaPlan, k: TmaViews, item: AttentionItem, tile: Int32, kv: PipelineProducer):
    """One K tile: hd / 64 slabs of 128 keys x 64 columns."""
    for column in cutlass.range_constexpr(plan.k_slabs):
        slab = kv.acquire_and_advance()
        k.load((tile, column, item.kv_batch), slab)
    return kv


@cute.jit
def load_v_tile(plan: Sm100FmhaPlan, v: TmaViews, item: AttentionItem, tile: Int32, kv: PipelineProducer):
    """One V tile, the columns of this work item: keys outermost, as P V consumes them."""
    for key in cutlass.range_constexpr(plan.v_key_slabs):
        for column in cutlass.range_constexpr(plan.v_column_slabs):
            slab = kv.acquire_and_advance()
            column_slab, key_slab = item.o_half * plan.v_column_slabs + column, tile * plan.v_key_slabs + key
            v.load((column_slab, key_slab, item.kv_batch), slab)
    return kv


@cute.jit
def load_warp(
    plan: Sm100FmhaPlan, problem: Problem, inputs: Inputs, smem: FmhaSmem, q: PipelineProducer, kv: PipelineProducer
):
    """The producer's work loop."""
    q_views, k_views, v_views = slab_views(plan, inputs, smem)
    start, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    for index in cutlass.range(start, problem.work_items, step, unroll=1):
        item = attention_item(plan, problem, index)
        if item.tiles > 0:
            q_tile = q.acquire_and_advance()
            for column in cutlass.range_constexpr(plan.k_slabs):
                stage = q_tile.index * plan.k_slabs + column
                q_views.load((item.row_tile, column, item.kv_batch), q_tile, stage)
            kv = load_k_tile(plan, k_views, item, item.first_tile, kv)
            for tile in cutlass.range(item.first_tile + 1, item.first_tile + item.tiles, unroll=1):
                kv = load_k_tile(plan, k_views, item, tile, kv)
                kv = load_v_tile(plan, v_views, item, tile - 1, kv)
            kv = load_v_tile(plan, v_views, item, item.first_tile + item.tiles - 1, kv)
