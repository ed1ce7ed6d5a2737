# ruff: noqa: N815
# pyright: reportMissingImports=false
"""The products of a tile: weights are loaded from shared memory into registers, unpacked and multiplied by the tokens.

With wgmma, a warpgroup multiplies two blocks of 64 weight rows, each with its own registers for A. While the tensor
core multiplies one block, the threads unpack the other, or the next unit of this one. A stage is released when its
wgmmas are known to be done, one block later. All codes of a stage are loaded at once, because an unpacking that begins
with a load waits for it (results/attempts.md).

For eight columns each warp multiplies its 16 rows by itself with mma.sync: wgmma takes 15 cycles of an H200 whatever N,
and its four warps wait for each other (results/records/h200-moe-clean-flush.json).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu import warp as warp_level
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from backends.cutedsl.ring import RingPlace, StageRing, advanced, wait_full
from backends.cutedsl.sm90_moe.epilogue import ColumnConsumer
from backends.cutedsl.sm90_moe.plan import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    K_STEPS,
    LANE_BYTES,
    PAIR_BYTES,
    ROW_BYTES,
    TURN_UNITS,
    UNIT_BYTES,
    UNIT_K,
    WARP_COLUMNS,
    Sm90MoePlan,
)
from backends.cutedsl.sm90_moe.unpack import unpack

CHUNK_BYTES = 16
"""A row of an 8 x 8 matrix of f16. The swizzle moves it as a whole."""


class GemmSmem(NamedTuple):
    """The ring as flat bytes: sB tokens, swizzled, and sA weights. sStaged: the staging of L1's epilogue, or None."""

    sB: cute.Tensor
    sA: cute.Tensor
    sStaged: cute.Tensor | None


class UnitRegisters(NamedTuple):
    """A thread's packed weights of a block in a unit, u32: a word of codes per k-step, one of block scales per two."""

    rCodes: cute.Tensor
    rScales: cute.Tensor


def make_unit(plan: Sm90MoePlan) -> tuple[UnitRegisters, ...]:
    """Registers for each block of a unit."""
    return tuple(
        UnitRegisters(cute.make_rmem_tensor(K_STEPS, Uint32), cute.make_rmem_tensor(K_STEPS // 2, Uint32))
        for _ in range(plan.group_blocks)
    )


def operand_of(plan: Sm90MoePlan) -> type[Float16] | type[BFloat16]:
    """The type of unpacked weights and of tokens."""
    return BFloat16 if plan.bf16 else Float16


def make_mma(plan: Sm90MoePlan) -> cute.TiledMma:
    """(64, width) += A B, A from registers, both K-major."""
    k_major, operand, tile = OperandMajorMode.K, operand_of(plan), (BLOCK_ROWS, plan.width)
    return hopper_helpers.make_trivial_tiled_mma(
        operand, operand, k_major, k_major, Float32, (1, 1, 1), tile, warpgroup.OperandSource.RMEM
    )


def tokens_of(plan: Sm90MoePlan, sB: cute.Tensor) -> cute.Tensor:
    """The tokens as wgmma reads them: (column, K, unit of stage, stage) f16 or bf16."""
    operand, tile = operand_of(plan), (BLOCK_ROWS, plan.width, UNIT_K)
    layout = hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, operand, 1)
    unit = cute.select(layout.outer, [0, 1])
    stages = cute.make_layout((plan.units, plan.stages), stride=(plan.width * UNIT_K, plan.b_bytes // 2))
    pointer = cute.recast_ptr(sB.iterator, layout.inner, dtype=operand)
    return cute.make_tensor(pointer, cute.append(cute.append(unit, stages[0]), stages[1]))


def sums_of(plan: Sm90MoePlan, rAcc: cute.Tensor, block: int) -> cute.Tensor:
    """The accumulators of one block of weight rows."""
    count = plan.width // 2
    return cute.make_tensor(rAcc.iterator + block * count, cute.make_layout(count))


@cute.jit
def load_unit(
    plan: Sm90MoePlan,
    sA: cute.Tensor,
    stage: Int32,
    unit: int,
    weights: tuple[UnitRegisters, ...],
    consumer: ColumnConsumer,
):
    """Load this thread's packed weights of a unit, for each block."""
    for block in cutlass.range_constexpr(plan.group_blocks):
        rCodes, rScales = weights[block]
        begin = stage * plan.a_bytes + (unit * UNIT_BYTES + block * BLOCK_BYTES)
        place = cute.assume(begin + consumer.codes_at, divby=LANE_BYTES)
        codes = cute.recast_ptr(sA.iterator + place, dtype=Uint32)
        cute.autovec_copy(cute.make_tensor(codes, cute.make_layout(cute.size(rCodes))), rCodes)
        scales = cute.recast_ptr(sA.iterator + cute.assume(begin + consumer.scales_at, divby=PAIR_BYTES), dtype=Uint32)
        cute.autovec_copy(cute.make_tensor(scales, cute.make_layout(cute.size(rScales))), rScales)


def give_back(ring: StageRing, stage: Int32, leads: Boolean) -> None:
    """Tell the producer that this warp has read the stage. `leads`: whether this is the lane that does it.

    There is no branch, because ptxas 13.5 gives up the pipeline of wgmmas if a branch divides it.
    """
    cute.arch.inline_ptx(
        "mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[ring.empty + stage], predicate=leads
    )


@cute.jit
def load_next(
    plan: Sm90MoePlan,
    smem: GemmSmem,
    ring: StageRing,
    place: RingPlace,
    unit: cutlass.Constexpr,
    exists: Boolean,
    weights: tuple[UnitRegisters, ...],
    consumer: ColumnConsumer,
):
    """Load the weights of the unit after unit `unit` of a turn, which is in the stage at `place`. `exists`: whether
    another turn follows."""
    following = cutlass.const_expr((unit + 1) % TURN_UNITS)
    inside = cutlass.const_expr(following % plan.units)
    if cutlass.const_expr(following > 0):
        if cutlass.const_expr(inside == 0):
            place = advanced(ring, place)
            wait_full(ring, place)
        load_unit(plan, smem.sA, place.stage, inside, weights, consumer)
    else:
        place = advanced(ring, place)
        if exists:
            wait_full(ring, place)
            load_unit(plan, smem.sA, place.stage, inside, weights, consumer)


@cute.jit
def multiply(
    plan: Sm90MoePlan,
    smem: GemmSmem,
    ring: StageRing,
    place: RingPlace,
    turns: Int32,
    rAcc: cute.Tensor,
    consumer: ColumnConsumer,
):
    """rAcc f32 = the products of `turns` turns. Returns the next place in the ring."""
    rAcc.fill(0.0)
    if cutlass.const_expr(plan.width == WARP_COLUMNS):
        place = multiply_by_warps(plan, smem, ring, place, turns, rAcc, consumer)
    else:
        place = multiply_by_warpgroups(plan, smem, ring, place, turns, rAcc, consumer)
    return place


@cute.jit
def multiply_by_warpgroups(
    plan: Sm90MoePlan,
    smem: GemmSmem,
    ring: StageRing,
    place: RingPlace,
    turns: Int32,
    rAcc: cute.Tensor,
    consumer: ColumnConsumer,
):
    """The loop of `multiply` with wgmma."""
    weights = [make_unit(plan) for _ in range(plan.units)]
    mma = make_mma(plan)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    slice_of = mma.get_slice(0)
    tCrB = slice_of.make_fragment_B(slice_of.partition_B(tokens_of(plan, smem.sB)))
    layout_c = slice_of.make_fragment_C(slice_of.partition_shape_C((BLOCK_ROWS, plan.width))).layout
    tCrC = [cute.make_tensor(sums_of(plan, rAcc, block).iterator, layout_c) for block in range(plan.group_blocks)]
    layout_a = slice_of.make_fragment_A(slice_of.partition_shape_A((BLOCK_ROWS, UNIT_K))).layout
    rA = [cute.make_rmem_tensor((4, K_STEPS), Uint32) for _ in range(plan.group_blocks)]
    before = place.stage
    for turn in cutlass.range(turns, unroll=1):
        for unit in cutlass.range_constexpr(TURN_UNITS):
            inside = cutlass.const_expr(unit % plan.units)
            if cutlass.const_expr(inside == 0):
                wait_full(ring, place)
                for loaded in cutlass.range_constexpr(plan.units):
                    load_unit(plan, smem.sA, place.stage, loaded, weights[loaded], consumer)
            for block in cutlass.range_constexpr(plan.group_blocks):
                rCodes, rScales = weights[inside][block]
                unpack(rCodes, rScales, rA[block], plan.bf16)
                tCrA = cute.make_tensor(cute.recast_ptr(rA[block].iterator, dtype=operand_of(plan)), layout_a)
                warpgroup.fence()
                for step in cutlass.range_constexpr(K_STEPS):
                    tokens = tCrB[None, None, step, inside, place.stage]
                    cute.gemm(mma, tCrC[block], tCrA[None, None, step], tokens, tCrC[block])
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if cutlass.const_expr(inside == 0 and block == 0):
                    give_back(ring, before, consumer.leads if unit > 0 else consumer.leads & (turn > 0))
            if cutlass.const_expr(inside == plan.units - 1):
                before = place.stage
                place = advanced(ring, place)
    warpgroup.wait_group(0)
    give_back(ring, before, consumer.leads)
    return place


@cute.jit
def load_tokens(plan: Sm90MoePlan, sB: cute.Tensor, stage: Int32, unit: int, rB: cute.Tensor, consumer: ColumnConsumer):
    """Load rB (2, k-step) u32, the B fragments of a unit of eight columns. Lane l addresses row l % 8 and chunk l / 8,
    which is stored at chunk ^ row. The chunks of the other two steps are at that place ^ 64 bytes."""
    lane = consumer.in_group % 32
    row, chunk = lane % 8, lane // 8
    place = stage * plan.b_bytes + unit * (plan.width * ROW_BYTES) + row * ROW_BYTES + (chunk ^ row) * CHUNK_BYTES
    for half in cutlass.range_constexpr(2):
        found = cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[sB.iterator + (place ^ half * (ROW_BYTES // 2))],
        )
        for matrix in cutlass.range_constexpr(4):
            rB[matrix % 2, 2 * half + matrix // 2] = found[matrix]


@cute.jit
def multiply_by_warps(
    plan: Sm90MoePlan,
    smem: GemmSmem,
    ring: StageRing,
    place: RingPlace,
    turns: Int32,
    rAcc: cute.Tensor,
    consumer: ColumnConsumer,
):
    """The loop of `multiply` with mma.sync, one block per warpgroup. The weights of a unit are loaded while the unit
    before is multiplied."""
    weights = make_unit(plan)
    wait_full(ring, place)
    load_unit(plan, smem.sA, place.stage, 0, weights, consumer)
    operand = operand_of(plan)
    mma = cute.make_mma_atom(warp_level.MmaF16BF16Op(operand, Float32, (16, WARP_COLUMNS, 16)))
    rA = cute.make_rmem_tensor((4, K_STEPS), Uint32)
    rB = cute.make_rmem_tensor((2, K_STEPS), Uint32)
    tCrA = cute.make_tensor(cute.recast_ptr(rA.iterator, dtype=operand), cute.make_layout((8, K_STEPS)))
    tCrB = cute.make_tensor(cute.recast_ptr(rB.iterator, dtype=operand), cute.make_layout((4, K_STEPS)))
    for turn in cutlass.range(turns, unroll=1):
        for unit in cutlass.range_constexpr(TURN_UNITS):
            inside = cutlass.const_expr(unit % plan.units)
            load_tokens(plan, smem.sB, place.stage, inside, rB, consumer)
            unpack(weights[0].rCodes, weights[0].rScales, rA, plan.bf16)
            load_next(plan, smem, ring, place, unit, turn + 1 < turns, weights, consumer)
            for step in cutlass.range_constexpr(K_STEPS):
                cute.mma_atom_call(mma, rAcc, tCrA[None, step], tCrB[None, step], rAcc)
            if cutlass.const_expr(inside == plan.units - 1):
                cute.arch.sync_warp()
                give_back(ring, place.stage, consumer.leads)
                place = advanced(ring, place)
    return place
