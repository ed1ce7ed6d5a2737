# pyright: reportMissingImports=false
"""The TMA producer warp: a ring stage holds codes and block scales of 128 rows of A and of W, 256 of K."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineProducer

from backends.cutedsl.sm100_moe.operands import Operand, Shared, partition_codes, partition_scales
from backends.cutedsl.sm100_moe.plan import TILE_M, Sm100MoePlan
from backends.cutedsl.sm100_moe.tiles import walk, work_item


@cute.jit
def load_warp(
    plan: Sm100MoePlan,
    a: Operand,
    w: Operand,
    shared: Shared,
    mUnits: cute.Tensor,
    w_rows: Int32,
    k_tiles: Int32,
    rank: Int32,
    ring: PipelineProducer,
):
    """The producer's work loop. `rank`: which CTA of the pair. The next item is read while this one is loaded."""
    tAgA, tAsA = partition_codes(a, shared.sA, plan.ring_stages)
    tWgW, tWsW = partition_codes(w, shared.sW, plan.ring_stages)
    tAgSF, tAsSF = partition_scales(a, shared.sSFA)
    items = walk(plan, mUnits, w_rows)
    item = work_item(mUnits, items, items.first)
    expert, row_tile = item.expert, item.row_tile
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        following = work_item(mUnits, items, index + items.step)
        a_tile = row_tile + rank
        w_first = index % items.w_tiles * plan.cta_group
        w_tile = w_first + rank
        mScales = cute.domain_offset((0, expert * (w_rows // TILE_M) + w_first), w.mScales)
        tWgSF, tWsSF = partition_scales(w._replace(mScales=mScales), shared.sSFW)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            stage = ring.acquire_and_advance()
            slot, barrier = stage.index, stage.barrier
            cute.copy(w.codes, tWgW[None, w_tile, k_tile, expert], tWsW[None, slot], tma_bar_ptr=barrier)
            cute.copy(w.scales, tWgSF[None, k_tile, 0], tWsSF[None, slot], tma_bar_ptr=barrier)
            cute.copy(a.codes, tAgA[None, a_tile, k_tile, 0], tAsA[None, slot], tma_bar_ptr=barrier)
            cute.copy(a.scales, tAgSF[None, k_tile, a_tile], tAsSF[None, slot], tma_bar_ptr=barrier)
        expert, row_tile = following.expert, following.row_tile
    ring.tail()
