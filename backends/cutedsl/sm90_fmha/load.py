# ruff: noqa: N815
# pyright: reportMissingImports=false
"""The TMA producer warps: Q once a work item, K and V slab by slab through a ring, in the order of its consumers."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from backends.cutedsl.sm90_fmha.operands import Sm90Smem, partition_tma
from backends.cutedsl.sm90_fmha.plan import GROUP_M, Sm90FmhaPlan
from backends.cutedsl.sm90_fmha.ring import RingPlace, StageRing, acquire, advanced, ring_number, ring_start
from backends.cutedsl.sm90_fmha.tiles import Sm90Problem, WorkItem, work_item


class Sm90Inputs(NamedTuple):
    """TMA atoms and coordinates of Q (rows, hd, kv_batch), K (s_k, hd, kv_batch) and V (hd, s_k, kv_batch)."""

    tma_q: cute.CopyAtom
    mQ: cute.Tensor
    tma_k: cute.CopyAtom
    mK: cute.Tensor
    tma_v: cute.CopyAtom
    mV: cute.Tensor


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


def make_loads(plan: Sm90FmhaPlan, inputs: Sm90Inputs, smem: Sm90Smem) -> Loads:
    """The views. Tiles are (rows, column, kv_batch); of V (column, keys, kv_batch)."""
    return Loads(
        inputs.tma_q,
        *partition_tma(inputs.tma_q, inputs.mQ, (GROUP_M, plan.hd), smem.sQ),
        inputs.tma_k,
        *partition_tma(inputs.tma_k, inputs.mK, (plan.tile_n, plan.slab_columns), smem.sK),
        inputs.tma_v,
        *partition_tma(inputs.tma_v, inputs.mV, (plan.slab_columns, plan.tile_n), smem.sV),
    )


@cute.jit
def load_k(plan: Sm90FmhaPlan, loads: Loads, kv: StageRing, place: RingPlace, tile: Int32, kv_batch: Int32):
    """Load one K tile. Returns the next place in the ring."""
    for slab in cutlass.range_constexpr(plan.slabs):
        acquire(kv, place, plan.slab_bytes)
        cute.copy(
            loads.tma_k,
            loads.tKgK[None, tile, slab, kv_batch],
            loads.tKsK[None, place.stage],
            tma_bar_ptr=kv.full + place.stage,
        )
        place = advanced(kv, place)
    return place


@cute.jit
def load_v(plan: Sm90FmhaPlan, loads: Loads, kv: StageRing, place: RingPlace, tile: Int32, kv_batch: Int32):
    """Load one V tile. Returns the next place in the ring."""
    for slab in cutlass.range_constexpr(plan.slabs):
        acquire(kv, place, plan.slab_bytes)
        cute.copy(
            loads.tma_v,
            loads.tVgV[None, slab, tile, kv_batch],
            loads.tVsV[None, place.stage],
            tma_bar_ptr=kv.full + place.stage,
        )
        place = advanced(kv, place)
    return place


@cute.jit
def load_q(plan: Sm90FmhaPlan, loads: Loads, q: StageRing, place: RingPlace, item: WorkItem):
    """Load one Q tile, 64 rows a copy. TMA fills rows past the end with zeros."""
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
def load_warp(plan: Sm90FmhaPlan, problem: Sm90Problem, loads: Loads, q: StageRing, kv: StageRing, ring: Int32):
    """The work loop of the producer of ring `ring`. The producer of ring 0 loads Q too, after the first K tile.

    K runs one tile ahead of V: the consumers issue S of the next tile before P V of this one.
    """
    start, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    kv = ring_number(kv, ring)
    kv_place = ring_start(kv, True)
    q_place = ring_start(q, True)
    for index in cutlass.range(start, problem.work_items, step, unroll=1):
        item = work_item(plan, problem, index)
        if item.tiles > 0:
            if ring < item.tiles:
                kv_place = load_k(plan, loads, kv, kv_place, item.first_tile + ring, item.kv_batch)
            if ring == 0:
                load_q(plan, loads, q, q_place, item)
                q_place = advanced(q, q_place)
            for i in cutlass.range(ring, item.tiles, plan.rings, unroll=1):
                tile = item.first_tile + i
                if i + plan.rings < item.tiles:
                    kv_place = load_k(plan, loads, kv, kv_place, tile + plan.rings, item.kv_batch)
                kv_place = load_v(plan, loads, kv, kv_place, tile, item.kv_batch)
