"""The map of tensor memory as a picture: x is the count of VM steps, y the column, colour says who wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megamoe.explain.roles import ranges
from megamoe.explain.svg import PALETTE, Canvas, round_ticks
from megamoe.explain.tmem import Holding, TmemMap

Scale = Callable[[float], float]
LEFT, RIGHT, TOP, PLOT_WIDTH = 78, 24, 74, 1120
DEAD = 0.22
"""Opacity of a value that nobody will read any more."""


def draw(map_: TmemMap, title: str, subtitle: str) -> str:
    """The picture as SVG."""
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
    """Full colour from the issue of the first write to the last read, faint until something overwrites it."""
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
    """A line a read; those that fall on the same pixel are one. Reads by the mma that accumulates are not marked."""
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
    """The name on each block that has room for it and is not overwritten there."""
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
