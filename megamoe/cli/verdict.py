"""For `megamoe run` and `megamoe gate`: reads the expected failures and prints a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megamoe import CHECKOUT
from megamoe.contract import STATUSES
from megamoe.gate.expected import Expectation, read_expected
from megamoe.gate.verdict import Verdict
from megamoe.records.lines import Record

EXPECTED = CHECKOUT / "conformance" / "expected.yaml"


def expectations_of(path: Path | None) -> tuple[Expectation, ...]:
    """The entries of `path`, which must exist. Without a path those of conformance/expected.yaml, if it is there."""
    if path is None and not EXPECTED.exists():
        return ()
    return read_expected(path or EXPECTED)


def print_verdict(console: Console, verdict: Verdict, records: Sequence[Record]) -> None:
    """Prints a table of the records, a sentence a finding, and the line that sums up."""
    if records:
        console.print(_table(records))
    for sentence in (*verdict.asks, *verdict.problems):
        console.print(sentence, markup=False)
    console.print(verdict.line, style="bold green" if verdict.passed else "bold red")


def _table(records: Sequence[Record]) -> Table:
    """Counts by op, backend, target, executor and status, with the host seconds of the judge."""
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
        table.add_row(*key, *counts, f"{sum(record.judge_host_seconds or 0.0 for record in group):.1f}")
    return table
