"""What every role of a grouped GEMM shares: parameters, shared memory, tensor memory, and the walk over the tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backends.ptx.builder import TID_X, Builder
from backends.ptx.operands import Address, Register, Special, at
from backends.ptx.shared_memory import SharedMemory
from backends.ptx.sm100_moe.geometry import (
    EPILOGUE_THREADS,
    MMA_WARP,
    PRODUCER_WARP,
    STAGES,
    TILE_M,
    TMEM_COLUMNS,
)

FULL_WARP = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class GemmParams:
    """The first parameters of both grouped GEMMs, in order. `a`, `b`, `sfa`, `sfb`: tensor maps. `row_tiles`: address
    of the number of row tiles; `expert_of_tile`: of the expert of each, u32. `n_tiles`, `k_stages`: how many of each.
    """

    a: Register
    b: Register
    sfa: Register
    sfb: Register
    row_tiles: Register
    expert_of_tile: Register
    n_tiles: Register
    k_stages: Register

    @classmethod
    def declare(cls, x: Builder) -> GemmParams:
        """Declares them."""
        maps = [x.tensor_map(f"{name}_map") for name in ("a", "b", "sfa", "sfb")]
        addresses = [x.param(name, "u64") for name in ("row_tiles", "expert_of_tile")]
        return cls(*maps, *addresses, *(x.param(name, "u32") for name in ("n_tiles", "k_stages")))


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile of a role's walk. `index` counts the tiles of this CTA; `first_row` = TILE_M * row_tile."""

    index: Register
    row_tile: Register
    n_tile: Register
    expert: Register
    first_row: Register


@dataclass(frozen=True, slots=True)
class Frame:
    """Registers that all roles read."""

    x: Builder
    params: GemmParams
    smem: Register
    places: SharedMemory
    thread: Register
    warp: Register
    tmem: Register
    row_tiles: Register
    tiles: Register
    """row_tiles * n_tiles."""

    def place(self, name: str) -> Address:
        """The shared memory address of a named place."""
        return at(self.smem, self.places[name])

    def walk(self, role: str) -> _Walk:
        """The tiles of this CTA, for one role."""
        return _Walk(self, role)


class _Walk:
    """CTA c takes tiles c, c + grid, ...; the row tiles that share weights are neighbours, so that CTAs which run at
    the same time read the same weights."""

    def __init__(self, frame: Frame, role: str) -> None:
        x = frame.x
        self._frame, self._role = frame, role
        self._linear = x.let(f"{role}_linear", "mov.u32", Special("%ctaid.x", "u32"))
        self._step = x.let(f"{role}_step", "mov.u32", Special("%nctaid.x", "u32"))
        self.index = x.let(f"{role}_index", "mov.b32", 0)
        self._finished = x.reg(f"{role}_finished", "pred")

    @contextmanager
    def tiles(self) -> Iterator[Tile]:
        """The body runs once a tile."""
        x, role = self._frame.x, self._role
        with x.loop(f"{role}_tiles") as loop:
            x.emit("setp.ge.u32", self._finished, self._linear, self._frame.tiles)
            x.emit("bra", loop.done, guard=self._finished)
            n_tile = x.let(f"{role}_n_tile", "div.u32", self._linear, self._frame.row_tiles)
            row_tile = x.let(f"{role}_row_tile", "rem.u32", self._linear, self._frame.row_tiles)
            expert_at = x.let(f"{role}_expert_at", "mad.wide.u32", row_tile, 4, self._frame.params.expert_of_tile)
            expert = x.let(f"{role}_expert", "ld.global.u32", at(expert_at))
            first_row = x.let(f"{role}_first_row", "mul.lo.u32", row_tile, TILE_M)
            yield Tile(self.index, row_tile, n_tile, expert, first_row)
            x.emit("add.u32", self.index, self.index, 1)
            x.emit("add.u32", self._linear, self._linear, self._step)


def open_frame(x: Builder, params: GemmParams, places: SharedMemory) -> Frame:
    """Sets up barriers and tensor memory. Call it when all parameters are declared."""
    smem = x.dynamic_smem(f"{x.entry}_smem", 1024)
    for name, (offset, _) in places.places.items():
        x.name_place(at(smem, offset), name)
    x.section("barriers, tensor memory, how many tiles")
    thread = x.let("thread", "mov.u32", TID_X)
    warp = x.let("warp", "shr.u32", thread, 5)
    is_initialiser = x.let("is_initialiser", "setp.eq.u32", thread, 0)
    with x.when(is_initialiser, "init_barriers"):
        _init_barriers(x, places, smem)
    is_tmem_owner = x.let("is_tmem_owner", "setp.eq.u32", warp, MMA_WARP)
    base = at(smem, places["tmem_base"])
    with x.when(is_tmem_owner, "alloc"):
        x.emit("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32", base, TMEM_COLUMNS)
        x.emit("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned")
    is_producer = x.let("is_producer", "setp.eq.u32", thread, PRODUCER_WARP * 32)
    for tensor_map in (params.a, params.b, params.sfa, params.sfb):
        x.emit("prefetch.tensormap", at(tensor_map), guard=is_producer)
    row_tiles = x.let("row_tile_count", "ld.global.u32", at(params.row_tiles))
    tiles = x.let("tile_count", "mul.lo.u32", row_tiles, params.n_tiles)
    x.emit("tcgen05.fence::before_thread_sync")
    x.emit("bar.sync", 0)
    x.emit("tcgen05.fence::after_thread_sync")
    tmem = x.let("tmem", "ld.shared.b32", base)
    return Frame(x, params, smem, places, thread, warp, tmem, row_tiles, tiles)


def _init_barriers(x: Builder, places: SharedMemory, smem: Register) -> None:
    arrivals = {
        "ring_full": (STAGES, 1),
        "ring_empty": (STAGES, 1),
        "tile_full": (1, 1),
        "tile_free": (1, EPILOGUE_THREADS),
    }
    for name, (count, expected) in arrivals.items():
        for index in range(count):
            place = at(smem, places[name] + 8 * index)
            x.emit("mbarrier.init.shared::cta.b64", place, expected, note=f"{name} {index}")
    x.comment("The tensor copies' completions come through the async proxy.")
    x.emit("fence.mbarrier_init.release.cluster")


def close_frame(frame: Frame) -> None:
    """All warps meet; the warp that allocated tensor memory gives it back."""
    x = frame.x
    x.section("the end")
    x.emit("tcgen05.fence::before_thread_sync")
    x.emit("bar.sync", 0)
    is_tmem_owner = x.let("is_tmem_owner", "setp.eq.u32", frame.warp, MMA_WARP)
    with x.when(is_tmem_owner, "dealloc"):
        x.emit("tcgen05.fence::after_thread_sync")
        x.emit("tcgen05.dealloc.cta_group::1.sync.aligned.b32", frame.tmem, TMEM_COLUMNS)
    x.emit("ret")
