# pyright: reportMissingImports=false
"""The persistent grouped GEMM on sm_90a.

warpgroup 0   the producer: one warp loads weights and tokens, a stage at a time; its registers go to the others
the others    the consumers, one or two blocks of 64 weight rows each: the products (multiply.py), then the epilogue
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, memory

from backends.cutedsl.device import WARPGROUP
from backends.cutedsl.ring import (
    RingPlace,
    StageRing,
    advanced,
    allocate_rings,
    init_rings,
    ring_start,
)
from backends.cutedsl.sm90_moe.epilogue import (
    ColumnActivations,
    ColumnConsumer,
    ColumnRows,
    ExpertScales,
    scales_of,
    store_activations,
    store_rows,
)
from backends.cutedsl.sm90_moe.multiply import GemmSmem, multiply, sums_of
from backends.cutedsl.sm90_moe.plan import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    BLOCKS,
    CODES_BYTES,
    LANE_BYTES,
    PAIR_BYTES,
    PANELS,
    PRODUCER_REGISTERS,
    ROW_BYTES,
    STAGED_PITCH,
    TURN_UNITS,
    UNIT_BYTES,
    Sm90MoePlan,
)
from backends.cutedsl.sm90_moe.schedule import ColumnGemm, ColumnPiece, entry_at, hand_over, piece_at, take_over, walk


def bulk_load(target: cute.Pointer, source: cute.Pointer, size: int, barrier: cute.Pointer) -> None:
    """cp.async.bulk of `size` bytes, a multiple of 16, by one thread."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, size, barrier],
    )


@cute.jit
def load_piece(
    plan: Sm90MoePlan, gemm: ColumnGemm, smem: GemmSmem, ring: StageRing, place: RingPlace, piece: ColumnPiece
):
    """Load the stages of a piece. If the tile extends past W, the last panel is loaded twice.

    Consumers read weights through the generic proxy. The PTX ISA asks for a proxy fence between these reads and a copy
    over them. The producer executes it after its mbarrier wait, so the warps that multiply have no fence.
    """
    units = gemm.turns * TURN_UNITS
    tokens = piece.column * gemm.pitch + Int64(piece.first) * (TURN_UNITS * plan.width * ROW_BYTES)
    panels = []
    for part in cutlass.range_constexpr(PANELS):
        panel = cutlass.min(piece.tile_m * PANELS + part, gemm.panels - 1)
        unit = Int64(piece.expert * gemm.panels + panel) * units + piece.first * TURN_UNITS
        panels.append(unit * UNIT_BYTES)
    a_size = cutlass.const_expr(plan.units * UNIT_BYTES)
    stages = (piece.stop - piece.first) * (TURN_UNITS // plan.units)
    for stage in cutlass.range(stages, unroll=1):
        cute.arch.mbarrier_wait(ring.empty + place.stage, place.parity)
        cute.arch.fence_proxy("async.shared", space="cta")
        with cute.arch.elect_one():
            barrier = ring.full + place.stage
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, plan.a_bytes + plan.b_bytes)
            for part in cutlass.range_constexpr(PANELS):
                source = gemm.mPacked.iterator + (panels[part] + stage * a_size)
                bulk_load(smem.sA.iterator + (place.stage * plan.a_bytes + part * a_size), source, a_size, barrier)
            source = gemm.mTokens.iterator + (tokens + Int64(stage) * plan.b_bytes)
            bulk_load(smem.sB.iterator + place.stage * plan.b_bytes, source, plan.b_bytes, barrier)
        place = advanced(ring, place)
    return place


@cute.jit
def load_warp(plan: Sm90MoePlan, gemm: ColumnGemm, smem: GemmSmem, ring: StageRing):
    """The producer's work loop. The next entry is read while this piece is loaded."""
    items, entry = walk(gemm)
    place = ring_start(ring, True)
    for number in cutlass.range(items.pieces, unroll=1):
        following = entry_at(gemm, items, number + 1)
        place = load_piece(plan, gemm, smem, ring, place, piece_at(gemm, items, number, entry))
        entry = following


@cute.jit
def finish(
    plan: Sm90MoePlan,
    gemm: ColumnGemm,
    smem: GemmSmem,
    tensors: ColumnActivations | ColumnRows,
    piece: ColumnPiece,
    scales: ExpertScales,
    rAcc: cute.Tensor,
    consumer: ColumnConsumer,
):
    """Hand over the sums of a piece, or add the sums of the rest of the tile and store the tile."""
    if piece.first > 0:
        hand_over(plan, gemm, rAcc, consumer.thread)
    else:
        if piece.stop < gemm.turns:
            take_over(plan, gemm, rAcc, consumer.thread)
        for block in cutlass.range_constexpr(plan.group_blocks):
            rows = (piece.tile_m * plan.groups + consumer.group) * plan.group_blocks + block
            rSums = sums_of(plan, rAcc, block)
            if cutlass.const_expr(not plan.swiglu):
                store_rows(plan, tensors, piece, scales, rSums, rows, consumer)
            else:
                store_activations(plan, tensors, piece, scales.a2, rSums, smem.sStaged, rows, consumer)


@cute.jit
def consumer_warpgroup(
    plan: Sm90MoePlan,
    gemm: ColumnGemm,
    smem: GemmSmem,
    tensors: ColumnActivations | ColumnRows,
    ring: StageRing,
    consumer: ColumnConsumer,
):
    """The work loop of a consumer."""
    items, entry = walk(gemm)
    place = ring_start(ring, False)
    rAcc = cute.make_rmem_tensor(plan.sums, Float32)
    for number in cutlass.range(items.pieces, unroll=1):
        following = entry_at(gemm, items, number + 1)
        piece = piece_at(gemm, items, number, entry)
        scales = scales_of(tensors, piece.expert)
        place = multiply(plan, smem, ring, place, piece.stop - piece.first, rAcc, consumer)
        finish(plan, gemm, smem, tensors, piece, scales, rAcc, consumer)
        entry = following


def consumer_of(plan: Sm90MoePlan, number: Int32, group: Int32, in_group: Int32) -> ColumnConsumer:
    """Thread `number` of the consumers."""
    warp, lane = in_group // 32, in_group % 32
    first = group * plan.group_blocks
    block = first // BLOCKS * (plan.units * UNIT_BYTES) + first % BLOCKS * BLOCK_BYTES
    codes_at = kept(block + in_group * LANE_BYTES, lane)
    scales_at = kept(block + CODES_BYTES + (warp * 8 + lane // 4) * PAIR_BYTES, lane)
    return ColumnConsumer(number, group, in_group, lane // 4, lane % 4, Boolean(lane == 0), codes_at, scales_at)


def kept(value: Int32, lane: Int32) -> Int32:
    """`value` of lane `lane` of the warp, in a register. ptxas would recompute it from threadIdx in each turn of the
    loop, which costs issue slots; it does not see through a shuffle."""
    return Int32(cute.arch.shuffle_sync(value, lane))


def allocate(plan: Sm90MoePlan, allocator: memory.SmemAllocator) -> GemmSmem:
    """The ring and the staging in shared memory."""
    sB = allocator.allocate_tensor(Uint8, cute.make_layout(plan.stages * plan.b_bytes), byte_alignment=1024)
    sA = allocator.allocate_tensor(Uint8, cute.make_layout(plan.stages * plan.a_bytes), byte_alignment=128)
    sStaged = None
    if plan.swiglu:
        stride = (STAGED_PITCH, 1, plan.staged_tokens * STAGED_PITCH)
        layout = cute.make_layout((plan.staged_tokens, BLOCK_ROWS // 2, plan.groups), stride=stride)
        sStaged = allocator.allocate_tensor(Float32, layout, byte_alignment=16)
    return GemmSmem(sB, sA, sStaged)


@cute.jit
def grouped_gemm(plan: Sm90MoePlan, gemm: ColumnGemm, tensors: ColumnActivations | ColumnRows):
    """The body of both kernels: dispatch the warps to their roles. `tensors`: the epilogue's."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    allocator = memory.SmemAllocator()
    smem = allocate(plan, allocator)
    ring = allocate_rings(allocator, plan.stages)
    if thread == 0:
        init_rings(ring, 1, plan.consumers // 32)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()

    if warp < 4:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp == 0:
            load_warp(plan, gemm, smem, ring)
    else:
        cute.arch.setmaxregister_increase(plan.consumer_registers)
        number, in_group = thread - WARPGROUP, thread % WARPGROUP
        group = cute.arch.make_warp_uniform((warp - 4) // 4)
        consumer = consumer_of(plan, number, group, in_group)
        consumer_warpgroup(plan, gemm, smem, tensors, ring, consumer)


@cute.kernel
def swiglu_kernel(plan: cutlass.Constexpr, gemm: ColumnGemm, tensors: ColumnActivations):
    """L1: a2 = requantise(swiglu(W1 x)), by expert row."""
    grouped_gemm(plan, gemm, tensors)


@cute.kernel
def rows_kernel(plan: cutlass.Constexpr, gemm: ColumnGemm, tensors: ColumnRows):
    """L2: rows = W2 a2, by expert row."""
    grouped_gemm(plan, gemm, tensors)
