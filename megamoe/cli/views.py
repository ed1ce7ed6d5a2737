"""The commands that turn record files into something else: `megamoe compare`, `report` and `export`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megamoe import CHECKOUT
from megamoe.cli.options import HowCompared, Specs, bounded, with_options
from megamoe.cli.terminal import console
from megamoe.contract.counted import counted
from megamoe.records.files import write_file
from megamoe.records.lines import RecordError
from megamoe.spec.load import load_specs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megamoe.diff.differ import Comparison
    from megamoe.report.material import Material
    from megamoe.spec.spec import Spec
from typing import Literal

from megamoe.records.files import read_records, write_folder

# What changed in each row between two runs


_SIDE = "a record file, a folder of them, a git revision, or REV:PATH"


@with_options
def compare(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help=f"The earlier side: {_SIDE}.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The later side, likewise.")],
    held: HowCompared,
    row: Annotated[
        list[str] | None,
        typer.Option("--row", metavar="GLOB", help='Only rows whose text matches, as "*on ptx*(timing)".'),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on AMBIGUOUS too.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also show rows that are the same.")] = False,
    most: Annotated[
        int, typer.Option("--most", parser=bounded(int, 0, 10**6), metavar="N", help="Show at most N rows.")
    ] = 100,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the whole comparison as JSON.")
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write it as Markdown for a pull request.")
    ] = None,
    specs: Specs = None,
) -> None:
    """Compares two runs row by row: statuses and counters exactly, times by intervals on raw samples.

    A revision alone means its tracked baselines. Compared with a run, it means only the baselines of what that run ran
    on. With --rename two backends, or two versions of one, are compared; BEFORE and AFTER may then be the same file.
    Exit status: 0 fine; 1 a regression, a missing row, a worse status; 2 nothing to compare. results/README.md explains
    how times are compared and how often that is wrong.
    """
    # Only this command needs tables and the differ; the others start faster without them.
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
    comparison = compare_runs(
        read_side(before), read_side(after), known, across=held.across, only=row or (), renames=held.rename or ()
    )
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
        terminal.print(f"… and {counted(len(rows) - most, 'more row')}; --most {len(rows)} shows all of them")
    status = comparison.exit_status(strict)
    terminal.print(comparison.line, style="bold red" if status else "bold green", markup=False)
    raise typer.Exit(status)


# One page, or tables


@with_options
def report(
    held: HowCompared,
    records: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RECORDS]...",
            help="Record files, or folders of them.  [default: results/baselines, results/records, the newest run]",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="The page.")] = Path("report.html"),
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="BASE", help="Compare with this: a file, a folder or a git revision."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print tables instead of writing the page.")] = False,
    specs: Specs = None,
) -> None:
    """Makes one self-contained HTML page of record files: matrix, times, comparison, coverage, history.

    --against compares RECORDS, or by default the newest run, with BASE. Exit status: 0, also if rows failed; 2 for
    unusable files.
    """
    from megamoe.report.material import gather, record_files

    given = records or []
    known = load_specs(specs)
    material = gather(record_files(given))
    comparison = _compared(against, given, held, known) if against is not None else None
    terminal = console()
    if text:
        from megamoe.report.text import tables

        terminal.print(tables(material, known, comparison))
        return
    _write(output, material, known, comparison)
    for note in material.notes:
        terminal.print(note, style="yellow", markup=False)
    size = output.stat().st_size / 1e6
    terminal.print(
        f"{output}: {counted(len(material.records), 'record')}, "
        f"{counted(len(material.timings), 'timing')}, {size:.2f} MB",
        markup=False,
    )


def _write(output: Path, material: Material, specs: Mapping[str, Spec], comparison: Comparison | None) -> None:
    from megamoe.records.files import write_file
    from megamoe.records.provenance import git_revision
    from megamoe.report.evidence import bundles, read_coverage, read_foreign_kernels, traces
    from megamoe.report.page import Extras, page

    extras = Extras(
        specs,
        datetime.now(UTC),
        git_revision(CHECKOUT),
        version("megamoe"),
        bundles(material.latest, output),
        traces(material.latest, output),
        comparison,
        read_coverage(),
        read_foreign_kernels(),
    )
    write_file(output, page(material, extras), "the report")


def _compared(against: str, given: Sequence[Path], held: HowCompared, specs: Mapping[str, Spec]) -> Comparison:
    from megamoe.diff.differ import compare_runs
    from megamoe.diff.sides import Side, read_side
    from megamoe.records.files import newest_run, read_records
    from megamoe.report.material import record_files

    newest = newest_run()
    files = record_files(given) if given else [newest] if newest else []
    if not files:
        raise RecordError(f"--against {against}: there is no run in results/runs to compare; name the records")
    after = Side(", ".join(map(str, files)), tuple(read_records(file) for file in files))
    return compare_runs(read_side(against), after, specs, across=held.across, renames=held.rename or ())


# Foreign formats


def formats() -> None:
    """Writes records in the formats of other tools."""


def export_flashinfer(
    records: Annotated[list[Path], typer.Argument(metavar="RECORDS", help="Record files.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder for the dataset.")],
    temperature: Annotated[
        Literal["cold", "hot"], typer.Option("--temperature", help="L2 state of the exported times.")
    ] = "cold",
    specs: Specs = None,
) -> None:
    """Writes a dataset for flashinfer-bench: definitions, workloads, solutions and traces.

    Only rows that passed have times. Exit status 2 if nothing can be exported; nothing is written then.
    """
    from megamoe.export.flashinfer.dataset import ExportError, dataset_of, files_of

    try:
        dataset = dataset_of([read_records(path) for path in records], load_specs(specs), temperature)
        write_folder(out, dict(files_of(dataset)), "the dataset")
    except ExportError as error:
        raise RecordError(str(error)) from error
    terminal = console()
    terminal.print(
        f"{out}: {counted(len(dataset.definitions), 'definition')}, {counted(len(dataset.workloads), 'workload')}, "
        f"{counted(len(dataset.solutions), 'solution')}, {counted(len(dataset.traces), 'trace')}",
        markup=False,
    )
    for why, number in dataset.left_out.most_common():
        terminal.print(f"{counted(number, 'row', 'has', 'have')} no trace: {why}", markup=False)
