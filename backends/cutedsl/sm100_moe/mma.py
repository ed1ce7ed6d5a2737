# pyright: reportMissingImports=false
"""The MMA issuer warp: scales from shared to tensor memory, then products, a ring stage at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import tcgen05
from cutlass.pipeline import PipelineProducer

from backends.cutedsl.sm100_moe.operands import (
    GroupedGemm,
    RingSmem,
    copy_scales,
    make_accumulators,
    make_mma,
    scale_copy,
)
from backends.cutedsl.sm100_moe.plan import HALF_N, K_BLOCKS, Sm100MoePlan
from backends.cutedsl.sm100_moe.routing import walk
from backends.cutedsl.tcgen05 import Ring, fence_after_sync


@cute.jit
def mma_warp(
    plan: Sm100MoePlan,
    gemm: GroupedGemm,
    smem: RingSmem,
    tmem_ptr: cute.Pointer,
    rank: Int32,
    ring: Ring,
    acc: PipelineProducer,
):
    """The issuer's work loop; the first CTA of a pair issues for both.

    Where there are fewer slots of scales than ring stages, `behind` follows the ring by that many stages. It waits
    until the tensor core is done with the stage, and so with the slot; the stage in between keeps the tensor core busy.
    """
    mma = make_mma(plan)
    tCrA, tCrW = mma.make_fragment_A(smem.sA), mma.make_fragment_B(smem.sW)
    copy_a = scale_copy(plan, smem.sSFA, True, tmem_ptr)
    copy_w = scale_copy(plan, smem.sSFW, False, tmem_ptr)
    items = walk(plan, gemm)
    operands, loads = ring.consumer, ring.pipeline
    behind = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, plan.ring_stages)
    slot, used, turn = Int32(0), Int32(0), Int32(0)
    if rank == 0:
        for _ in cutlass.range(items.first, items.end, items.step, unroll=1):
            acc_tile = acc.acquire_and_advance()
            fence_after_sync()
            tCtAcc = make_accumulators(plan, tmem_ptr + turn * HALF_N)
            turn ^= 1
            for k_tile in cutlass.range(gemm.k_tiles, unroll=1):
                stage = operands.wait_and_advance()
                if cutlass.const_expr(plan.sf_slots < plan.ring_stages):
                    if used >= plan.sf_slots:
                        loads.sync_object_empty.wait(behind.index, behind.phase)
                        behind.advance()
                    used += 1
                fence_after_sync()
                tSFA = copy_scales(plan, copy_a, tmem_ptr, stage.index, slot)
                tSFW = copy_scales(plan, copy_w, tmem_ptr, stage.index, slot)
                slot = cutlass.select_(slot + 1 == plan.sf_slots, Int32(0), slot + 1)
                for k_block in cutlass.range_constexpr(K_BLOCKS):
                    mma.set(tcgen05.Field.ACCUMULATE, k_tile != 0 if k_block == 0 else True)
                    mma.set(tcgen05.Field.SFA, tSFA[None, None, k_block].iterator)
                    mma.set(tcgen05.Field.SFB, tSFW[None, None, k_block].iterator)
                    cute.gemm(
                        mma,
                        tCtAcc,
                        tCrA[None, None, k_block, stage.index],
                        tCrW[None, None, k_block, stage.index],
                        tCtAcc,
                    )
                stage.release()
            acc_tile.commit()
        acc.tail()
