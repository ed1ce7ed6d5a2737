# pyright: reportMissingImports=false
"""A CTA is one warpgroup and has one work item: for short caches.

Such a call is over before a machine that is built for long ones has got going. So nothing is divided before the first
load, whose instructions come first; a tile's products wait for each other; and what a persistent kernel has is left
out: a producer, turns, merging, rounds of items. After a flush the instructions themselves come from memory. hd 64 on
128 keys of four sequences takes 6.7 us with all that, and TODO so.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from backends.cutedsl.attention_tiles import AttentionItem, Outputs, Problem
from backends.cutedsl.ring import RingPlace, RingSlot, StageRing, advanced, announce, ring_start, wait_full
from backends.cutedsl.sm90_fmha.attend import begin_rows, issue_pv, issue_qk, mask_tile, softmax_tile
from backends.cutedsl.sm90_fmha.epilogue import elements_at, row_place, row_results, store_lse, sum_over_quads
from backends.cutedsl.sm90_fmha.load import Loads
from backends.cutedsl.sm90_fmha.operands import (
    Consumer,
    Registers,
    Sm90Smem,
    make_operands,
    make_registers,
    visible_keys,
)
from backends.cutedsl.sm90_fmha.plan import Sm90FmhaPlan
from backends.cutedsl.sm90_fmha.softmax import ROWS, rescale, round_p, row_values


def own_item(plan: Sm90FmhaPlan, problem: Problem) -> AttentionItem:
    """The item of this CTA, by the indices of the grid. Its tiles are those that any query of the sequence sees."""
    kv_batch, row_tile, split = cute.arch.block_idx()
    low, high = problem.s_k - problem.t, problem.s_k - 1
    key_begin = cutlass.max(low - problem.left + 1, Int32(0))
    key_end = cutlass.max(cutlass.min(high + problem.right + 1, problem.s_k), Int32(0))
    part = split * problem.split_tiles
    begin = cutlass.max(key_begin // plan.tile_n, part)
    end = cutlass.min((key_end + plan.tile_n - 1) // plan.tile_n, part + problem.split_tiles)
    clear_begin = cutlass.max(high - problem.left + 1, Int32(0))
    clear_end = cutlass.max(cutlass.min(low + problem.right + 1, problem.s_k), Int32(0))
    return AttentionItem(
        kv_batch=kv_batch,
        split=split,
        row_tile=row_tile,
        o_half=Int32(0),
        first_tile=begin,
        tiles=cutlass.max(end - begin, Int32(0)),
        clear_first=(clear_begin + plan.tile_n - 1) // plan.tile_n,
        clear_last=clear_end // plan.tile_n,
    )


@cute.jit
def load_tile(plan: Sm90FmhaPlan, loads: Loads, kv: StageRing, place: RingPlace, tile: Int32, item: AttentionItem):
    """Load K and V of a tile into two stages that nobody reads. Returns the place behind them."""
    announce(kv, place, plan.slab_bytes)
    loads.k.load((tile, 0, item.kv_batch), RingSlot(kv, place))
    place = advanced(kv, place)
    announce(kv, place, plan.slab_bytes)
    loads.v.load((0, tile, item.kv_batch), RingSlot(kv, place))
    return advanced(kv, place)


@cute.jit
def lone_warpgroup(
    plan: Sm90FmhaPlan,
    problem: Problem,
    loads: Loads,
    smem: Sm90Smem,
    outputs: Outputs,
    mSink: cute.Tensor | None,
    q: StageRing,
    kv: StageRing,
    thread: Int32,
):
    """Compute the item of this CTA. Warp 0 loads. `mSink`: as in begin_rows."""
    item = own_item(plan, problem)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    depth = cutlass.const_expr(plan.ring_stages // 2)
    ahead = ring_start(kv, False)
    if warp == 0:
        if thread == 0:
            for barrier in cutlass.range_constexpr(plan.ring_stages):
                cute.arch.mbarrier_init(kv.full + barrier, 1)
            cute.arch.mbarrier_init(q.full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        q_place = ring_start(q, False)
        announce(q, q_place, plan.q_bytes)
        loads.q.load((item.row_tile, 0, item.kv_batch), RingSlot(q, q_place))
        for i in cutlass.range(cutlass.min(item.tiles, Int32(depth)), unroll=1):
            ahead = load_tile(plan, loads, kv, ahead, item.first_tile + i, item)
    cute.arch.sync_threads()

    consumer = Consumer(Int32(0), thread)
    operands, registers = make_operands(plan, smem), make_registers(plan)
    begin_rows(plan, problem, item, registers.rows, mSink, consumer)
    registers.rO.fill(0.0)
    rKeys = visible_keys(plan, problem, item, consumer)
    wait_full(q, ring_start(q, False))
    place = ring_start(kv, False)
    for i in cutlass.range(item.tiles, unroll=1):
        free = place
        place = issue_qk(plan, operands, registers.rS, Int32(0), kv, place)
        warpgroup.wait_group(0)
        mask_tile(plan, problem, item, registers.rS, item.first_tile + i, rKeys, consumer)
        softmax_tile(plan, problem, registers, kv, place)
        rescale(registers.rO, registers.rows.rFactor)
        round_p(registers.rS, registers.rP)
        place = issue_pv(plan, operands, registers, kv, place)
        warpgroup.wait_group(0)
        if i + depth < item.tiles:
            cute.arch.sync_threads()
            if warp == 0:
                load_tile(plan, loads, kv, free, item.first_tile + i + depth, item)
    cute.arch.griddepcontrol_launch_dependents()
    store(plan, problem, outputs, item, registers, consumer)


@cute.jit
def store(
    plan: Sm90FmhaPlan,
    problem: Problem,
    outputs: Outputs,
    item: AttentionItem,
    registers: Registers,
    consumer: Consumer,
):
    """Store normalised O and the log-sum-exp of this thread's rows, two columns of a block of 8 at a time."""
    lane = consumer.thread % 32
    sum_over_quads(registers.rows)
    for i in cutlass.range_constexpr(ROWS):
        place = row_place(plan, problem, outputs, item, consumer, i)
        inverse, lse = row_results(registers.rows, problem.scale_log2, i)
        store_lse(outputs, problem.splits, place, lse, lane)
        rRow = row_values(registers.rO, i)
        if place.exists:
            if problem.splits == 1:
                store_pairs(outputs.mO, place.flat * plan.hd + 2 * (lane % 4), rRow, inverse)
            else:
                store_pairs(outputs.mO_part, place.part * plan.hd + 2 * (lane % 4), rRow, inverse)


@cute.jit
def store_pairs(mO: cute.Tensor, offset: Int64, rRow: cute.Tensor, inverse: Float32):
    """Store the pairs of a row times `inverse`, the first at `offset`, the others 8 columns apart."""
    for block in cutlass.range_constexpr(cute.size(rRow, mode=[1])):
        rPair = cute.make_rmem_tensor(2, mO.element_type)
        rPair.store((rRow[None, block].load() * inverse).to(mO.element_type))
        cute.autovec_copy(rPair, elements_at(mO, offset + 8 * block, 2))
