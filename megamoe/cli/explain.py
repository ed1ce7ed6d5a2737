"""`megamoe explain`: what to look at in a kernel before profiling it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megamoe.cli import options as cli_options
from megamoe.cli.options import Specs, find_modules_of_the_user
from megamoe.contract import Row, UnsupportedError
from megamoe.explain import FOLDER, folder_of
from megamoe.spec.load import load_specs
from megamoe.spec.selection import DEFAULT_EXECUTOR, SelectionError, checked_targets, expand_schedules, spec_of

REPORT_WIDTH = 180


def explain_case(
    case: Annotated[str, typer.Argument(metavar="CASE", help="Case id, as `megamoe list` prints it.")],
    backend: Annotated[str, typer.Option("--backend", metavar="NAME", help="Registered, or package.module:ATTRIBUTE.")],
    target: Annotated[str, typer.Option("--target", metavar="NAME", help="sm_90a or sm_100a.")] = "sm_100a",
    executor: Annotated[str, typer.Option("--executor", metavar="NAME", help="As for --backend.")] = DEFAULT_EXECUTOR,
    schedule: Annotated[str, typer.Option("--schedule", metavar="NAME", help="eager, lazy, random:SEED.")] = "lazy",
    output: Annotated[Path | None, typer.Option("--output", help=f"Folder; a new one in {FOLDER}.")] = None,
    specs: Specs = None,
) -> None:
    """Shows geometry, memory maps, warp roles, pipeline and counters of one case; writes pictures and a trace."""
    # These import torch, which would slow down every other command.
    from megamoe.explain.explain import ExplainError, explain, write_files
    from megamoe.explain.tables import report

    find_modules_of_the_user([backend, executor])
    known = load_specs(specs)
    spec = spec_of(known, case)
    names = expand_schedules([schedule])
    if len(names) != 1:
        raise SelectionError(f"one schedule is explained at a time, not {schedule!r}")
    row = Row(spec.parse_case(case).id, backend, checked_targets([target])[0], executor, names[0])
    folder = output or folder_of(row.case, row.backend, row.target)
    try:
        found = explain(spec, row)
        files = write_files(found, folder)
    except (UnsupportedError, ExplainError) as error:
        raise SelectionError(str(error)) from error
    except Exception as error:
        # A backend may be the user's own code and raise anything.
        raise SelectionError(f"{case} on {backend} cannot be explained: {type(error).__name__}: {error}") from error
    with (folder / "report.txt").open("w", encoding="utf-8") as text:
        Console(file=text, width=REPORT_WIDTH, highlight=False).print(report(found))
    console = cli_options.console()
    console.print(report(found))
    console.print()
    for file in [folder / "report.txt", *files]:
        note = ": open it in ui.perfetto.dev" if file.suffix == ".json" else ""
        console.print(f"{file}{note}", markup=False)
    if found.violation:
        raise typer.Exit(1)
