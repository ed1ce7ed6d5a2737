# ruff: noqa: N815
# pyright: reportMissingImports=false
"""The schedule of the grouped GEMMs, all on the device: the routing kernel writes it, the GEMMs' warps walk along it.

A unit is the rows of an expert that a CTA computes, one row tile, or a pair of CTAs, two. A work item is a unit times a
tile of W's rows. The rows of an expert are in the order of its routes, so no atomic decides where a row lies.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, memory

from backends.cutedsl.moe.layout import MAX_EXPERTS, TILE_M
from backends.cutedsl.moe.routing import inclusive_sum
from backends.cutedsl.sm100_moe.operands import GroupedGemm
from backends.cutedsl.sm100_moe.plan import Sm100MoePlan

WARPS = 8
THREADS = 32 * WARPS


class GemmSchedule(NamedTuple):
    """Outputs of the routing kernel, all int32.

    mRowOfRoute (tokens * topk): the expert row of a route; not written for a route to an expert of another rank.
    mRouteOfRow (rows): its inverse, -1 for padding rows of tiles that have a route.
    mUnits (1 + row tiles, 4): entry 0 is the number of units, then (expert, first row tile, row tiles) of each.
    """

    mRowOfRoute: cute.Tensor
    mRouteOfRow: cute.Tensor
    mUnits: cute.Tensor


@cute.jit
def count_routes(ids: cute.Tensor, sCounts: cute.Tensor, routes: Int32, thread: Int32):
    """Count the routes of each expert in sCounts. Every CTA counts all experts rather than wait for another CTA."""
    for expert in cutlass.range_constexpr(0, MAX_EXPERTS, THREADS):
        sCounts[expert + thread] = Int32(0)
    cute.arch.sync_threads()
    for route in cutlass.range(thread, routes, THREADS, unroll=1):
        expert = ids[route]
        if expert >= 0:
            cute.arch.atomic_add(sCounts.iterator + expert, Int32(1))
    cute.arch.sync_threads()


@cute.jit
def place_experts(cta_group: cutlass.Constexpr, sCounts, sTiles, sUnits, experts: Int32, lane: Int32) -> Int32:
    """Set sTiles[expert], sUnits[expert] to the row tiles and units before it. By one warp; returns all units."""
    tiles_before, units_before = Int32(0), Int32(0)
    for first in cutlass.range(0, experts, 32, unroll=1):
        expert = first + lane
        tiles = (sCounts[expert] + TILE_M - 1) // TILE_M
        units = (tiles + cta_group - 1) // cta_group
        tile_end, unit_end = inclusive_sum(tiles, lane), inclusive_sum(units, lane)
        sTiles[expert] = tiles_before + tile_end - tiles
        sUnits[expert] = units_before + unit_end - units
        tiles_before += cute.arch.shuffle_sync(tile_end, 31)
        units_before += cute.arch.shuffle_sync(unit_end, 31)
    return units_before


@cute.jit
def place_rows(ids: cute.Tensor, schedule: GemmSchedule, expert: Int32, first_row: Int32, count: Int32, lane: Int32):
    """Place the rows of one expert, by one warp: its routes in ascending order, then padding."""
    routes = cute.size(schedule.mRowOfRoute)
    placed = Int32(0)
    for first in cutlass.range(0, routes, 32, unroll=1):
        route = first + lane
        here = False
        if route < routes:
            here = ids[route] == expert
        ballot = cute.arch.vote_ballot_sync(here)
        if here:
            row = first_row + placed + cute.arch.popc(ballot & cute.arch.lanemask_lt())
            schedule.mRouteOfRow[row] = route
            schedule.mRowOfRoute[route] = row
        placed += cute.arch.popc(ballot)
    end = (count + TILE_M - 1) // TILE_M * TILE_M
    for padding in cutlass.range(count + lane, end, 32, unroll=1):
        schedule.mRouteOfRow[first_row + padding] = Int32(-1)


@cute.kernel
def routing_kernel(cta_group: cutlass.Constexpr, mTopkIds: cute.Tensor, schedule: GemmSchedule, experts: Int32):
    """Write `schedule` from mTopkIds (tokens * topk). One warp per expert, `WARPS` experts per CTA."""
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    smem = memory.SmemAllocator()
    sCounts, sTiles, sUnits = (
        smem.allocate_tensor(Int32, cute.make_layout(MAX_EXPERTS), byte_alignment=16) for _ in range(3)
    )
    count_routes(mTopkIds, sCounts, cute.size(mTopkIds), thread)
    if warp == 0:
        units = place_experts(cta_group, sCounts, sTiles, sUnits, experts, lane)
        if block == 0 and lane == 0:
            schedule.mUnits[0, 0] = units
    cute.arch.sync_threads()
    expert = block * WARPS + warp
    count = Int32(0)
    if expert < experts:
        count = sCounts[expert]
    if count > 0:
        first_tile = sTiles[expert]
        place_rows(mTopkIds, schedule, expert, first_tile * TILE_M, count, lane)
        tiles = (count + TILE_M - 1) // TILE_M
        for unit in cutlass.range(lane, (tiles + cta_group - 1) // cta_group, 32, unroll=1):
            entry = 1 + sUnits[expert] + unit
            schedule.mUnits[entry, 0] = expert
            schedule.mUnits[entry, 1] = first_tile + unit * cta_group
            schedule.mUnits[entry, 2] = cutlass.min(tiles - unit * cta_group, Int32(cta_group))


class Walk(NamedTuple):
    """The work items of this CTA or pair: `first`, `first + step`, ... below `end`. `w_tiles`: tiles of W's rows."""

    first: Int32
    step: Int32
    end: Int32
    w_tiles: Int32


class GemmTile(NamedTuple):
    """One tile: rows of expert `expert` from row tile `row_tile` on, `row_tiles` of them, times W's tile `w_tile`."""

    expert: Int32
    row_tile: Int32
    row_tiles: Int32
    w_tile: Int32


def walk(plan: Sm100MoePlan, gemm: GroupedGemm) -> Walk:
    """The work of this CTA. The tiles of W of one unit are neighbours, so its rows of A are read from memory once."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    w_tiles = (gemm.w_rows + plan.tile_n - 1) // plan.tile_n
    return Walk(block // plan.cta_group, blocks // plan.cta_group, gemm.mUnits[0, 0] * w_tiles, w_tiles)


@cute.jit
def work_item(gemm: GroupedGemm, items: Walk, index: Int32) -> GemmTile:
    """Work item `index`; meaningless past the end."""
    expert, row_tile, row_tiles = Int32(0), Int32(0), Int32(0)
    if index < items.end:
        unit = 1 + index // items.w_tiles
        expert, row_tile, row_tiles = (gemm.mUnits[unit, field] for field in range(3))
    return GemmTile(expert, row_tile, row_tiles, index % items.w_tiles)
