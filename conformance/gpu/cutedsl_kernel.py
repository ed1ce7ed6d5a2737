"""A small CuTeDSL kernel of our own for sm_90a: one tile of a bf16 product, by tensor maps, an mbarrier and wgmma."""

# The DSL's decorators and structs turn these into other things than a type checker sees.
# pyright: reportInvalidTypeArguments=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int64, pipeline, utils
from cutlass.cute.nvgpu import cpasync, warpgroup

THREADS = 128
TILER = (64, 64, 64)


@cute.struct
class ProductStorage:
    """Barriers of a ring of one stage."""

    full: cute.struct.MemRange[Int64, 2]


@cute.kernel
def product_kernel(
    tiled_mma: cute.TiledMma,
    tma_a: cute.CopyAtom,
    a: cute.Tensor,
    tma_b: cute.CopyAtom,
    b: cute.Tensor,
    c: cute.Tensor,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
):
    """c [64, 64] f32 = a [64, k] bf16 times b [64, k] bf16 transposed, by one warpgroup."""
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = utils.SmemAllocator()
    storage = smem.allocate(ProductStorage)
    sA = smem.allocate_tensor(BFloat16, layout_a.outer, 1024, swizzle=layout_a.inner)
    sB = smem.allocate_tensor(BFloat16, layout_b.outer, 1024, swizzle=layout_b.inner)
    loads = cute.size_in_bytes(BFloat16, cute.slice_(layout_a, (None, None, 0))) + cute.size_in_bytes(
        BFloat16, cute.slice_(layout_b, (None, None, 0))
    )
    ring = pipeline.PipelineTmaAsync.create(
        barrier_storage=storage.full.data_ptr(),
        num_stages=1,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, THREADS // 32),
        tx_count=loads,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )
    gA = cute.local_tile(a, TILER, (0, 0, None), proj=(1, None, 1))
    gB = cute.local_tile(b, TILER, (0, 0, None), proj=(None, 1, 1))
    gC = cute.local_tile(c, TILER, (0, 0, None), proj=(1, 1, None))
    thread_mma = tiled_mma.get_slice(tid)
    one_cta = cute.make_layout(1)
    tAsA, tAgA = cpasync.tma_partition(tma_a, 0, one_cta, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
    tBsB, tBgB = cpasync.tma_partition(tma_b, 0, one_cta, cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2))
    warpgroup_mma = tiled_mma.get_slice(0)
    tCrA = tiled_mma.make_fragment_A(warpgroup_mma.partition_A(sA))
    tCrB = tiled_mma.make_fragment_B(warpgroup_mma.partition_B(sB))
    tCgC = thread_mma.partition_C(gC)
    accumulators = cute.make_rmem_tensor(tCgC.shape, Float32)
    accumulators.fill(0.0)
    filling = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
    reading = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    for k in cutlass.range(cute.size(gA, mode=[2])):
        if warp == 0:
            ring.producer_acquire(filling)
            barrier = ring.producer_get_barrier(filling)
            cute.copy(tma_a, tAgA[(None, k)], tAsA[(None, 0)], tma_bar_ptr=barrier)
            cute.copy(tma_b, tBgB[(None, k)], tBsB[(None, 0)], tma_bar_ptr=barrier)
            ring.producer_commit(filling)
        filling.advance()
        ring.consumer_wait(reading)
        warpgroup.fence()
        for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            at = (None, None, block, 0)
            cute.gemm(tiled_mma, accumulators, tCrA[at], tCrB[at], accumulators)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        ring.consumer_release(reading)
        reading.advance()
    cute.autovec_copy(accumulators, tCgC)


@cute.jit
def product(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    """One tile: tensor maps for a and b, then product_kernel."""
    tiled_mma = sm90.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        warpgroup.OperandMajorMode.K,
        warpgroup.OperandMajorMode.K,
        Float32,
        (1, 1, 1),
        tiler_mn=TILER[:2],
    )
    k_major = utils.LayoutEnum.ROW_MAJOR
    layout_a = sm90.make_smem_layout_a(k_major, TILER, BFloat16, 1)
    layout_b = sm90.make_smem_layout_b(k_major, TILER, BFloat16, 1)
    load = cpasync.CopyBulkTensorTileG2SOp()
    tile = (TILER[0], TILER[2])
    tma_a, map_a = cpasync.make_tiled_tma_atom(load, a, cute.slice_(layout_a, (None, None, 0)), tile)
    tma_b, map_b = cpasync.make_tiled_tma_atom(load, b, cute.slice_(layout_b, (None, None, 0)), tile)
    product_kernel(tiled_mma, tma_a, map_a, tma_b, map_b, c, layout_a, layout_b).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
