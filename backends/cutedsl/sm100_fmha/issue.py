# pyright: reportMissingImports=false
"""The two issuing warps: one loads by TMA, one multiplies; S = Q K^T runs one tile ahead of O += P V.

The producer loads Q once per work item, and K and V slab by slab through one ring, in the order of the MMA warp.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from backends.cutedsl.attention_tiles import AttentionItem, Inputs, Problem, attention_item
from backends.cutedsl.sm100_fmha.operands import FmhaSmem, Fragments, make_fragments, make_pv_mma, make_qk_mma, pv_tiler
from backends.cutedsl.sm100_fmha.plan import SLAB_COLUMNS, TILE_M, TILE_N, Sm100FmhaPlan
from backends.cutedsl.tcgen05 import fence_after_sync
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
    """Load one K tile: hd / 64 slabs of 128 keys x 64 columns."""
    for column in cutlass.range_constexpr(plan.k_slabs):
        slab = kv.acquire_and_advance()
        k.load((tile, column, item.kv_batch), slab)
    return kv


@cute.jit
def load_v_tile(plan: Sm100FmhaPlan, v: TmaViews, item: AttentionItem, tile: Int32, kv: PipelineProducer):
    """Load one V tile, the columns of this work item: keys outermost, in the order of P V."""
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


@dataclass
class MmaRings:
    """The issuer's ends of the rings."""

    kv: PipelineConsumer
    s: PipelineProducer
    p: PipelineConsumer
    o: PipelineProducer
    q: PipelineConsumer


@cute.jit
def issue_qk(plan: Sm100FmhaPlan, qk: Fragments, q_index: Int32, rings: MmaRings):
    """Issue one S tile into the next S stage. Each K slab is released as soon as its instructions are done."""
    qk_mma = make_qk_mma()
    s_tile = rings.s.acquire_and_advance()
    fence_after_sync()
    tStS = qk.tCtC[None, None, None, s_tile.index]
    for column in cutlass.range_constexpr(plan.k_slabs):
        slab = rings.kv.wait_and_advance()
        for k_block in cutlass.range_constexpr(cute.size(qk.tCrB, mode=[2])):
            qk_mma.set(tcgen05.Field.ACCUMULATE, column != 0 or k_block != 0)
            tSrQ = qk.tCrA[None, None, k_block, q_index * plan.k_slabs + column]
            cute.gemm(qk_mma, tStS, tSrQ, qk.tCrB[None, None, k_block, slab.index], tStS)
        slab.release()
    s_tile.commit()
    return rings


@cute.jit
def issue_pv(plan: Sm100FmhaPlan, pv: Fragments, accumulate: Boolean, rings: MmaRings):
    """Issue O (+)= P V of one key tile, once O is rescaled (`o` acquired) and P is written."""
    pv_mma = make_pv_mma(plan)
    o_turn = rings.o.acquire_and_advance()
    p_tile = rings.p.wait_and_advance()
    fence_after_sync()
    tOrP = pv.tCrA[None, None, None, p_tile.index]
    k_blocks = cute.size(pv.tCrB, mode=[2])
    for key in cutlass.range_constexpr(plan.v_key_slabs):
        for column in cutlass.range_constexpr(plan.v_column_slabs):
            slab = rings.kv.wait_and_advance()
            tOtO = cute.make_tensor(pv.tCtC.iterator + column * plan.pv_tile_n, pv.tCtC.layout)
            for k_block in cutlass.range_constexpr(k_blocks):
                first = cutlass.const_expr(key == 0 and k_block == 0)
                pv_mma.set(tcgen05.Field.ACCUMULATE, accumulate if first else True)
                tOrP_block = tOrP[None, None, key * k_blocks + k_block]
                cute.gemm(pv_mma, tOtO, tOrP_block, pv.tCrB[None, None, k_block, slab.index], tOtO)
            slab.release()
    p_tile.release()
    o_turn.commit()
    return rings


@cute.jit
def mma_warp(plan: Sm100FmhaPlan, problem: Problem, tmem_ptr: cute.Pointer, smem: FmhaSmem, rings: MmaRings):
    """The issuer's work loop; S of the next tile is always issued before O of this one."""
    qk, pv = make_fragments(plan, tmem_ptr, smem)
    start, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    for index in cutlass.range(start, problem.work_items, step, unroll=1):
        item = attention_item(plan, problem, index)
        if item.tiles > 0:
            q_tile = rings.q.wait_and_advance()
            rings = issue_qk(plan, qk, q_tile.index, rings)
            accumulate = Boolean(False)
            for _ in cutlass.range(1, item.tiles, unroll=1):
                rings = issue_qk(plan, qk, q_tile.index, rings)
                rings = issue_pv(plan, pv, accumulate, rings)
                accumulate = Boolean(True)
            q_tile.release()
            rings = issue_pv(plan, pv, accumulate, rings)
