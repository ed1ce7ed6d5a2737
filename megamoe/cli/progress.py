"""The progress of a run: a bar with counts and the remaining time on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megamoe.contract import STATUSES
from megamoe.records.lines import Record

PLAIN_LINE_EVERY_S = 10.0


def _bar(console: Console) -> Progress:
    count, status, left = MofNCompleteColumn(), TextColumn("{task.description}"), TextColumn("left")
    return Progress(
        TextColumn("rows"),
        BarColumn(),
        count,
        status,
        TimeElapsedColumn(),
        left,
        TimeRemainingColumn(),
        console=console,
    )


class RunProgress:
    """Counts records as they come and prints each row that did not pass."""

    def __init__(self, console: Console, total: int, bar: bool) -> None:
        self._console, self._total = console, total
        self._counts: Counter[str] = Counter()
        self._started = self._printed = time.monotonic()
        self._bar = _bar(console) if bar else None
        self._task = self._bar.add_task("", total=total) if self._bar else None

    def show(self, record: Record) -> None:
        """Counts one record, and prints its row unless it passed. The verdict prints the sentence."""
        self._counts[record.status] += 1
        if record.status != "passed":
            self._console.print(f"{record.status}: {record.row}", markup=False, highlight=False, soft_wrap=True)
        if self._bar and self._task is not None:
            self._bar.update(self._task, advance=1, description=escape(self._summary()))
        elif self._counts.total() == self._total or time.monotonic() - self._printed >= PLAIN_LINE_EVERY_S:
            self._printed = time.monotonic()
            elapsed = self._printed - self._started
            self._console.print(f"{self._counts.total()}/{self._total} rows, {self._summary()}, {elapsed:.0f} s")

    def _summary(self) -> str:
        return ", ".join(f"{self._counts[name]} {name}" for name in STATUSES if self._counts[name])

    def __enter__(self) -> RunProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
