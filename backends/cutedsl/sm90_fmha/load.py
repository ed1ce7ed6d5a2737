# pyright: reportMissingImports=false
"""The TMA producer warps: Q once a work item, K and V slab by slab through a ring, in the order of its consumers."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from backends.cutedsl.attention_tiles import AttentionItem, Inputs, Problem
from backends.cutedsl.ring import RingPlace, RingSlot, StageRing, acquire, advanced, ring_number, ring_start
from backends.cutedsl.sm90_fmha.operands import Sm90Smem
from backends.cutedsl.sm90_fmha.order import deal, dealt_item
from backends.cutedsl.sm90_fmha.plan import GROUP_M, Sm90FmhaPlan
from backends.cutedsl.tma import TmaTensor, TmaViews, tma_views


class Loads(NamedTuple):
    """Views of Q, K and V. Tiles are (rows, column, kv_batch); of V (column, keys, kv_batch)."""

    q: TmaViews
    k: TmaViews
    v: TmaViews


def make_loads(plan: Sm90FmhaPlan, inputs: Inputs, smem: Sm90Smem) -> Loads:
    """The views of all stages."""

    def views(tensor: TmaTensor, tiler: tuple[int, int], sX: cute.Tensor) -> TmaViews:
        return tma_views(tensor.atom, cute.flat_divide(tensor.coordinates, tiler), sX, 2)

    return Loads(
        views(inputs.q, (GROUP_M, plan.hd), smem.sQ),
        views(inputs.k, (plan.tile_n, plan.slab_columns), smem.sK),
        views(inputs.v, (plan.hd, plan.v_keys), smem.sV),
    )


@cute.jit
def load_k(plan: Sm90FmhaPlan, loads: Loads, ring: StageRing, place: RingPlace, tile: Int32, item: AttentionItem):
    """Load one K tile, slab by slab. Returns the next place in the ring."""
    for slab in cutlass.range_constexpr(plan.slabs):
        acquire(ring, place, plan.slab_bytes)
        loads.k.load((tile, slab, item.kv_batch), RingSlot(ring, place))
        place = advanced(ring, place)
    return place


@cute.jit
def load_v(plan: Sm90FmhaPlan, loads: Loads, ring: StageRing, place: RingPlace, tile: Int32, item: AttentionItem):
    """Load one V tile, slab by slab. Returns the next place in the ring."""
    for slab in cutlass.range_constexpr(plan.slabs):
        acquire(ring, place, plan.slab_bytes)
        loads.v.load((0, tile * plan.slabs + slab, item.kv_batch), RingSlot(ring, place))
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
def load_warp(plan: Sm90FmhaPlan, problem: Problem, loads: Loads, q: StageRing, kv: StageRing, ring: Int32):
    """The work loop of the producer of ring `ring`. The producer of ring 0 loads Q too, after the first K tile.

    K runs one tile ahead of V: the consumers issue S of the next tile before P V of this one. After the last load the
    combine kernel may be launched: its CTAs find room on all SMs then. Launched at the head of this kernel, they crowd
    on the few SMs without an item.
    """
    kv = ring_number(kv, ring)
    kv_place = ring_start(kv, True)
    q_place = ring_start(q, True)
    hand = deal(plan, problem)
    for number in cutlass.range(hand.start, hand.stop, hand.step, unroll=1):
        item = dealt_item(plan, problem, number)
        if item.tiles > 0:
            if ring < item.tiles:
                kv_place = load_k(plan, loads, kv, kv_place, item.first_tile + ring, item)
            if ring == 0:
                load_q(plan, loads, q, q_place, item)
                q_place = advanced(q, q_place)
            for i in cutlass.range(ring, item.tiles, plan.rings, unroll=1):
                tile = item.first_tile + i
                if i + plan.rings < item.tiles:
                    kv_place = load_k(plan, loads, kv, kv_place, tile + plan.rings, item)
                kv_place = load_v(plan, loads, kv, kv_place, tile, item)
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def load_warp_of_k(plan: Sm90FmhaPlan, problem: Problem, loads: Loads, k: StageRing):
    """The work loop of the producer of K, where K and V have rings of their own."""
    place = ring_start(k, True)
    hand = deal(plan, problem)
    for number in cutlass.range(hand.start, hand.stop, hand.step, unroll=1):
        item = dealt_item(plan, problem, number)
        for i in cutlass.range(item.tiles, unroll=1):
            place = load_k(plan, loads, k, place, item.first_tile + i, item)


@cute.jit
def load_warp_of_v(plan: Sm90FmhaPlan, problem: Problem, loads: Loads, q: StageRing, v: StageRing):
    """The work loop of the producer of Q and V, where K and V have rings of their own."""
    q_place, place = ring_start(q, True), ring_start(v, True)
    hand = deal(plan, problem)
    for number in cutlass.range(hand.start, hand.stop, hand.step, unroll=1):
        item = dealt_item(plan, problem, number)
        if item.tiles > 0:
            load_q(plan, loads, q, q_place, item)
            q_place = advanced(q, q_place)
        for i in cutlass.range(item.tiles, unroll=1):
            place = load_v(plan, loads, v, place, item.first_tile + i, item)
    cute.arch.griddepcontrol_launch_dependents()
