# pyright: reportMissingImports=false
"""The TMA producer warp: a ring stage holds codes and block scales of 128 rows of A and of W, 256 of K."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineProducer

from backends.cutedsl.sm100_moe.operands import GroupedGemm, RingSmem, codes_views, scales_views
from backends.cutedsl.sm100_moe.plan import TILE_M, Sm100MoePlan
from backends.cutedsl.sm100_moe.routing import walk, work_item


@cute.jit
def load_warp(plan: Sm100MoePlan, gemm: GroupedGemm, smem: RingSmem, rank: Int32, ring: PipelineProducer):
    """The producer's work loop. `rank`: which CTA of the pair. The next item is read while this one is loaded."""
    a_codes = codes_views(gemm.a.codes, smem.sA, plan.ring_stages)
    w_codes = codes_views(gemm.w.codes, smem.sW, plan.ring_stages)
    a_scales = scales_views(gemm.a.scales, smem.sSFA)
    items = walk(plan, gemm)
    item = work_item(gemm, items, items.first)
    expert, row_tile = item.expert, item.row_tile
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        following = work_item(gemm, items, index + items.step)
        a_tile = row_tile + rank
        w_first = index % items.w_tiles * plan.cta_group
        w_tile = w_first + rank
        of_expert = cute.domain_offset((0, expert * (gemm.w_rows // TILE_M) + w_first), gemm.w.scales.coordinates)
        w_scales = scales_views(gemm.w.scales._replace(coordinates=of_expert), smem.sSFW)
        for k_tile in cutlass.range(gemm.k_tiles, unroll=1):
            stage = ring.acquire_and_advance()
            w_codes.load((w_tile, k_tile, expert), stage)
            w_scales.load((k_tile, 0), stage)
            a_codes.load((a_tile, k_tile, 0), stage)
            a_scales.load((k_tile, a_tile), stage)
        expert, row_tile = following.expert, following.row_tile
    ring.tail()
