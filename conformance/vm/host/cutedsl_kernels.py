# The DSL's decorators and structs turn these into other things than a type checker sees.
# pyright: reportInvalidTypeArguments=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
"""Small CuTeDSL host functions that exercise the host side: launches, attributes, tensor maps, streams, products.

`gemm` is for sm_100a and `product` for sm_90a: tensor maps, mbarriers and the tensor core of each.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64, pipeline, utils
from cutlass.cute.nvgpu import cpasync, tcgen05, warpgroup

THREADS = 128
MMA_TILER = (128, 64, 64)


@cute.kernel
def scale_add_kernel(x: cute.Tensor, y: cute.Tensor, alpha: Float32):
    """y[i] += alpha * x[i], one thread per element. It may start before the kernel that writes x has ended."""
    cute.arch.griddepcontrol_wait()
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    i = bid * THREADS + tid
    if i < cute.size(x):
        y[i] = alpha * x[i] + y[i]


@cute.jit
def scale_add(x: cute.Tensor, y: cute.Tensor, alpha: Float32, stream: cuda.CUstream):
    """One launch."""
    blocks = cute.ceil_div(cute.size(x), THREADS)
    scale_add_kernel(x, y, alpha).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def scale_add_twice(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor, count: Int32, stream: cuda.CUstream):
    """y += 2x, then z += count * y. The second launch reads the y of the first and may start early."""
    blocks = cute.ceil_div(cute.size(x), THREADS)
    scale_add_kernel(x, y, Float32(2)).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)
    scale_add_kernel(y, z, Float32(count)).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
    )


@cute.jit
def launches_nothing(x: cute.Tensor, stream: cuda.CUstream):
    """A host function without a kernel."""


@cute.kernel
def rank_kernel(ranks: cute.Tensor):
    """ranks[cta] = rank of the CTA in its cluster."""
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    rank = cute.arch.block_idx_in_cluster()
    if tid == 0:
        ranks[bid] = rank


@cute.jit
def cluster_ranks(ranks: cute.Tensor, stream: cuda.CUstream):
    """Clusters of two CTAs, launched cooperatively."""
    rank_kernel(ranks).launch(
        grid=[cute.size(ranks), 1, 1], block=[32, 1, 1], cluster=[2, 1, 1], stream=stream, cooperative=True
    )


@cute.struct
class GemmStorage:
    """Shared memory of gemm_kernel apart from the operands."""

    full: cute.struct.MemRange[Int64, 2]
    done: cute.struct.MemRange[Int64, 2]
    tmem_base: Int32


@cute.kernel
def gemm_kernel(
    tiled_mma: cute.TiledMma,
    tma_a: cute.CopyAtom,
    a: cute.Tensor,
    tma_b: cute.CopyAtom,
    b: cute.Tensor,
    c: cute.Tensor,
    layout_a: cute.ComposedLayout,
    layout_b: cute.ComposedLayout,
):
    """c [128, 64] f32 = a [128, k] bf16 times b [64, k] bf16 transposed, one CTA, one stage."""
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = utils.SmemAllocator()
    storage = smem.allocate(GemmStorage)
    sA = smem.allocate_tensor(BFloat16, layout_a.outer, 1024, swizzle=layout_a.inner)
    sB = smem.allocate_tensor(BFloat16, layout_b.outer, 1024, swizzle=layout_b.inner)
    barrier = pipeline.NamedBarrier(barrier_id=1, num_threads=THREADS)
    tmem = utils.TmemAllocator(storage.tmem_base.ptr, barrier_for_retrieve=barrier)
    tmem.allocate(64)
    one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    loads = cute.size_in_bytes(BFloat16, cute.select(layout_a, mode=[0, 1, 2])) + cute.size_in_bytes(
        BFloat16, cute.select(layout_b, mode=[0, 1, 2])
    )
    producer, consumer = pipeline.PipelineTmaUmma.create(
        num_stages=1, producer_group=one, consumer_group=one, tx_count=loads, barrier_storage=storage.full.data_ptr()
    ).make_participants()
    issuer, reader = pipeline.PipelineUmmaAsync.create(
        num_stages=1,
        producer_group=one,
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, THREADS),
        barrier_storage=storage.done.data_ptr(),
    ).make_participants()
    gA = cute.local_tile(a, MMA_TILER, (0, 0, None), proj=(1, None, 1))
    gB = cute.local_tile(b, MMA_TILER, (0, 0, None), proj=(None, 1, 1))
    gC = cute.local_tile(c, MMA_TILER, (0, 0, None), proj=(1, 1, None))
    thread_mma = tiled_mma.get_slice(0)
    one_cta = cute.make_layout(1)
    tAsA, tAgA = cpasync.tma_partition(
        tma_a, 0, one_cta, cute.group_modes(sA, 0, 3), cute.group_modes(thread_mma.partition_A(gA), 0, 3)
    )
    tBsB, tBgB = cpasync.tma_partition(
        tma_b, 0, one_cta, cute.group_modes(sB, 0, 3), cute.group_modes(thread_mma.partition_B(gB), 0, 3)
    )
    tCrA, tCrB = tiled_mma.make_fragment_A(sA), tiled_mma.make_fragment_B(sB)
    tCgC = thread_mma.partition_C(gC)
    tmem.wait_for_alloc()
    base = tmem.retrieve_ptr(Float32)
    tCtC = cute.make_tensor(base, tiled_mma.make_fragment_C(tiled_mma.partition_shape_C(MMA_TILER[:2])).layout)
    if warp == 0:
        accumulator = issuer.acquire_and_advance()
        for k in cutlass.range(cute.size(gA, mode=[2])):
            empty = producer.acquire_and_advance()
            cute.copy(tma_a, tAgA[(None, k)], tAsA[(None, empty.index)], tma_bar_ptr=empty.barrier)
            cute.copy(tma_b, tBgB[(None, k)], tBsB[(None, empty.index)], tma_bar_ptr=empty.barrier)
            full = consumer.wait_and_advance()
            for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                at = (None, None, block, full.index)
                cute.gemm(tiled_mma, tCtC, tCrA[at], tCrB[at], tCtC)
                tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
            full.release()
        accumulator.commit()
    tmem.relinquish_alloc_permit()
    finished = reader.wait_and_advance()
    load = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x64), Float32), tCtC)
    mine = load.get_slice(tid)
    tDgC = mine.partition_D(tCgC)
    registers = cute.make_rmem_tensor(tDgC.shape, Float32)
    cute.copy(load, mine.partition_S(tCtC), registers)
    cute.autovec_copy(registers, tDgC)
    finished.release()
    pipeline.sync(barrier_id=1)
    tmem.free(base)


@cute.jit
def gemm(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
    """One tile: tensor maps for a and b, then gemm_kernel."""
    mma = tcgen05.MmaF16BF16Op(
        BFloat16,
        Float32,
        (*MMA_TILER[:2], 16),
        tcgen05.CtaGroup.ONE,
        tcgen05.OperandSource.SMEM,
        tcgen05.OperandMajorMode.K,
        tcgen05.OperandMajorMode.K,
    )
    tiled_mma = cute.make_tiled_mma(mma)
    layout_a = sm100.make_smem_layout_a(tiled_mma, MMA_TILER, BFloat16, 1)
    layout_b = sm100.make_smem_layout_b(tiled_mma, MMA_TILER, BFloat16, 1)
    copy = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    tma_a, map_a = cute.nvgpu.make_tiled_tma_atom_A(
        copy, a, cute.select(layout_a, mode=[0, 1, 2]), MMA_TILER, tiled_mma
    )
    tma_b, map_b = cute.nvgpu.make_tiled_tma_atom_B(
        copy, b, cute.select(layout_b, mode=[0, 1, 2]), MMA_TILER, tiled_mma
    )
    gemm_kernel(tiled_mma, tma_a, map_a, tma_b, map_b, c, layout_a, layout_b).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


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
