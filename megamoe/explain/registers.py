"""Which register of which thread gets which (M, N) of an accumulator, load by load, and a picture of it.

The fragment of each shape is the closed form of the figures in PTX ISA 9.7.16.2.3 (tcgen05 matrix fragments). Row M is
the tensor-memory lane: this holds for M = 128 in one CTA and for each CTA's half of M = 256 in a pair. Column N counts
from the first column of the accumulator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megamoe.contract.counted import counted
from megamoe.contract.trace import Bounds, CtaTrace
from megamoe.explain.roles import role_name
from megamoe.explain.svg import PALETTE, Canvas
from megamoe.explain.tmem import Holding, overlap, tmem_map

WARP_SIZE = 32
LEFT, RIGHT, TOP, WIDTH = 78, 24, 118, 1120
ROW_HEIGHT = 2.2
STRIP = 16
CELL_WIDTH, CELL_HEIGHT = 56, 15
CELLS_ACROSS = WIDTH // CELL_WIDTH
GATE, UP = PALETTE[5], PALETTE[4]
_LOAD = re.compile(r"tcgen05\.ld\.sync\.aligned\.(?P<shape>\d+x\d+b)\.x(?P<num>\d+)\.b32")
# Shape -> registers per thread in the x1 form, and (thread, register) -> (lane, column).
_FRAGMENTS: Mapping[str, tuple[int, Callable[[int, int], tuple[int, int]]]] = {
    "32x32b": (1, lambda t, r: (t, r)),
    "16x64b": (1, lambda t, r: (t // 4 + 8 * (t % 2), 2 * r + t // 2 % 2)),
    "16x128b": (2, lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2))),
    "16x256b": (4, lambda t, r: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4))),
}


def fragment(shape: str, num: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(lane, column), relative to the load's address -> (thread of the warp, register), for `tcgen05.ld.SHAPE.xNUM`."""
    registers, place = _FRAGMENTS[shape]
    return {place(t, r): (t, r) for t in range(WARP_SIZE) for r in range(registers * num)}


@dataclass(frozen=True, slots=True)
class AccumulatorLoad:
    """One `tcgen05.ld.SHAPE.xNUM` of a warp, at a PTX line. `row`, `column`: the first M and N that it reads."""

    warp: int
    line: int
    shape: str
    num: int
    row: int
    column: int

    @property
    def cells(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(M, N) -> (thread of the warp, register)."""
        return {
            (self.row + lane, self.column + column): who
            for (lane, column), who in fragment(self.shape, self.num).items()
        }

    @property
    def extent(self) -> tuple[Bounds, Bounds]:
        """(first row, last row), (first column, last column)."""
        rows, columns = zip(*self.cells, strict=True)
        return (min(rows), max(rows)), (min(columns), max(columns))


@dataclass(frozen=True, slots=True)
class AccumulatorTile:
    """An accumulator of `columns` columns and its loads. `turns`: columns of gate, then as many of up; or None."""

    columns: int
    first_column: int
    loads: tuple[AccumulatorLoad, ...]
    turns: int | None


def accumulator_tile(cta: CtaTrace, ptx: str, last_step: int, interleave: int | None) -> AccumulatorTile | None:
    """The first accumulator of a CTA that warps load into registers, or None.

    `interleave`: the case's value, if it has one. It is used only if the loading warps compute exponentials (a SwiGLU).
    """
    map_ = tmem_map(cta, last_step)
    for holding in map_.holdings if map_ else ():
        if holding.by != "tcgen05.mma":
            continue
        loads = _loads_of(cta, holding, ptx.splitlines())
        if loads:
            first, last = holding.columns
            activates = any(_activates(cta, load.warp) for load in loads)
            return AccumulatorTile(last - first + 1, first, loads, interleave if activates else None)
    return None


def _activates(cta: CtaTrace, warp: int) -> bool:
    return any("activation" in role_name(one.opcodes) for one in cta.warps if one.index == warp)


def _loads_of(cta: CtaTrace, holding: Holding, ptx: Sequence[str]) -> tuple[AccumulatorLoad, ...]:
    """The distinct loads of a holding, ordered by warp, row and column."""
    steps = {read.step for read in holding.reads if read.by == "tcgen05.ld"}
    found: set[tuple[int, int, int, int, str, int]] = set()
    for touch in cta.tmem:
        if touch.by != "tcgen05.ld" or touch.step not in steps or not overlap(touch.columns, holding.columns):
            continue
        named = _LOAD.search(ptx[touch.line - 1])
        if named:
            column = touch.columns[0] - holding.columns[0]
            found.add((touch.warp, touch.lanes[0], column, touch.line, named["shape"], int(named["num"])))
    return tuple(AccumulatorLoad(warp, line, shape, num, row, column)
                 for warp, row, column, line, shape, num in sorted(found))  # fmt: skip


def draw_registers(tile: AccumulatorTile, title: str, subtitle: str) -> str:
    """SVG: which warp and load takes which part of the tile, and one load enlarged, cell by cell."""
    rows = 1 + max(load.extent[0][1] for load in tile.loads)
    overview = rows * ROW_HEIGHT
    shown = tile.loads[0]
    enlarged = 1 + shown.extent[0][1] - shown.extent[0][0]
    below = TOP + overview + 96
    canvas = Canvas(LEFT + WIDTH + RIGHT, below + 46 + enlarged * CELL_HEIGHT + 24)
    canvas.text(LEFT, 26, title, size=17, bold=True)
    canvas.text(LEFT, 47, subtitle, size=12, shape="soft")
    canvas.text(LEFT, 69, _rule(shown), size=13, bold=True)
    _overview(canvas, tile, rows)
    _legend(canvas, tile, TOP + overview + 44)
    _enlarged(canvas, tile, shown, below)
    return canvas.svg()


def _rule(load: AccumulatorLoad) -> str:
    """Describes which M and N the registers of a thread hold."""
    words = {
        "32x32b": "thread t of warp w holds one row, M = 32 (w mod 4) + t; register r holds column N = N0 + r",
        "16x64b": "thread t holds row M = M0 + t / 4 + 8 (t mod 2); register r holds N = N0 + 2 r + t / 2 mod 2",
        "16x128b": "register r of thread t holds M = M0 + t / 4 + 8 (r mod 2), N = N0 + t mod 4 + 4 (r / 2)",
        "16x256b": "register r of thread t holds M = M0 + t / 4 + 8 (r / 2 mod 2), N = N0 + 2 (t mod 4) + r mod 2 "
        "+ 8 (r / 4)",
    }
    return f"{load.shape}.x{load.num}: {words[load.shape]}"


def _overview(canvas: Canvas, tile: AccumulatorTile, rows: int) -> None:
    """The whole tile: a block for each load, in the colour of its warp; above it the alternation of gate and up."""
    per_column = WIDTH / tile.columns
    if tile.turns:
        for number, first in enumerate(range(0, tile.columns, tile.turns)):
            name, colour = ("up", UP) if number % 2 else ("gate", GATE)
            title = f"{name}, columns {first}-{first + tile.turns - 1}"
            x, width = LEFT + first * per_column, tile.turns * per_column
            canvas.rectangle(x, TOP - STRIP - 4, width, STRIP, fill=colour, opacity=0.75, title=title)
        canvas.text(LEFT - 9, TOP - 8, "gate/up", anchor="end", shape="soft")
    canvas.rectangle(LEFT, TOP, WIDTH, rows * ROW_HEIGHT, shape="empty")
    for load in tile.loads:
        (top, bottom), (first, last) = load.extent
        what = f"{load.shape}.x{load.num}, rows {top}-{bottom}, columns {first}-{last}"
        title = f"warp {load.warp}, PTX line {load.line}: {what}"
        x, width = LEFT + first * per_column + 0.5, (last + 1 - first) * per_column - 1
        y, height = TOP + top * ROW_HEIGHT + 0.5, (bottom + 1 - top) * ROW_HEIGHT - 1
        canvas.rectangle(x, y, width, height, fill=PALETTE[load.warp % len(PALETTE)], opacity=0.7, title=title)
    for row in range(0, rows + 1, 32):
        canvas.text(LEFT - 9, TOP + row * ROW_HEIGHT + 4, str(row), anchor="end", shape="soft")
    for column in range(0, tile.columns + 1, max(tile.columns // 16, 1)):
        at = LEFT + column * per_column
        canvas.line(at, TOP + rows * ROW_HEIGHT, at, TOP + rows * ROW_HEIGHT + 5, "axis")
        canvas.text(at, TOP + rows * ROW_HEIGHT + 18, str(column), anchor="middle", shape="soft")
    canvas.text(24, TOP + rows * ROW_HEIGHT / 2, "row M (lane)", anchor="middle", turned=True)


def _legend(canvas: Canvas, tile: AccumulatorTile, y: float) -> None:
    x = float(LEFT)
    entries = [(f"warp {warp}", PALETTE[warp % len(PALETTE)]) for warp in sorted({load.warp for load in tile.loads})]
    if tile.turns:
        entries += [(f"gate, {counted(tile.turns, 'column')} a turn", GATE), ("up", UP)]
    for words, colour in entries:
        canvas.rectangle(x, y - 11, 22, 13, fill=colour, opacity=0.75)
        canvas.text(x + 30, y, words)
        x += 52 + 7 * len(words)
    named = f"column N of the accumulator (tensor memory columns {tile.first_column} and on)"
    canvas.text(LEFT + WIDTH, y, named, anchor="end", shape="soft")


def _enlarged(canvas: Canvas, tile: AccumulatorTile, load: AccumulatorLoad, top: float) -> None:
    """The first columns of one load: thread and register in each cell."""
    (first_row, _), (first, last) = load.extent
    last = min(last, first + CELLS_ACROSS - 1)
    words = (
        f"warp {load.warp}, PTX line {load.line}, enlarged: columns {first} to {last}; t is the thread, r the register"
    )
    canvas.text(LEFT, top, words, bold=True)
    for column in range(first, last + 1):
        x = LEFT + (column - first) * CELL_WIDTH
        canvas.text(x + CELL_WIDTH / 2, top + 22, f"N {column}", anchor="middle", shape="soft", size=10)
    for (row, column), (thread, register) in load.cells.items():
        if column > last:
            continue
        x, y = LEFT + (column - first) * CELL_WIDTH, top + 30 + (row - first_row) * CELL_HEIGHT
        colour = PALETTE[load.warp % len(PALETTE)] if not tile.turns else UP if column // tile.turns % 2 else GATE
        canvas.rectangle(x + 0.5, y + 0.5, CELL_WIDTH - 1, CELL_HEIGHT - 1, fill=colour, opacity=0.3,
                         title=f"M {row}, N {column}: thread {thread}, register {register}")  # fmt: skip
        canvas.text(x + CELL_WIDTH / 2, y + 11, f"t{thread} r{register}", size=10, anchor="middle", shape="ink")
        if column == first:
            canvas.text(LEFT - 9, y + 11, f"M {row}", size=10, anchor="end", shape="soft")
