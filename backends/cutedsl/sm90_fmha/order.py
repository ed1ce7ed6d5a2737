# pyright: reportMissingImports=false
"""Which work items a CTA takes, and in which order.

Items are dealt to the CTAs in turn. If items are equal, or if the warpgroups share the keys, that is all.

Under a causal mask the row tiles of a query head differ in their number of keys. A CTA then takes them in pairs: of the
tiles left of a head, the heaviest and the lightest. All pairs are equally heavy, and the CTAs work on few heads at
once, whose keys and values stay in L2. Pairs do not fill the last round. So the last heads, at least two rounds of
pairs, are dealt tile by tile: the heaviest tiles of all these heads first, in rounds that alternate forwards and
backwards. For 4096 queries on as many keys of 64 heads, counted in keys, 132 SMs are then busy 99.8 % of the time with
tiles of 128 rows and 98.4 % with tiles of 192; with pairs alone 97 and 90 %.

If a head has few tiles, all of them are dealt in one round; rounds alternate forwards and backwards. The CTAs of a head
then read its keys at the same time, and once from memory. 512 queries on 4096 keys of 64 heads of hd 256 take 181 us
like this and 190 in pairs. If a tile has rows of several heads, the last tile of a kv head is the lightest, and heads
are dealt in pairs.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from backends.cutedsl.attention_tiles import AttentionItem, Problem, attention_item
from backends.cutedsl.divisor import Divisor, divisor_of, parts
from backends.cutedsl.sm90_fmha.plan import Sm90FmhaPlan

MIN_TILES = 8
"""The fewest row tiles of a head for which heads are dealt in pairs, and the last heads tile by tile."""
SINGLE_ROUNDS = 2
"""The fewest rounds of pairs that are dealt tile by tile instead."""


class Order(NamedTuple):
    """How a launch deals its items. If the warpgroups share the keys, only `grid` matters.

    grid: CTAs. head_tiles: row tiles of a query head. whole_heads: 1 if a round has all tiles of its heads. A CTA has
    `paired` items of the first `paired_heads` heads, in pairs. Of the others it has one item in each of `rounds`
    rounds, and `left` CTAs have one more. single_heads: heads that are dealt in rounds.
    """

    grid: Int32
    head_tiles: Divisor
    whole_heads: Int32
    paired_heads: Int32
    paired: Int32
    rounds: Int32
    left: Int32
    single_heads: Divisor


class Deal(NamedTuple):
    """The items of a CTA have the numbers range(start, stop, step)."""

    start: Int32
    stop: Int32
    step: Int32


@cute.jit
def greatest_divisor(a: Int32, b: Int32) -> Int32:
    """The greatest common divisor."""
    while b > 0:
        a, b = b, parts(a, b)[1]
    return a


class HeadTiles(NamedTuple):
    """Row tiles of a query head. `whole`: its tokens fill them; if not, all rows of a kv head count as one head.

    `few`: under a causal mask, a round can have all tiles of its heads, and there is more than one round.
    """

    number: Int32
    whole: Boolean
    few: Boolean


def head_tiles_of(plan: Sm90FmhaPlan, problem: Problem, max_ctas: Int32) -> HeadTiles:
    """The row tiles of a query head."""
    tiles, rest = parts(problem.t, Int32(plan.tile_m))
    whole = Boolean(rest == 0)
    count = Int32(cutlass.select_(whole, tiles, problem.row_tiles)) * plan.o_halves
    few = (count > 1) & (count < MIN_TILES) & (count <= max_ctas) & (problem.work_items > max_ctas)
    return HeadTiles(count, whole, Boolean(few & (problem.splits == 1) & (problem.right == 0)))


def ctas(plan: Sm90FmhaPlan, problem: Problem, tiles: HeadTiles, max_ctas: Int32) -> Int32:
    """The fewest CTAs that need no more rounds than `max_ctas` would; if items differ, as many as have work.

    Rounded up to whole clusters, and to whole heads if rounds have whole heads, but down if `max_ctas` are too few.

    With 256 items on 132 SMs, 128 CTAs take two each. On an H200 they read 32 caches of 8 heads of hd 128 in 238.4 us;
    a kernel that only reads takes 236.5 (results/records/h200-fmha-clean-flush.json).
    """
    rounds = (problem.work_items + max_ctas - 1) // max_ctas
    few = (problem.work_items + rounds - 1) // rounds
    if plan.share == "keys":
        return few
    most = cutlass.min(max_ctas, problem.work_items)
    heads = cutlass.min((few + tiles.number - 1) // tiles.number, max_ctas // tiles.number)
    count = Int32(cutlass.select_((problem.right == 0) & ~tiles.few, most, few))
    count = Int32(cutlass.select_(tiles.few & tiles.whole, heads * tiles.number, count))
    return (count + plan.cluster - 1) // plan.cluster * plan.cluster


@cute.jit
def paired_heads_of(problem: Problem, tiles: HeadTiles, grid: Int32) -> Int32:
    """The number of heads that are dealt in pairs, as many pairs to each CTA, before the others are dealt in rounds."""
    head_pairs, odd = parts(tiles.number, Int32(2))
    paired_heads = Int32(0)
    if problem.right == 0 and odd == 0:
        unit, _ = parts(grid, greatest_divisor(grid, head_pairs))
        pairs = problem.work_items // 2
        if tiles.number >= MIN_TILES:
            paired_heads = parts(cutlass.max(pairs - SINGLE_ROUNDS * grid, Int32(0)), unit * head_pairs)[0] * unit
        elif tiles.few and not tiles.whole:
            paired_heads = parts(pairs, unit * head_pairs)[0] * unit
    return paired_heads


@cute.jit
def order_of(plan: Sm90FmhaPlan, problem: Problem, max_ctas: Int32) -> Order:
    """The order of a launch, computed on the host."""
    tiles = head_tiles_of(plan, problem, max_ctas)
    grid = ctas(plan, problem, tiles, max_ctas)
    paired_heads = paired_heads_of(problem, tiles, grid)
    paired_items = paired_heads * tiles.number
    rounds, left = parts(problem.work_items - paired_items, grid)
    single_heads = cutlass.max(parts(problem.work_items, tiles.number)[0] - paired_heads, Int32(1))
    return Order(
        grid=grid,
        head_tiles=divisor_of(tiles.number),
        whole_heads=Int32(cutlass.select_(tiles.few & tiles.whole, Int32(1), Int32(0))),
        paired_heads=paired_heads,
        paired=parts(paired_items, grid)[0],
        rounds=rounds,
        left=left,
        single_heads=divisor_of(single_heads),
    )


@cute.jit
def deal(plan: Sm90FmhaPlan, problem: Problem, order: Order) -> Deal:
    """The numbers of this CTA's work items."""
    block, _, _ = cute.arch.block_idx()
    hand = Deal(block, problem.work_items, order.grid)
    if cutlass.const_expr(plan.share != "keys"):
        backwards = (problem.right == 0) & (order.rounds % 2 == 1)
        turn = cutlass.select_(backwards, order.grid - 1 - block, block)
        last = cutlass.select_(turn < order.left, Int32(1), Int32(0))
        hand = Deal(Int32(0), order.paired + order.rounds + last, Int32(1))
    return hand


@cute.jit
def dealt_item(plan: Sm90FmhaPlan, problem: Problem, order: Order, number: Int32) -> AttentionItem:
    """The work item at `number` of this CTA's deal."""
    index = number
    if cutlass.const_expr(plan.share != "keys"):
        block, _, _ = cute.arch.block_idx()
        grid, head_tiles = order.grid, order.head_tiles
        index = number * grid + block
        if problem.right == 0:
            turn = number - order.paired
            if turn < 0:
                head, place = head_tiles.parts((block + (number >> 1) * grid) * 2 + (number & 1))
                half = place >> 1
                index = head * head_tiles.value + cutlass.select_(place % 2 == 0, head_tiles.value - 1 - half, half)
            else:
                index = turn * grid + cutlass.select_(turn % 2 == 1, grid - 1 - block, block)
                if order.whole_heads == 0:
                    light, head = order.single_heads.parts(index)
                    index = (order.paired_heads + head + 1) * head_tiles.value - 1 - light
    return attention_item(plan, problem, index)
