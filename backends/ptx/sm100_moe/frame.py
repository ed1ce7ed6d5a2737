"""Shared by all roles of a grouped GEMM: parameters, shared memory, tensor memory, and the loop over the tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backends.ptx.builder import CTAID_X, NCTAID_X, TID_X, Builder
from backends.ptx.moe.layout import TILE_M
from backends.ptx.operands import Register, at
from backends.ptx.parameters import U32, Map, Parameters, Pointer
from backends.ptx.shared_memory import Smem, SmemLayout
from backends.ptx.sm100_moe.geometry import ROLES
from backends.ptx.tcgen05 import Threads, meet, set_up


@dataclass(frozen=True, slots=True)
class GemmParams(Parameters):
    """The first parameters of both grouped GEMMs. `row_tiles`: the number of row tiles. `expert_of_tile`: the expert of
    each row tile, u32. `n_tiles`, `k_stages`: how many there are."""

    a: Map
    b: Map
    sfa: Map
    sfb: Map
    row_tiles: Pointer
    expert_of_tile: Pointer
    n_tiles: U32
    k_stages: U32


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile in a role's loop. `index` counts the tiles of this CTA; `first_row` = TILE_M * row_tile."""

    index: Register
    row_tile: Register
    n_tile: Register
    expert: Register
    first_row: Register


@dataclass(frozen=True, slots=True)
class GemmFrame:
    """Registers that all roles read."""

    x: Builder
    params: GemmParams
    smem: Smem
    threads: Threads
    row_tiles: Register
    tile_count: Register
    """row_tiles * n_tiles."""
    tmem: Register

    @property
    def thread(self) -> Register:
        """The thread's index in the CTA."""
        return self.threads.thread

    @property
    def warp(self) -> Register:
        """The warp's index in the CTA."""
        return self.threads.warp

    @contextmanager
    def tiles(self, role: str) -> Iterator[Tile]:
        """Runs the body once per tile of this CTA.

        CTA c takes tiles c, c + grid, ... Row tiles that share weights are adjacent, so that CTAs running at the same
        time read the same weights.
        """
        x = self.x
        linear = x.let(f"{role}_linear", "mov.u32", CTAID_X)
        step = x.let(f"{role}_step", "mov.u32", NCTAID_X)
        index = x.let(f"{role}_index", "mov.b32", 0)
        steps = ((index, 1), (linear, step))
        with x.while_below(f"{role}_tiles", linear, self.tile_count, f"{role}_finished", *steps):
            n_tile = x.let(f"{role}_n_tile", "div.u32", linear, self.row_tiles)
            row_tile = x.let(f"{role}_row_tile", "rem.u32", linear, self.row_tiles)
            expert = x.entry_of(f"{role}_expert", self.params.expert_of_tile, row_tile)
            yield Tile(index, row_tile, n_tile, expert, x.let(f"{role}_first_row", "mul.lo.u32", row_tile, TILE_M))


def open_frame(x: Builder, params: GemmParams, layout: SmemLayout) -> GemmFrame:
    """Sets up barriers and tensor memory. Call it after all parameters are declared."""
    smem = Smem.declare(x, f"{x.entry}_smem", layout)
    x.section("barriers, tensor memory, how many tiles")
    thread = x.let("thread", "mov.u32", TID_X)
    threads = Threads(thread, x.let("warp", "shr.u32", thread, 5))
    set_up(smem, threads, ROLES, (params.a, params.b, params.sfa, params.sfb))
    row_tiles = x.let("row_tile_count", "ld.global.u32", at(params.row_tiles))
    tile_count = x.let("tile_count", "mul.lo.u32", row_tiles, params.n_tiles)
    return GemmFrame(x, params, smem, threads, row_tiles, tile_count, meet(smem))
