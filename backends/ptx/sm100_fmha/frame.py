"""Shared by all roles of the kernel: parameters, shared memory, tensor memory, and the tiles of this CTA."""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.attention import CtaTile, FmhaAxes, FmhaFrame, KeyTiles, end_visible, first_visible, position_offset
from backends.ptx.builder import TID_X, Builder
from backends.ptx.operands import Register
from backends.ptx.parameters import Map, Parameters, Pointer
from backends.ptx.shared_memory import Smem
from backends.ptx.sm100_fmha.geometry import ROLES, TILE_M, TILE_N, Sm100FmhaTiling
from backends.ptx.split_keys import KeyPart, SplitFmhaParams
from backends.ptx.tcgen05 import Threads, meet, set_up


@dataclass(frozen=True, slots=True)
class Sm100FmhaParams(Parameters):
    """The kernel's parameters, in order. `lse` is null when it is not wanted."""

    q: Map
    k: Map
    v: Map
    o: Map
    lse: Pointer
    axes: FmhaAxes


@dataclass(frozen=True, slots=True)
class Sm100FmhaFrame(FmhaFrame):
    """Registers that all roles read."""

    tiling: Sm100FmhaTiling
    params: Sm100FmhaParams | SplitFmhaParams
    threads: Threads
    tmem: Register
    part: KeyPart | None
    """This CTA's part of the keys, or None if they are not split."""

    @property
    def warp(self) -> Register:
        """The warp's index in the CTA."""
        return self.threads.warp


def open_frame(x: Builder, tiling: Sm100FmhaTiling, part_keys: int | None) -> Sm100FmhaFrame:
    """Declares the parameters, computes the tile range, sets up barriers and tensor memory.

    `part_keys`: keys per part if CTAs share them, a multiple of TILE_N.
    """
    params = (SplitFmhaParams if part_keys else Sm100FmhaParams).declare(x)
    axes = params.axes
    smem = Smem.declare(x, "dynamic_smem", tiling.smem)
    x.section("which rows, which keys")
    thread = x.let("thread", "mov.u32", TID_X)
    threads = Threads(thread, x.let("warp", "shr.u32", thread, 5))
    cta = CtaTile.read(x, tiling, TILE_M)
    part = KeyPart.read(x, params, cta.batch, part_keys) if isinstance(params, SplitFmhaParams) and part_keys else None
    batch_head, offset = cta.batch_head(x, axes), position_offset(x, axes)
    keys = _key_tiles(x, axes, cta.row_origin, offset, part)
    x.section("barriers and tensor memory")
    set_up(smem, threads, ROLES, (params.q, params.k, params.v, *(() if part else (params.o,))))
    return Sm100FmhaFrame(
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
        threads=threads,
        tmem=meet(smem),
        part=part,
    )


def _key_tiles(x: Builder, axes: FmhaAxes, row_origin: Register, offset: Register, part: KeyPart | None) -> KeyTiles:
    x.comment("A row sees an interval of keys: j > position - window, j <= position + ahead, 0 <= j < s_k.")
    x.comment("Both ends of a row's interval grow with its query index, so the tile's range follows from two rows.")
    last_row = x.let("last_row", "add.u32", row_origin, TILE_M)
    x.emit("min.u32", last_row, last_row, axes.rows)
    x.emit("sub.u32", last_row, last_row, 1)
    origin_head = x.let("origin_head", "div.u32", row_origin, axes.t)
    last_head = x.let("last_head", "div.u32", last_row, axes.t)
    least_query = x.let("least_query", "rem.u32", row_origin, axes.t)
    most_query = x.let("most_query", "rem.u32", last_row, axes.t)
    several_heads = x.let("several_heads", "setp.ne.u32", origin_head, last_head)
    last_query = x.let("last_query", "sub.u32", axes.t, 1)
    x.emit("selp.u32", least_query, 0, least_query, several_heads)
    x.emit("selp.u32", most_query, last_query, most_query, several_heads)
    least_position = x.let("least_position", "add.s32", least_query, offset)
    most_position = x.let("most_position", "add.s32", most_query, offset)
    first = first_visible(x, axes, least_position, "tile")
    end = end_visible(x, axes, most_position, "tile")
    if part is not None:
        part.clip(x, first, end)
    return KeyTiles.between(x, first, end, TILE_N)


def buffer_of(x: Builder, tile: Register, role: str) -> tuple[Register, Register]:
    """Index and parity of the double buffer that `tile` uses: (tile & 1, tile >> 1 & 1)."""
    index = x.let(f"{role}_buffer", "and.b32", tile, 1)
    lap = x.let(f"{role}_lap", "shr.u32", tile, 1)
    return index, x.let(f"{role}_parity", "and.b32", lap, 1)
