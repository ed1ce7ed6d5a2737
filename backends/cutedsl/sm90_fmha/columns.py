# pyright: reportMissingImports=false
"""Consumers that share the columns of O: one warpgroup computes S and the softmax, two others O += P V, a half each.

P, the factors of O and at the end the reciprocals of the row sums go through a ring of tiles in shared memory, which
both other warpgroups read. When P of a tile is there, they multiply O by its factors and start P V.

P V of a tile could wait for S of the next tile, so that the tensor core has work during the softmax. But then slabs of
V become free later, and that costs more: 64 sequences of 128 heads on 4096 keys take 137 us, and 141 if P V waits
(results/records/h200-fmha-attempts.json).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from backends.cutedsl.attention_tiles import Outputs, Problem
from backends.cutedsl.device import WARPGROUP
from backends.cutedsl.ring import RingPlace, StageRing, advanced, make_full, release, ring_start, wait_empty, wait_full
from backends.cutedsl.sm90_fmha.attend import begin_rows, mask_tile
from backends.cutedsl.sm90_fmha.epilogue import row_place, row_results, store_lse, store_o, sum_over_quads
from backends.cutedsl.sm90_fmha.operands import (
    Consumer,
    Operands,
    Sm90Smem,
    make_operands,
    make_p_operand,
    make_pv_mma,
    make_qk_mma,
    visible_keys,
)
from backends.cutedsl.sm90_fmha.order import Order, deal, dealt_item
from backends.cutedsl.sm90_fmha.plan import GROUP_M, Sm90FmhaPlan
from backends.cutedsl.sm90_fmha.softmax import (
    ROWS,
    bf16_pair,
    exponentials,
    make_row_state,
    raise_maxima,
    rescale,
    row_values,
)


class ColumnRings(NamedTuple):
    """The rings of Q, slabs of K, slabs of V and tiles of P. The warps that compute P make its stages full."""

    q: StageRing
    k: StageRing
    v: StageRing
    p: StageRing


@cute.jit
def compute_scores(plan: Sm90FmhaPlan, operands: Operands, rS: cute.Tensor, k: StageRing, place: RingPlace):
    """Compute S = Q K^T, slab by slab of K from `place` on. Returns the next place."""
    qk_mma = make_qk_mma(plan)
    qk_thread = qk_mma.get_slice(0)
    tSrS = cute.make_tensor(
        rS.iterator, qk_thread.make_fragment_C(qk_thread.partition_shape_C((GROUP_M, plan.tile_n))).layout
    )
    k_blocks = cute.size(operands.tSrK, mode=[2])
    before = place.stage
    warpgroup.fence()
    for slab in cutlass.range_constexpr(plan.slabs):
        wait_full(k, place)
        for k_block in cutlass.range_constexpr(k_blocks):
            qk_mma.set(warpgroup.Field.ACCUMULATE, slab != 0 or k_block != 0)
            cute.gemm(
                qk_mma,
                tSrS,
                operands.tSrQ[None, None, slab * k_blocks + k_block, 0],
                operands.tSrK[None, None, k_block, place.stage],
                tSrS,
            )
        warpgroup.commit_group()
        if cutlass.const_expr(slab > 0):
            warpgroup.wait_group(1)
            release(k, before)
        before = place.stage
        place = advanced(k, place)
    warpgroup.wait_group(0)
    release(k, before)
    return place


@cute.jit
def store_p(plan: Sm90FmhaPlan, rS: cute.Tensor, sP: cute.Tensor, stage: Int32, thread: Int32):
    """Round P to bf16 and store it as a swizzled MMA operand: 16-byte chunk c of row r goes to c ^ (r % 8)."""
    lane = thread % 32
    words = cute.recast_ptr(sP.iterator, dtype=Int32)
    base = stage * (plan.p_bytes // 4) + ((thread // 32) * 16 + lane // 4) * 32 + lane % 4
    for i in cutlass.range_constexpr(ROWS):
        rRow = row_values(rS, i)
        for block in cutlass.range_constexpr(plan.tile_n // 8):
            panel, chunk = divmod(block, 8)
            offset = base + panel * (GROUP_M * 32) + 8 * i * 32 + ((lane // 4) ^ chunk) * 4
            target = cute.make_tensor(words + offset, cute.make_layout(1))
            target[0] = bf16_pair(rRow[0, block], rRow[1, block])


@cute.jit
def store_factors(sFactor: cute.Tensor, rFactor: cute.Tensor, stage: Int32, thread: Int32):
    """Store the factor of each of this thread's rows; the first lane of the quad does it."""
    if thread % 4 == 0:
        for i in cutlass.range_constexpr(ROWS):
            sFactor[(thread // 32) * 16 + (thread % 32) // 4 + 8 * i, stage] = rFactor[i]


@cute.jit
def score_warpgroup(
    plan: Sm90FmhaPlan,
    problem: Problem,
    order: Order,
    smem: Sm90Smem,
    outputs: Outputs,
    mSink: cute.Tensor | None,
    rings: ColumnRings,
    thread: Int32,
):
    """The work loop of the warpgroup that computes S and P."""
    consumer = Consumer(Int32(0), thread)
    q_place, k_place, p_place = ring_start(rings.q, False), ring_start(rings.k, False), ring_start(rings.p, True)
    operands = make_operands(plan, smem)
    rS = cute.make_rmem_tensor(plan.tile_n // 2, Float32)
    rows = make_row_state()
    hand = deal(plan, problem, order)
    for number in cutlass.range(hand.start, hand.stop, hand.step, unroll=1):
        item = dealt_item(plan, problem, order, number)
        own = problem.of(item.sequence, plan)
        begin_rows(plan, own, item, rows, mSink, consumer)
        if item.tiles > 0:
            rKeys = visible_keys(plan, own, item, consumer)
            wait_full(rings.q, q_place)
            for i in cutlass.range(item.tiles, unroll=1):
                k_place = compute_scores(plan, operands, rS, rings.k, k_place)
                if i == item.tiles - 1:
                    release(rings.q, q_place.stage)
                mask_tile(plan, own, item, rS, item.first_tile + i, rKeys, consumer)
                raise_maxima(rS, rows, problem.scale_log2, tuple(range(ROWS)))
                for row in cutlass.range_constexpr(ROWS):
                    exponentials(rS, rows, problem.scale_log2, row)
                wait_empty(rings.p, p_place)
                store_factors(smem.sFactor, rows.rFactor, p_place.stage, thread)
                store_p(plan, rS, smem.sP, p_place.stage, thread)
                make_full(rings.p, p_place)
                p_place = advanced(rings.p, p_place)
            q_place = advanced(rings.q, q_place)
        sum_over_quads(rows)
        rInverse = cute.make_rmem_tensor(ROWS, Float32)
        for i in cutlass.range_constexpr(ROWS):
            inverse, lse = row_results(rows, problem.scale_log2, i)
            rInverse[i] = inverse
            place = row_place(plan, own, outputs, item, consumer, i)
            if cutlass.const_expr(plan.o_halves > 1):
                place = place._replace(exists=place.exists & Boolean(item.o_half == 0))
            store_lse(outputs, problem.splits, place, lse, thread % 32)
        wait_empty(rings.p, p_place)
        store_factors(smem.sFactor, rInverse, p_place.stage, thread)
        make_full(rings.p, p_place)
        p_place = advanced(rings.p, p_place)


@cute.jit
def load_factors(sFactor: cute.Tensor, stage: Int32, thread: Int32) -> cute.Tensor:
    """The factors of this thread's rows."""
    rFactor = cute.make_rmem_tensor(ROWS, Float32)
    for i in cutlass.range_constexpr(ROWS):
        rFactor[i] = sFactor[(thread // 32) * 16 + (thread % 32) // 4 + 8 * i, stage]
    return rFactor


@cute.jit
def value_warpgroup(
    plan: Sm90FmhaPlan,
    problem: Problem,
    order: Order,
    smem: Sm90Smem,
    outputs: Outputs,
    rings: ColumnRings,
    half: Int32,
    thread: Int32,
):
    """The work loop of a warpgroup that holds the columns of O from `half` * o_columns on."""
    consumer = Consumer(Int32(0), thread)
    v_place, p_place = ring_start(rings.v, False), ring_start(rings.p, False)
    operands, tOrPs = make_operands(plan, smem), make_p_operand(plan, smem.sP)
    pv_mma = make_pv_mma(plan)
    pv_mma.set(warpgroup.Field.ACCUMULATE, True)
    pv_thread = pv_mma.get_slice(0)
    layout_o = pv_thread.make_fragment_C(pv_thread.partition_shape_C((GROUP_M, plan.pv_columns))).layout
    parts = cutlass.const_expr(plan.o_columns // plan.pv_columns)
    rO = cute.make_rmem_tensor(GROUP_M * plan.o_columns // WARPGROUP, Float32)
    hand = deal(plan, problem, order)
    for number in cutlass.range(hand.start, hand.stop, hand.step, unroll=1):
        item = dealt_item(plan, problem, order, number)
        own = problem.of(item.sequence, plan)
        rO.fill(0.0)
        for _ in cutlass.range(item.tiles, unroll=1):
            wait_full(rings.p, p_place)
            rFactor = load_factors(smem.sFactor, p_place.stage, thread)
            rescale(rO, rFactor)
            before = v_place.stage
            warpgroup.fence()
            for slab in cutlass.range_constexpr(plan.v_slabs):
                wait_full(rings.v, v_place)
                for k_block in cutlass.range_constexpr(plan.v_keys // 16):
                    tOrP = tOrPs[None, None, slab * (plan.v_keys // 16) + k_block, p_place.stage]
                    for part in cutlass.range_constexpr(parts):
                        tOrV = operands.tOrV[None, half * parts + part, k_block, v_place.stage]
                        tOrO = cute.make_tensor(rO.iterator + part * cute.size(layout_o), layout_o)
                        cute.gemm(pv_mma, tOrO, tOrP, cute.append_ones(tOrV, up_to_rank=2), tOrO)
                warpgroup.commit_group()
                if cutlass.const_expr(slab > 0):
                    warpgroup.wait_group(1)
                    release(rings.v, before)
                before = v_place.stage
                v_place = advanced(rings.v, v_place)
            warpgroup.wait_group(0)
            release(rings.v, before)
            release(rings.p, p_place.stage)
            p_place = advanced(rings.p, p_place)
        wait_full(rings.p, p_place)
        rInverse = load_factors(smem.sFactor, p_place.stage, thread)
        release(rings.p, p_place.stage)
        p_place = advanced(rings.p, p_place)
        for i in cutlass.range_constexpr(ROWS):
            place = row_place(plan, own, outputs, item, consumer, i)
            column = half * plan.o_columns
            if cutlass.const_expr(plan.o_halves > 1):
                column = item.o_half * plan.v_columns + column
            store_o(plan, own, outputs, place, row_values(rO, i), rInverse[i], column, thread % 32)
