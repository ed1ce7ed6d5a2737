"""From top-k ids to expert rows, on the device.

A route is a pair (token, choice); its number is token * topk + choice. Expert rows are the routes sorted by expert and,
within an expert, by number; each expert begins at a multiple of TILE_M. CTA e does expert e. It counts every expert's
routes itself, in shared memory, as that is cheaper than a second launch that would have to wait for the counts of all;
then its warps, each with a stretch of the routes, place those of expert e in order. An id that names no expert here has
no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backends.ptx.builder import TID_X, Builder
from backends.ptx.operands import Register, Special, at
from backends.ptx.sm100_moe.frame import FULL_WARP
from backends.ptx.sm100_moe.geometry import TILE_M

ENTRY = "moe_route"
WARPS = 8
THREADS = WARPS * 32
NO_ROW = 0xFFFFFFFF
COUNTS_OFFSET = 64
"""In shared memory: WARPS counts of this expert's routes, the first row, then the counts of all experts."""
FIRST_ROW_OFFSET = WARPS * 4


def smem_bytes(num_experts: int) -> int:
    """Dynamic shared memory of the launch."""
    return COUNTS_OFFSET + 4 * num_experts


@dataclass(frozen=True, slots=True)
class _Params:
    topk_ids: Register
    row_tiles: Register
    expert_of_tile: Register
    token_of_row: Register
    route_of_row: Register
    row_of_route: Register
    tokens: Register
    topk: Register
    num_experts: Register

    @classmethod
    def declare(cls, x: Builder) -> _Params:
        names = ("topk_ids", "row_tiles", "expert_of_tile", "token_of_row", "route_of_row", "row_of_route")
        addresses = [x.param(name, "u64") for name in names]
        return cls(*addresses, *(x.param(name, "u32") for name in ("tokens", "topk", "num_experts")))


class _Router:
    """Registers of one thread."""

    def __init__(self, x: Builder) -> None:
        self.x = x
        self.params = _Params.declare(x)
        self.smem = x.dynamic_smem(f"{ENTRY}_smem", 16)
        x.section("this warp's stretch of the routes")
        self.thread = x.let("thread", "mov.u32", TID_X)
        self.warp = x.let("warp", "shr.u32", self.thread, 5)
        self.lane = x.let("lane", "and.b32", self.thread, 31)
        self.lanes_below = x.let("lanes_below", "mov.u32", Special("%lanemask_lt", "u32"))
        self.expert = x.let("expert", "mov.u32", Special("%ctaid.x", "u32"))
        self.routes = x.let("routes", "mul.lo.u32", self.params.tokens, self.params.topk)
        stretch = x.let("stretch", "add.u32", self.routes, THREADS - 1)
        x.emit("div.u32", stretch, stretch, THREADS)
        x.emit("shl.b32", stretch, stretch, 5)
        self.begin = x.let("begin", "mul.lo.u32", self.warp, stretch)
        self.end = x.let("end", "add.u32", self.begin, stretch)
        x.emit("min.u32", self.end, self.end, self.routes)
        self.warp_count = x.indexed("warp_count_at", self.smem, self.warp, 4)

    def address(self, name: str, base: Register, index: Register) -> Register:
        """Where entry `index` of a u32 table is."""
        return self.x.let(name, "mad.wide.u32", index, 4, base)

    @contextmanager
    def strided(self, name: str, count: Register) -> Iterator[Register]:
        """The body runs for i = thread, thread + THREADS, ... below `count`."""
        x = self.x
        index, finished = x.let(name, "mov.b32", self.thread), x.reg(f"{name}_finished", "pred")
        with x.loop(f"{name}_loop") as loop:
            x.emit("setp.ge.u32", finished, index, count)
            x.emit("bra", loop.done, guard=finished)
            yield index
            x.emit("add.u32", index, index, THREADS)

    @contextmanager
    def stretch(self, name: str) -> Iterator[tuple[Register, Register, Register, Register]]:
        """The body runs for each 32 routes of this warp with (route, its id, whether the route exists, the ballot of
        the lanes whose route is this CTA's expert's)."""
        x = self.x
        base, finished = x.let(f"{name}_base", "mov.b32", self.begin), x.reg(f"{name}_finished", "pred")
        with x.loop(f"{name}_loop") as loop:
            x.emit("setp.ge.u32", finished, base, self.end)
            x.emit("bra", loop.done, guard=finished)
            route = x.let(f"{name}_route", "add.u32", base, self.lane)
            exists = x.let(f"{name}_exists", "setp.lt.u32", route, self.end)
            chosen = x.let(f"{name}_id", "mov.b32", NO_ROW)
            x.emit("ld.global.b32", chosen, at(self.address("id_at", self.params.topk_ids, route)), guard=exists)
            mine = x.let(f"{name}_mine", "setp.eq.u32", chosen, self.expert)
            yield route, chosen, exists, x.let(f"{name}_ballot", "vote.sync.ballot.b32", mine, FULL_WARP)
            x.emit("add.u32", base, base, 32)


def routing_kernel(version: tuple[int, int]) -> Builder:
    """Grid: one CTA an expert."""
    x = Builder(ENTRY, target="sm_100a", version=version, block=THREADS)
    x.header(["Routing: expert rows, padded to whole tiles, from top-k ids. One CTA an expert."])
    router = _Router(x)
    _count(router)
    first_row, count, padded = _first_row(router)
    _place(router, first_row)
    _fill(router, first_row, count, padded)
    x.emit("ret")
    return x


def _count(router: _Router) -> None:
    x = router.x
    x.section("how many routes each expert has, and how many of this expert each warp will place")
    cells = x.let("cells", "add.u32", router.params.num_experts, COUNTS_OFFSET // 4)
    with router.strided("cell", cells) as cell:
        x.emit("st.shared.u32", at(x.indexed("cell_at", router.smem, cell, 4)), 0)
    x.emit("bar.sync", 0)
    count = x.let("warp_total", "mov.b32", 0)
    first_cta = x.let("is_first_cta", "setp.eq.u32", router.expert, 0)
    with router.stretch("count") as (route, chosen, exists, ballot):
        known = x.let("is_known", "setp.lt.u32", chosen, router.params.num_experts)
        counter = x.indexed("counter_at", router.smem, chosen, 4)
        x.emit("red.shared.add.u32", at(counter, COUNTS_OFFSET), 1, guard=known)
        x.emit("add.u32", count, count, x.let("found", "popc.b32", ballot))
        x.comment("A route to an expert elsewhere has no row; the first CTA says so.")
        nowhere = x.let("is_nowhere", "setp.ge.and.u32", chosen, router.params.num_experts, exists)
        x.emit("and.pred", nowhere, nowhere, first_cta)
        row_at = router.address("no_row_at", router.params.row_of_route, route)
        x.emit("st.global.u32", at(row_at), NO_ROW, guard=nowhere)
    is_lane_0 = x.let("is_lane_0", "setp.eq.u32", router.lane, 0)
    x.emit("st.shared.u32", at(router.warp_count), count, guard=is_lane_0)
    x.emit("bar.sync", 0)


def _padded(x: Builder, name: str, count: Register) -> Register:
    padded = x.let(name, "add.u32", count, TILE_M - 1)
    x.emit("and.b32", padded, padded, -TILE_M)
    return padded


def _first_row(router: _Router) -> tuple[Register, Register, Register]:
    """The expert's first row, its routes, and its rows with those that fill up the last tile."""
    x = router.x
    x.section("where this expert's rows begin")
    before = x.let("rows_before", "mov.b32", 0)
    with router.strided("earlier", router.expert) as earlier:
        counter = x.indexed("earlier_at", router.smem, earlier, 4)
        routes = x.let("earlier_routes", "ld.shared.u32", at(counter, COUNTS_OFFSET))
        x.emit("add.u32", before, before, _padded(x, "earlier_rows", routes))
    x.emit("red.shared.add.u32", at(router.smem, FIRST_ROW_OFFSET), before)
    x.emit("bar.sync", 0)
    first_row = x.let("first_row", "ld.shared.u32", at(router.smem, FIRST_ROW_OFFSET))
    own = x.indexed("own_at", router.smem, router.expert, 4)
    count = x.let("own_routes", "ld.shared.u32", at(own, COUNTS_OFFSET))
    return first_row, count, _padded(x, "own_rows", count)


def _place(router: _Router, first_row: Register) -> None:
    x, params = router.x, router.params
    x.section("each warp places its routes behind those of the warps before it")
    row_base = x.let("row_base", "mov.b32", first_row)
    for warp in range(WARPS - 1):
        later = x.let("is_later", "setp.gt.u32", router.warp, warp)
        placed = x.let("placed", "ld.shared.u32", at(router.smem, 4 * warp))
        x.emit("add.u32", row_base, row_base, placed, guard=later)
    with router.stretch("place") as (route, chosen, _, ballot):
        mine = x.let("is_mine", "setp.eq.u32", chosen, router.expert)
        below = x.let("below", "and.b32", ballot, router.lanes_below)
        row = x.let("row", "add.u32", row_base, x.let("rank", "popc.b32", below))
        token = x.let("token", "div.u32", route, params.topk)
        for name, table, index, value in (
            ("token_of_row_at", params.token_of_row, row, token),
            ("route_of_row_at", params.route_of_row, row, route),
            ("row_of_route_at", params.row_of_route, route, row),
        ):
            x.emit("st.global.u32", at(router.address(name, table, index)), value, guard=mine)
        x.emit("add.u32", row_base, row_base, x.let("placed_now", "popc.b32", ballot))


def _fill(router: _Router, first_row: Register, count: Register, padded: Register) -> None:
    x, params = router.x, router.params
    x.section("rows that fill up the last tile belong to the token behind the last; whose tiles these are")
    row = x.let("fill_row", "add.u32", count, router.thread)
    is_fill = x.let("is_fill", "setp.lt.u32", row, padded)
    x.emit("add.u32", row, row, first_row)
    x.emit("st.global.u32", at(router.address("fill_token_at", params.token_of_row, row)), params.tokens, guard=is_fill)
    x.emit("st.global.u32", at(router.address("fill_route_at", params.route_of_row, row)), router.routes, guard=is_fill)
    first_tile = x.let("first_tile", "div.u32", first_row, TILE_M)
    tiles = x.let("own_tiles", "div.u32", padded, TILE_M)
    with router.strided("tile", tiles) as own_tile:
        tile = x.let("global_tile", "add.u32", first_tile, own_tile)
        x.emit("st.global.u32", at(router.address("tile_at", params.expert_of_tile, tile)), router.expert)
    last_expert = x.let("last_expert", "sub.u32", params.num_experts, 1)
    says_total = x.let("says_total", "setp.eq.u32", router.expert, last_expert)
    is_thread_0 = x.let("is_thread_0", "setp.eq.and.u32", router.thread, 0, says_total)
    x.emit("st.global.u32", at(params.row_tiles), x.let("total", "add.u32", first_tile, tiles), guard=is_thread_0)
