"""From top-k ids to expert rows, on the device.

A route is a pair (token, choice); its number is token * topk + choice. Expert rows are the routes sorted by expert and,
within an expert, by number. Each expert begins at a multiple of TILE_M. An id of no local expert gets no row.

CTA e handles expert e. It counts the routes of all experts itself, in shared memory: that is cheaper than a second
launch that waits for the counts. Then its warps, each with a stretch of the routes, place the routes of expert e in
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from backends.ptx.builder import CTAID_X, FULL_WARP, LANEMASK_LT, TID_X, Builder
from backends.ptx.moe.layout import TILE_M
from backends.ptx.operands import Register, at
from backends.ptx.parameters import U32, Parameters, Pointer
from megamoe.contract import Target

ENTRY = "moe_route"
WARPS = 8
THREADS = WARPS * 32
NO_ROW = 0xFFFFFFFF
COLUMN_WARPS = 32
COLUMN_THREADS = COLUMN_WARPS * 32
"""Threads per CTA if there are column tiles."""
COLUMN_WORDS = 4
"""A column tile in its table: the expert, the first row, the number of rows, and the narrowest width for them."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Shared memory: a count for each of `warps`, the first row, the first column tile, the counts of all experts."""

    warps: int

    @property
    def first_row(self) -> int:
        return 4 * self.warps

    @property
    def first_column(self) -> int:
        return self.first_row + 4

    @property
    def counts(self) -> int:
        """Offset of the counts, a multiple of 64."""
        return -(-(self.first_column + 4) // 64) * 64


def _layout(columns: bool) -> _Layout:
    return _Layout(COLUMN_WARPS if columns else WARPS)


def smem_bytes(num_experts: int, *, columns: bool = False) -> int:
    """Dynamic shared memory of the launch, with or without column tiles."""
    return _layout(columns).counts + 4 * num_experts


@dataclass(frozen=True, slots=True)
class RoutingParams(Parameters):
    """The ids, the tables made from them, and three extents."""

    topk_ids: Pointer
    row_tiles: Pointer
    expert_of_tile: Pointer
    token_of_row: Pointer
    route_of_row: Pointer
    row_of_route: Pointer
    tokens: U32
    topk: U32
    num_experts: U32


@dataclass(frozen=True, slots=True)
class ColumnRoutingParams(RoutingParams):
    """For kernels whose tiles are columns: rows of an expert in one of several widths, COLUMN_WORDS per tile."""

    columns: Pointer
    column_count: Pointer


@dataclass(frozen=True, slots=True)
class _LaneRoute:
    """A lane's route. `expert`: its top-k id, or NO_ROW if the route does not exist. `ballot`: the lanes whose route
    belongs to this CTA's expert."""

    route: Register
    expert: Register
    exists: Register
    ballot: Register


@dataclass(frozen=True, slots=True)
class _ExpertRows:
    """This expert's rows. `first`: the first row. `count`: rows that have a route. `padded`: rows including the padding
    of the last tile. `first_column`: the first of its column tiles, if there are any."""

    first: Register
    count: Register
    padded: Register
    first_column: Register | None


class _Router:
    """Registers of one thread. `widths`: the widths of column tiles, ascending; () if there are none."""

    def __init__(self, x: Builder, widths: tuple[int, ...]) -> None:
        self.x, self.widths = x, widths
        self.layout, self.threads = _layout(bool(widths)), COLUMN_THREADS if widths else THREADS
        self.params = (ColumnRoutingParams if widths else RoutingParams).declare(x)
        self.smem = x.dynamic_smem(f"{ENTRY}_smem", 16)
        x.section("this warp's stretch of the routes")
        self.thread = x.let("thread", "mov.u32", TID_X)
        self.warp = x.let("warp", "shr.u32", self.thread, 5)
        self.lane = x.let("lane", "and.b32", self.thread, 31)
        self.lanes_below = x.let("lanes_below", "mov.u32", LANEMASK_LT)
        self.expert = x.let("expert", "mov.u32", CTAID_X)
        self.routes = x.let("routes", "mul.lo.u32", self.params.tokens, self.params.topk)
        stretch = x.let("stretch", "add.u32", self.routes, self.threads - 1)
        x.emit("div.u32", stretch, stretch, self.threads)
        x.emit("shl.b32", stretch, stretch, 5)
        self.begin = x.let("begin", "mul.lo.u32", self.warp, stretch)
        self.end = x.let("end", "add.u32", self.begin, stretch)
        x.emit("min.u32", self.end, self.end, self.routes)
        self.warp_count = x.indexed("warp_count_at", self.smem, self.warp, 4)

    def store_entry(self, name: str, table: Register, index: Register, value: Register, guard: Register) -> None:
        """Stores `value` in entry `index` of a u32 table in global memory."""
        self.x.emit("st.global.u32", at(self.x.indexed_wide(name, table, index, 4)), value, guard=guard)

    @contextmanager
    def strided(self, name: str, count: Register) -> Iterator[Register]:
        """Runs the body for i = thread, thread + threads, ... below `count`."""
        index = self.x.let(name, "mov.b32", self.thread)
        with self.x.while_below(f"{name}_loop", index, count, f"{name}_finished", (index, self.threads)):
            yield index

    @contextmanager
    def stretch(self, name: str) -> Iterator[_LaneRoute]:
        """Runs the body for every 32 routes of this warp, one route per lane."""
        x = self.x
        base = x.let(f"{name}_base", "mov.b32", self.begin)
        with x.while_below(f"{name}_loop", base, self.end, f"{name}_finished", (base, 32)):
            route = x.let(f"{name}_route", "add.u32", base, self.lane)
            exists = x.let(f"{name}_exists", "setp.lt.u32", route, self.end)
            chosen = x.let(f"{name}_id", "mov.b32", NO_ROW)
            x.emit("ld.global.b32", chosen, at(x.indexed_wide("id_at", self.params.topk_ids, route, 4)), guard=exists)
            mine = x.let(f"{name}_mine", "setp.eq.u32", chosen, self.expert)
            ballot = x.let(f"{name}_ballot", "vote.sync.ballot.b32", mine, FULL_WARP)
            yield _LaneRoute(route, chosen, exists, ballot)


@cache
def routing_kernel(version: tuple[int, int], target: Target = "sm_100a", widths: tuple[int, ...] = ()) -> Builder:
    """Grid: one CTA per expert. With `widths`, ascending, it also writes the table of column tiles."""
    x = Builder(ENTRY, target=target, version=version, block=COLUMN_THREADS if widths else THREADS)
    x.header(["Routing: expert rows, padded to whole tiles, from top-k ids. One CTA an expert."])
    router = _Router(x, widths)
    _count(router)
    rows = _expert_rows(router)
    _place(router, rows.first)
    _fill(router, rows)
    if rows.first_column is not None:
        _fill_columns(router, rows, rows.first_column)
    x.emit("ret")
    return x


def _count(router: _Router) -> None:
    x, params = router.x, router.params
    x.section("how many routes each expert has, and how many of this expert each warp will place")
    cells = x.let("cells", "add.u32", params.num_experts, router.layout.counts // 4)
    with router.strided("cell", cells) as cell:
        x.emit("st.shared.u32", at(x.indexed("cell_at", router.smem, cell, 4)), 0)
    x.sync_cta()
    count = x.let("warp_total", "mov.b32", 0)
    first_cta = x.let("is_first_cta", "setp.eq.u32", router.expert, 0)
    with router.stretch("count") as candidate:
        known = x.let("is_known", "setp.lt.u32", candidate.expert, params.num_experts)
        counter = x.indexed("counter_at", router.smem, candidate.expert, 4)
        x.emit("red.shared.add.u32", at(counter, router.layout.counts), 1, guard=known)
        x.emit("add.u32", count, count, x.let("found", "popc.b32", candidate.ballot))
        x.comment("A route to an expert elsewhere has no row; the first CTA says so.")
        nowhere = x.let("is_nowhere", "setp.ge.and.u32", candidate.expert, params.num_experts, candidate.exists)
        x.emit("and.pred", nowhere, nowhere, first_cta)
        row_at = x.indexed_wide("no_row_at", params.row_of_route, candidate.route, 4)
        x.emit("st.global.u32", at(row_at), NO_ROW, guard=nowhere)
    is_lane_0 = x.let("is_lane_0", "setp.eq.u32", router.lane, 0)
    x.emit("st.shared.u32", at(router.warp_count), count, guard=is_lane_0)
    x.sync_cta()


def _padded(x: Builder, name: str, count: Register) -> Register:
    padded = x.let(name, "add.u32", count, TILE_M - 1)
    x.emit("and.b32", padded, padded, -TILE_M)
    return padded


def _columns(x: Builder, name: str, count: Register, width: int) -> Register:
    columns = x.let(name, "add.u32", count, width - 1)
    x.emit("div.u32", columns, columns, width)
    return columns


def _expert_rows(router: _Router) -> _ExpertRows:
    x = router.x
    x.section("where this expert's rows begin")
    before = x.let("rows_before", "mov.b32", 0)
    columns_before = x.let("columns_before", "mov.b32", 0) if router.widths else None
    with router.strided("earlier", router.expert) as earlier:
        counter = x.indexed("earlier_at", router.smem, earlier, 4)
        routes = x.let("earlier_routes", "ld.shared.u32", at(counter, router.layout.counts))
        x.emit("add.u32", before, before, _padded(x, "earlier_rows", routes))
        if columns_before is not None:
            x.emit("add.u32", columns_before, columns_before, _columns(x, "earlier", routes, router.widths[-1]))
    if columns_before is not None:
        x.emit("red.shared.add.u32", at(router.smem, router.layout.first_column), columns_before)
    x.emit("red.shared.add.u32", at(router.smem, router.layout.first_row), before)
    x.sync_cta()
    first_row = x.let("first_row", "ld.shared.u32", at(router.smem, router.layout.first_row))
    own = x.indexed("own_at", router.smem, router.expert, 4)
    count = x.let("own_routes", "ld.shared.u32", at(own, router.layout.counts))
    padded = _padded(x, "own_rows", count)
    if not router.widths:
        return _ExpertRows(first_row, count, padded, None)
    first_column = x.let("first_column", "ld.shared.u32", at(router.smem, router.layout.first_column))
    return _ExpertRows(first_row, count, padded, first_column)


def _place(router: _Router, first_row: Register) -> None:
    x, params = router.x, router.params
    x.section("each warp places its routes behind those of the warps before it")
    before, is_before = (
        x.let("placed_before", "mov.b32", 0),
        x.let("is_before", "setp.lt.u32", router.lane, router.warp),
    )
    x.emit("ld.shared.u32", before, at(x.indexed("placed_at", router.smem, router.lane, 4)), guard=is_before)
    x.emit("redux.sync.add.u32", before, before, FULL_WARP)
    row_base = x.let("row_base", "add.u32", first_row, before)
    with router.stretch("place") as candidate:
        route = candidate.route
        mine = x.let("is_mine", "setp.eq.u32", candidate.expert, router.expert)
        below = x.let("below", "and.b32", candidate.ballot, router.lanes_below)
        row = x.let("row", "add.u32", row_base, x.let("rank", "popc.b32", below))
        token = x.let("token", "div.u32", route, params.topk)
        router.store_entry("token_of_row_at", params.token_of_row, row, token, guard=mine)
        router.store_entry("route_of_row_at", params.route_of_row, row, route, guard=mine)
        router.store_entry("row_of_route_at", params.row_of_route, route, row, guard=mine)
        x.emit("add.u32", row_base, row_base, x.let("placed_now", "popc.b32", candidate.ballot))


def _fill(router: _Router, rows: _ExpertRows) -> None:
    x, params = router.x, router.params
    x.section("rows that fill up the last tile belong to the token behind the last; whose tiles these are")
    row = x.let("fill_row", "add.u32", rows.count, router.thread)
    is_fill = x.let("is_fill", "setp.lt.u32", row, rows.padded)
    x.emit("add.u32", row, row, rows.first)
    router.store_entry("fill_token_at", params.token_of_row, row, params.tokens, guard=is_fill)
    router.store_entry("fill_route_at", params.route_of_row, row, router.routes, guard=is_fill)
    first_tile = x.let("first_tile", "div.u32", rows.first, TILE_M)
    tiles = x.let("own_tiles", "div.u32", rows.padded, TILE_M)
    with router.strided("tile", tiles) as own_tile:
        tile = x.let("global_tile", "add.u32", first_tile, own_tile)
        x.emit("st.global.u32", at(x.indexed_wide("tile_at", params.expert_of_tile, tile, 4)), router.expert)
    last_expert = x.let("last_expert", "sub.u32", params.num_experts, 1)
    says_total = x.let("says_total", "setp.eq.u32", router.expert, last_expert)
    is_thread_0 = x.let("is_thread_0", "setp.eq.and.u32", router.thread, 0, says_total)
    x.emit("st.global.u32", at(params.row_tiles), x.let("total", "add.u32", first_tile, tiles), guard=is_thread_0)


def _fill_columns(router: _Router, rows: _ExpertRows, first_column: Register) -> None:
    x, params, widest = router.x, router.params, router.widths[-1]
    assert isinstance(params, ColumnRoutingParams)
    x.section("the column tiles of this expert")
    columns = _columns(x, "own_columns", rows.count, widest)
    with router.strided("column", columns) as column:
        done = x.let("rows_done", "mul.lo.u32", column, widest)
        left = x.let("rows_left", "sub.u32", rows.count, done)
        x.emit("min.u32", left, left, widest)
        x.emit("add.u32", done, done, rows.first)
        width, fits = x.let("width", "mov.b32", widest), x.reg("fits", "pred")
        for narrower in reversed(router.widths[:-1]):
            x.emit("setp.le.u32", fits, left, narrower)
            x.emit("selp.b32", width, narrower, width, fits)
        place = x.let("global_column", "add.u32", first_column, column)
        entry = x.indexed_wide("column_at", params.columns, place, 4 * COLUMN_WORDS)
        x.emit("st.global.v4.b32", at(entry), (router.expert, done, left, width))
    total = x.let("total_columns", "add.u32", first_column, columns)
    last_expert = x.let("last_of_experts", "sub.u32", params.num_experts, 1)
    says_total = x.let("says_columns", "setp.eq.u32", router.expert, last_expert)
    x.emit("setp.eq.and.u32", says_total, router.thread, 0, says_total)
    x.emit("st.global.u32", at(params.column_count), total, guard=says_total)
