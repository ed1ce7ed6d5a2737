# pyright: reportMissingImports=false
"""Which work items a CTA takes, and in which order.

Items are dealt to the CTAs in turn. Under a causal mask the row tiles of a head differ in their number of keys. There
a CTA takes two at a time, the heaviest that is left of a head and the lightest. All pairs of a head are as heavy, so
every CTA has as much to do; and the CTAs work on few heads at once, whose keys and values stay in L2. For 4096 queries
on as many keys of 64 heads, pairs keep 132 SMs as busy as equal items do: 1,024 pairs take eight rounds of 132.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from backends.cutedsl.attention_tiles import AttentionItem, Problem, attention_item
from backends.cutedsl.sm90_fmha.plan import Sm90FmhaPlan


class Deal(NamedTuple):
    """The numbers that a CTA's loop runs through: range(start, stop, step). `item` makes a work item of each."""

    start: Int32
    stop: Int32
    step: Int32


def handful(plan: Sm90FmhaPlan, problem: Problem) -> Int32:
    """Items that a CTA takes at a time."""
    return cutlass.select_(problem.right == 0, Int32(2), Int32(1))


def ctas(plan: Sm90FmhaPlan, problem: Problem, max_ctas: Int32) -> Int32:
    """As few CTAs as do the work in as many rounds as `max_ctas` would.

    With 256 items on 132 SMs, 128 CTAs take two each. On an H200 those read 32 caches of 8 heads of hd 128 in 238.4 us;
    a kernel that only reads takes 236.5 (results/records/h200-fmha-clean-flush.json).
    """
    hands = problem.work_items
    if plan.share == "rows":
        size = handful(plan, problem)
        hands = (hands + size - 1) // size
    rounds = (hands + max_ctas - 1) // max_ctas
    return (hands + rounds - 1) // rounds


def deal(plan: Sm90FmhaPlan, problem: Problem) -> Deal:
    """The numbers of this CTA's work items."""
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    if plan.share != "rows":
        return Deal(block, problem.work_items, grid)
    size = handful(plan, problem)
    last_hand = (problem.work_items + size - 1) // size - 1
    whole_hands = (last_hand - block) // grid
    last = block + whole_hands * grid
    count = whole_hands * size + cutlass.min(size, problem.work_items - last * size)
    return Deal(Int32(0), count, Int32(1))


def dealt_item(plan: Sm90FmhaPlan, problem: Problem, number: Int32) -> AttentionItem:
    """The work item at `number` of this CTA's deal."""
    if plan.share != "rows":
        return attention_item(plan, problem, number)
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    size = handful(plan, problem)
    place = (block + number // size * grid) * size + number % size
    # Tiles of one query head, if its tokens fill whole tiles; else all rows are taken for one head's.
    head_tiles = cutlass.select_(problem.t % plan.tile_m == 0, problem.t // plan.tile_m, problem.row_tiles)
    row_tile = place % problem.row_tiles
    tile = row_tile % head_tiles
    half = tile // 2
    inwards = cutlass.select_(tile % 2 == 0, head_tiles - 1 - half, half)
    index = place + cutlass.select_(size == 2, inwards - tile, Int32(0))
    return attention_item(plan, problem, index)
