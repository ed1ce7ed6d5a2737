"""What every part of the kernel shares: parameters, shared memory, and the rows and keys this CTA works on."""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.attention import CtaTile, FmhaAxes, FmhaFrame, KeyTiles, end_visible, first_visible, position_offset
from backends.ptx.builder import NCTAID_Z, TID_X, Builder
from backends.ptx.operands import Register
from backends.ptx.parameters import U32, Map, Parameters, Pointer
from backends.ptx.shared_memory import Smem
from backends.ptx.sm90_fmha.geometry import SPLIT_KEYS, TILE_M, Sm90FmhaTiling


@dataclass(frozen=True, slots=True)
class Sm90FmhaParams(Parameters):
    """The kernel's parameters, in order. `lse` is null when it is not wanted."""

    q: Map
    k: Map
    v: Map
    o: Pointer
    lse: Pointer
    axes: FmhaAxes


@dataclass(frozen=True, slots=True)
class SplitFmhaParams(Sm90FmhaParams):
    """Where `splits` CTAs share the keys. `o` is that of the partial outputs (f32
    [splits][batch * kv_heads * rows][hd]), `lse` that of the partial statistics (f32
    [splits][batch * kv_heads * rows][2]: reference and sum)."""

    splits: U32


@dataclass(frozen=True, slots=True)
class KeySplit:
    """`index`: which split of the keys this CTA has, None if there is one only. `first_row`: first row of its partial
    results, index * batch * kv_heads * rows (u64)."""

    index: Register | None
    first_row: Register


@dataclass(frozen=True, slots=True)
class Sm90FmhaFrame(FmhaFrame):
    """Registers that all parts read."""

    tiling: Sm90FmhaTiling
    params: Sm90FmhaParams
    is_leader: Register
    """Thread 0, which loads."""
    split: KeySplit


def open_frame(x: Builder, tiling: Sm90FmhaTiling, split: bool) -> Sm90FmhaFrame:
    """Declares the parameters, computes the tile range and sets up the barriers. `split`: whether CTAs share keys."""
    params = (SplitFmhaParams if split else Sm90FmhaParams).declare(x)
    axes = params.axes
    smem = Smem.declare(x, "dynamic_smem", tiling.smem)
    x.section("which rows, which keys")
    thread = x.let("thread", "mov.u32", TID_X)
    is_leader = x.let("is_leader", "setp.eq.u32", thread, 0)
    cta = CtaTile.read(x, tiling, TILE_M)
    key_split = _split(x, params, cta.batch)
    batch_head, offset = cta.batch_head(x, axes), position_offset(x, axes)
    keys = _key_tiles(x, tiling, axes, offset, key_split)
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
        split=key_split,
    )


def _split(x: Builder, params: Sm90FmhaParams, batch: Register) -> KeySplit:
    """The third index of the CTA comes in as `batch`; it counts the splits of a batch first. It becomes the batch."""
    if not isinstance(params, SplitFmhaParams):
        return KeySplit(None, x.let("part", "mov.u64", 0))
    x.comment("The third index of the grid: batch * splits + split.")
    index = x.let("split", "rem.u32", batch, params.splits)
    x.emit("div.u32", batch, batch, params.splits)
    layers = x.let("layers", "mov.u32", NCTAID_Z)
    x.emit("div.u32", layers, layers, params.splits)
    x.emit("mul.lo.u32", layers, layers, params.axes.kv_heads)
    x.emit("mul.lo.u32", layers, layers, index)
    return KeySplit(index, x.let("part", "mul.wide.u32", layers, params.axes.rows))


def _key_tiles(x: Builder, tiling: Sm90FmhaTiling, axes: FmhaAxes, offset: Register, split: KeySplit) -> KeyTiles:
    x.comment("Some row's query is the first of its sequence, some row's the last, or nearly: t is 128 at most. So the")
    x.comment("tiles are those that any query of the sequence sees: from the window of query 0 to the reach of t - 1.")
    last = x.let("last_position", "sub.s32", axes.s_k, 1)
    first = first_visible(x, axes, offset, "tile")
    end = end_visible(x, axes, last, "tile")
    if split.index is not None:
        split_first = x.let("split_first", "mul.lo.u32", split.index, SPLIT_KEYS)
        split_end = x.let("split_end", "add.u32", split_first, SPLIT_KEYS)
        x.emit("max.s32", first, first, split_first)
        x.emit("min.s32", end, end, split_end)
    return KeyTiles.between(x, first, end, tiling.tile_n)
