# pyright: reportMissingImports=false
"""Work items of the persistent attention kernel, and the keys that each of them sees."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32

from backends.cutedsl.sm100_fmha.plan import TILE_M, TILE_N, Sm100FmhaPlan


class Problem(NamedTuple):
    """Run-time sizes. `rows` counts the query rows of one (batch, kv head): heads // kv_heads * t, head-major.

    Row r is query token r % t, whose position is p = r % t + s_k - t. It sees the keys p - left < j <= p + right.
    Split i has the key tiles from i * split_tiles on, whatever keys the rows see: so the arithmetic of a row does not
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
    split_tiles: Int32 | None = None

    def with_split_tiles(self) -> Problem:
        """The same with `split_tiles`, which the device computes."""
        key_tiles = (self.s_k + TILE_N - 1) // TILE_N
        return self._replace(split_tiles=(key_tiles + self.splits - 1) // self.splits)


class AttentionItem(NamedTuple):
    """One (kv_batch, split, row_tile, o_half) and its key tiles `first_tile` to `first_tile + tiles - 1`.

    Tiles before `clear_first` or from `clear_last` on hold a key that some row does not see.
    """

    kv_batch: Int32
    split: Int32
    row_tile: Int32
    o_half: Int32
    first_tile: Int32
    tiles: Int32
    clear_first: Int32
    clear_last: Int32


def work_item(plan: Sm100FmhaPlan, problem: Problem, index: Int32) -> AttentionItem:
    """Work item `index`. Neighbours share keys, O halves first, then row tiles, so that L2 serves the second reader."""
    o_half = index % plan.o_halves
    rest = index // plan.o_halves
    row_tile = rest % problem.row_tiles
    rest = rest // problem.row_tiles
    split = rest % problem.splits
    kv_batch = rest // problem.splits

    first_row = row_tile * TILE_M
    last_row = cutlass.min(first_row + TILE_M, problem.rows) - 1
    one_head = Boolean(first_row // problem.t == last_row // problem.t)
    token_low = cutlass.select_(one_head, first_row % problem.t, Int32(0))
    token_high = cutlass.select_(one_head, last_row % problem.t, problem.t - 1)
    low = token_low + problem.s_k - problem.t
    high = token_high + problem.s_k - problem.t

    key_begin = cutlass.max(low - problem.left + 1, Int32(0))
    key_end = cutlass.max(cutlass.min(high + problem.right + 1, problem.s_k), Int32(0))
    tile_begin = key_begin // TILE_N
    tile_end = (key_end + TILE_N - 1) // TILE_N
    begin = cutlass.max(tile_begin, split * problem.split_tiles)
    end = cutlass.min(tile_end, (split + 1) * problem.split_tiles)

    clear_begin = cutlass.max(high - problem.left + 1, Int32(0))
    clear_end = cutlass.max(cutlass.min(low + problem.right + 1, problem.s_k), Int32(0))
    return AttentionItem(
        kv_batch=kv_batch,
        split=split,
        row_tile=row_tile,
        o_half=o_half,
        first_tile=begin,
        tiles=cutlass.max(end - begin, Int32(0)),
        clear_first=(clear_begin + TILE_N - 1) // TILE_N,
        clear_last=clear_end // TILE_N,
    )
