"""Shared by all parts of the kernel: parameters, shared memory, and the rows and keys of this CTA."""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.attention import (
    CtaTile,
    FmhaAxes,
    FmhaFrame,
    FmhaParams,
    KeyTiles,
    end_visible,
    first_visible,
    position_offset,
)
from backends.ptx.builder import TID_X, Builder
from backends.ptx.operands import Register
from backends.ptx.shared_memory import Smem
from backends.ptx.sm90_fmha.geometry import Tiling
from backends.ptx.split_keys import KeyPart, SplitFmhaParams


@dataclass(frozen=True, slots=True)
class Sm90FmhaFrame(FmhaFrame):
    """Registers that all parts read."""

    tiling: Tiling
    params: FmhaParams
    is_leader: Register
    """Thread 0, which loads."""
    part: KeyPart | None
    """This CTA's part of the keys, or None if they are not split."""


def open_frame(x: Builder, tiling: Tiling, part_keys: int | None) -> Sm90FmhaFrame:
    """Declares the parameters, computes the tile range and sets up the barriers.

    `part_keys`: keys per part if CTAs share them, a multiple of tile_n.
    """
    params = (SplitFmhaParams if part_keys else FmhaParams).declare(x)
    axes = params.axes
    smem = Smem.declare(x, "dynamic_smem", tiling.smem)
    x.section("which rows, which keys")
    thread = x.let("thread", "mov.u32", TID_X)
    is_leader = x.let("is_leader", "setp.eq.u32", thread, 0)
    cta = CtaTile.read(x, tiling, tiling.tile_m)
    part = _part(x, params, cta.batch, part_keys)
    batch_head, offset = cta.batch_head(x, axes), position_offset(x, axes)
    keys = _key_tiles(x, tiling, axes, offset, part)
    x.section("barriers")
    with x.when(is_leader, "init_barriers"):
        smem.init_mbarriers()
    x.sync_cta()
    return Sm90FmhaFrame(
        x=x,
        axes=axes,
        smem=smem,
        thread=thread,
        row_origin=cta.row_origin,
        o_origin=cta.o_origin,
        batch_head=batch_head,
        position_offset=offset,
        keys=keys,
        tiling=tiling,
        params=params,
        is_leader=is_leader,
        part=part,
    )


def _part(x: Builder, params: FmhaParams, batch: Register, part_keys: int | None) -> KeyPart | None:
    if isinstance(params, SplitFmhaParams) and part_keys:
        return KeyPart.read(x, params, batch, part_keys)
    x.let("part", "mov.u64", 0)  # Unused. H200 records name programs by digest, and those programs have it.
    return None


def _key_tiles(x: Builder, tiling: Tiling, axes: FmhaAxes, offset: Register, part: KeyPart | None) -> KeyTiles:
    x.comment("Some row's query is the first of its sequence, some row's the last, or nearly: t is 128 at most. So the")
    x.comment("tiles are those that any query of the sequence sees: from the window of query 0 to the reach of t - 1.")
    last = x.let("last_position", "sub.s32", axes.s_k, 1)
    first = first_visible(x, axes, offset, "tile")
    end = end_visible(x, axes, last, "tile")
    if part is not None:
        part.clip(x, first, end)
    return KeyTiles.between(x, first, end, tiling.tile_n)
