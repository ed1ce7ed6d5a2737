# ruff: noqa: N815
# pyright: reportMissingImports=false
"""The TMA producer warps: Q once a work item, K and V slab by slab through a ring, in the order of its consumers."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from backends.cutedsl.sm90_fmha.plan import GROUP_M, Sm90FmhaPlan
from backends.cutedsl.sm90_fmha.ring import Barriers, Place, acquire, advanced, ring_start
from backends.cutedsl.sm90_fmha.tiles import Problem, WorkItem, work_item


class Loads(NamedTuple):
    """TMA atoms, each with its (global, shared) views."""

    tma_q: cute.CopyAtom
    tQgQ: cute.Tensor
    tQsQ: cute.Tensor
    tma_k: cute.CopyAtom
    tKgK: cute.Tensor
    tKsK: cute.Tensor
    tma_v: cute.CopyAtom
    tVgV: cute.Tensor
    tVsV: cute.Tensor


@cute.jit
def load_k(plan: Sm90FmhaPlan, loads: Loads, kv: Barriers, place: Place, first: Int32, tile: Int32, kv_batch: Int32):
    """One K tile."""
    for slab in cutlass.range_constexpr(plan.slabs):
        acquire(kv, place, plan.slab_bytes)
        cute.copy(
            loads.tma_k,
            loads.tKgK[None, tile, slab, kv_batch],
            loads.tKsK[None, place.stage],
            tma_bar_ptr=kv.full + place.stage,
        )
        place = advanced(place, first, plan.ring_stages)
    return place


@cute.jit
def load_v(plan: Sm90FmhaPlan, loads: Loads, kv: Barriers, place: Place, first: Int32, tile: Int32, kv_batch: Int32):
    """One V tile."""
    for slab in cutlass.range_constexpr(plan.slabs):
        acquire(kv, place, plan.slab_bytes)
        cute.copy(
            loads.tma_v,
            loads.tVgV[None, slab, tile, kv_batch],
            loads.tVsV[None, place.stage],
            tma_bar_ptr=kv.full + place.stage,
        )
        place = advanced(place, first, plan.ring_stages)
    return place


@cute.jit
def load_q(plan: Sm90FmhaPlan, loads: Loads, q: Barriers, place: Place, item: WorkItem):
    """One Q tile, 64 rows a copy. Rows past the end come as zeros."""
    acquire(q, place, plan.q_bytes)
    parts = cutlass.const_expr(plan.tile_m // GROUP_M)
    for part in cutlass.range_constexpr(parts):
        cute.copy(
            loads.tma_q,
            loads.tQgQ[None, item.row_tile * parts + part, 0, item.kv_batch],
            loads.tQsQ[None, place.stage * parts + part],
            tma_bar_ptr=q.full + place.stage,
        )


@cute.jit
def load_warp(plan: Sm90FmhaPlan, problem: Problem, loads: Loads, q: Barriers, kv: Barriers, ring: Int32):
    """The work loop of the producer of ring `ring`; that of ring 0 loads Q too, after the first K tile.

    K runs one tile ahead of V: the consumers issue S of the next tile before P V of this one.
    """
    start, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    first = ring * plan.ring_stages
    kv_place = ring_start(first, True)
    q_place = ring_start(Int32(0), True)
    for index in cutlass.range(start, problem.work_items, step, unroll=1):
        item = work_item(plan, problem, index)
        if item.tiles > 0:
            if ring < item.tiles:
                kv_place = load_k(plan, loads, kv, kv_place, first, item.first_tile + ring, item.kv_batch)
            if ring == 0:
                load_q(plan, loads, q, q_place, item)
                q_place = advanced(q_place, Int32(0), plan.q_stages)
            for i in cutlass.range(ring, item.tiles, plan.rings, unroll=1):
                tile = item.first_tile + i
                if i + plan.rings < item.tiles:
                    kv_place = load_k(plan, loads, kv, kv_place, first, tile + plan.rings, item.kv_batch)
                kv_place = load_v(plan, loads, kv, kv_place, first, tile, item.kv_batch)
