"""Shared by all roles of a grouped GEMM: parameters, shared memory, the ring, and the loop over the tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backends.ptx.builder import CTAID_X, NCTAID_X, TID_X, Builder
from backends.ptx.moe.routing import COLUMN_WORDS
from backends.ptx.operands import Register, Vector, at
from backends.ptx.parameters import U32, Parameters, Pointer
from backends.ptx.shared_memory import Smem
from backends.ptx.sm90_moe.geometry import ColumnTiling

WARPGROUP_THREADS = 128


@dataclass(frozen=True, slots=True)
class ColumnGemmParams(Parameters):
    """The first parameters of both grouped GEMMs. `weights`, `activations`: see geometry.py. `tiles_m`: tiles per
    expert; `units` along K; `weight_pitch`, `column_pitch`: bytes of a panel of weights and of a column tile."""

    weights: Pointer
    activations: Pointer
    columns: Pointer
    column_count: Pointer
    tiles_m: U32
    units: U32
    weight_pitch: U32
    column_pitch: U32


@dataclass(frozen=True, slots=True)
class ColumnTile:
    """One tile in a role's loop: `rows` rows of `expert` from expert row `first_row` on, as `width` columns of B, times
    the weight rows of tile `tile_m`. `column`: the index of the column tile."""

    column: Register
    tile_m: Register
    expert: Register
    first_row: Register
    rows: Register
    width: Register


@dataclass(frozen=True, slots=True)
class ColumnFrame:
    """Registers that all roles read."""

    x: Builder
    tiling: ColumnTiling
    params: ColumnGemmParams
    smem: Smem
    thread: Register
    warp: Register
    warpgroup: Register
    lane: Register
    barrier: Register
    """The named barrier of this warpgroup; barrier 0 is for the whole CTA."""
    tile_count: Register

    @contextmanager
    def tiles(self, role: str) -> Iterator[ColumnTile]:
        """Runs the body once per tile of this CTA: tiles c, c + grid, ... Tiles of one column tile are adjacent, so
        that CTAs running at the same time read the same tokens. The next tile's entry is loaded one tile ahead."""
        x, params = self.x, self.params
        linear = x.let(f"{role}_linear", "mov.u32", CTAID_X)
        step = x.let(f"{role}_step", "mov.u32", NCTAID_X)
        entry, following = (x.regs(f"{role}_{name}", "b32", COLUMN_WORDS) for name in ("entry", "next_entry"))
        self._load_entry(role, linear, following)
        with x.while_below(f"{role}_tiles", linear, self.tile_count, f"{role}_finished", (linear, step)):
            for register, loaded in zip(entry, following, strict=True):
                x.emit("mov.b32", register, loaded)
            column = x.let(f"{role}_column", "div.u32", linear, params.tiles_m)
            tile_m = x.let(f"{role}_tile_m", "rem.u32", linear, params.tiles_m)
            later = x.let(f"{role}_later", "add.u32", linear, step)
            self._load_entry(role, later, following)
            yield ColumnTile(column, tile_m, *entry)

    def _load_entry(self, role: str, linear: Register, entry: Vector) -> None:
        """Loads the column tile of tile `linear`, if that tile exists."""
        x, params = self.x, self.params
        exists = x.let(f"{role}_exists", "setp.lt.u32", linear, self.tile_count)
        column = x.let(f"{role}_later_column", "div.u32", linear, params.tiles_m)
        entry_at = x.indexed_wide(f"{role}_entry_at", params.columns, column, 4 * COLUMN_WORDS)
        x.emit("ld.global.v4.b32", entry, at(entry_at), guard=exists)

    def sync_warpgroup(self, note: str = "") -> None:
        """Barrier for the threads of this warpgroup, one of those that multiply."""
        self.x.emit("bar.sync", self.barrier, WARPGROUP_THREADS, note=note)


def open_frame(x: Builder, params: ColumnGemmParams, tiling: ColumnTiling) -> ColumnFrame:
    """Sets up the barriers. Call it after all parameters are declared."""
    smem = Smem.declare(x, f"{x.entry}_smem", tiling.smem)
    x.section("barriers, how many tiles")
    thread = x.let("thread", "mov.u32", TID_X)
    is_initialiser = x.let("is_initialiser", "setp.eq.u32", thread, 0)
    with x.when(is_initialiser, "init_barriers"):
        smem.init_mbarriers()
    x.sync_cta()
    warp, warpgroup = x.let("warp", "shr.u32", thread, 5), x.let("warpgroup", "shr.u32", thread, 7)
    lane, barrier = x.let("lane", "and.b32", thread, 31), x.let("barrier", "add.u32", warpgroup, 1)
    columns = x.let("column_tiles", "ld.global.u32", at(params.column_count))
    tile_count = x.let("tile_count", "mul.lo.u32", columns, params.tiles_m)
    return ColumnFrame(x, tiling, params, smem, thread, warp, warpgroup, lane, barrier, tile_count)
