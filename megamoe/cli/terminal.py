"""What the user sees: the one console, the progress of a run, and a verdict. Nothing else writes to a terminal.

A message may repeat bytes from a backend, a file or an option. Control characters are escaped here, so that none of
them moves the cursor, paints over a verdict or starts a new line.
"""

from __future__ import annotations

import os
import re
import select
import signal
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from megamoe.contract import STATUSES, Row, Status
from megamoe.contract.counted import counted
from megamoe.diff.directions import NOT_FAILED_ON
from megamoe.gate.verdict import Finding, Verdict
from megamoe.records.lines import MAX_CHARACTERS, MAX_LINE_TEXT, Record, shortened, without_rerun

PLAIN_LINE_EVERY_S = 10.0
MIN_FOLDED = 3
_FOLDED: tuple[Status, ...] = ("unsupported", "not_run")

# C0 except tab and newline, DEL, C1, and characters that reorder or separate lines: ISO 6429, Unicode 3.11, UAX #9.
_CONTROLS = (*range(9), *range(11, 32), *range(127, 160), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F))
_ESCAPED: Mapping[int, str] = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in (*_CONTROLS, *range(0x2066, 0x206A))
}


def printable(text: str) -> str:
    """`text` with each control character except tab and newline escaped as in Python."""
    return text if text.isprintable() else text.translate(_ESCAPED)


def on_one_line(text: str) -> str:
    """Makes a message that cannot pretend to be two lines."""
    return printable(text).replace("\n", "\\n")


class Terminal(Console):
    """A console that escapes control characters in text, and raises BrokenPipeError when its reader is gone."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As in Console. Cursor moves that rich makes itself are control segments and pass unchanged."""
        for one in super().render(renderable, options):
            yield one if one.control else Segment(printable(one.text), one.style)

    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError, because rich would exit from within a print."""
        self.quiet = True
        raise BrokenPipeError


def console(quiet: bool = False) -> Console:
    """The console of a command: as wide as the terminal, or 200 columns without one. `quiet` shows nothing."""
    found = Terminal(highlight=False, soft_wrap=True, quiet=quiet)
    return found if found.is_terminal else Terminal(highlight=False, soft_wrap=True, width=200, quiet=quiet)


_LONG = re.compile(
    rf"(?<![^\s(])'([^'\n]{{{MAX_CHARACTERS + 1},}})'(?!\w)|(?<!\S)(?![./])\S{{{MAX_CHARACTERS + 100},}}"
)
"""A quotation or a word of which nobody reads the end. A path is kept."""


def _repeated(found: re.Match[str]) -> str:
    return f"'{shortened(found[1])}'" if found[1] else shortened(found[0])


def complain(text: str) -> None:
    """Prints one sentence on stderr. What it repeats of a long option or file is shortened, and so is the whole."""
    text = _LONG.sub(_repeated, text)
    print(printable(shortened(text, MAX_LINE_TEXT)), file=sys.stderr)


def in_ci() -> bool:
    """Whether a CI service runs this; all of them set CI."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


INTERRUPT_AGAIN_S = 5.0


def let_go_of_stdout() -> None:
    """Redirects stdout to /dev/null, so that Python does not complain about the lost reader again at exit."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


@contextmanager
def ended_with_its_reader() -> Iterator[None]:
    """Interrupts this process, as Ctrl-C does, when the reader of its stdout pipe is gone, as after `| head`.

    A print would notice that only at the next row, and a row may take minutes.
    """
    descriptor = -1
    try:
        descriptor = sys.stdout.fileno()
        piped = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except (OSError, ValueError):
        piped = False
    if not piped:
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(descriptor, over), daemon=True)
    # A script's background job starts with SIGINT ignored; this process's own interrupt would then be lost.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        if before is signal.SIG_IGN:
            signal.signal(signal.SIGINT, before)


def _watch(descriptor: int, over: threading.Event) -> None:
    # poll reports POLLERR without being asked, and on Linux only once the last reader is gone.
    poll = select.poll()
    poll.register(descriptor, 0)
    while not over.is_set():
        if poll.poll(200) and not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            # An interrupt is lost where Python cannot raise, such as in a callback or a finaliser. So repeat it.
            over.wait(INTERRUPT_AGAIN_S)


# Progress


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
    """A bar with counts and remaining time on a terminal, plain lines elsewhere, and each row that went wrong."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total = console, total
        self._counts: Counter[str] = Counter()
        self._started = self._printed = time.monotonic()
        self._bar = _bar(console) if console.is_terminal and not console.quiet and not in_ci() else None
        self._task = self._bar.add_task("", total=total) if self._bar else None

    def show(self, record: Record) -> None:
        """Counts one record, and prints its row if it went wrong. The verdict prints the sentence."""
        self._counts[record.status] += 1
        if record.status not in ("passed", "unsupported"):
            self._console.print(f"{record.status}: {record.row}", markup=False, highlight=False, soft_wrap=True)
        if self._bar and self._task is not None:
            self._bar.update(self._task, advance=1, description=escape(self._summary()))
        elif self._counts.total() == self._total or time.monotonic() - self._printed >= PLAIN_LINE_EVERY_S:
            self._printed = time.monotonic()
            elapsed = self._printed - self._started
            self._console.print(
                f"{self._counts.total():,}/{counted(self._total, 'row')}, {self._summary()}, {elapsed:.0f} s"
            )

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


# The verdict


def print_verdict(verdict: Verdict, records: Sequence[Record], quiet: bool = False, summed_up: str = "") -> None:
    """Prints a table of the records, one sentence per finding, and a summary line. `quiet`: no table.

    Rows that are unsupported or were not run for the same reason share a sentence. Rows whose sentence contains
    `summed_up` get none, because the command prints one for all of them.
    """
    out = console()
    if records and not quiet:
        out.print(_table(records))
    findings = sorted(verdict.findings, key=lambda one: one.closes)
    for sentence in _sentences(findings, verdict.records, summed_up):
        out.print(on_one_line(sentence), markup=False)
    if counted := _counted_only(records):
        out.print(counted, markup=False)
    out.print(verdict.line, style="bold green" if verdict.passed else "bold red")


def _counted_only(records: Sequence[Record]) -> str:
    """Lists what the ISA forbids and rows of unregistered backends passed with nevertheless; "" if nothing.

    For registered backends the gate compares these counters with a baseline.
    """
    counts, rows = Counter[str](), 0
    for record in records:
        if record.status == "passed" and ":" in record.backend:
            found = {name: count for name in NOT_FAILED_ON if (count := record.counters.get(name, 0))}
            counts.update(found)
            rows += bool(found)
    told = ", ".join(f"{name} {count}" for name, count in counts.items())
    return (
        f"{counted(rows, 'row')} passed with what a row does not fail on: {told}; see docs/rules/README.md"
        if told
        else ""
    )


def _sentences(findings: Sequence[Finding], records: Mapping[Row, Record | None], summed_up: str) -> Iterator[str]:
    """The findings as sentences. If MIN_FOLDED or more rows share a reason, it is printed once."""
    groups: dict[str, list[Finding]] = {}
    for number, one in enumerate(findings):
        record = records.get(one.row) if one.row else None
        if record and record.status in _FOLDED and one.kind == "status":
            if not (summed_up and summed_up in one.sentence):
                groups.setdefault(_without_row(record, one.sentence), []).append(one)
        else:
            groups[str(number)] = [one]
    for why, group in groups.items():
        if len(group) < MIN_FOLDED:
            yield from map(str, group)
        else:
            yield f"{why} ({counted(len(group), 'row')}, {group[0].row} to {group[-1].row})"


def _without_row(record: Record, sentence: str) -> str:
    return without_rerun(sentence).replace(str(record.row), "the row").replace(record.case, "the case")


def _table(records: Sequence[Record]) -> Table:
    """Counts by op, backend, target, executor and status, with the judge's host seconds."""
    groups: dict[tuple[str, str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.op, record.backend, record.target, record.executor), []).append(record)
    statuses = [name for name in STATUSES if any(record.status == name for record in records)]
    table = Table(box=None, header_style="bold")
    for name in ("op", "backend", "target", "executor"):
        table.add_column(name, overflow="fold")
    for name in (*statuses, "host s"):
        table.add_column(name, justify="right")
    for key, group in groups.items():
        counts = [str(sum(record.status == name for record in group)) for name in statuses]
        table.add_row(*map(escape, key), *counts, f"{sum(record.judge_host_seconds or 0.0 for record in group):.1f}")
    return table
