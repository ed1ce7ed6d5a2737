# pyright: reportMissingImports=false
"""The TMA producer warp: Q once a work item, K and V slab by slab through one ring, in the order of the MMA warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineProducer

from backends.cutedsl.sm100_fmha.plan import Sm100FmhaPlan
from backends.cutedsl.sm100_fmha.tiles import Problem, work_item


@cute.jit
def load_k_tile(plan: Sm100FmhaPlan, tma_k, tKgK, tKsK, tile: Int32, kv_batch: Int32, kv: PipelineProducer):
    """One K tile: hd / 64 slabs of 128 keys x 64 columns."""
    for column in cutlass.range_constexpr(plan.k_slabs):
        slab = kv.acquire_and_advance()
        cute.copy(tma_k, tKgK[None, tile, column, kv_batch], tKsK[None, slab.index], tma_bar_ptr=slab.barrier)
    return kv


@cute.jit
def load_v_tile(
    plan: Sm100FmhaPlan, tma_v, tVgV, tVsV, tile: Int32, o_half: Int32, kv_batch: Int32, kv: PipelineProducer
):
    """One V tile, the columns of this work item: keys outermost, as P V consumes them."""
    for key in cutlass.range_constexpr(plan.v_key_slabs):
        for column in cutlass.range_constexpr(plan.v_column_slabs):
            slab = kv.acquire_and_advance()
            coordinate = (None, o_half * plan.v_column_slabs + column, tile * plan.v_key_slabs + key, kv_batch)
            cute.copy(tma_v, tVgV[coordinate], tVsV[None, slab.index], tma_bar_ptr=slab.barrier)
    return kv


@cute.jit
def load_warp(
    plan: Sm100FmhaPlan, problem: Problem, tma_q, tma_k, tma_v, tQ, tK, tV, q: PipelineProducer, kv: PipelineProducer
):
    """The producer's work loop. `tQ`, `tK`, `tV` are (global, shared) pairs of `tma_partition`."""
    tQgQ, tQsQ = tQ
    tKgK, tKsK = tK
    tVgV, tVsV = tV
    start, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    for index in cutlass.range(start, problem.work_items, step, unroll=1):
        item = work_item(plan, problem, index)
        if item.tiles > 0:
            q_tile = q.acquire_and_advance()
            for column in cutlass.range_constexpr(plan.k_slabs):
                cute.copy(
                    tma_q,
                    tQgQ[None, item.row_tile, column, item.kv_batch],
                    tQsQ[None, q_tile.index * plan.k_slabs + column],
                    tma_bar_ptr=q_tile.barrier,
                )
            kv = load_k_tile(plan, tma_k, tKgK, tKsK, item.first_tile, item.kv_batch, kv)
            for tile in cutlass.range(item.first_tile + 1, item.first_tile + item.tiles, unroll=1):
                kv = load_k_tile(plan, tma_k, tKgK, tKsK, tile, item.kv_batch, kv)
                kv = load_v_tile(plan, tma_v, tVgV, tVsV, tile - 1, item.o_half, item.kv_batch, kv)
            last = item.first_tile + item.tiles - 1
            kv = load_v_tile(plan, tma_v, tVgV, tVsV, last, item.o_half, item.kv_batch, kv)
