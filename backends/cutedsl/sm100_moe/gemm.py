# pyright: reportMissingImports=false
"""The persistent grouped GEMM on sm_100a: warp-specialised, block-scaled NVFP4, L1 with SwiGLU or L2 with bf16 rows.

    epilogue  one warpgroup: an accumulator's rows from tensor memory; owns the allocation of tensor memory
    MMA       a warp: block scales from shared to tensor memory (tcgen05.cp), then tcgen05.mma; of a pair the first's
    TMA       a warp: codes and block scales of both operands

Two pipelines, each a ring of (full, empty) mbarriers:

    ring      TMA -> MMA        128 rows of A and of W, 256 of K, codes and scales
    acc       MMA -> epilogue   an accumulator, so that the epilogue of a tile overlaps the products of the next

CTAs, or pairs of them, walk over the tiles of all experts with a fixed stride. How many tiles there are, and whose,
is in the schedule that the routing kernel wrote (sm100_moe_routing): the grid is what the machine holds, whatever
the routing. A pair has one ring: barriers of the first CTA count what both have loaded, and its MMA warp issues for
both; each epilogue has the 128 rows in its own tensor memory.
"""

from collections.abc import Mapping

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, memory, pipeline
from cutlass.cute.nvgpu import cpasync

from backends.cutedsl.sm100_moe.load import load_warp
from backends.cutedsl.sm100_moe.mma import mma_warp
from backends.cutedsl.sm100_moe.operands import Operand, allocate_ring
from backends.cutedsl.sm100_moe.plan import (
    LOAD_WARP,
    MMA_WARP,
    THREADS,
    TMEM_COLUMNS,
    WARPGROUP,
    Sm100MoePlan,
)
from backends.cutedsl.sm100_moe.rows import RowsTensors, allocate_store, rows_warpgroup
from backends.cutedsl.sm100_moe.swiglu import SwigluTensors, swiglu_warpgroup


def cluster_layout(plan: Sm100MoePlan) -> cute.Layout:
    """(CTAs of an MMA, M, N, K) of a cluster: a pair, or a CTA by itself."""
    return cute.make_layout((plan.cta_group, 1, 1, 1))


def make_pipelines(plan: Sm100MoePlan, smem: memory.SmemAllocator):
    """(pipeline, producer, consumer) of the ring and of the accumulators."""

    def threads(count: int) -> pipeline.CooperativeGroup:
        return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)

    def make(kind, stages: int, consumers: int, **tx_count: int):
        made = kind.create(
            num_stages=stages,
            producer_group=threads(1),
            consumer_group=threads(consumers),
            barrier_storage=smem.allocate_array(Int64, 2 * stages),
            cta_layout_vmnk=cluster_layout(plan),
            defer_sync=True,
            **tx_count,
        )
        return made, *made.make_participants()

    loaded = plan.stage_bytes * plan.cta_group
    return (
        make(pipeline.PipelineTmaUmma, plan.ring_stages, 1, tx_count=loaded),
        make(pipeline.PipelineUmmaAsync, plan.acc_stages, WARPGROUP * plan.cta_group),
    )


@cute.jit
def grouped_gemm(
    plan: Sm100MoePlan,
    interleave: cutlass.Constexpr,
    a: Operand,
    w: Operand,
    mUnits: cute.Tensor,
    w_rows: Int32,
    k_tiles: Int32,
    tensors: SwigluTensors | RowsTensors,
):
    """The body of both kernels: dispatch the warps to their roles. `tensors`: those of the epilogue."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = Int32(0)
    if cutlass.const_expr(plan.cta_group == 2):
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    if warp == LOAD_WARP:
        for atom in (a.codes, a.scales, w.codes, w.scales):
            cpasync.prefetch_descriptor(atom)

    smem = memory.SmemAllocator()
    shared = allocate_ring(plan, smem)
    sStore = None if plan.swiglu else allocate_store(smem)
    ring, acc = make_pipelines(plan, smem)
    tmem = memory.TmemAllocator(
        smem.allocate_array(Int32, 1),
        barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=WARPGROUP + 32),
        allocator_warp_id=0,
        is_two_cta=plan.cta_group == 2,
        two_cta_tmem_dealloc_mbar_ptr=smem.allocate_array(Int64, 1),
    )
    cluster_shape = (plan.cta_group, 1)
    pipeline.pipeline_init_arrive(cluster_shape_mn=cluster_shape, is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=cluster_shape)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()

    if warp == LOAD_WARP:
        load_warp(plan, a, w, shared, mUnits, w_rows, k_tiles, rank, ring[1])
    if warp == MMA_WARP:
        tmem.wait_for_alloc()
        tmem_ptr = tmem.retrieve_ptr(Float32)
        mma_warp(plan, shared, tmem_ptr, mUnits, w_rows, k_tiles, rank, ring[2], ring[0], acc[1])
    if warp < MMA_WARP:
        tmem.allocate(TMEM_COLUMNS)
        tmem.wait_for_alloc()
        tmem_ptr = tmem.retrieve_ptr(Float32)
        if cutlass.const_expr(plan.swiglu):
            swiglu_warpgroup(plan, interleave, tmem_ptr, mUnits, tensors, w_rows, rank, acc[2])
        else:
            rows_warpgroup(plan, tmem_ptr, mUnits, sStore, tensors, w_rows, rank, acc[2])
        tmem.relinquish_alloc_permit()
        # Every other use of tensor memory lies before the last accumulator, which this warpgroup has just read.
        pipeline.NamedBarrier(barrier_id=2, num_threads=WARPGROUP).arrive_and_wait()
        tmem.free(tmem_ptr)


@cute.kernel
def swiglu_kernel(
    plan: cutlass.Constexpr,
    interleave: cutlass.Constexpr,
    a: Operand,
    w: Operand,
    mUnits: cute.Tensor,
    w_rows: Int32,
    k_tiles: Int32,
    tensors: SwigluTensors,
):
    """L1: a2 = requantise(swiglu(W1 x)), by expert row."""
    grouped_gemm(plan, interleave, a, w, mUnits, w_rows, k_tiles, tensors)


@cute.kernel
def rows_kernel(
    plan: cutlass.Constexpr,
    a: Operand,
    w: Operand,
    mUnits: cute.Tensor,
    w_rows: Int32,
    k_tiles: Int32,
    tensors: RowsTensors,
):
    """L2: rows = W2 a2, by expert row."""
    grouped_gemm(plan, None, a, w, mUnits, w_rows, k_tiles, tensors)


def launch_shape(plan: Sm100MoePlan, row_tiles: Int32, w_tiles: Int32, max_ctas: Int32) -> Mapping[str, object]:
    """Grid, cluster and block: no more CTAs than there can be tiles, nor than `max_ctas`."""
    pairs = cutlass.min(row_tiles * w_tiles, max_ctas // plan.cta_group)
    shape = {"grid": [pairs * plan.cta_group, 1, 1], "block": [THREADS, 1, 1], "min_blocks_per_mp": 1, "use_pdl": True}
    return shape | ({"cluster": [2, 1, 1]} if plan.cta_group == 2 else {})
