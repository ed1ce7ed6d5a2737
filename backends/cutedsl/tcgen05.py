# pyright: reportMissingImports=false
"""Parts that every tcgen05 kernel needs: rings between warps, tensor memory, fences."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, memory, pipeline
from cutlass.cute.nvgpu import tcgen05
from cutlass.experimental.primitives import nvvm_wrapper
from cutlass.pipeline import PipelineAsync, PipelineConsumer, PipelineProducer

from backends.cutedsl.device import TMEM_COLUMNS, TMEM_LANES, WARPGROUP

CHUNK = 32
"""Columns of one tcgen05.ld or tcgen05.st."""


class Ring(NamedTuple):
    """A ring of (full, empty) mbarriers and its two ends. Each thread has its own position at either end."""

    pipeline: PipelineAsync
    producer: PipelineProducer
    consumer: PipelineConsumer


def make_ring(kind: type, smem: memory.SmemAllocator, stages: int, producers: int, consumers: int, **options) -> Ring:
    """A ring of a CuTeDSL pipeline class, with the numbers of threads that arrive at each end.

    pipeline_init_arrive and pipeline_init_wait make its barriers visible.
    """
    made = kind.create(
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, producers),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, consumers),
        barrier_storage=smem.allocate_array(Int64, 2 * stages),
        defer_sync=True,
        **options,
    )
    return Ring(made, *made.make_participants())


def make_tmem(
    smem: memory.SmemAllocator, allocator_warp: int, users: int, cta_group: int | None = None
) -> memory.TmemAllocator:
    """The allocator of tensor memory. `users`: threads that take its address, including the allocating warp's.

    `cta_group`: 1 or 2 in a kernel that may run in CTA pairs, which free tensor memory together; None in any other.
    """
    address = smem.allocate_array(Int32, 1)
    freed = None if cta_group is None else smem.allocate_array(Int64, 1)
    return memory.TmemAllocator(
        address,
        barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=users),
        allocator_warp_id=allocator_warp,
        is_two_cta=cta_group == 2,
        two_cta_tmem_dealloc_mbar_ptr=freed,
    )


@cute.jit
def allocate_tmem(tmem: memory.TmemAllocator) -> cute.Pointer:
    """Allocate all of tensor memory. The warpgroup of the allocating warp calls this, and also frees it."""
    tmem.allocate(TMEM_COLUMNS)
    return address_of_tmem(tmem)


@cute.jit
def address_of_tmem(tmem: memory.TmemAllocator) -> cute.Pointer:
    """The first address of tensor memory, once it is allocated. Every other user calls this."""
    tmem.wait_for_alloc()
    return tmem.retrieve_ptr(Float32)


@cute.jit
def free_tmem(tmem: memory.TmemAllocator, tmem_ptr: cute.Pointer):
    """Free tensor memory. The warpgroup that allocated it calls this; its reads must be the last use."""
    tmem.relinquish_alloc_permit()
    pipeline.NamedBarrier(barrier_id=2, num_threads=WARPGROUP).arrive_and_wait()
    tmem.free(tmem_ptr)


def fence_before_sync() -> None:
    """Order this thread's completed accesses to tensor memory before its next arrive (PTX ISA 9.7.16.6.4.4).

    CuTeDSL's pipelines leave this fence and `fence_after_sync` to their user.
    """
    nvvm_wrapper.tcgen05_fence("before_thread_sync")


def fence_after_sync() -> None:
    """Order this thread's later accesses to tensor memory after the wait that it has just done."""
    nvvm_wrapper.tcgen05_fence("after_thread_sync")


def tmem_rows(tmem_ptr: cute.Pointer, columns: int) -> cute.Tensor:
    """(128, columns) fp32 words of tensor memory from `tmem_ptr`. Lanes are 2^16 addresses apart (facts.md 1)."""
    return cute.make_tensor(tmem_ptr, cute.make_layout((TMEM_LANES, columns), stride=(1 << 16, 1)))


@cute.jit
def load_row(tmem_ptr: cute.Pointer, rRow: cute.Tensor, thread: Int32, first: cutlass.Constexpr = 0):
    """Load rRow f32 (a multiple of 32): this thread's row from column `first` after `tmem_ptr`. The caller waits.

    32x32b: thread t of the warpgroup has lane t, register r column r.
    """
    tRow = tmem_rows(tmem_ptr, CHUNK)
    atom = cute.make_copy_atom(tcgen05.copy.Ld32x32bOp(tcgen05.copy.Repetition(CHUNK)), Float32)
    load = tcgen05.make_tmem_copy(atom, tRow).get_slice(thread)
    source = load.partition_S(tRow)
    shape = load.partition_D(cute.make_identity_tensor((TMEM_LANES, CHUNK))).shape
    for column in cutlass.range_constexpr(0, cute.size(rRow), CHUNK):
        chunk = cute.make_tensor(source.iterator + (first + column), source.layout)
        cute.copy(load, chunk, cute.make_tensor(rRow.iterator + column, cute.make_layout(shape)))


@cute.jit
def store_row(rRow: cute.Tensor, tmem_ptr: cute.Pointer, thread: Int32, first: cutlass.Constexpr = 0):
    """Store the words of rRow to this thread's row from column `first` after `tmem_ptr`. The caller waits."""
    columns = cutlass.const_expr(cute.size(rRow))
    tRow = tmem_rows(tmem_ptr, columns)
    atom = cute.make_copy_atom(tcgen05.copy.St32x32bOp(tcgen05.copy.Repetition(columns)), Float32)
    store = tcgen05.make_tmem_copy(atom, tRow).get_slice(thread)
    target = store.partition_D(tRow)
    shape = store.partition_S(cute.make_identity_tensor((TMEM_LANES, columns))).shape
    chunk = cute.make_tensor(target.iterator + first, target.layout)
    cute.copy(store, cute.make_tensor(rRow.iterator, cute.make_layout(shape)), chunk)
