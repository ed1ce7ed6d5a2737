# pyright: reportMissingImports=false
"""Which work items a CTA takes, and in which order.

Items are dealt to the CTAs in turn. That is all where they are equal, and where the warpgroups share the keys.

Under a causal mask the row tiles of a query head differ in their number of keys. A CTA then takes them in pairs, the
heaviest that is left of a head and the lightest. All pairs are as heavy, and the CTAs work on few heads at once, whose
keys and values stay in L2. Pairs do not fill the last round. So where a head has many tiles, the last heads, two rounds
of pairs and more, are dealt tile by tile: the heaviest tiles of all of them first, forwards and backwards by turns. For
4096 queries on as many keys of 64 heads, counted in keys, 132 SMs are then busy 99.8 % of the time with tiles of 128
rows and 98.4 % with tiles of 192; with pairs alone 97 and 90 %.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from backends.cutedsl.attention_tiles import AttentionItem, Problem, attention_item
from backends.cutedsl.device import H200_SM_COUNT
from backends.cutedsl.sm90_fmha.plan import Sm90FmhaPlan

MIN_TILES = 8
"""Row tiles of a head from which on its last heads are dealt tile by tile. Fewer are alike enough for pairs."""
SINGLE_ROUNDS = 2
"""Rounds of pairs, at least, that are dealt tile by tile."""


class Deal(NamedTuple):
    """The items of a CTA have the numbers range(start, stop, step)."""

    start: Int32
    stop: Int32
    step: Int32


def parts(number: Int32, size: Int32) -> tuple[Int32, Int32]:
    """Quotient and remainder of numbers that are not negative: a quarter of the registers of a signed division."""
    quotient = Uint32(number) // Uint32(size)
    return Int32(quotient), number - Int32(quotient) * size


@cute.jit
def greatest_divisor(a: Int32, b: Int32) -> Int32:
    """The greatest common divisor."""
    while b > 0:
        a, b = b, parts(a, b)[1]
    return a


def head_tiles_of(plan: Sm90FmhaPlan, problem: Problem) -> Int32:
    """The row tiles of a query head, if its tokens fill whole tiles; else all rows are taken for one head's."""
    tiles, rest = parts(problem.t, Int32(plan.tile_m))
    head_tiles = Int32(cutlass.select_(rest == 0, tiles, problem.row_tiles))
    return head_tiles if plan.o_halves == 1 else head_tiles * plan.o_halves


def hand_size(plan: Sm90FmhaPlan, problem: Problem) -> Int32:
    """Items that a CTA is dealt at a time: two under a causal mask where heads have few tiles and there are enough."""
    head_tiles = head_tiles_of(plan, problem)
    pairs = (head_tiles > 1) & (head_tiles < MIN_TILES) & (problem.splits == 1)
    pairs = pairs & (problem.right == 0) & (problem.work_items > H200_SM_COUNT)
    return Int32(cutlass.select_(pairs, Int32(2), Int32(1)))


def ctas(plan: Sm90FmhaPlan, problem: Problem, max_ctas: Int32) -> Int32:
    """As few CTAs as do the work in as many rounds as `max_ctas` would; where items differ, as many as have work.

    Rounded up to whole clusters.

    With 256 items on 132 SMs, 128 CTAs take two each. On an H200 those read 32 caches of 8 heads of hd 128 in 238.4 us;
    a kernel that only reads takes 236.5 (results/records/h200-fmha-clean-flush.json).
    """
    hands = problem.work_items
    if plan.share != "keys":
        size = hand_size(plan, problem)
        hands = (hands + size - 1) // size
    rounds = (hands + max_ctas - 1) // max_ctas
    few = (hands + rounds - 1) // rounds
    if plan.share == "keys":
        return few
    unequal = (problem.right == 0) & (hand_size(plan, problem) == 1)
    count = Int32(cutlass.select_(unequal, cutlass.min(max_ctas, problem.work_items), few))
    return (count + plan.cluster - 1) // plan.cluster * plan.cluster


@cute.jit
def paired_heads_of(plan: Sm90FmhaPlan, problem: Problem) -> Int32:
    """Query heads that are dealt by pairs before the others are dealt tile by tile: as many pairs to every CTA.

    The consumers have no register to spare, so they compute this again for each item.
    """
    grid, _, _ = cute.arch.grid_dim()
    head_tiles = head_tiles_of(plan, problem)
    head_pairs, odd = parts(head_tiles, Int32(2))
    paired_heads = Int32(0)
    if problem.right == 0 and odd == 0 and head_tiles >= MIN_TILES:
        unit, _ = parts(grid, greatest_divisor(grid, head_pairs))
        paired = cutlass.max(problem.work_items // 2 - SINGLE_ROUNDS * grid, Int32(0))
        paired_heads = parts(paired, unit * head_pairs)[0] * unit
    return paired_heads


@cute.jit
def deal(plan: Sm90FmhaPlan, problem: Problem) -> Deal:
    """The numbers of this CTA's work items."""
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    hand = Deal(block, problem.work_items, grid)
    if cutlass.const_expr(plan.share != "keys"):
        size = hand_size(plan, problem)
        paired_items = paired_heads_of(plan, problem) * head_tiles_of(plan, problem)
        rounds, left = parts(problem.work_items - paired_items, grid * size)
        turn = cutlass.select_((problem.right == 0) & (size == 1) & (rounds % 2 == 1), grid - 1 - block, block)
        last = cutlass.min(cutlass.max(left - turn * size, Int32(0)), size)
        hand = Deal(Int32(0), parts(paired_items, grid)[0] + rounds * size + last, Int32(1))
    return hand


@cute.jit
def dealt_item(plan: Sm90FmhaPlan, problem: Problem, number: Int32) -> AttentionItem:
    """The work item at `number` of this CTA's deal."""
    index = number
    if cutlass.const_expr(plan.share != "keys"):
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        index = number * grid + block
        if problem.right == 0:
            head_tiles = head_tiles_of(plan, problem)
            paired_heads = paired_heads_of(plan, problem)
            turn = number - parts(paired_heads * head_tiles, grid)[0]
            if turn < 0 or hand_size(plan, problem) == 2:
                head, place = parts((block + (number >> 1) * grid) * 2 + number % 2, head_tiles)
                half = place >> 1
                index = head * head_tiles + cutlass.select_(place % 2 == 0, head_tiles - 1 - half, half)
            else:
                single = turn * grid + cutlass.select_(turn % 2 == 1, grid - 1 - block, block)
                light, head = parts(single, parts(problem.work_items, head_tiles)[0] - paired_heads)
                index = (paired_heads + head) * head_tiles + head_tiles - 1 - light
    return attention_item(plan, problem, index)
