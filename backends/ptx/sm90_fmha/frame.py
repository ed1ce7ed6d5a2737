"""What every part of the kernel shares: parameters, shared memory, and the rows and keys this CTA works on."""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.attention import end_visible, first_visible
from backends.ptx.builder import TID_X, Builder
from backends.ptx.operands import Address, Register, Special, at
from backends.ptx.sm90_fmha.geometry import SPLIT_KEYS, TILE_M, Geometry

FULL_WARP = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Params:
    """The kernel's parameters, in order. `rows`: group * t folded query rows of a (batch, kv_head); `ahead`: how many
    keys past its own position a row may see (0 when causal); `lse`: address, or 0 when it is not wanted.

    Where the keys are split, `o` is that of the partial outputs (f32 [splits][batch * kv_heads * rows][hd]), `lse` that
    of the partial statistics (f32 [splits][batch * kv_heads * rows][2]: reference and sum), and there are `splits`.
    """

    q: Register
    k: Register
    v: Register
    o: Register
    lse: Register
    t: Register
    s_k: Register
    rows: Register
    kv_heads: Register
    window: Register
    ahead: Register
    scale_log2: Register
    splits: Register | None


@dataclass(frozen=True, slots=True)
class Frame:
    """Registers that all parts read."""

    x: Builder
    geometry: Geometry
    params: Params
    smem: Register
    thread: Register
    is_leader: Register
    """Thread 0, which loads."""
    row_origin: Register
    """First folded row of this CTA's tile."""
    batch_head: Register
    """batch * kv_heads + kv_head, the outermost coordinate of every tensor map."""
    o_origin: Register
    """First column of O and V that this CTA owns."""
    first_key: Register
    """First key of the first tile that any row sees; a multiple of tile_n."""
    tiles: Register
    """Key tiles to visit; 0 when no row sees a key."""
    position_offset: Register
    """s_k - t: what turns a query index into its position among the keys."""
    part: Register
    """First row of this CTA's partial results, split * batch * kv_heads * rows (u64); 0 where nothing is split."""

    def place(self, name: str, offset: int = 0) -> Address:
        """The shared memory address `offset` bytes into a named place."""
        return at(self.smem, self.geometry.smem[name] + offset)


def open_frame(x: Builder, geometry: Geometry, split: bool) -> Frame:
    """Declares the parameters, computes the tile range and sets up the barriers. `split`: whether CTAs share keys."""
    params = _declare_params(x, split)
    smem = x.dynamic_smem("dynamic_smem", 1024)
    for name, (offset, _) in geometry.smem.places.items():
        x.name_place(at(smem, offset), name)
    x.section("which rows, which keys")
    thread = x.let("thread", "mov.u32", TID_X)
    is_leader = x.let("is_leader", "setp.eq.u32", thread, 0)
    x.comment(f"{geometry.halves} CTA(s) a row tile, each with {geometry.o_columns} columns of O.")
    x_index = x.let("x_index", "mov.u32", Special("%ctaid.x", "u32"))
    row_tile = x.let("row_tile", "div.u32", x_index, geometry.halves)
    half = x.let("half", "rem.u32", x_index, geometry.halves)
    o_origin = x.let("o_origin", "mul.lo.u32", half, geometry.o_columns)
    row_origin = x.let("row_origin", "mul.lo.u32", row_tile, TILE_M)
    kv_head = x.let("kv_head", "mov.u32", Special("%ctaid.y", "u32"))
    batch = x.let("batch", "mov.u32", Special("%ctaid.z", "u32"))
    index, part = _split(x, params, batch)
    batch_head = x.let("batch_head", "mad.lo.u32", batch, params.kv_heads, kv_head)
    position_offset = x.let("position_offset", "sub.s32", params.s_k, params.t)
    first_key, tiles = _key_range(x, geometry, params, position_offset, index)
    _init_barriers(x, geometry, smem, is_leader)
    return Frame(
        x=x,
        geometry=geometry,
        params=params,
        smem=smem,
        thread=thread,
        is_leader=is_leader,
        row_origin=row_origin,
        batch_head=batch_head,
        o_origin=o_origin,
        first_key=first_key,
        tiles=tiles,
        position_offset=position_offset,
        part=part,
    )


def _declare_params(x: Builder, split: bool) -> Params:
    return Params(
        q=x.tensor_map("q_map"),
        k=x.tensor_map("k_map"),
        v=x.tensor_map("v_map"),
        o=x.param("o", "u64"),
        lse=x.param("lse", "u64"),
        t=x.param("t", "u32"),
        s_k=x.param("s_k", "u32"),
        rows=x.param("rows", "u32"),
        kv_heads=x.param("kv_heads", "u32"),
        window=x.param("window", "s32"),
        ahead=x.param("ahead", "s32"),
        scale_log2=x.param("scale_log2", "f32"),
        splits=x.param("splits", "u32") if split else None,
    )


def _split(x: Builder, params: Params, batch: Register) -> tuple[Register | None, Register]:
    """Which split of the keys this CTA has (None: there is one), and where its partial results begin.

    `batch` comes in as the third index of the CTA, which counts the splits of a batch first, and becomes the batch.
    """
    if params.splits is None:
        return None, x.let("part", "mov.u64", 0)
    x.comment("The third index of the grid: batch * splits + split.")
    index = x.let("split", "rem.u32", batch, params.splits)
    x.emit("div.u32", batch, batch, params.splits)
    layers = x.let("layers", "mov.u32", Special("%nctaid.z", "u32"))
    x.emit("div.u32", layers, layers, params.splits)
    x.emit("mul.lo.u32", layers, layers, params.kv_heads)
    x.emit("mul.lo.u32", layers, layers, index)
    return index, x.let("part", "mul.wide.u32", layers, params.rows)


def _key_range(
    x: Builder, geometry: Geometry, params: Params, position_offset: Register, split: Register | None
) -> tuple[Register, Register]:
    x.comment("Some row's query is the first of its sequence, some row's the last, or nearly: t is 128 at most. So the")
    x.comment("tiles are those that any query of the sequence sees: from the window of query 0 to the reach of t - 1.")
    last = x.let("last_position", "sub.s32", params.s_k, 1)
    first = first_visible(x, params, position_offset, "tile")
    end = end_visible(x, params, last, "tile")
    if split is not None:
        split_first = x.let("split_first", "mul.lo.u32", split, SPLIT_KEYS)
        split_end = x.let("split_end", "add.u32", split_first, SPLIT_KEYS)
        x.emit("max.s32", first, first, split_first)
        x.emit("min.s32", end, end, split_end)
    first_key = x.let("first_key", "and.b32", first, -geometry.tile_n)
    reach = x.let("reach", "sub.s32", end, first_key)
    x.emit("max.s32", reach, reach, 0)
    x.emit("add.s32", reach, reach, geometry.tile_n - 1)
    return first_key, x.let("tiles", "shr.u32", reach, geometry.tile_n.bit_length() - 1)


def _init_barriers(x: Builder, geometry: Geometry, smem: Register, is_leader: Register) -> None:
    x.section("barriers")
    with x.when(is_leader, "init_barriers"):
        for name, count in (("q_full", 1), ("k_full", geometry.stages), ("v_full", geometry.stages)):
            for index in range(count):
                place = at(smem, geometry.smem[name] + 8 * index)
                x.emit("mbarrier.init.shared::cta.b64", place, 1, note=f"{name} {index}")
        x.comment("The tensor copies' completions come through the async proxy.")
        x.emit("fence.mbarrier_init.release.cluster")
    x.emit("bar.sync", 0)
