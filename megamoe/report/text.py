"""The report for a terminal: the matrix by op and subject, the worst rows, counters, and a comparison."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megamoe.contract import Status
from megamoe.contract.counted import counted
from megamoe.records.keys import SEVERITY
from megamoe.records.lines import Record, Timing
from megamoe.report.layout import Grid, Listing, lay_out, spans
from megamoe.report.material import Material, Subject
from megamoe.report.measures import MEASURES, SIGNS, counter_ratios, error_ratio, share_of_floor
from megamoe.spec.spec import Spec

if TYPE_CHECKING:
    from megamoe.diff.differ import Comparison

MAX_WORST = 10
MAX_SENTENCE = 300
_STYLES: Mapping[Status, str] = {"passed": "", "unsupported": "dim", "not_run": "yellow"}
_BAD = "bold white on red"


@dataclass(frozen=True, slots=True)
class _Cell:
    """A case of a subject: its worst status over the schedules, and its cold share of the floor (floor over median
    time)."""

    status: Status
    floor: float | None

    @property
    def text(self) -> Text:
        share = "" if self.floor is None else f"{min(self.floor, 9.99):.2f}".removeprefix("0")
        return Text(SIGNS[self.status] + share, style=_STYLES.get(self.status, _BAD))


_Cells = Mapping[tuple[str, Subject], _Cell]


def tables(material: Material, specs: Mapping[str, Spec], comparison: Comparison | None = None) -> Group:
    """The whole report, ready to print."""
    cells = _cells(material)
    parts: list[RenderableType] = [_heading(material)]
    for op in material.ops:
        parts += _matrix(op, material, specs.get(op), cells)
    parts += _worst(material)
    parts += _counters(material)
    if comparison is not None:
        parts += _comparison(comparison)
    parts += [Text(note, style="yellow") for note in material.notes]
    return Group(*parts)


def _heading(material: Material) -> Text:
    counts = Counter(record.status for record in material.latest)
    text = Text("")
    for status in reversed(SEVERITY):
        if counts[status]:
            text.append(f"{SIGNS[status]} {counts[status]:,} {status.replace('_', ' ')}  ", _STYLES.get(status, _BAD))
    text.append(
        f"{counted(len(material.records), 'record')} and {counted(len(material.timings), 'timing')} "
        f"of {counted(len(material.runs), 'run')}"
    )
    if material.runs:
        newest = material.runs[-1]
        device = newest.device.name if newest.device else "no device"
        revision = (newest.git_revision or "unknown")[:10]
        text.append(f"; newest {newest.started[:16]} UTC at {revision}, {device}", style="dim")
    if timed := _timed_on(material):
        text.append(f"; times of: {', '.join(timed)}", style="dim")
    return text


def _timed_on(material: Material) -> list[str]:
    """The devices of the runs with timings. The newest run may have another."""
    devices = {run.run: run.device.name for run in material.runs if run.device}
    return list(dict.fromkeys(devices[line.run] for line in material.timings if line.run in devices))


def _cells(material: Material) -> dict[tuple[str, Subject], _Cell]:
    statuses: dict[tuple[str, Subject], list[Status]] = {}
    floors: dict[tuple[str, Subject], float | None] = {}
    for record in material.latest:
        statuses.setdefault(_key(record), []).append(record.status)
    for timing in material.latest_timings:
        statuses.setdefault(_key(timing), [timing.status])
        if timing.temperature == "cold":
            floors[_key(timing)] = share_of_floor(timing, material.devices.get(timing.run))
    return {key: _Cell(min(found, key=SEVERITY.index), floors.get(key)) for key, found in statuses.items()}


def _key(line: Record | Timing) -> tuple[str, Subject]:
    return line.case, Subject(line.backend, line.target, line.executor)


def _matrix(op: str, material: Material, spec: Spec | None, cells: _Cells) -> Iterator[RenderableType]:
    lines = (*material.records, *material.timings, *material.figures)
    cases = [line.case for line in lines if line.op == op]
    subjects = [one for one in material.subjects if any((case, one) in cells for case in cases)]
    yield Text(f"\n{op}", style="bold")
    for block in lay_out(spec, cases):
        if isinstance(block, Grid):
            yield _grid(block, subjects, cells)
        else:
            yield _listing(block, subjects, cells)


def _grid(block: Grid, subjects: Sequence[Subject], cells: _Cells) -> Table:
    fixed = "".join(f" {name}={value}" for name, value in block.fixed.items())
    table = Table(box=None, title=f"{block.title}{fixed}", title_justify="left", title_style="dim", pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column(f"{block.row_axis} \\ {', '.join(block.column_axes)}", justify="right", no_wrap=True)
    for label in _column_labels(block):
        table.add_column(label, justify="left", no_wrap=True)
    for subject in subjects:
        for place, (value, row) in enumerate(zip(block.rows, block.cells, strict=True)):
            texts = [_text(cells.get((case, subject)) if case else None) for case in row]
            if any(texts):
                table.add_row(Text("" if place else str(subject)), value, *texts)
    return table


def _column_labels(block: Grid) -> list[str]:
    """Headers with one line per axis; a value is shown where it changes."""
    lines: list[list[str]] = []
    for level in range(len(block.column_axes)):
        lines.append([label for value, span in spans(block.columns, level) for label in [value, *[""] * (span - 1)]])
    return ["\n".join(column) for column in zip(*lines, strict=True)]


def _text(cell: _Cell | None) -> Text:
    return Text("") if cell is None else cell.text


def _listing(block: Listing, subjects: Sequence[Subject], cells: _Cells) -> Table:
    table = Table(box=None, title=f"{block.title}, {counted(len(block.cases), 'case')} in order", title_justify="left",
                  title_style="dim", pad_edge=False, show_header=False)  # fmt: skip
    for subject in subjects:
        found = [cells.get((case, subject)) for case in block.cases]
        if any(found):
            signs = [cell.text if cell else Text("·", style="dim") for cell in found]
            timed = any(cell and cell.floor is not None for cell in found)
            table.add_row(Text(str(subject)), Text(" " if timed else "").join(signs))
    return table


def _worst(material: Material) -> Iterator[RenderableType]:
    """The rows that did not pass. If all passed, the rows nearest to their bars."""
    bad = [record for record in material.latest if record.status not in ("passed", "unsupported")]
    bad.sort(key=lambda record: SEVERITY.index(record.status))
    if bad:
        yield Text("\nrows that did not pass", style="bold")
        for record in bad[:MAX_WORST]:
            sentence = (
                record.sentence if len(record.sentence) <= MAX_SENTENCE else record.sentence[:MAX_SENTENCE] + " …"
            )
            yield Text(f"{SIGNS[record.status]} {record.row}: {sentence}")
        if len(bad) > MAX_WORST:
            yield Text(f"… and {len(bad) - MAX_WORST:,} more", style="dim")
        return
    cells = {_key(record): record for record in material.latest}
    held = [(ratio, record) for record in cells.values() if (ratio := error_ratio(record.metrics))]
    held.sort(key=lambda pair: -pair[0][0])
    if held:
        table = Table(box=None, title="nearest to their bars", title_justify="left", title_style="bold", pad_edge=False)
        for name in ("error / bar", "metric", "row"):
            table.add_column(name)
        for (ratio, name), record in held[:MAX_WORST]:
            table.add_row(f"{ratio:.3f}", Text(name), Text(str(record.row)))
        yield Text("")
        yield table


def _counters(material: Material) -> Iterator[RenderableType]:
    """Median and worst of each counter ratio, by op and subject."""
    measures = [measure for measure in MEASURES if measure.source == "counters"]
    found: dict[tuple[str, Subject], list[dict[str, float]]] = {}
    for record in material.latest:
        if ratios := counter_ratios(record.counters):
            found.setdefault((record.op, _key(record)[1]), []).append(ratios)
    if not found:
        return
    title = "counters: median and worst over the cases"
    table = Table(box=None, title=title, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("op")
    table.add_column("subject")
    for measure in measures:
        table.add_column(measure.title, justify="right")
    for (op, subject), ratios in sorted(found.items()):
        told = [_median_and_worst(ratios, one.name, one.style) for one in measures]
        table.add_row(Text(op), Text(str(subject)), *told)
    yield Text("")
    yield table


def _median_and_worst(ratios: Iterable[Mapping[str, float]], name: str, style: str) -> str:
    values = [one[name] for one in ratios if name in one and math.isfinite(one[name])]
    if not values:
        return "-"
    pair = median(values), max(values)
    return " / ".join(f"{value:.1%}" if style == "percent" else f"{value:.2f}" for value in pair)


def _comparison(found: Comparison) -> Iterator[RenderableType]:
    from megamoe.report.comparison import as_table, lines_of, shown

    yield Text("\ncomparison", style="bold")
    yield from (Text(line) for line in lines_of(found))
    if rows := shown(found)[:MAX_WORST]:
        yield as_table(rows)
    yield Text(found.line, style="bold red" if found.exit_status() else "bold green")
