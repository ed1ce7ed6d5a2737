# ruff: noqa: N815
# pyright: reportMissingImports=false
"""Device code that persistent attention kernels share: tensors, run-time sizes, work items and the keys they see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from backends.cutedsl.device import LOG2_E
from backends.cutedsl.divisor import Divisor, divisor_of, parts
from backends.cutedsl.tma import TmaTensor

RESCALE_THRESHOLD = 8.0
"""A row keeps its old maximum while the new one is at most 2^8 above it (FlashAttention-4's idea).

P then stays below 256, in bf16's range and harmless to the fp32 sums, and most tiles leave O as it is.
"""


class Plan(Protocol):
    """The part of a kernel's plan that divides the work.

    A tile has `tile_m` query rows and `tile_n` keys; `o_halves` work items share it, each with its columns of O.
    """

    @property
    def hd(self) -> int: ...
    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def o_halves(self) -> int: ...
    def part_begin(self, problem: Problem, split: Int32) -> Int32:
        """The first key tile of a split, whatever keys the rows see."""
        ...


class Inputs(NamedTuple):
    """TMA loads of Q (rows, hd, kv_batch), K (s_k, hd, kv_batch) and V (hd, s_k, kv_batch).

    For ragged sequences: mQ (token, head, hd) itself, and K and V of `clipped_tensors`.
    """

    q: TmaTensor | cute.Tensor
    k: TmaTensor
    v: TmaTensor


class Outputs(NamedTuple):
    """Destinations of the results: o and lse with one split, else the partials, with O normalised within its split.

    mO (kv_batch, row, hd) bf16; mLSE (kv_batch * row) f32; mO_part (split, kv_batch, row, hd) f32, or bf16 where the
    plan has short parts; mLSE_part (split, kv_batch, row) f32. All natural logarithms.
    """

    mO: cute.Tensor
    mLSE: cute.Tensor
    mO_part: cute.Tensor
    mLSE_part: cute.Tensor


class Lengths(NamedTuple):
    """Sequence lengths, int32. mStarts_q (sequence + 1): the first query of each sequence, then the total.

    Keys have either mStarts_k, as for queries, or mUsed_k (sequence), the keys of each, with mTable (sequence, page),
    the page that holds its keys from page * page_size on.
    """

    mStarts_q: cute.Tensor
    mStarts_k: cute.Tensor | None
    mUsed_k: cute.Tensor | None
    mTable: cute.Tensor | None


class Sequence(NamedTuple):
    """Sequence `number`: how many queries and keys it has, and where they begin in q and, without pages, in k.

    `kv_head` is the work item's; the head's columns in k and v begin at `first_column`.
    """

    number: Int32
    kv_head: Int32
    first_column: Int32
    t: Int32
    s_k: Int32
    first_q: Int32
    first_k: Int32


class Divisors(NamedTuple):
    """Divisors of row and work item numbers, when all sequences have the same lengths."""

    t: Divisor
    row_tiles: Divisor
    splits: Divisor


class Problem(NamedTuple):
    """Run-time sizes. `rows` counts the query rows of one (batch, kv head): heads // kv_heads * t, head-major.

    Row r is query token r % t at position p = r % t + s_k - t. It sees the keys p - left < j <= p + right. The start of
    a split depends on its number, not on the keys that rows see, so the arithmetic of a row does not depend on the
    other rows of its tile. `scale_log2`: the scale of the scores times log2 e, for base-2 exponentials. The device
    computes the key tiles of a sequence, and of a split if splits are alike, by `with_tiles`.

    With `lengths`, t, s_k and rows are the largest of all sequences; `of` gives the values of one sequence. `group`:
    query heads per kv head.
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
    split_tiles: Int32 | None = None
    lengths: Lengths | None = None
    kv_heads: Int32 | None = None
    group: Int32 | None = None
    divisors: Divisors | None = None

    def sequence(self, kv_batch: Int32, hd: int) -> Sequence | None:
        """The sequence of a kv_batch; None if sequences are not ragged."""
        lengths, kv_heads = self.lengths, self.kv_heads
        if lengths is None or kv_heads is None:
            return None
        (number, kv_head), first_k = parts(kv_batch, kv_heads), Int32(0)
        first_q = lengths.mStarts_q[number]
        if lengths.mUsed_k is not None:
            s_k = lengths.mUsed_k[number]
        else:
            assert lengths.mStarts_k is not None
            first_k = lengths.mStarts_k[number]
            s_k = lengths.mStarts_k[number + 1] - first_k
        t = lengths.mStarts_q[number + 1] - first_q
        return Sequence(number, kv_head, kv_head * hd, t, s_k, first_q, first_k)

    def of(self, sequence: Sequence | None, plan: Plan) -> Problem:
        """The sizes of one sequence. Without queries it has no rows, but its t is 1, because t is a divisor."""
        if sequence is None or self.group is None:
            return self
        t, rows = cutlass.max(sequence.t, Int32(1)), sequence.t * self.group
        return self._replace(t=t, s_k=sequence.s_k, rows=rows).with_tiles(plan)

    def with_divisors(self) -> Problem:
        """This problem with its divisors, computed on the host; unchanged for ragged sequences."""
        if self.lengths is not None:
            return self
        return self._replace(divisors=Divisors(*map(divisor_of, (self.t, self.row_tiles, self.splits))))

    def head_and_token(self, row: Int32, same: bool = True) -> tuple[Int32, Int32]:
        """The query head of a row, counted within its kv head, and its token. `same`: as in Divisor.parts."""
        if self.divisors is None:
            return parts(row, self.t)
        return self.divisors.t.parts(row, same)

    def with_tiles(self, plan: Plan) -> Problem:
        """This problem with its key tiles."""
        key_tiles = (self.s_k + plan.tile_n - 1) // plan.tile_n
        return self._replace(key_tiles=key_tiles, split_tiles=(key_tiles + self.splits - 1) // self.splits)


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
    sequence: Sequence | None = None


def tma_tensors(hd: int, mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor) -> tuple[cute.Tensor, ...]:
    """The tensors of PARAMETERS as TMA loads them: Q (rows, hd, batch), K (s_k, hd, batch) and V (hd, s_k, batch)."""
    kv_batches, rows, _ = mQ.shape
    s_k = mK.shape[1]
    q_batch = cute.assume(Int64(rows) * hd, divby=hd)
    kv_batch = cute.assume(Int64(s_k) * hd, divby=hd)
    return (
        cute.make_tensor(mQ.iterator, cute.make_layout((rows, hd, kv_batches), stride=(hd, 1, q_batch))),
        cute.make_tensor(mK.iterator, cute.make_layout((s_k, hd, kv_batches), stride=(hd, 1, kv_batch))),
        cute.make_tensor(mV.iterator, cute.make_layout((hd, s_k, kv_batches), stride=(1, hd, kv_batch))),
    )


CLIP_END = 1 << 30
"""One past the last row of `clipped_tensors`, and the coordinate in mode `wrap`."""
WRAP_BYTES = 1 << 34
"""CLIP_END times WRAP_BYTES is 2^64, which leaves an address unchanged."""


def clipped_tensors(mK: cute.Tensor, mV: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """K (row, column, end, wrap) and V (column, row, end, wrap) of mK and mV (row, kv_head, hd): TMA loads some rows.

    Column c of kv head h is h * hd + c. A box holds the rows from `first` on, with zeros for all but the first `valid`.
    It begins at row CLIP_END - valid of CLIP_END, so TMA treats the other rows as past the end. Mode `end` has the
    stride of a row, and its coordinate is first + valid. The address is then CLIP_END rows too high. Mode `wrap`, with
    coordinate CLIP_END, takes them off: its stride is WRAP_BYTES less one row, and addresses wrap around at 2^64.
    Triton's ragged tensor descriptors are made like this (triton.tools.ragged_tma).

    The map thus begins where the tensor does. A map that begins below the tensor would need no wrapping. But the TMA
    unit of an H200 reads the first byte of the map even for a box without a row
    (results/records/h200-tma-out-of-bounds.json), and there may be no memory below a tensor.
    """
    rows, kv_heads, hd = mK.shape
    step = cute.assume(Int64(kv_heads) * hd, divby=hd)
    wrap = cute.assume(Int64(WRAP_BYTES // 2) - step, divby=hd)
    rest, rest_strides = (rows + 1, CLIP_END + 1), (step, wrap)

    def clipped(mX: cute.Tensor, shape: tuple, strides: tuple) -> cute.Tensor:
        return cute.make_tensor(mX.iterator, cute.make_layout((*shape, *rest), stride=(*strides, *rest_strides)))

    columns = kv_heads * hd
    return clipped(mK, (CLIP_END, columns), (step, 1)), clipped(mV, (columns, CLIP_END), (1, step))


def ragged_problem_of(call: SimpleNamespace, plan: Plan) -> Problem:
    """The sizes of `call`, whose arguments are named as in attention.RAGGED."""
    heads, kv_heads, batch = call.mQ.shape[1], call.mK.shape[1], call.mCu_seqlens_q.shape[0] - 1
    group = heads // kv_heads
    row_tiles = (group * call.t + plan.tile_m - 1) // plan.tile_m
    given = (getattr(call, name, None) for name in ("mCu_seqlens_k", "mSeqused_k", "mBlock_table"))
    return Problem(
        rows=group * call.t,
        t=call.t,
        s_k=call.s_k,
        row_tiles=row_tiles,
        splits=call.splits,
        left=call.left,
        right=call.right,
        work_items=batch * kv_heads * call.splits * row_tiles * plan.o_halves,
        scale_log2=call.scale * LOG2_E,
        lengths=Lengths(call.mCu_seqlens_q, *given),
        kv_heads=kv_heads,
        group=group,
    )


def problem_of(call: SimpleNamespace, plan: Plan) -> Problem:
    """The sizes of `call`, whose arguments are named as in attention.PARAMETERS."""
    kv_batches, rows, _ = call.mQ.shape
    row_tiles = (rows + plan.tile_m - 1) // plan.tile_m
    return Problem(
        rows=rows,
        t=call.t,
        s_k=call.mK.shape[1],
        row_tiles=row_tiles,
        splits=call.splits,
        left=call.left,
        right=call.right,
        work_items=kv_batches * call.splits * row_tiles * plan.o_halves,
        scale_log2=call.scale * LOG2_E,
    )


def attention_item(plan: Plan, problem: Problem, index: Int32) -> AttentionItem:
    """Work item `index`. Neighbours (O halves first, then row tiles) share keys, so L2 serves the second reader."""
    o_half = index % plan.o_halves
    rest = index // plan.o_halves
    if problem.divisors is None:
        rest, row_tile = parts(rest, problem.row_tiles)
        kv_batch, split = parts(rest, problem.splits)
    else:
        rest, row_tile = problem.divisors.row_tiles.parts(rest)
        kv_batch, split = problem.divisors.splits.parts(rest)
    return item_at(plan, problem, kv_batch, split, row_tile, o_half)


def item_at(
    plan: Plan, problem: Problem, kv_batch: Int32, split: Int32, row_tile: Int32, o_half: Int32
) -> AttentionItem:
    """The work item with these numbers."""
    tile_m, tile_n = plan.tile_m, plan.tile_n
    sequence = problem.sequence(kv_batch, plan.hd)
    problem = problem.of(sequence, plan)

    first_row = row_tile * tile_m
    last_row = cutlass.min(first_row + tile_m, problem.rows) - 1
    (first_head, first_token), (last_head, last_token) = (problem.head_and_token(row) for row in (first_row, last_row))
    one_head = Boolean(first_head == last_head)
    token_low = cutlass.select_(one_head, first_token, Int32(0))
    token_high = cutlass.select_(one_head, last_token, problem.t - 1)
    low = token_low + problem.s_k - problem.t
    high = token_high + problem.s_k - problem.t

    key_begin = cutlass.max(low - problem.left + 1, Int32(0))
    key_end = cutlass.max(cutlass.min(high + problem.right + 1, problem.s_k), Int32(0))
    tile_begin = key_begin // tile_n
    tile_end = (key_end + tile_n - 1) // tile_n
    begin = cutlass.max(tile_begin, plan.part_begin(problem, split))
    end = cutlass.min(tile_end, plan.part_begin(problem, split + 1))

    clear_begin = cutlass.max(high - problem.left + 1, Int32(0))
    clear_end = cutlass.max(cutlass.min(low + problem.right + 1, problem.s_k), Int32(0))
    return AttentionItem(
        kv_batch=kv_batch,
        split=split,
        row_tile=row_tile,
        o_half=o_half,
        first_tile=begin,
        tiles=cutlass.max(end - begin, Int32(0)),
        clear_first=(clear_begin + tile_n - 1) // tile_n,
        clear_last=clear_end // tile_n,
        sequence=sequence,
    )


def allocate_operand(allocator: cutlass.memory.SmemAllocator, layout: cute.ComposedLayout) -> cute.Tensor:
    """A bf16 tensor in shared memory with the swizzled `layout`."""
    return allocator.allocate_tensor(cutlass.BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
