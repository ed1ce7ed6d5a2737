# pyright: reportMissingImports=false
"""Attention on short caches: a CTA is one warpgroup with one tile of keys.

Such a call would be over before a persistent kernel gets going. So the loads come first, with no division before them.
There is no producer, ring, turn, merge or round of items. That keeps the code short: after a flush the instructions
themselves come from memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from backends.cutedsl.attention_tiles import AttentionItem, Outputs, Problem
from backends.cutedsl.ring import RingPlace, RingSlot, StageRing, announce, ring_start, wait_full
from backends.cutedsl.sm90_fmha.attend import begin_rows, issue_pv, issue_qk, mask_tile, softmax_tile
from backends.cutedsl.sm90_fmha.epilogue import finish_item
from backends.cutedsl.sm90_fmha.load import Loads
from backends.cutedsl.sm90_fmha.operands import Consumer, Sm90Smem, make_operands, make_registers, visible_keys
from backends.cutedsl.sm90_fmha.plan import Sm90FmhaPlan
from backends.cutedsl.sm90_fmha.softmax import round_p


def own_item(plan: Sm90FmhaPlan, problem: Problem) -> AttentionItem:
    """The item of this CTA, by grid index: split i is tile i, empty if no query of the sequence sees a key in it."""
    kv_batch, row_tile, tile = cute.arch.block_idx()
    low, high = problem.s_k - problem.t, problem.s_k - 1
    first, end = tile * plan.tile_n, (tile + 1) * plan.tile_n
    seen = (end > low - problem.left + 1) & (first < cutlass.min(high + problem.right + 1, problem.s_k))
    clear = (first > high - problem.left) & (end <= cutlass.min(low + problem.right + 1, problem.s_k))
    return AttentionItem(
        kv_batch=kv_batch,
        split=tile,
        row_tile=row_tile,
        o_half=Int32(0),
        first_tile=tile,
        tiles=Int32(seen),
        clear_first=cutlass.select_(clear, tile, tile + 1),
        clear_last=tile + 1,
    )


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
    q_place, k_place = ring_start(q, False), ring_start(kv, False)
    v_place = RingPlace(k_place.stage + 1, k_place.parity)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
        if thread == 0:
            cute.arch.mbarrier_init(q.full, 1)
            for stage in cutlass.range_constexpr(kv.stages):
                cute.arch.mbarrier_init(kv.full + stage, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        if item.tiles > 0:
            announce(q, q_place, plan.q_bytes)
            loads.q.load((item.row_tile, 0, item.kv_batch), RingSlot(q, q_place))
            announce(kv, k_place, plan.slab_bytes)
            loads.k.load((item.first_tile, 0, item.kv_batch), RingSlot(kv, k_place))
            announce(kv, v_place, plan.slab_bytes)
            loads.v.load((0, item.first_tile, item.kv_batch), RingSlot(kv, v_place))
    cute.arch.sync_threads()

    consumer = Consumer(Int32(0), thread)
    operands, registers = make_operands(plan, smem), make_registers(plan)
    begin_rows(plan, problem, item, registers.rows, mSink, consumer)
    if item.tiles > 0:
        rKeys = visible_keys(plan, problem, item, consumer)
        wait_full(q, q_place)
        issue_qk(plan, operands, registers.rS, Int32(0), kv, k_place)
        warpgroup.wait_group(0)
        mask_tile(plan, problem, item, registers.rS, item.first_tile, rKeys, consumer)
        softmax_tile(plan, problem, registers, kv, v_place)
        round_p(registers.rS, registers.rP)
        issue_pv(plan, operands, registers, kv, v_place, adds=False)
        warpgroup.wait_group(0)
    else:
        registers.rO.fill(0.0)
    cute.arch.griddepcontrol_launch_dependents()
    finish_item(plan, problem, outputs, smem, item, registers, consumer)
