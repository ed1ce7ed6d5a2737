# pyright: reportMissingImports=false
"""The persistent grouped GEMM on sm_100a: warp-specialised, block-scaled NVFP4, L1 with SwiGLU or L2 with bf16 rows.

    epilogue  one warpgroup: an accumulator's rows from tensor memory; owns the allocation of tensor memory
    MMA       a warp: block scales from shared to tensor memory (tcgen05.cp), then tcgen05.mma; in a pair, of CTA 0
    TMA       a warp: codes and block scales of both operands

Two pipelines, each a ring of (full, empty) mbarriers:

    ring      TMA -> MMA        128 rows of A and of W, 256 of K, codes and scales
    acc       MMA -> epilogue   an accumulator, so that the epilogue of a tile overlaps the products of the next

CTAs, or pairs of them, walk over the tiles of all experts with a fixed stride. The schedule that the routing kernel
wrote (routing.py) says how many tiles there are, and of which experts. The grid does not depend on the routing. A pair
has one ring: barriers of the first CTA count the loads of both, and its MMA warp issues for both. Each epilogue handles
the 128 rows in its own tensor memory.
"""

from collections.abc import Mapping

import cutlass
import cutlass.cute as cute
from cutlass import Int32, memory, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.pipeline import PipelineProducer

from backends.cutedsl.device import WARPGROUP
from backends.cutedsl.moe.layout import TILE_M
from backends.cutedsl.sm100_moe.epilogue import (
    RowsTensors,
    SwigluTensors,
    allocate_store,
    rows_warpgroup,
    swiglu_warpgroup,
)
from backends.cutedsl.sm100_moe.operands import (
    GroupedGemm,
    RingSmem,
    allocate_ring,
    codes_views,
    copy_scales,
    make_accumulators,
    make_mma,
    scale_copy,
    scales_views,
)
from backends.cutedsl.sm100_moe.plan import HALF_N, K_BLOCKS, LOAD_WARP, MMA_WARP, THREADS, Sm100MoePlan
from backends.cutedsl.sm100_moe.routing import walk, work_item
from backends.cutedsl.tcgen05 import (
    Ring,
    address_of_tmem,
    allocate_tmem,
    fence_after_sync,
    free_tmem,
    make_ring,
    make_tmem,
)


@cute.jit
def load_warp(plan: Sm100MoePlan, gemm: GroupedGemm, smem: RingSmem, rank: Int32, ring: PipelineProducer):
    """The producer's work loop. `rank`: which CTA of the pair. The next item is read while this one is loaded."""
    a_codes = codes_views(gemm.a.codes, smem.sA, plan.ring_stages)
    w_codes = codes_views(gemm.w.codes, smem.sW, plan.ring_stages)
    a_scales = scales_views(gemm.a.scales, smem.sSFA)
    items = walk(plan, gemm)
    item = work_item(gemm, items, items.first)
    expert, row_tile = item.expert, item.row_tile
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        following = work_item(gemm, items, index + items.step)
        a_tile = row_tile + rank
        w_first = index % items.w_tiles * plan.cta_group
        w_tile = w_first + rank
        of_expert = cute.domain_offset((0, expert * (gemm.w_rows // TILE_M) + w_first), gemm.w.scales.coordinates)
        w_scales = scales_views(gemm.w.scales._replace(coordinates=of_expert), smem.sSFW)
        for k_tile in cutlass.range(gemm.k_tiles, unroll=1):
            stage = ring.acquire_and_advance()
            w_codes.load((w_tile, k_tile, expert), stage)
            w_scales.load((k_tile, 0), stage)
            a_codes.load((a_tile, k_tile, 0), stage)
            a_scales.load((k_tile, a_tile), stage)
        expert, row_tile = following.expert, following.row_tile
    ring.tail()


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

    If there are fewer slots of scales than ring stages, `behind` follows the ring at a distance of `sf_slots` stages.
    It waits until the tensor core is done with that stage, and so with its slot. The stage in between keeps the tensor
    core busy.
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


def cluster_layout(plan: Sm100MoePlan) -> cute.Layout:
    """(CTAs of an MMA, M, N, K) of a cluster: a pair, or a CTA by itself."""
    return cute.make_layout((plan.cta_group, 1, 1, 1))


def make_rings(plan: Sm100MoePlan, allocator: memory.SmemAllocator) -> tuple[Ring, Ring]:
    """The ring of operands and the ring of accumulators."""
    clustered = {"cta_layout_vmnk": cluster_layout(plan)}
    loaded = plan.stage_bytes * plan.cta_group
    ring = make_ring(pipeline.PipelineTmaUmma, allocator, plan.ring_stages, 1, 1, tx_count=loaded, **clustered)
    readers = WARPGROUP * plan.cta_group
    return ring, make_ring(pipeline.PipelineUmmaAsync, allocator, plan.acc_stages, 1, readers, **clustered)


@cute.jit
def grouped_gemm(
    plan: Sm100MoePlan, interleave: cutlass.Constexpr, gemm: GroupedGemm, tensors: SwigluTensors | RowsTensors
):
    """The body of both kernels: dispatch the warps to their roles. `tensors`: the epilogue's."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = Int32(0)
    if cutlass.const_expr(plan.cta_group == 2):
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    if warp == LOAD_WARP:
        for tensor in (*gemm.a, *gemm.w):
            cpasync.prefetch_descriptor(tensor.atom)

    allocator = memory.SmemAllocator()
    smem = allocate_ring(plan, allocator)
    sStore = None if plan.swiglu else allocate_store(allocator)
    ring, acc = make_rings(plan, allocator)
    tmem = make_tmem(allocator, 0, users=WARPGROUP + 32, cta_group=plan.cta_group)
    cluster_shape = (plan.cta_group, 1)
    pipeline.pipeline_init_arrive(cluster_shape_mn=cluster_shape, is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=cluster_shape)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()

    if warp == LOAD_WARP:
        load_warp(plan, gemm, smem, rank, ring.producer)
    if warp == MMA_WARP:
        tmem_ptr = address_of_tmem(tmem)
        mma_warp(plan, gemm, smem, tmem_ptr, rank, ring, acc.producer)
    if warp < MMA_WARP:
        tmem_ptr = allocate_tmem(tmem)
        if cutlass.const_expr(plan.swiglu):
            swiglu_warpgroup(plan, interleave, tmem_ptr, gemm, tensors, rank, acc.consumer)
        else:
            rows_warpgroup(plan, tmem_ptr, gemm, sStore, tensors, rank, acc.consumer)
        free_tmem(tmem, tmem_ptr)


@cute.kernel
def swiglu_kernel(plan: cutlass.Constexpr, interleave: cutlass.Constexpr, gemm: GroupedGemm, tensors: SwigluTensors):
    """L1: a2 = requantise(swiglu(W1 x)), by expert row."""
    grouped_gemm(plan, interleave, gemm, tensors)


@cute.kernel
def rows_kernel(plan: cutlass.Constexpr, gemm: GroupedGemm, tensors: RowsTensors):
    """L2: rows = W2 a2, by expert row."""
    grouped_gemm(plan, None, gemm, tensors)


def launch_shape(plan: Sm100MoePlan, row_tiles: Int32, w_tiles: Int32, max_ctas: Int32) -> Mapping[str, object]:
    """Grid, cluster and block: no more CTAs than there can be tiles, nor than `max_ctas`."""
    pairs = cutlass.min(row_tiles * w_tiles, max_ctas // plan.cta_group)
    shape = {"grid": [pairs * plan.cta_group, 1, 1], "block": [THREADS, 1, 1], "min_blocks_per_mp": 1, "use_pdl": True}
    return shape | ({"cluster": [2, 1, 1]} if plan.cta_group == 2 else {})
