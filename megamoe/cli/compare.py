"""`megamoe compare`: what became of every row between two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from megamoe.cli.options import Specs, console
from megamoe.records.files import write_file
from megamoe.spec.load import load_specs

_SIDE = "a record file, a folder of them, a git revision, or REV:PATH"


def compare(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help=f"What it was: {_SIDE}.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="What it is now, likewise.")],
    row: Annotated[
        list[str] | None,
        typer.Option("--row", metavar="GLOB", help='Only rows whose text matches, as "*on ptx*(timing)".'),
    ] = None,
    across: Annotated[bool, typer.Option("--across", help="Compare other machines or versions; labelled.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="AMBIGUOUS fails as well.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show the rows that are the same, too.")] = False,
    most: Annotated[int, typer.Option("--most", min=0, metavar="N", help="Show at most N rows.")] = 100,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it as JSON.")] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write it as a comment on a change.")
    ] = None,
    specs: Specs = None,
) -> None:
    """Compares two runs row by row: statuses and counters exactly, times by intervals on raw samples.

    A revision alone means the tracked baselines at it. Exit status: 0 fine; 1 a regression, a missing row, a worse
    status; 2 nothing that can be compared. How times are compared, and how often it errs: results/README.md.
    """
    # Only this command needs tables and the differ; the others start faster without.
    from megamoe.diff.differ import compare_runs
    from megamoe.diff.sides import read_side
    from megamoe.report.comparison import (
        as_json,
        as_markdown,
        as_table,
        lines_of,
        shown,
    )

    known = load_specs(specs)
    comparison = compare_runs(read_side(before), read_side(after), known, across=across, only=row or ())
    if json_file:
        write_file(
            json_file, json.dumps(as_json(comparison, strict), indent=1, allow_nan=False) + "\n", "the comparison"
        )
    if markdown_file:
        write_file(markdown_file, as_markdown(comparison, strict), "the comparison")
    terminal = console()
    for line in lines_of(comparison):
        terminal.print(line, markup=False)
    rows = shown(comparison, everything)
    if rows[:most]:
        terminal.print(as_table(rows[:most]))
    if len(rows) > most:
        terminal.print(f"… and {len(rows) - most} more rows; --most {len(rows)} shows all of them")
    status = comparison.exit_status(strict)
    terminal.print(comparison.line, style="bold red" if status else "bold green", markup=False)
    raise typer.Exit(status)
