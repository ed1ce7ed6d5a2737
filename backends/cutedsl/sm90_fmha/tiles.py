# pyright: reportMissingImports=false
"""Work items of the persistent attention kernel, and the keys that each of them sees."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32

from backends.cutedsl.sm90_fmha.plan import GROUP_M, Sm90FmhaPlan


class Sm90Problem(NamedTuple):
    """Run-time sizes. `rows` counts the query rows of one (batch, kv head): heads // kv_heads * t, head-major.

    Row r is query token r % t, whose position is p = r % t + s_k - t. It sees the keys p - left < j <= p + right.
    Split i begins at key tile i * key_tiles // splits, whatever keys the rows see: so the arithmetic of a row does not
    depend on the rows that share its tile. `scale_log2`: the scale of the scores times log2 e, for base-2 exponentials.
    """

    rows: Int32
    t: Int32
    s_k: Int32
    row_tiles: Int32
    splits: Int32
    left: Int32
    right: Int32
    work_items: Int32
    scale_log2: Float32
    key_tiles: Int32 | None = None

    def with_key_tiles(self, plan: Sm90FmhaPlan) -> Sm90Problem:
        """The same with `key_tiles`, which the device computes."""
        return self._replace(key_tiles=(self.s_k + plan.tile_n - 1) // plan.tile_n)


class WorkItem(NamedTuple):
    """One (kv_batch, split, row_tile) and its key tiles `first_tile` to `first_tile + tiles - 1`.

    Tiles before `clear_first` or from `clear_last` on hold a key that some row does not see.
    """

    kv_batch: Int32
    split: Int32
    row_tile: Int32
    first_tile: Int32
    tiles: Int32
    clear_first: Int32
    clear_last: Int32


class Consumer(NamedTuple):
    """A thread of the consumers: its warpgroup, 0 or 1, and its number there, 0 to 127."""

    group: Int32
    thread: Int32


def work_item(plan: Sm90FmhaPlan, problem: Sm90Problem, index: Int32) -> WorkItem:
    """Work item `index`. Neighbours share keys, row tiles first, so that L2 serves the second reader."""
    row_tile = index % problem.row_tiles
    rest = index // problem.row_tiles
    split = rest % problem.splits
    kv_batch = rest // problem.splits

    first_row = row_tile * plan.tile_m
    last_row = cutlass.min(first_row + plan.tile_m, problem.rows) - 1
    one_head = Boolean(first_row // problem.t == last_row // problem.t)
    token_low = cutlass.select_(one_head, first_row % problem.t, Int32(0))
    token_high = cutlass.select_(one_head, last_row % problem.t, problem.t - 1)
    low = token_low + problem.s_k - problem.t
    high = token_high + problem.s_k - problem.t

    key_begin = cutlass.max(low - problem.left + 1, Int32(0))
    key_end = cutlass.max(cutlass.min(high + problem.right + 1, problem.s_k), Int32(0))
    tile_begin = key_begin // plan.tile_n
    tile_end = (key_end + plan.tile_n - 1) // plan.tile_n
    begin = cutlass.max(tile_begin, split * problem.key_tiles // problem.splits)
    end = cutlass.min(tile_end, (split + 1) * problem.key_tiles // problem.splits)

    clear_begin = cutlass.max(high - problem.left + 1, Int32(0))
    clear_end = cutlass.max(cutlass.min(low + problem.right + 1, problem.s_k), Int32(0))
    return WorkItem(
        kv_batch=kv_batch,
        split=split,
        row_tile=row_tile,
        first_tile=begin,
        tiles=cutlass.max(end - begin, Int32(0)),
        clear_first=(clear_begin + plan.tile_n - 1) // plan.tile_n,
        clear_last=clear_end // plan.tile_n,
    )


def first_row(plan: Sm90FmhaPlan, item: WorkItem, consumer: Consumer) -> Int32:
    """The row of register row 0 of this thread, as softmax.py counts them."""
    row = item.row_tile * plan.tile_m + (consumer.thread // 32) * 16 + (consumer.thread % 32) // 4
    return row + consumer.group * GROUP_M if plan.share == "rows" else row
