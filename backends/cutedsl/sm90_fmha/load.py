# ruff: noqa: N815
# pyright: reportMissingImports=false
"""The TMA producer warps: Q once per work item, K and V slab by slab through a ring, in the order of its consumers.

For ragged sequences, TMA writes zeros past the last key of a sequence. Memory there holds values of another sequence or
leftovers in a page, which may be infinite or NaN, and 0 times these is NaN. The rows of a Q tile are then scattered in
q, and a separate warp copies them.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op

from backends.cutedsl.attention_tiles import CLIP_END, AttentionItem, Inputs, Problem, Sequence
from backends.cutedsl.divisor import parts
from backends.cutedsl.ring import (
    RingPlace,
    RingSlot,
    StageRing,
    acquire,
    advanced,
    make_full,
    ring_number,
    ring_start,
    wait_empty,
)
from backends.cutedsl.sm90_fmha.operands import Sm90Smem
from backends.cutedsl.sm90_fmha.order import Order, deal, dealt_item
from backends.cutedsl.sm90_fmha.plan import GROUP_M, Sm90FmhaPlan
from backends.cutedsl.tma import TmaTensor, TmaViews, tma_views

Q_WARP = 2
"""The warp that copies Q of ragged sequences. Warps 0 and 1 load K and V."""
LANES = 32
VECTOR = 8
"""Elements of bf16 that a lane copies at once: 16 bytes."""


class BoxViews(NamedTuple):
    """K or V in boxes of some keys each: coordinates of attention_tiles.clipped_tensors, boxes of all stages."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor
    sX: cute.Tensor


class Loads(NamedTuple):
    """Views of Q, K and V. Tiles are (rows, column, kv_batch); of V (column, keys, kv_batch).

    For ragged sequences, q is mQ (token, head, hd).
    """

    q: TmaViews | cute.Tensor
    k: TmaViews | BoxViews
    v: TmaViews | BoxViews


def make_loads(plan: Sm90FmhaPlan, inputs: Inputs, smem: Sm90Smem) -> Loads:
    """The views of all stages."""
    if plan.ragged:
        sK = cute.flat_divide(smem.sK, (plan.k_box, plan.slab_columns))[None, None, None, 0, None]
        sV = cute.flat_divide(smem.sV, (plan.v_columns, plan.v_box))[None, None, 0, None, None]
        return Loads(inputs.q, BoxViews(*inputs.k, sK), BoxViews(*inputs.v, sV))

    def views(tensor: TmaTensor, tiler: tuple[int, int], sX: cute.Tensor) -> TmaViews:
        return tma_views(tensor.atom, cute.flat_divide(tensor.coordinates, tiler), sX, 2)

    return Loads(
        views(inputs.q, (GROUP_M, plan.hd), smem.sQ),
        views(inputs.k, (plan.tile_n, plan.slab_columns), smem.sK),
        views(inputs.v, (plan.v_columns, plan.v_keys), smem.sV),
    )


@cute.jit
def key_row(plan: Sm90FmhaPlan, problem: Problem, sequence: Sequence, key: Int32):
    """The row of k and v that holds a key of a sequence; arbitrary for a key past the sequence's end.

    A page is looked up only for keys that exist: table entries past them mean nothing.
    """
    row = sequence.first_k + key
    if cutlass.const_expr(plan.page_size > 0):
        page, rest = parts(key, Int32(plan.page_size))
        row = Int32(0)
        if key < sequence.s_k:
            table = problem.lengths.mTable  # pyright: ignore[reportOptionalMemberAccess] (const_expr narrows nothing)
            row = table[sequence.number, page] * plan.page_size + rest  # pyright: ignore[reportOptionalSubscript]
    return row


@cute.jit
def tile_rows(plan: Sm90FmhaPlan, problem: Problem, item: AttentionItem, tile: Int32, box: cutlass.Constexpr):
    """The rows of k and v where a tile of a ragged sequence begins; else None.

    With pages, lane i has the row of box i of `box` keys, so that all are looked up at once. Without, all lanes have
    the row of the tile's first key.
    """
    rows = None
    if cutlass.const_expr(plan.ragged):
        key = tile * plan.tile_n
        if cutlass.const_expr(plan.page_size > 0):
            key = key + cute.arch.lane_idx() * box
        rows = key_row(plan, problem, item.sequence, key)
    return rows


@cute.jit
def load_boxes(
    views: BoxViews,
    slot: RingSlot,
    sequence: Sequence,
    key: Int32,
    rows: Int32,
    column: cutlass.Constexpr,
    by_key: cutlass.Constexpr,
    first_box: cutlass.Constexpr = 0,
):
    """Load the boxes of a slab: keys from `key` on, columns of the head from `column` on. `rows`: from tile_rows.

    `by_key`: whether keys are the first mode, as in K, or the second, as in V. `first_box`: the slab's first box in the
    tile.
    """
    mode = cutlass.const_expr(0 if by_key else 1)
    box = cutlass.const_expr(cute.size(views.sX, mode=[mode]))
    tiler = cutlass.const_expr((cute.size(views.sX, mode=[0]), cute.size(views.sX, mode=[1])))
    column = sequence.first_column + column
    for i in cutlass.range(cute.size(views.sX, mode=[2]), unroll=1):
        valid = cutlass.max(cutlass.min(sequence.s_k - key - i * box, Int32(box)), Int32(0))
        row = cute.arch.shuffle_sync(rows, first_box + i)
        gX = views.coordinates[None, None, row + valid, CLIP_END]
        first = (CLIP_END - valid, column) if by_key else (column, CLIP_END - valid)
        gX = cute.local_tile(cute.domain_offset(first, gX), tiler, (0, 0))
        sX = views.sX[None, None, i, None]
        shared, coordinates = cpasync.tma_partition(
            views.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        cute.copy(views.atom, coordinates, shared[None, slot.index], tma_bar_ptr=slot.barrier)


@cute.jit
def load_k(
    plan: Sm90FmhaPlan,
    loads: Loads,
    ring: StageRing,
    place: RingPlace,
    tile: Int32,
    rows: Int32 | None,
    item: AttentionItem,
):
    """Load one K tile, slab by slab. `rows`: from tile_rows. Returns the next place in the ring."""
    for slab in cutlass.range_constexpr(plan.slabs):
        acquire(ring, place, plan.slab_bytes)
        slot = RingSlot(ring, place)
        if cutlass.const_expr(plan.ragged):
            load_boxes(loads.k, slot, item.sequence, tile * plan.tile_n, rows, slab * plan.slab_columns, True)
        else:
            loads.k.load((tile, slab, item.kv_batch), slot)
        place = advanced(ring, place)
    return place


@cute.jit
def load_v(
    plan: Sm90FmhaPlan,
    loads: Loads,
    ring: StageRing,
    place: RingPlace,
    tile: Int32,
    rows: Int32 | None,
    item: AttentionItem,
):
    """Load one V tile, slab by slab. `rows`: from tile_rows. Returns the next place in the ring."""
    for slab in cutlass.range_constexpr(plan.v_slabs):
        acquire(ring, place, plan.slab_bytes)
        slot = RingSlot(ring, place)
        if cutlass.const_expr(plan.ragged):
            key = tile * plan.tile_n + slab * plan.v_keys
            if cutlass.const_expr(plan.page_size > 0):
                first_box = cutlass.const_expr(slab * (plan.v_keys // plan.v_box))
                load_boxes(loads.v, slot, item.sequence, key, rows, 0, False, first_box)
            else:
                first: Int32 = rows  # pyright: ignore[reportAssignmentType] (const_expr narrows nothing)
                load_boxes(loads.v, slot, item.sequence, key, first + slab * plan.v_keys, 0, False)
        else:
            loads.v.load((item.o_half if plan.o_halves > 1 else 0, tile * plan.v_slabs + slab, item.kv_batch), slot)
        place = advanced(ring, place)
    return place


@cute.jit
def load_q(plan: Sm90FmhaPlan, loads: Loads, q: StageRing, place: RingPlace, item: AttentionItem):
    """Load one Q tile, 64 rows a copy. TMA fills rows past the end with zeros."""
    acquire(q, place, plan.q_bytes)
    parts = cutlass.const_expr(plan.tile_m // GROUP_M)
    for part in cutlass.range_constexpr(parts):
        coordinate = (item.row_tile * parts + part, 0, item.kv_batch)
        loads.q.load(coordinate, RingSlot(q, place), place.stage * parts + part)


@cute.jit
def load_warp(
    plan: Sm90FmhaPlan, problem: Problem, order: Order, loads: Loads, q: StageRing, kv: StageRing, ring: Int32
):
    """The work loop of the producer of ring `ring`. The producer of ring 0 also loads Q, after the first K tile.

    K runs one tile ahead of V: the consumers issue S of the next tile before P V of this one. The combine kernel may be
    launched after the last load, when its CTAs find room on all SMs. Launched at the head of this kernel, they crowd on
    the few SMs without an item.
    """
    kv = ring_number(kv, ring)
    kv_place = ring_start(kv, True)
    q_place = ring_start(q, True)
    hand = deal(plan, problem, order)
    for number in cutlass.range(hand.start, hand.stop, hand.step, unroll=1):
        item = dealt_item(plan, problem, order, number)
        if item.tiles > 0:
            rows = tile_rows(plan, problem, item, item.first_tile + ring, plan.k_box)
            if ring < item.tiles:
                kv_place = load_k(plan, loads, kv, kv_place, item.first_tile + ring, rows, item)
            if cutlass.const_expr(not plan.ragged):  # noqa: SIM102 (one is decided at compile time, one at run time)
                if ring == 0:
                    load_q(plan, loads, q, q_place, item)
                    q_place = advanced(q, q_place)
            for i in cutlass.range(ring, item.tiles, plan.rings, unroll=1):
                tile = item.first_tile + i
                v_rows = rows
                if i + plan.rings < item.tiles:
                    rows = tile_rows(plan, problem, item, tile + plan.rings, plan.k_box)
                    kv_place = load_k(plan, loads, kv, kv_place, tile + plan.rings, rows, item)
                kv_place = load_v(plan, loads, kv, kv_place, tile, v_rows, item)
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def load_warp_of_k(plan: Sm90FmhaPlan, problem: Problem, order: Order, loads: Loads, k: StageRing):
    """The work loop of the producer of K, if K and V have separate rings."""
    place = ring_start(k, True)
    hand = deal(plan, problem, order)
    for number in cutlass.range(hand.start, hand.stop, hand.step, unroll=1):
        item = dealt_item(plan, problem, order, number)
        for i in cutlass.range(item.tiles, unroll=1):
            rows = tile_rows(plan, problem, item, item.first_tile + i, plan.k_box)
            place = load_k(plan, loads, k, place, item.first_tile + i, rows, item)


@cute.jit
def load_warp_of_v(plan: Sm90FmhaPlan, problem: Problem, order: Order, loads: Loads, q: StageRing, v: StageRing):
    """The work loop of the producer of Q and V, if K and V have separate rings."""
    q_place, place = ring_start(q, True), ring_start(v, True)
    hand = deal(plan, problem, order)
    for number in cutlass.range(hand.start, hand.stop, hand.step, unroll=1):
        item = dealt_item(plan, problem, order, number)
        if cutlass.const_expr(not plan.ragged):  # noqa: SIM102 (one is decided at compile time, one at run time)
            if item.tiles > 0:
                load_q(plan, loads, q, q_place, item)
                q_place = advanced(q, q_place)
        for i in cutlass.range(item.tiles, unroll=1):
            rows = tile_rows(plan, problem, item, item.first_tile + i, plan.v_box)
            place = load_v(plan, loads, v, place, item.first_tile + i, rows, item)
    cute.arch.griddepcontrol_launch_dependents()


@dsl_user_op
def copy_16_bytes(shared: Int32, source: Int64, exists: Boolean, *, loc=None, ip=None) -> None:
    """Queue a copy of 16 bytes from global address `source` to address `shared`, or of zeros unless `exists`."""
    size = cutlass.select_(exists, Int32(16), Int32(0))
    values = [value.ir_value(loc=loc, ip=ip) for value in (shared, source, size)]
    instruction = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    llvm.inline_asm(None, values, instruction, "r,l,r", has_side_effects=True, loc=loc, ip=ip)


@cute.jit
def copy_q(
    plan: Sm90FmhaPlan,
    problem: Problem,
    mQ: cute.Tensor,
    sQ: cute.Tensor,
    stage: Int32,
    item: AttentionItem,
    lane: Int32,
):
    """Queue the copies of one Q tile into a swizzled MMA operand: 16-byte chunk c of row r goes to c ^ (r % 8).

    Rows past the end become zeros. `problem` is the sequence's.
    """
    chunks = cutlass.const_expr(plan.hd // VECTOR)
    base, source, heads = sQ.iterator.toint() + stage * plan.q_bytes, mQ.iterator.toint(), mQ.shape[1]
    sequence: Sequence = item.sequence  # pyright: ignore[reportAssignmentType] (there is one where this is compiled)
    first_head = sequence.kv_head * problem.group
    for i in cutlass.range(plan.tile_m * chunks // LANES, unroll=4):
        number = i * LANES + lane
        row, chunk = number // chunks, number % chunks
        head, token = problem.head_and_token(item.row_tile * plan.tile_m + row, same=False)
        exists = item.row_tile * plan.tile_m + row < problem.rows
        flat = Int64(sequence.first_q + token) * heads + first_head + head
        panel = (row // GROUP_M) * chunks // VECTOR + chunk // VECTOR
        place = (panel * GROUP_M + row % GROUP_M) * 128 + ((chunk ^ row) % VECTOR) * 16
        offset = cutlass.select_(exists, flat * (plan.hd * 2) + chunk * 16, Int64(0))
        copy_16_bytes(base + place, source + offset, Boolean(exists))


@cute.jit
def load_warp_of_q(
    plan: Sm90FmhaPlan, problem: Problem, order: Order, mQ: cute.Tensor, sQ: cute.Tensor, q: StageRing, warp: Int32
):
    """The work loop of the warp that copies Q of ragged sequences. Other warps do nothing."""
    if warp == Q_WARP:
        place = ring_start(q, True)
        lane = cute.arch.lane_idx()
        hand = deal(plan, problem, order)
        for number in cutlass.range(hand.start, hand.stop, hand.step, unroll=1):
            item = dealt_item(plan, problem, order, number)
            if item.tiles > 0:
                wait_empty(q, place)
                copy_q(plan, problem.of(item.sequence, plan), mQ, sQ, place.stage, item, lane)
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)
                make_full(q, place)
                place = advanced(q, place)
