# pyright: reportMissingImports=false
"""Work items of a persistent grouped GEMM: (unit of an expert's rows, tile of W's rows), read from the schedule."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from backends.cutedsl.sm100_moe.plan import Sm100MoePlan


class Walk(NamedTuple):
    """The work items of this CTA or pair: `first`, `first + step`, ... below `end`. `w_tiles`: tiles of W's rows."""

    first: Int32
    step: Int32
    end: Int32
    w_tiles: Int32


class WorkItem(NamedTuple):
    """One tile: rows of expert `expert` from row tile `row_tile` on, `row_tiles` of them, times W's tile `w_tile`."""

    expert: Int32
    row_tile: Int32
    row_tiles: Int32
    w_tile: Int32


def walk(plan: Sm100MoePlan, mUnits: cute.Tensor, w_rows: Int32) -> Walk:
    """What this CTA has to do. The tiles of W of one unit are neighbours: its rows of A are read from memory once."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    w_tiles = (w_rows + plan.tile_n - 1) // plan.tile_n
    return Walk(block // plan.cta_group, blocks // plan.cta_group, mUnits[0, 0] * w_tiles, w_tiles)


@cute.jit
def work_item(mUnits: cute.Tensor, items: Walk, index: Int32) -> WorkItem:
    """Work item `index`, which may lie past the end: then it means nothing."""
    expert, row_tile, row_tiles = Int32(0), Int32(0), Int32(0)
    if index < items.end:
        unit = 1 + index // items.w_tiles
        expert, row_tile, row_tiles = mUnits[unit, 0], mUnits[unit, 1], mUnits[unit, 2]
    return WorkItem(expert, row_tile, row_tiles, index % items.w_tiles)
