# ruff: noqa: N815
# pyright: reportMissingImports=false
"""From top-k ids to expert rows and column tiles, all on the device, one CTA per expert.

A CTA counts the routes of all experts itself, in shared memory, which is cheaper than a second launch that waits for
the counts. Then its warps, each with a stretch of the routes, place the routes of its expert in ascending order.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, memory

from backends.cutedsl.moe.layout import MAX_EXPERTS, TILE_M
from backends.cutedsl.moe.routing import inclusive_sum

WARPS = 32
THREADS = 32 * WARPS
AT_ONCE = 4
"""Ids that a lane loads before it uses the first: a warp then waits for a load once per 128 routes, not once per 32."""


class Columns(NamedTuple):
    """Outputs of the routing kernel, all int32.

    mRowOfRoute (tokens * topk): the expert row of a route; not written for a route to an expert of another rank.
    mRouteOfRow (rows): its inverse; not written for padding rows.
    mColumns (1 + column tiles, 4): entry 0 is the number of column tiles, then (expert, first row, rows) of each.
    mFlags: one per warp that may wait for another CTA (schedule.py), set to 0.
    """

    mRowOfRoute: cute.Tensor
    mRouteOfRow: cute.Tensor
    mColumns: cute.Tensor
    mFlags: cute.Tensor


def tiles_of(rows: Int32, size) -> Int32:
    """The number of tiles of `size` that hold `rows`."""
    return (rows + size - 1) // size


@cute.jit
def load_ids(ids: cute.Tensor, first: Int32, end: Int32, lane: Int32, rIds: cute.Tensor):
    """rIds (AT_ONCE): the ids of this lane in AT_ONCE times 32 routes from `first` on; -1 from `end` on."""
    for turn in cutlass.range_constexpr(AT_ONCE):
        rIds[turn] = Int32(-1)
        if first + 32 * turn + lane < end:
            rIds[turn] = ids[first + 32 * turn + lane]


@cute.jit
def own_routes(ids: cute.Tensor, sCounts: cute.Tensor, expert: Int32, begin: Int32, end: Int32, lane: Int32) -> Int32:
    """The number of routes among `begin` to `end` that are of `expert`. Counts all of them in sCounts, by expert."""
    own = Int32(0)
    rIds = cute.make_rmem_tensor(AT_ONCE, Int32)
    for first in cutlass.range(begin, end, 32 * AT_ONCE, unroll=1):
        load_ids(ids, first, end, lane, rIds)
        for turn in cutlass.range_constexpr(AT_ONCE):
            chosen = rIds[turn]
            if chosen >= 0:
                cute.arch.atomic_add(sCounts.iterator + chosen, Int32(1))
            own += cute.arch.popc(cute.arch.vote_ballot_sync(chosen == expert))
    return own


@cute.jit
def before(sCounts: cute.Tensor, sFirst: cute.Tensor, expert: Int32, width: Int32, thread: Int32):
    """Add up the rows and column tiles of the experts before `expert` in sFirst."""
    rows, columns = Int32(0), Int32(0)
    for earlier in cutlass.range(thread, expert, THREADS, unroll=1):
        count = sCounts[earlier]
        rows += tiles_of(count, TILE_M) * TILE_M
        columns += tiles_of(count, width)
    if rows > 0:
        cute.arch.atomic_add(sFirst.iterator, rows)
        cute.arch.atomic_add(sFirst.iterator + 1, columns)


@cute.jit
def place(ids: cute.Tensor, columns: Columns, expert: Int32, begin: Int32, end: Int32, row: Int32, lane: Int32):
    """Place the routes of `expert` among `begin` to `end` in the rows from `row` on."""
    rIds = cute.make_rmem_tensor(AT_ONCE, Int32)
    for first in cutlass.range(begin, end, 32 * AT_ONCE, unroll=1):
        load_ids(ids, first, end, lane, rIds)
        for turn in cutlass.range_constexpr(AT_ONCE):
            here = rIds[turn] == expert
            ballot = cute.arch.vote_ballot_sync(here)
            if here:
                route, placed = first + 32 * turn + lane, row + cute.arch.popc(ballot & cute.arch.lanemask_lt())
                columns.mRouteOfRow[placed] = route
                columns.mRowOfRoute[route] = placed
            row += cute.arch.popc(ballot)


@cute.jit
def fill_columns(mColumns: cute.Tensor, expert: Int32, first_row: Int32, first: Int32, count: Int32, width, thread):
    """Write the entries of an expert's column tiles, from tile `first` on."""
    for column in cutlass.range(thread, tiles_of(count, width), THREADS, unroll=1):
        rows = cutlass.min(count - column * width, width)
        entry = 1 + first + column
        mColumns[entry, 0] = expert
        mColumns[entry, 1] = first_row + column * width
        mColumns[entry, 2] = rows


@cute.kernel
def routing_kernel(mTopkIds: cute.Tensor, columns: Columns, width: Int32):
    """Write `columns` from mTopkIds (tokens * topk). One CTA per expert; `width`: columns of a tile."""
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    expert, _, _ = cute.arch.block_idx()
    experts, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    smem = memory.SmemAllocator()
    sCounts = smem.allocate_tensor(Int32, cute.make_layout(MAX_EXPERTS), byte_alignment=16)
    sFirst = smem.allocate_tensor(Int32, cute.make_layout(2), byte_alignment=16)
    sWarps = smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
    if thread < MAX_EXPERTS:
        sCounts[thread] = Int32(0)
    if thread < 2:
        sFirst[thread] = Int32(0)
    for flag in cutlass.range(expert * THREADS + thread, cute.size(columns.mFlags), experts * THREADS, unroll=1):
        columns.mFlags[flag] = Int32(0)
    cute.arch.sync_threads()

    routes = cute.size(mTopkIds)
    stretch = tiles_of(routes, THREADS) * 32
    begin = cutlass.min(warp * stretch, routes)
    end = cutlass.min(begin + stretch, routes)
    own = own_routes(mTopkIds, sCounts, expert, begin, end, lane)
    if lane == 0:
        sWarps[warp] = own
    cute.arch.sync_threads()

    before(sCounts, sFirst, expert, width, thread)
    cute.arch.sync_threads()
    first_row, first_column, count = sFirst[0], sFirst[1], sCounts[expert]
    earlier = inclusive_sum(sWarps[lane], lane) - sWarps[lane]
    place(mTopkIds, columns, expert, begin, end, first_row + cute.arch.shuffle_sync(earlier, warp), lane)
    fill_columns(columns.mColumns, expert, first_row, first_column, count, width, thread)
    if expert == experts - 1 and thread == 0:
        columns.mColumns[0, 0] = first_column + tiles_of(count, width)
