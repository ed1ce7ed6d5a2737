# pyright: reportMissingImports=false
"""A CTA of one warpgroup and a warp that loads, one work item a CTA: for short caches.

Such a call is over before a machine that is built for long ones has got going. So a tile's products wait for each other,
and what a persistent kernel has is left out, turns, merging and rounds of items: after a flush the instructions
themselves come from memory. The warp that loads makes the barriers and waits for nobody.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from backends.cutedsl.attention_tiles import AttentionItem, Outputs, Problem, item_at
from backends.cutedsl.ring import StageRing, init_rings, release, ring_start, wait_full
from backends.cutedsl.sm90_fmha.attend import begin_rows, issue_pv, issue_qk, mask_tile, softmax_tile
from backends.cutedsl.sm90_fmha.epilogue import finish_item
from backends.cutedsl.sm90_fmha.load import Loads, load_k, load_q, load_v
from backends.cutedsl.sm90_fmha.operands import Consumer, Sm90Smem, make_operands, make_registers, visible_keys
from backends.cutedsl.sm90_fmha.plan import Sm90FmhaPlan
from backends.cutedsl.sm90_fmha.softmax import rescale, round_p

LOAD_WARP = 4
BEGIN_BARRIER = 1
"""A named barrier: the barriers in memory are made."""


def own_item(plan: Sm90FmhaPlan, problem: Problem) -> AttentionItem:
    """The item of this CTA. Its numbers are the indices of the grid, so nothing is divided."""
    kv_batch, row_tile, split = cute.arch.block_idx()
    return item_at(plan, problem, kv_batch, split, row_tile, Int32(0))


@cute.jit
def lone_load_warp(plan: Sm90FmhaPlan, problem: Problem, loads: Loads, q: StageRing, kv: StageRing):
    """Make the barriers; load Q, then K and V tile by tile."""
    if cute.arch.lane_idx() == 0:
        init_rings(q, 1, 4)
        init_rings(kv, 1, plan.ring_consumers)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()
    cute.arch.barrier_arrive(barrier_id=BEGIN_BARRIER, number_of_threads=plan.threads)
    item = own_item(plan, problem)
    place = ring_start(kv, True)
    if item.tiles > 0:
        load_q(plan, loads, q, ring_start(q, True), item)
    for i in cutlass.range(item.tiles, unroll=1):
        tile = item.first_tile + i
        place = load_k(plan, problem, loads, kv, place, tile, tile, item)
        place = load_v(plan, problem, loads, kv, place, tile, tile, item)
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def lone_warpgroup(
    plan: Sm90FmhaPlan,
    problem: Problem,
    smem: Sm90Smem,
    outputs: Outputs,
    mSink: cute.Tensor | None,
    q: StageRing,
    kv: StageRing,
    thread: Int32,
):
    """Compute the item of this CTA. `mSink`: as in begin_rows."""
    consumer, item = Consumer(Int32(0), thread), own_item(plan, problem)
    operands, registers = make_operands(plan, smem), make_registers(plan)
    begin_rows(plan, problem, item, registers.rows, mSink, consumer)
    registers.rO.fill(0.0)
    rKeys = visible_keys(plan, problem, item, consumer)
    cute.arch.barrier(barrier_id=BEGIN_BARRIER, number_of_threads=plan.threads)
    place = ring_start(kv, False)
    if item.tiles > 0:
        wait_full(q, ring_start(q, False))
    for i in cutlass.range(item.tiles, unroll=1):
        k_stage = place.stage
        place = issue_qk(plan, operands, registers.rS, Int32(0), kv, place)
        warpgroup.wait_group(0)
        release(kv, k_stage)
        mask_tile(plan, problem, item, registers.rS, item.first_tile + i, rKeys, consumer)
        softmax_tile(plan, problem, registers, kv, place)
        rescale(registers.rO, registers.rows.rFactor)
        round_p(registers.rS, registers.rP)
        v_stage = place.stage
        place = issue_pv(plan, operands, registers, kv, place)
        warpgroup.wait_group(0)
        release(kv, v_stage)
    finish_item(plan, problem, outputs, smem, item, registers, consumer)
