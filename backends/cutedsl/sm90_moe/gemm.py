# ruff: noqa: N815
# pyright: reportMissingImports=false
"""The persistent grouped GEMM on sm_90a: weights out of shared memory into registers, unpacked, times the tokens.

    warpgroup 0   the producer: a warp brings weights and tokens, a stage at a time; its registers go to the others
    the others    the consumers, 64 weight rows each: A from registers by wgmma, then the epilogue

A consumer has two sets of registers for A: while the tensor core multiplies with one, the threads unpack the next unit
into the other. A stage is given back when its wgmmas are known to be done, one unit later.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64, Uint8, Uint32, memory
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from backends.cutedsl.device import WARPGROUP
from backends.cutedsl.ring import (
    RingPlace,
    StageRing,
    advanced,
    allocate_rings,
    init_rings,
    ring_start,
    wait_full,
)
from backends.cutedsl.sm90_moe.epilogue import Consumer, RowsTensors, SwigluTensors, store_activations, store_rows
from backends.cutedsl.sm90_moe.plan import (
    BLOCK_BYTES,
    CODES_BYTES,
    GROUP_M,
    K_STEPS,
    LANE_BYTES,
    PAIR_BYTES,
    PRODUCER_REGISTERS,
    ROW_BYTES,
    STAGED_PITCH,
    TURN_UNITS,
    UNIT_BYTES,
    UNIT_K,
    Sm90MoePlan,
)
from backends.cutedsl.sm90_moe.schedule import GroupedGemm, Piece, hand_over, piece_at, take_over, walk
from backends.cutedsl.sm90_moe.unpack import unpack


class GemmSmem(NamedTuple):
    """The ring: tokens f16, swizzled, flat; weights u8, flat. sStaged: the staging of L1's epilogue, or None."""

    sB: cute.Tensor
    sA: cute.Tensor
    sStaged: cute.Tensor | None


def bulk_load(target: cute.Pointer, source: cute.Pointer, size: int, barrier: cute.Pointer) -> None:
    """cp.async.bulk of `size` bytes, a multiple of 16, by one thread."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, size, barrier],
    )


@cute.jit
def load_piece(plan: Sm90MoePlan, gemm: GroupedGemm, smem: GemmSmem, ring: StageRing, place: RingPlace, piece: Piece):
    """The stages of a piece. Of a tile that is larger than what is left of W, the last panel is loaded twice."""
    units = gemm.turns * TURN_UNITS
    tokens = piece.column * gemm.pitch + Int64(piece.first) * (TURN_UNITS * plan.width * ROW_BYTES)
    panels = []
    for part in cutlass.range_constexpr(plan.panels):
        panel = cutlass.min(piece.tile_m * plan.panels + part, gemm.panels - 1)
        unit = Int64(piece.expert * gemm.panels + panel) * units + piece.first * TURN_UNITS
        panels.append(unit * UNIT_BYTES)
    a_size = cutlass.const_expr(plan.units * UNIT_BYTES)
    stages = (piece.stop - piece.first) * (TURN_UNITS // plan.units)
    for stage in cutlass.range(stages, unroll=1):
        cute.arch.mbarrier_wait(ring.empty + place.stage, place.parity)
        with cute.arch.elect_one():
            barrier = ring.full + place.stage
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, plan.a_bytes + plan.b_bytes)
            for part in cutlass.range_constexpr(plan.panels):
                source = gemm.mPacked.iterator + (panels[part] + stage * a_size)
                bulk_load(smem.sA.iterator + (place.stage * plan.a_bytes + part * a_size), source, a_size, barrier)
            source = gemm.mTokens.iterator + (tokens + Int64(stage) * plan.b_bytes)
            bulk_load(smem.sB.iterator + place.stage * plan.b_bytes, source, plan.b_bytes, barrier)
        place = advanced(ring, place)
    return place


@cute.jit
def load_warp(plan: Sm90MoePlan, gemm: GroupedGemm, smem: GemmSmem, ring: StageRing):
    """The producer's work loop. The next piece is read while this one is loaded."""
    items = walk(plan, gemm)
    place = ring_start(ring, True)
    piece = piece_at(gemm, items, Int32(0))
    for number in cutlass.range(items.pieces, unroll=1):
        following = piece_at(gemm, items, number + 1)
        place = load_piece(plan, gemm, smem, ring, place, piece)
        piece = following


def make_mma(width: int) -> cute.TiledMma:
    """(64, width) += A B, A from registers, both K-major."""
    k_major = OperandMajorMode.K
    return hopper_helpers.make_trivial_tiled_mma(
        Float16, Float16, k_major, k_major, Float32, (1, 1, 1), (GROUP_M, width), warpgroup.OperandSource.RMEM
    )


def tokens_of(plan: Sm90MoePlan, sB: cute.Tensor) -> cute.Tensor:
    """(column, K, unit of stage, stage) f16, as wgmma reads them."""
    layout = hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (GROUP_M, plan.width, UNIT_K), Float16, 1)
    unit = cute.select(layout.outer, [0, 1])
    stages = cute.make_layout((plan.units, plan.stages), stride=(plan.width * UNIT_K, plan.b_bytes // 2))
    pointer = cute.recast_ptr(sB.iterator, layout.inner, dtype=Float16)
    return cute.make_tensor(pointer, cute.append(cute.append(unit, stages[0]), stages[1]))


@cute.jit
def load_unit(
    plan: Sm90MoePlan, sA: cute.Tensor, stage: Int32, unit: int, rCodes: cute.Tensor, rScales: cute.Tensor, consumer
):
    """What this thread unpacks of a unit: a word of codes a k-step, a word of block scales for two."""
    in_group, group = consumer.in_group, consumer.group
    block = stage * plan.a_bytes + (group // 2 * plan.units + unit) * UNIT_BYTES + group % 2 * BLOCK_BYTES
    codes = cute.recast_ptr(sA.iterator + cute.assume(block + in_group * LANE_BYTES, divby=LANE_BYTES), dtype=Uint32)
    cute.autovec_copy(cute.make_tensor(codes, cute.make_layout(cute.size(rCodes))), rCodes)
    pair = block + CODES_BYTES + (in_group // 32 * 8 + consumer.quad) * PAIR_BYTES
    scales = cute.recast_ptr(sA.iterator + cute.assume(pair, divby=PAIR_BYTES), dtype=Uint32)
    cute.autovec_copy(cute.make_tensor(scales, cute.make_layout(cute.size(rScales))), rScales)


def give_back(ring: StageRing, stage: Int32, leads: Boolean) -> None:
    """Tell the producer that this warp has read the stage. `leads`: one lane of it.

    Without a branch: ptxas 13.5 gives up the pipeline of wgmmas that one divides.
    """
    cute.arch.inline_ptx(
        "mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[ring.empty + stage], predicate=leads
    )


@cute.jit
def multiply(
    plan: Sm90MoePlan,
    smem: GemmSmem,
    ring: StageRing,
    place: RingPlace,
    turns: Int32,
    rAcc: cute.Tensor,
    consumer: Consumer,
):
    """rAcc f32 = the products of `turns` turns. Returns the next place in the ring."""
    mma = make_mma(plan.width)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    slice_of = mma.get_slice(0)
    tCrB = slice_of.make_fragment_B(slice_of.partition_B(tokens_of(plan, smem.sB)))
    tCrC = cute.make_tensor(
        rAcc.iterator, slice_of.make_fragment_C(slice_of.partition_shape_C((GROUP_M, plan.width))).layout
    )
    layout_a = slice_of.make_fragment_A(slice_of.partition_shape_A((GROUP_M, UNIT_K))).layout
    rA = [cute.make_rmem_tensor((4, K_STEPS), Uint32) for _ in range(TURN_UNITS)]
    rCodes = cute.make_rmem_tensor(K_STEPS, Uint32)
    rScales = cute.make_rmem_tensor(K_STEPS // 2, Uint32)
    rAcc.fill(0.0)
    before = place.stage
    for turn in cutlass.range(turns, unroll=1):
        for unit in cutlass.range_constexpr(TURN_UNITS):
            inside = cutlass.const_expr(unit % plan.units)
            if cutlass.const_expr(inside == 0):
                wait_full(ring, place)
            load_unit(plan, smem.sA, place.stage, inside, rCodes, rScales, consumer)
            unpack(rCodes, rScales, rA[unit])
            tCrA = cute.make_tensor(cute.recast_ptr(rA[unit].iterator, dtype=Float16), layout_a)
            warpgroup.fence()
            for step in cutlass.range_constexpr(K_STEPS):
                cute.gemm(mma, tCrC, tCrA[None, None, step], tCrB[None, None, step, inside, place.stage], tCrC)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if cutlass.const_expr(inside == 0):
                give_back(ring, before, consumer.leads if unit > 0 else consumer.leads & (turn > 0))
            if cutlass.const_expr(inside == plan.units - 1):
                before = place.stage
                place = advanced(ring, place)
    warpgroup.wait_group(0)
    give_back(ring, before, consumer.leads)
    return place


@cute.jit
def finish(
    plan: Sm90MoePlan,
    gemm: GroupedGemm,
    smem: GemmSmem,
    tensors: SwigluTensors | RowsTensors,
    piece: Piece,
    rAcc: cute.Tensor,
    consumer: Consumer,
):
    """Hand the sums of a piece over, or take over those of the rest of the tile and store it."""
    if piece.first > 0:
        hand_over(plan, gemm, rAcc, consumer.thread)
    else:
        if piece.stop < gemm.turns:
            take_over(plan, gemm, rAcc, consumer.thread)
        if cutlass.const_expr(smem.sStaged is None):
            store_rows(plan, tensors, piece, rAcc, consumer)
        else:
            store_activations(plan, tensors, piece, rAcc, smem.sStaged, consumer)


@cute.jit
def consumer_warpgroup(
    plan: Sm90MoePlan,
    gemm: GroupedGemm,
    smem: GemmSmem,
    tensors: SwigluTensors | RowsTensors,
    ring: StageRing,
    consumer: Consumer,
):
    """The work loop of a consumer."""
    items = walk(plan, gemm)
    place = ring_start(ring, False)
    rAcc = cute.make_rmem_tensor(plan.width // 2, Float32)
    piece = piece_at(gemm, items, Int32(0))
    for number in cutlass.range(items.pieces, unroll=1):
        following = piece_at(gemm, items, number + 1)
        place = multiply(plan, smem, ring, place, piece.stop - piece.first, rAcc, consumer)
        finish(plan, gemm, smem, tensors, piece, rAcc, consumer)
        piece = following


def allocate(plan: Sm90MoePlan, allocator: memory.SmemAllocator, staged: bool) -> GemmSmem:
    """The ring and the staging in shared memory."""
    sB = allocator.allocate_tensor(Uint8, cute.make_layout(plan.stages * plan.b_bytes), byte_alignment=1024)
    sA = allocator.allocate_tensor(Uint8, cute.make_layout(plan.stages * plan.a_bytes), byte_alignment=128)
    sStaged = None
    if staged:
        stride = (STAGED_PITCH, 1, plan.staged_tokens * STAGED_PITCH)
        layout = cute.make_layout((plan.staged_tokens, GROUP_M // 2, plan.groups), stride=stride)
        sStaged = allocator.allocate_tensor(Float32, layout, byte_alignment=16)
    return GemmSmem(sB, sA, sStaged)


@cute.jit
def grouped_gemm(plan: Sm90MoePlan, gemm: GroupedGemm, tensors: SwigluTensors | RowsTensors, staged: cutlass.Constexpr):
    """The body of both kernels: dispatch the warps to their roles. `tensors`: those of the epilogue."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    allocator = memory.SmemAllocator()
    smem = allocate(plan, allocator, staged)
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
        consumer = Consumer(number, group, in_group, in_group % 32 // 4, in_group % 4, Boolean(in_group % 32 == 0))
        consumer_warpgroup(plan, gemm, smem, tensors, ring, consumer)


@cute.kernel
def swiglu_kernel(plan: cutlass.Constexpr, gemm: GroupedGemm, tensors: SwigluTensors):
    """L1: a2 = requantise(swiglu(W1 x)), by expert row."""
    grouped_gemm(plan, gemm, tensors, True)


@cute.kernel
def rows_kernel(plan: cutlass.Constexpr, gemm: GroupedGemm, tensors: RowsTensors):
    """L2: rows = W2 a2, by expert row."""
    grouped_gemm(plan, gemm, tensors, False)
