# pyright: reportMissingImports=false
"""The MMA issuer warp: scales from shared to tensor memory, then products, a ring stage at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.pipeline import PipelineConsumer, PipelineProducer

from backends.cutedsl.sm100_moe_operands import Shared, copy_scales, make_accumulators, make_mma, scale_copy
from backends.cutedsl.sm100_moe_plan import K_BLOCKS, Sm100MoePlan
from backends.cutedsl.sm100_moe_tiles import walk
from backends.cutedsl.sm100_moe_tmem import fence_after_sync


@cute.jit
def mma_warp(
    plan: Sm100MoePlan,
    shared: Shared,
    tmem_ptr: cute.Pointer,
    mUnits: cute.Tensor,
    w_rows: Int32,
    k_tiles: Int32,
    rank: Int32,
    ring: PipelineConsumer,
    acc: PipelineProducer,
):
    """The issuer's work loop; of a pair the first CTA issues for both."""
    mma = make_mma(plan)
    tCtAcc = make_accumulators(plan, tmem_ptr)
    tCrA, tCrW = mma.make_fragment_A(shared.sA), mma.make_fragment_B(shared.sW)
    copy_a = scale_copy(plan, shared.sSFA, True, tmem_ptr)
    copy_w = scale_copy(plan, shared.sSFW, False, tmem_ptr)
    items = walk(plan, mUnits, w_rows)
    if rank == 0:
        for _ in cutlass.range(items.first, items.end, items.step, unroll=1):
            acc_tile = acc.acquire_and_advance()
            fence_after_sync()
            tCtAcc_stage = tCtAcc[None, None, None, acc_tile.index]
            for k_tile in cutlass.range(k_tiles, unroll=1):
                stage = ring.wait_and_advance()
                fence_after_sync()
                tSFA = copy_scales(copy_a, tmem_ptr, stage.index)
                tSFW = copy_scales(copy_w, tmem_ptr, stage.index)
                for k_block in cutlass.range_constexpr(K_BLOCKS):
                    mma.set(tcgen05.Field.ACCUMULATE, k_tile != 0 if k_block == 0 else True)
                    mma.set(tcgen05.Field.SFA, tSFA[None, None, k_block].iterator)
                    mma.set(tcgen05.Field.SFB, tSFW[None, None, k_block].iterator)
                    cute.gemm(
                        mma,
                        tCtAcc_stage,
                        tCrA[None, None, k_block, stage.index],
                        tCrW[None, None, k_block, stage.index],
                        tCtAcc_stage,
                    )
                stage.release()
            acc_tile.commit()
        acc.tail()
