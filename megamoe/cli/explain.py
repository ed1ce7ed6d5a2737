"""`megamoe explain`: what a person wants to see of a kernel before profiling it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megamoe.cli import options as cli_options
from megamoe.cli.options import Specs, find_modules_of_the_user
from megamoe.contract import UnsupportedError
from megamoe.spec.load import load_specs
from megamoe.spec.selection import DEFAULT_EXECUTOR, SelectionError, checked_targets, expand_schedules, spec_of

FOLDER = Path("results/explain")
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
    # These bring torch, which `megamoe list` must not pay for.
    from megamoe.explain.explain import ExplainError, Subject, explain, write_files
    from megamoe.explain.tables import report

    find_modules_of_the_user([backend, executor])
    known = load_specs(specs)
    spec = spec_of(known, case)
    parsed = spec.parse_case(case)
    names = expand_schedules([schedule])
    if len(names) != 1:
        raise SelectionError(f"one schedule is explained at a time, not {schedule!r}")
    subject = Subject(parsed, backend, checked_targets([target])[0], executor, names[0])
    try:
        found = explain(spec, subject)
        folder = output or FOLDER / subject.label
        files = write_files(found, folder)
    except (UnsupportedError, ExplainError) as error:
        raise SelectionError(str(error)) from error
    except Exception as error:
        # What a backend's own code raises: it may be the user's.
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
