"""What every role of the kernel shares: parameters, shared memory, tensor memory, and the tiles this CTA works on."""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.attention import end_visible, first_visible
from backends.ptx.builder import TID_X, Builder
from backends.ptx.operands import Address, Register, Special, at
from backends.ptx.sm100_fmha.geometry import (
    MMA_WARP,
    PRODUCER_WARP,
    THREADS,
    TILE_M,
    TILE_N,
    TMEM_COLUMNS,
    WARPGROUP_THREADS,
    Geometry,
)

FULL_WARP = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class TensorMaps:
    """Generic addresses of the tensor maps."""

    q: Register
    k: Register
    v: Register
    o: Register


@dataclass(frozen=True, slots=True)
class Params:
    """The kernel's parameters, in order. `rows`: group * t folded query rows of a (batch, kv_head); `ahead`: how many
    keys past its own position a row may see (0 when causal); `lse`: address, or 0 when it is not wanted."""

    maps: TensorMaps
    lse: Register
    t: Register
    s_k: Register
    rows: Register
    kv_heads: Register
    window: Register
    ahead: Register
    scale_log2: Register


@dataclass(frozen=True, slots=True)
class Frame:
    """Registers that all roles read."""

    x: Builder
    geometry: Geometry
    params: Params
    smem: Register
    thread: Register
    warp: Register
    row_origin: Register
    """First folded row of this CTA's tile."""
    batch_head: Register
    """batch * kv_heads + kv_head, the outermost coordinate of every tensor map."""
    o_origin: Register
    """First column of O and V that this CTA owns."""
    first_key: Register
    """First key of the first tile that any row sees; a multiple of TILE_N."""
    tiles: Register
    """Key tiles to visit; 0 when no row sees a key."""
    position_offset: Register
    """s_k - t: what turns a query index into its position among the keys."""
    tmem: Register

    def place(self, name: str) -> Address:
        """The shared memory address of a named place."""
        return at(self.smem, self.geometry.smem[name])

    def buffered(self, name: str, index: Register, label: str) -> Address:
        """The mbarrier `index` of a named row of mbarriers."""
        return at(self.x.indexed(label, self.smem, index, 8), self.geometry.smem[name])


def open_frame(x: Builder, geometry: Geometry) -> Frame:
    """Declares the parameters, computes the tile range, sets up barriers and tensor memory."""
    params = _declare_params(x)
    smem = x.dynamic_smem("dynamic_smem", 1024)
    for name, (offset, _) in geometry.smem.places.items():
        x.name_place(at(smem, offset), name)
    x.section("which rows, which keys")
    thread = x.let("thread", "mov.u32", TID_X)
    warp = x.let("warp", "shr.u32", thread, 5)
    x.comment(f"{geometry.halves} CTA(s) a row tile, each with {geometry.o_columns} columns of O.")
    x_index = x.let("x_index", "mov.u32", Special("%ctaid.x", "u32"))
    row_tile = x.let("row_tile", "div.u32", x_index, geometry.halves)
    half = x.let("half", "rem.u32", x_index, geometry.halves)
    o_origin = x.let("o_origin", "mul.lo.u32", half, geometry.o_columns)
    row_origin = x.let("row_origin", "mul.lo.u32", row_tile, TILE_M)
    kv_head = x.let("kv_head", "mov.u32", Special("%ctaid.y", "u32"))
    batch = x.let("batch", "mov.u32", Special("%ctaid.z", "u32"))
    batch_head = x.let("batch_head", "mad.lo.u32", batch, params.kv_heads, kv_head)
    position_offset = x.let("position_offset", "sub.s32", params.s_k, params.t)
    first_key, tiles = _key_range(x, params, row_origin, position_offset)
    tmem = _set_up(x, geometry, params, smem, thread, warp)
    return Frame(
        x=x,
        geometry=geometry,
        params=params,
        smem=smem,
        thread=thread,
        warp=warp,
        row_origin=row_origin,
        batch_head=batch_head,
        o_origin=o_origin,
        first_key=first_key,
        tiles=tiles,
        position_offset=position_offset,
        tmem=tmem,
    )


def _declare_params(x: Builder) -> Params:
    return Params(
        maps=TensorMaps(*(x.tensor_map(f"{tensor}_map") for tensor in "qkvo")),
        lse=x.param("lse", "u64"),
        t=x.param("t", "u32"),
        s_k=x.param("s_k", "u32"),
        rows=x.param("rows", "u32"),
        kv_heads=x.param("kv_heads", "u32"),
        window=x.param("window", "s32"),
        ahead=x.param("ahead", "s32"),
        scale_log2=x.param("scale_log2", "f32"),
    )


def _key_range(
    x: Builder, params: Params, row_origin: Register, position_offset: Register
) -> tuple[Register, Register]:
    x.comment("A row sees an interval of keys: j > position - window, j <= position + ahead, 0 <= j < s_k.")
    x.comment("Both ends of a row's interval grow with its query index, so the tile's range follows from two rows.")
    last_row = x.let("last_row", "add.u32", row_origin, TILE_M)
    x.emit("min.u32", last_row, last_row, params.rows)
    x.emit("sub.u32", last_row, last_row, 1)
    origin_head = x.let("origin_head", "div.u32", row_origin, params.t)
    last_head = x.let("last_head", "div.u32", last_row, params.t)
    least_query = x.let("least_query", "rem.u32", row_origin, params.t)
    most_query = x.let("most_query", "rem.u32", last_row, params.t)
    several_heads = x.let("several_heads", "setp.ne.u32", origin_head, last_head)
    last_query = x.let("last_query", "sub.u32", params.t, 1)
    x.emit("selp.u32", least_query, 0, least_query, several_heads)
    x.emit("selp.u32", most_query, last_query, most_query, several_heads)
    least_position = x.let("least_position", "add.s32", least_query, position_offset)
    most_position = x.let("most_position", "add.s32", most_query, position_offset)
    first = first_visible(x, params, least_position, "tile")
    end = end_visible(x, params, most_position, "tile")
    first_key = x.let("first_key", "and.b32", first, -TILE_N)
    reach = x.let("reach", "sub.s32", end, first_key)
    x.emit("max.s32", reach, reach, 0)
    x.emit("add.s32", reach, reach, TILE_N - 1)
    return first_key, x.let("tiles", "shr.u32", reach, TILE_N.bit_length() - 1)


def _set_up(
    x: Builder, geometry: Geometry, params: Params, smem: Register, thread: Register, warp: Register
) -> Register:
    x.section("barriers and tensor memory")
    is_initialiser = x.let("is_initialiser", "setp.eq.u32", thread, 0)
    with x.when(is_initialiser, "init_barriers"):
        _init_barriers(x, geometry, smem)
    is_tmem_owner = x.let("is_tmem_owner", "setp.eq.u32", warp, MMA_WARP)
    with x.when(is_tmem_owner, "alloc"):
        base = at(smem, geometry.smem["tmem_base"])
        x.emit("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32", base, TMEM_COLUMNS)
        x.emit("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned")
    is_producer = x.let("is_producer", "setp.eq.u32", thread, PRODUCER_WARP * 32)
    for tensor_map in (params.maps.q, params.maps.k, params.maps.v, params.maps.o):
        x.emit("prefetch.tensormap", at(tensor_map), guard=is_producer)
    x.emit("tcgen05.fence::before_thread_sync")
    x.emit("bar.sync", 0)
    x.emit("tcgen05.fence::after_thread_sync")
    return x.let("tmem", "ld.shared.b32", at(smem, geometry.smem["tmem_base"]))


def _init_barriers(x: Builder, geometry: Geometry, smem: Register) -> None:
    arrivals = {
        "q_full": (1, 1),
        "ring_full": (geometry.ring_stages, 1),
        "ring_empty": (geometry.ring_stages, 1),
        "s_full": (2, 1),
        "pv_ready": (2, 2 * WARPGROUP_THREADS),
        "pv_done": (2, 1),
        "rescale_full": (2, WARPGROUP_THREADS),
        "row_sum_full": (1, WARPGROUP_THREADS),
    }
    for name, (count, expected) in arrivals.items():
        for index in range(count):
            place = at(smem, geometry.smem[name] + 8 * index)
            x.emit("mbarrier.init.shared::cta.b64", place, expected, note=f"{name} {index}")
    x.comment("The tensor copies' completions come through the async proxy.")
    x.emit("fence.mbarrier_init.release.cluster")


def close_frame(frame: Frame) -> None:
    """All warps meet; the warp that allocated tensor memory gives it back."""
    x = frame.x
    x.section("the end")
    x.emit("tcgen05.fence::before_thread_sync")
    x.emit("bar.sync", 0, note=f"all {THREADS} threads")
    is_tmem_owner = x.let("is_tmem_owner", "setp.eq.u32", frame.warp, MMA_WARP)
    with x.when(is_tmem_owner, "dealloc"):
        x.emit("tcgen05.fence::after_thread_sync")
        x.emit("tcgen05.dealloc.cta_group::1.sync.aligned.b32", frame.tmem, TMEM_COLUMNS)
    x.emit("ret")
