"""`megamoe accept`: takes a change into the tracked baseline on purpose, and says why."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from megamoe import CHECKOUT
from megamoe.cli import options as cli_options
from megamoe.cli.options import Expected, Specs
from megamoe.cli.run import RUNS
from megamoe.cli.verdict import expectations_of
from megamoe.contract import Row
from megamoe.gate.accept import Seen, parse_row, rows_matching, seen_in, take
from megamoe.gate.baseline import VM_BASELINE, baseline_for, read_baseline, sole_writer, write_baseline
from megamoe.records.files import read_records
from megamoe.records.lines import Acceptance
from megamoe.records.provenance import git_revision
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, SelectionError, owed_rows

Rows = Annotated[list[str] | None, typer.Argument(metavar="ROW...", help="Rows as the gate prints them.")]
AllOf = Annotated[
    str | None, typer.Option("--all-of", metavar="CASE-GLOB", help="All rows whose case matches, instead of ROW.")
]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why the change is right. It is kept.")]
From = Annotated[
    list[Path] | None,
    typer.Option("--from", metavar="RECORDS", help=f"Where the rows were seen.  [default: the newest file in {RUNS}]"),
]
BaselineFile = Annotated[
    Path | None,
    typer.Option("--baseline", metavar="FILE", help="What to change.  [default: vm.jsonl, or that of the device]"),
]


def accept(
    reason: Reason,
    rows: Rows = None,
    all_of: AllOf = None,
    records: From = None,
    baseline: BaselineFile = None,
    specs: Specs = None,
    expected: Expected = None,
) -> None:
    """Takes rows, as a run has seen them, into the baseline that the gate holds runs against.

    A row brings its counters, the compiler figures of its program and its times. A row that nobody owes any more leaves
    the baseline. A row that did not pass is refused.
    """
    console = cli_options.console()
    text = _checked(reason)
    if bool(rows) == bool(all_of):
        raise SelectionError("name rows as the gate prints them, or give --all-of CASE-GLOB, and not both")
    seen = seen_in([read_records(path) for path in records or _newest()])
    owed = frozenset(owed_rows(load_specs(specs), Selection()))
    wanted = (
        [parse_row(row) for row in _quoted(rows)] if rows else _matching(all_of or "", seen, baseline, owed, expected)
    )
    path = _one_path(wanted, seen, baseline)
    why = Acceptance(
        run="accept",
        row="*",
        reason=text,
        accepted=datetime.now(UTC).isoformat(timespec="seconds"),
        git_revision=git_revision(CHECKOUT),
    )
    with sole_writer(path):
        after, accepted = take(read_baseline(path), seen, wanted, owed, why)
        if not accepted:
            raise SelectionError(f"there is nothing to accept: {path} says the same as {seen.where}")
        write_baseline(after)
    for one in accepted:
        steps = ", ".join(f"{name} {step}" for name, step in one.changes.items())
        console.print(f"accepted: {one.row}: {steps}", markup=False)
    left_out = len(seen.unsupported) if all_of else 0
    if left_out:
        console.print(f"left out: {left_out} rows that are unsupported where they were run")
    console.print(f"{len(accepted)} rows of {path} changed; commit it with the change that it is about", markup=False)


def _checked(reason: str) -> str:
    """The reason in one line. SelectionError if it says nothing, like the dots that the gate prints for it."""
    text = " ".join(reason.split())
    if not any(character.isalnum() for character in text):
        raise SelectionError(
            f"--reason {reason!r} says nothing; write why the change is right, for those who come later"
        )
    return text


def _newest() -> list[Path]:
    files = sorted(RUNS.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    return files[-1:]


def _quoted(words: list[str]) -> list[str]:
    """The rows, if they were quoted; else one row, which the shell split into words."""
    return words if all(" on " in word for word in words) else [" ".join(words)]


def _matching(
    pattern: str, seen: Seen, baseline: Path | None, owed: Collection[Row], expected: Path | None
) -> list[Row]:
    expectations = expectations_of(expected)
    excused = {row for row in seen.rows if any(one.entry.matches(row) for one in expectations)}
    found = rows_matching(pattern, read_baseline(baseline or VM_BASELINE), seen, owed, excused)
    if not found:
        raise SelectionError(f"no row of {seen.where} or of the baseline has a case that matches {pattern!r}")
    return found


def _one_path(rows: list[Row], seen: Seen, baseline: Path | None) -> Path:
    """The file that holds all of `rows`."""
    if baseline is not None:
        return baseline
    headers = seen.rows
    paths = sorted({baseline_for(row.executor, headers.get(row)) for row in rows})
    if len(paths) > 1:
        names = " and ".join(path.name for path in paths)
        raise SelectionError(f"these rows belong to {names}: name the rows of one, or the file with --baseline")
    return paths[0]
