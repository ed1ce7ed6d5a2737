# ruff: noqa: N815
# pyright: reportMissingImports=false
"""Which pieces of which tiles a CTA computes, and how two CTAs share a tile.

A tile is a column tile by 256 weight rows. Tiles of one column tile are neighbours, so that CTAs that run at the same
time read the same tokens. CTAs take whole tiles in turn while at least two rounds are left. The rest, less than two
tiles per CTA, is cut into equally long stretches of K, so that no CTA is idle in a last round. With 1344 tiles for 132
CTAs, whole tiles alone would cost a twelfth.

A stretch may begin in a tile that another CTA has begun. Its sums of that tile then go to that CTA through global
memory, as f32. The order of the sum does not depend on which CTA is first. A CTA reads sums that the CTA with the next
lower number has written at the start of its own stretch. So it waits only if that CTA is late, and never for a CTA that
cannot start.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from backends.cutedsl.sm90_moe.plan import PANELS, Sm90MoePlan


class ColumnGemm(NamedTuple):
    """One product for all experts: repacked weights and expanded tokens, u8, and the table of column tiles.

    `panels`: panels of 128 rows of W per expert; `turns`: steps of 128 along K; `pitch`: bytes of a column tile of
    tokens. mPartials (flat) f32: sums that CTAs hand over. mFlags s32: one per warp and CTA, set when they are written.
    """

    mPacked: cute.Tensor
    mTokens: cute.Tensor
    mColumns: cute.Tensor
    mPartials: cute.Tensor
    mFlags: cute.Tensor
    panels: Int32
    turns: Int32
    pitch: Int64


class ColumnWalk(NamedTuple):
    """The pieces of a CTA: `whole` tiles, then the pieces of its stretch, `begin` to `end` in turns of K from tile
    `first_tile` on. `pieces`: the number of both."""

    whole: Int32
    first_tile: Int32
    begin: Int32
    end: Int32
    pieces: Int32
    tiles_m: Int32


class ColumnPiece(NamedTuple):
    """Turns `first` to `stop - 1` along K of a tile: `rows` rows of `expert`, from `first_row` on."""

    column: Int32
    tile_m: Int32
    expert: Int32
    first_row: Int32
    rows: Int32
    first: Int32
    stop: Int32


def uniform(value: Int32) -> Int32:
    """`value`, equal in all lanes of a warp, such that ptxas knows it: a descriptor that depends on it is then computed
    in uniform registers, beside the threads' instructions. ptxas does not see through loads and shuffles."""
    return cute.arch.inline_ptx(
        "redux.sync.or.b32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Int32], read_only_args=[value]
    )


class Entry(NamedTuple):
    """An entry of the table of column tiles: `rows` rows of `expert`, from `first_row` on."""

    expert: Int32
    first_row: Int32
    rows: Int32


def count_and_entry(mColumns: cute.Tensor, column: Int32) -> tuple[Int32, Entry]:
    """The number of column tiles, and the entry of tile `column`, which means nothing if there are fewer.

    All loads are issued at once. The compiler would load the entry only once it knows that there is one, which is a
    load's latency later.
    """
    count, expert, first_row, rows = cute.arch.inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}]; ld.global.v2.b32 {{$w1}, {$w2}}, [{$r1}]; ld.global.b32 {$w3}, [{$r1}+8];",
        write_only_types=[Int32] * 4,
        read_only_args=[mColumns.iterator, mColumns.iterator + (1 + column) * 4],
    )
    return count, Entry(expert, first_row, rows)


@cute.jit
def walk(gemm: ColumnGemm) -> tuple[ColumnWalk, Entry]:
    """The work of this CTA, and the entry of its first piece."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    tiles_m = (gemm.panels + PANELS - 1) // PANELS
    count, entry = count_and_entry(gemm.mColumns, block // tiles_m)
    tiles = uniform(count) * tiles_m
    workers = cutlass.max(cutlass.min(blocks, tiles), Int32(1))
    whole = cutlass.max(tiles // workers - 1, Int32(0))
    shared = (tiles - whole * workers) * gemm.turns
    place = workers - 1 - block
    begin, end = place * shared // workers, (place + 1) * shared // workers
    parts = (end - 1) // gemm.turns - begin // gemm.turns + 1
    pieces = cutlass.select_((block < workers) & (end > begin), whole + parts, Int32(0))
    items = ColumnWalk(whole, whole * workers, begin, end, pieces, tiles_m)
    if whole == 0:
        entry = entry_at(gemm, items, Int32(0))
    return items, entry


@cute.jit
def tile_at(gemm: ColumnGemm, items: ColumnWalk, number: Int32) -> tuple[Int32, Int32, Int32]:
    """The tile of piece `number`, its first turn, and one past its last turn."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    tile, first, stop = number * blocks + block, Int32(0), gemm.turns
    if number >= items.whole:
        place = items.begin // gemm.turns + number - items.whole
        tile = items.first_tile + place
        first = cutlass.max(items.begin - place * gemm.turns, Int32(0))
        stop = cutlass.min(items.end - place * gemm.turns, gemm.turns)
    return tile, first, stop


@cute.jit
def entry_at(gemm: ColumnGemm, items: ColumnWalk, number: Int32) -> Entry:
    """The entry of piece `number`; zeros past the last piece."""
    expert, first_row, rows = Int32(0), Int32(0), Int32(0)
    if number < items.pieces:
        column = 1 + tile_at(gemm, items, number)[0] // items.tiles_m
        expert, first_row, rows = (gemm.mColumns[column, field] for field in range(3))
    return Entry(expert, first_row, rows)


def piece_at(gemm: ColumnGemm, items: ColumnWalk, number: Int32, entry: Entry) -> ColumnPiece:
    """Piece `number`, whose `entry` has been read before."""
    tile, first, stop = tile_at(gemm, items, number)
    return ColumnPiece(tile // items.tiles_m, tile % items.tiles_m, *entry, first, stop)


def partial(plan: Sm90MoePlan, gemm: ColumnGemm, block: Int32, thread: Int32, registers: int) -> cute.Tensor:
    """(register): the sums of a thread of `block` on their way to another CTA."""
    slot = plan.sums * plan.consumers
    pointer = gemm.mPartials.iterator + Int64(block) * slot + thread
    return cute.make_tensor(pointer, cute.make_layout(registers, stride=plan.consumers))


@cute.jit
def hand_over(plan: Sm90MoePlan, gemm: ColumnGemm, rAcc: cute.Tensor, thread: Int32):
    """Hand this thread's sums to the CTA that has begun the tile."""
    block, _, _ = cute.arch.block_idx()
    gSums = partial(plan, gemm, block, thread, cute.size(rAcc))
    for register in cutlass.range_constexpr(cute.size(rAcc)):
        gSums[register] = rAcc[register]
    cute.arch.sync_warp()
    if thread % 32 == 0:
        flag = gemm.mFlags.iterator + block * (plan.consumers // 32) + thread // 32
        cute.arch.store(flag, Int32(1), sem="release", scope="gpu")


@cute.jit
def take_over(plan: Sm90MoePlan, gemm: ColumnGemm, rAcc: cute.Tensor, thread: Int32):
    """Add the sums of the CTA that computes the rest of the tile."""
    block, _, _ = cute.arch.block_idx()
    flag = gemm.mFlags.iterator + (block - 1) * (plan.consumers // 32) + thread // 32
    ready = Int32(0)
    while ready == 0:
        ready = uniform(cute.arch.load(flag, Int32, sem="acquire", scope="gpu"))
    gSums = partial(plan, gemm, block - 1, thread, cute.size(rAcc))
    for register in cutlass.range_constexpr(cute.size(rAcc)):
        rAcc[register] = rAcc[register] + gSums[register]
