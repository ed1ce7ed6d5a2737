"""A comparison as tables for a terminal, as Markdown for a comment, and as JSON for a machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megamoe.contract.counted import counted
from megamoe.diff.differ import Call, ComparedRow, Comparison

FORMAT = "megamoe-comparison-1"
MAX_ROWS = 100
FOREST_WIDTH = 33
_STYLES: dict[Call, str] = {
    "STATUS-CHANGED": "bold red",
    "SLOWER": "bold red",
    "WORSE": "bold red",
    "MISSING": "bold red",
    "AMBIGUOUS": "yellow",
    "CHANGED": "yellow",
    "NEW": "cyan",
    "FASTER": "green",
    "BETTER": "green",
    "SAME": "dim",
}


def shown(comparison: Comparison, everything: bool = False) -> tuple[ComparedRow, ...]:
    """The rows that changed, or all of them if `everything`."""
    return tuple(row for row in comparison.rows if everything or row.call != "SAME")


def as_table(rows: Sequence[ComparedRow]) -> Group:
    """Two tables: rows with a ratio of times and its interval, and the other rows."""
    parts: list[Table | Text] = []
    timed = [row for row in rows if row.ratio is not None]
    if timed:
        parts.append(_timings(timed, forest_span(timed)))
    others = [row for row in rows if row.ratio is None]
    if others:
        parts.append(_others(others))
    return Group(*parts)


def _timings(rows: Sequence[ComparedRow], span: float) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("", "row"):
        table.add_column(name, overflow="fold")
    for name in ("before us", "after us", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"99 % interval, {-span:+.0%} to {span:+.0%}", no_wrap=True)
    table.add_column("")
    for row in rows:
        assert row.ratio is not None
        times = [f"{time:.2f}" if time is not None else "" for time in (row.before_us, row.after_us)]
        cells = [escape(str(row.key)), *times, f"{row.ratio - 1:+.1%}", forest(row, span), _same_program(row)]
        table.add_row(_styled(row), *cells)
    return table


def _others(rows: Sequence[ComparedRow]) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("", "row", ""):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(_styled(row), escape(str(row.key)), escape(row.sentence))
    return table


def _styled(row: ComparedRow) -> Text:
    style = "green" if row.call == "STATUS-CHANGED" and not row.regression else _STYLES[row.call]
    return Text(_called(row), style)


def _called(row: ComparedRow) -> str:
    """The call; for a changed status, also its direction."""
    if row.call != "STATUS-CHANGED":
        return row.call
    return f"{row.call} ({'worse' if row.regression else 'better'})"


def _same_program(row: ComparedRow) -> str:
    return "same program" if row.same_program else ""


def forest_span(rows: Sequence[ComparedRow]) -> float:
    """The reach of a forest plot of `rows` on either side of 0, as a share: a round number, at most 1."""
    ends = [abs(end - 1) for row in rows for end in (row.low, row.high, row.ratio) if end is not None]
    widest = max([0.0, *(end for end in ends if math.isfinite(end))])
    return next((span for span in (0.05, 0.1, 0.2, 0.5) if widest <= span), 1.0)


def forest(row: ComparedRow, span: float, width: int = FOREST_WIDTH) -> str:
    """The interval of `row` as a line of `width` characters, from -span to +span with 0 in the middle.

    Dots mark the threshold; an arrow means that the interval extends further.
    """
    if row.ratio is None or row.low is None or row.high is None or row.threshold is None:
        return " " * width
    middle = width // 2

    def column(ratio: float) -> int:
        return width if ratio == math.inf else round(middle + (ratio - 1) / span * middle)

    cells = [" "] * width
    for at in range(max(0, column(1 - row.threshold)), min(width, column(1 + row.threshold) + 1)):
        cells[at] = "·"
    cells[middle] = "│"
    first, last = column(row.low), column(row.high)
    for at in range(max(first, 0), min(last, width - 1) + 1):
        cells[at] = "─"
    if first < 0:
        cells[0] = "◄"
    if last >= width:
        cells[-1] = "►"
    if 0 <= (centre := column(row.ratio)) < width:
        cells[centre] = "●"
    return "".join(cells)


def as_markdown(comparison: Comparison, strict: bool = False) -> str:
    """Markdown for a comment on a change: the verdict, the counts, and at most MAX_ROWS rows that differ."""
    verdict = "regression" if comparison.exit_status(strict) else "no regression"
    lines = [
        f"### megamoe compare: {verdict}",
        "",
        f"`{comparison.before}` → `{comparison.after}`: {comparison.line}",
        "",
    ]
    lines += [f"> **Not the same machine:** {_cell(difference)}\n" for difference in comparison.across]
    lines += [f"> {_cell(note)}\n" for note in comparison.notes]
    rows = shown(comparison)
    if rows:
        lines += ["| call | row | before → after | |", "|---|---|---|---|"]
        lines += [_markdown_row(row) for row in rows[:MAX_ROWS]]
    if len(rows) > MAX_ROWS:
        lines += ["", f"… and {counted(len(rows) - MAX_ROWS, 'more row')}."]
    return "\n".join(lines) + "\n"


def _markdown_row(row: ComparedRow) -> str:
    mark = "**" if row.regression else ""
    times = "" if row.before_us is None or row.after_us is None else f"{row.before_us:.2f} → {row.after_us:.2f} µs"
    return f"| {mark}{_called(row)}{mark} | `{_cell(str(row.key))}` | {times} | {_cell(row.sentence)} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("`", "'").replace("<", "&lt;").split())


def as_json(comparison: Comparison, strict: bool = False) -> dict[str, object]:
    """The whole comparison as plain values. An interval without an upper end has null there."""
    return {
        "format": FORMAT,
        "before": comparison.before,
        "after": comparison.after,
        "exit_status": comparison.exit_status(strict),
        "summary": comparison.line,
        "counts": comparison.counts,
        "notes": list(comparison.notes),
        "across": list(comparison.across),
        "rows": [_json_row(row) for row in comparison.rows],
    }


def _json_row(row: ComparedRow) -> dict[str, object]:
    values = {name: getattr(row, name) for name in ComparedRow.__slots__ if name not in ("key", "changes")}
    key = row.key
    found: dict[str, object] = {"kind": key.kind, "case": key.case, "backend": key.backend, "target": key.target}
    found |= {"executor": key.by, "variant": key.variant, **{name: _plain(value) for name, value in values.items()}}
    if row.changes:
        found["changes"] = [
            {"name": one.name, "before": one.before, "after": one.after, "trend": one.trend} for one in row.changes
        ]
    return {name: value for name, value in found.items() if value is not None or name == "high"}


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lines_of(comparison: Comparison) -> Iterator[str]:
    """Lines to read before the rows: both sides, and how their machines differ."""
    yield f"before: {comparison.before}"
    yield f"after:  {comparison.after}"
    yield from (f"not the same machine: {difference}" for difference in comparison.across)
    yield from comparison.notes
