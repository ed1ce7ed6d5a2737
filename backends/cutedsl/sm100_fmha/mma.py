# pyright: reportMissingImports=false
"""The MMA issuer warp: S = Q K^T one tile ahead, then O += P V."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean
from cutlass.cute.nvgpu import tcgen05
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from backends.cutedsl.sm100_fmha.operands import make_pv_mma, make_qk_mma
from backends.cutedsl.sm100_fmha.plan import Sm100FmhaPlan
from backends.cutedsl.sm100_fmha.tiles import Problem, work_item
from backends.cutedsl.sm100_fmha.tmem import fence_after_sync


@cute.jit
def issue_qk(plan: Sm100FmhaPlan, tStS, tSrQ, tSrK, q_index, kv: PipelineConsumer, s: PipelineProducer):
    """One S tile into the next S stage; each K slab goes back to the producer as soon as its instructions are done."""
    qk_mma = make_qk_mma()
    s_tile = s.acquire_and_advance()
    fence_after_sync()
    tStS_stage = tStS[None, None, None, s_tile.index]
    for column in cutlass.range_constexpr(plan.k_slabs):
        slab = kv.wait_and_advance()
        for k_block in cutlass.range_constexpr(cute.size(tSrK, mode=[2])):
            qk_mma.set(tcgen05.Field.ACCUMULATE, column != 0 or k_block != 0)
            cute.gemm(
                qk_mma,
                tStS_stage,
                tSrQ[None, None, k_block, q_index * plan.k_slabs + column],
                tSrK[None, None, k_block, slab.index],
                tStS_stage,
            )
        slab.release()
    s_tile.commit()
    return kv, s


@cute.jit
def issue_pv(
    plan: Sm100FmhaPlan,
    tOtO,
    tOrP,
    tOrV,
    accumulate: Boolean,
    kv: PipelineConsumer,
    p: PipelineConsumer,
    o: PipelineProducer,
):
    """O (+)= P V of one key tile, once O is rescaled (`o` acquired) and P is written."""
    pv_mma = make_pv_mma(plan)
    o_turn = o.acquire_and_advance()
    p_tile = p.wait_and_advance()
    fence_after_sync()
    tOrP_stage = tOrP[None, None, None, p_tile.index]
    k_blocks = cute.size(tOrV, mode=[2])
    for key in cutlass.range_constexpr(plan.v_key_slabs):
        for column in cutlass.range_constexpr(plan.v_column_slabs):
            slab = kv.wait_and_advance()
            tOtO_column = cute.make_tensor(tOtO.iterator + column * plan.pv_tile_n, tOtO.layout)
            for k_block in cutlass.range_constexpr(k_blocks):
                if cutlass.const_expr(key == 0 and k_block == 0):
                    pv_mma.set(tcgen05.Field.ACCUMULATE, accumulate)
                else:
                    pv_mma.set(tcgen05.Field.ACCUMULATE, True)
                cute.gemm(
                    pv_mma,
                    tOtO_column,
                    tOrP_stage[None, None, key * k_blocks + k_block],
                    tOrV[None, None, k_block, slab.index],
                    tOtO_column,
                )
            slab.release()
    p_tile.release()
    o_turn.commit()
    return kv, p, o


@cute.jit
def mma_warp(plan: Sm100FmhaPlan, problem: Problem, qk_tensors, pv_tensors, q, kv, s, p, o):
    """The issuer's work loop; S of the next tile is always issued before O of this one."""
    tStS, tSrQ, tSrK = qk_tensors
    tOtO, tOrP, tOrV = pv_tensors
    start, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    for index in cutlass.range(start, problem.work_items, step, unroll=1):
        item = work_item(plan, problem, index)
        if item.tiles > 0:
            q_tile = q.wait_and_advance()
            kv, s = issue_qk(plan, tStS, tSrQ, tSrK, q_tile.index, kv, s)
            accumulate = Boolean(False)
            for _ in cutlass.range(1, item.tiles, unroll=1):
                kv, s = issue_qk(plan, tStS, tSrQ, tSrK, q_tile.index, kv, s)
                kv, p, o = issue_pv(plan, tOtO, tOrP, tOrV, accumulate, kv, p, o)
                accumulate = Boolean(True)
            q_tile.release()
            kv, p, o = issue_pv(plan, tOtO, tOrP, tOrV, accumulate, kv, p, o)
