"""A map of tensor memory made from its accesses, and a picture: what columns hold, who wrote it, who reads it when.

The names of blocks (S, P, O) are inferred from their readers, and the picture says so. Everything else is as recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megamoe.contract.trace import Bounds, CtaTrace, TmemTouch
from megamoe.explain.roles import ranges, role_name
from megamoe.explain.svg import PALETTE, Canvas, round_ticks

ACCUMULATORS = ("tcgen05.mma",)
Scale = Callable[[float], float]
LEFT, RIGHT, TOP, PLOT_WIDTH = 78, 24, 74, 1120
DEAD = 0.22
"""Opacity of a value that is not read any more."""
MAX_READS_AN_MMA = 8
"""An mma reads at most this many blocks of tensor memory: parts of its accumulator and of operand A."""


@dataclass(slots=True)
class Read:
    """Columns read at a step. `by`: "tcgen05.ld" or "tcgen05.mma". `line`: the PTX line.

    `of_accumulator`: the mma reads the accumulator to which it adds, not its operand A.
    """

    step: int
    by: str
    warp: int
    line: int
    columns: Bounds
    of_accumulator: bool = False


@dataclass(slots=True)
class Holding:
    """Inclusive columns that hold one value from step `begins` on. Later holdings may overwrite parts of them.

    `landed`: the step at which its last write was complete.
    """

    by: str
    columns: Bounds
    begins: int
    landed: int
    lines: set[int] = field(default_factory=set[int])
    warps: set[int] = field(default_factory=set[int])
    cells: set[tuple[Bounds, Bounds]] = field(default_factory=set[tuple[Bounds, Bounds]])
    writes: list[int] = field(default_factory=list[int])
    reads: list[Read] = field(default_factory=list[Read])
    accumulates: bool = False
    name: str = ""

    @property
    def last_read(self) -> int | None:
        """The step of the last read; None if it is never read."""
        return max((read.step for read in self.reads), default=None)

    @property
    def writer(self) -> str:
        """The writer in words, identical in every iteration of a loop."""
        return f"{self.by} of {'warp' if len(self.warps) == 1 else 'warps'} {ranges(sorted(self.warps))}"


@dataclass(frozen=True, slots=True)
class TmemMap:
    """The holdings of one CTA, ordered by first step. The CTA had columns allocated from step `begins` to `ends`."""

    begins: int
    ends: int
    columns: int
    holdings: tuple[Holding, ...]


def tmem_map(cta: CtaTrace, last_step: int) -> TmemMap | None:
    """The map of a CTA, or None if it never had tensor memory."""
    if not cta.tmem_spans:
        return None
    ends = {operation.number: operation.ended for operation in cta.operations}
    holdings: list[Holding] = []
    for touch in cta.tmem:
        landed = (ends.get(touch.operation) if touch.operation is not None else None) or touch.step
        if touch.verb == "read":
            _note_read(holdings, touch, landed)
        else:
            _note_write(holdings, touch, landed)
    _name(cta, holdings)
    return TmemMap(
        begins=min(span.begins for span in cta.tmem_spans),
        ends=max(span.ends or last_step for span in cta.tmem_spans),
        columns=max(span.first + span.columns for span in cta.tmem_spans),
        holdings=tuple(holdings),
    )


def overlap(a: Bounds, b: Bounds) -> bool:
    """Whether two inclusive ranges have a number in common."""
    return a[0] <= b[1] and b[0] <= a[1]


def _touches(a: Bounds, b: Bounds) -> bool:
    return a[0] <= b[1] + 1 and b[0] <= a[1] + 1


def _current(holdings: Sequence[Holding], touch: TmemTouch) -> list[tuple[Holding, Bounds]]:
    """The holdings visible in the cells of an access, latest first, each with the columns where it is visible."""
    left, found = set(range(touch.columns[0], touch.columns[1] + 1)), list[tuple[Holding, Bounds]]()
    for holding in reversed(holdings):
        covered = {
            column
            for lanes, columns in holding.cells
            if overlap(lanes, touch.lanes) and overlap(columns, touch.columns)
            for column in range(columns[0], columns[1] + 1)
        } & left
        if covered:
            found.append((holding, (min(covered), max(covered))))
            left -= covered
        if not left:
            break
    return found


def _note_read(holdings: list[Holding], touch: TmemTouch, landed: int) -> None:
    for holding, columns in _current(holdings, touch):
        holding.reads.append(Read(landed, touch.by, touch.warp, touch.line, columns))


def _note_write(holdings: list[Holding], touch: TmemTouch, landed: int) -> None:
    into: Holding | None = None
    accumulating = False
    if touch.by.startswith(ACCUMULATORS):
        current = _current(holdings, touch)
        for holding, _ in current:
            for read in holding.reads[-MAX_READS_AN_MMA:]:
                if (read.line, read.warp, read.step) == (touch.line, touch.warp, landed):
                    accumulating = read.of_accumulator = True
        if accumulating and current[0][0].by == touch.by and current[0][0].columns == touch.columns:
            into = current[0][0]
    else:
        into = next((one for one in reversed(holdings[-8:]) if _continues(one, touch)), None)
    if into is None:
        into = Holding(touch.by, touch.columns, touch.step, landed, accumulates=accumulating)
        holdings.append(into)
    into.columns = (min(into.columns[0], touch.columns[0]), max(into.columns[1], touch.columns[1]))
    into.landed = max(into.landed, landed)
    into.lines.add(touch.line)
    into.warps.add(touch.warp)
    into.cells.add((touch.lanes, touch.columns))
    into.writes.append(landed)


def _continues(holding: Holding, touch: TmemTouch) -> bool:
    """Whether a store continues a holding: same writer, adjacent columns, and cells not written before."""
    if holding.by != touch.by or not _touches(holding.columns, touch.columns):
        return False
    return not any(overlap(lanes, touch.lanes) and overlap(columns, touch.columns) for lanes, columns in holding.cells)


def _name(cta: CtaTrace, holdings: Sequence[Holding]) -> None:
    """Names the holdings. S: an accumulator that softmax warps read, or that nobody reads and no mma adds to. O: any
    other accumulator. Without softmax warps every accumulator is D. P: stored values that become operand A of an mma.
    Values stored into an O or D are "rescaled O"."""
    softmax = {warp.index for warp in cta.warps if "softmax" in role_name(warp.opcodes)}
    for holding in holdings:
        readers = {read.warp for read in holding.reads if read.by == "tcgen05.ld"}
        if holding.by.startswith("tcgen05.cp"):
            holding.name = "scale factors"
        elif holding.by == "tcgen05.mma":
            holding.name = (
                ("S" if readers & softmax or not (readers or holding.accumulates) else "O") if softmax else "D"
            )
    accumulators = [one.columns for one in holdings if one.name in ("O", "D")]
    for holding in holdings:
        if holding.by == "tcgen05.st":
            again = any(overlap(holding.columns, columns) for columns in accumulators)
            operand = any(read.by == "tcgen05.mma" and not read.of_accumulator for read in holding.reads)
            holding.name = "rescaled O" if again else "P" if operand else "stored values"


def draw_tmem(map_: TmemMap, title: str, subtitle: str) -> str:
    """SVG: x is the VM step, y the column, the colour the writer."""
    per_column = max(1.0, 384 / map_.columns)
    plot_height = map_.columns * per_column
    keys = list(dict.fromkeys((one.name, one.writer) for one in map_.holdings))
    canvas = Canvas(LEFT + PLOT_WIDTH + RIGHT, TOP + plot_height + 76 + 20 * max(len(keys), 3))
    scale = PLOT_WIDTH / max(map_.ends - map_.begins, 1)

    def x(step: float) -> float:
        return LEFT + (min(max(step, map_.begins), map_.ends) - map_.begins) * scale

    def y(column: float) -> float:
        return TOP + column * per_column

    canvas.text(LEFT, 26, title, size=17, bold=True)
    canvas.text(LEFT, 47, subtitle, size=12, shape="soft")
    canvas.rectangle(LEFT, TOP, PLOT_WIDTH, plot_height, shape="empty")
    colours = {key: PALETTE[index % len(PALETTE)] for index, key in enumerate(keys)}
    for holding in map_.holdings:
        _draw_holding(canvas, holding, colours[holding.name, holding.writer], x, y, map_.ends)
    for holding in map_.holdings:
        _draw_reads(canvas, holding, x, y)
    _label(canvas, map_.holdings, x, y, map_.ends)
    _axes(canvas, map_, x, y, plot_height)
    _legend(canvas, map_.holdings, colours, TOP + plot_height + 62)
    return canvas.svg()


def _draw_holding(canvas: Canvas, holding: Holding, colour: str, x: Scale, y: Scale, end: int) -> None:
    """Full colour from the issue of the first write to the last read, then faint until overwritten."""
    top, height = y(holding.columns[0]), y(holding.columns[1] + 1) - y(holding.columns[0])
    last = holding.last_read if holding.last_read is not None else holding.landed
    lines = f"PTX line{'s' * (len(holding.lines) > 1)} {ranges(sorted(holding.lines))}"
    title = (
        f"{holding.name}, columns {holding.columns[0]}-{holding.columns[1]}: {holding.writer}, {lines}; written at "
        f"steps {holding.begins}-{holding.landed}, "
        + (f"last read at {holding.last_read}" if holding.last_read is not None else "never read")
    )
    canvas.rectangle(x(holding.begins), top, x(end) - x(holding.begins), height, shape="empty")
    canvas.rectangle(x(holding.begins), top, x(end) - x(holding.begins), height, fill=colour, opacity=DEAD, title=title)
    canvas.rectangle(
        x(holding.begins), top, x(last) - x(holding.begins), height, fill=colour, opacity=0.85, title=title
    )


def _draw_reads(canvas: Canvas, holding: Holding, x: Scale, y: Scale) -> None:
    """One line per read, merged if on the same pixel. An mma's reads of its own accumulator are not marked."""
    seen: set[tuple[int, str, tuple[int, int]]] = set()
    for read in holding.reads:
        if read.of_accumulator:
            continue
        spot = (round(x(read.step)), read.by, read.columns)
        if spot not in seen:
            seen.add(spot)
            dash = "3 2" if read.by == "tcgen05.mma" else ""
            at = x(read.step)
            canvas.line(at, y(read.columns[0]) + 0.5, at, y(read.columns[1] + 1) - 0.5, "mark", 1.1, dash)


def _label(canvas: Canvas, holdings: Sequence[Holding], x: Scale, y: Scale, end: int) -> None:
    """Writes the name of each block, if there is room for it and nothing overwrites the block."""
    for index, holding in enumerate(holdings):
        later = [one for one in holdings[index + 1 :] if _within(holding.columns, one.columns)]
        last = min([holding.last_read or holding.landed, *(one.begins for one in later)])
        rows = _visible_rows(holding, holdings[index + 1 :], last)
        if rows is None or x(last) - x(holding.begins) < 9 * len(holding.name) + 6:
            continue
        middle = (y(rows[0]) + y(rows[1] + 1)) / 2
        canvas.text(
            (x(holding.begins) + x(last)) / 2,
            middle + 6,
            holding.name,
            size=17,
            anchor="middle",
            bold=True,
            shape="label",
        )


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _visible_rows(holding: Holding, later: Sequence[Holding], last: int) -> tuple[int, int] | None:
    first, behind = holding.columns[0], holding.columns[1] + 1
    for other in later:
        if other.begins >= last or other.columns[1] < first or other.columns[0] >= behind:
            continue
        if other.columns[0] - first > behind - other.columns[1] - 1:
            behind = other.columns[0]
        else:
            first = other.columns[1] + 1
    return (first, behind - 1) if behind - first >= 16 else None


def _axes(canvas: Canvas, map_: TmemMap, x: Scale, y: Scale, height: float) -> None:
    for column in range(0, map_.columns + 1, 64 if map_.columns > 64 else 8):
        canvas.line(LEFT - 5, y(column), LEFT + PLOT_WIDTH, y(column), "grid", 0.6)
        canvas.text(LEFT - 9, y(column) + 4, str(column), anchor="end", shape="soft")
    for step in round_ticks(map_.begins, map_.ends, 12):
        canvas.line(x(step), TOP + height, x(step), TOP + height + 5, "axis")
        canvas.text(x(step), TOP + height + 19, str(step), anchor="middle", shape="soft")
    canvas.line(LEFT, TOP, LEFT, TOP + height, "axis", 1.2)
    canvas.line(LEFT, TOP + height, LEFT + PLOT_WIDTH, TOP + height, "axis", 1.2)
    canvas.text(24, TOP + height / 2, "tensor memory column", anchor="middle", turned=True)
    canvas.text(LEFT + PLOT_WIDTH / 2, TOP + height + 40, "VM steps: the order of events, not a time", anchor="middle")


def _legend(canvas: Canvas, holdings: Sequence[Holding], colours: Mapping[tuple[str, str], str], top: float) -> None:
    for row, (key, colour) in enumerate(colours.items()):
        y = top + 20 * row
        lines = sorted({line for one in holdings if (one.name, one.writer) == key for line in one.lines})
        named = ranges(lines) if len(lines) < 9 else f"{lines[0]} to {lines[-1]}"
        canvas.rectangle(LEFT, y, 22, 13, fill=colour, opacity=0.85)
        canvas.text(LEFT + 30, y + 11, f"{key[0]}: {key[1]}, PTX line{'s' * (len(lines) > 1)} {named}")
    left = LEFT + 640
    canvas.line(left + 11, top, left + 11, top + 13, "mark", 1.2)
    canvas.text(left + 30, top + 11, "read by tcgen05.ld")
    canvas.line(left + 11, top + 20, left + 11, top + 33, "mark", 1.2, "3 2")
    canvas.text(left + 30, top + 31, "read by tcgen05.mma as operand A")
    canvas.text(left + 30, top + 51, "full colour: still to be read; faint: nobody reads it any more", shape="soft")
