"""`megamoe report`: shows record files as one HTML page or in the terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megamoe import CHECKOUT
from megamoe.cli.options import Specs, console
from megamoe.records.lines import RecordError
from megamoe.spec.load import load_specs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megamoe.diff.differ import Comparison
    from megamoe.report.material import Material
    from megamoe.spec.spec import Spec


def report(
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
    across: Annotated[bool, typer.Option("--across", help="Compare other machines or versions; labelled.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Tables in the terminal instead of the page.")] = False,
    specs: Specs = None,
) -> None:
    """Makes one self-contained HTML page of record files: matrix, times, comparison, coverage, history.

    --against compares RECORDS, or else the newest run, with BASE. Exit status: 0, also if rows failed; 2 for files that
    cannot be used.
    """
    from megamoe.report.material import gather, record_files

    given = records or []
    known = load_specs(specs)
    material = gather(record_files(given))
    comparison = _compared(against, given, across, known) if against is not None else None
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
        f"{output}: {len(material.records):,} records, {len(material.timings):,} timings, {size:.2f} MB", markup=False
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


def _compared(against: str, given: Sequence[Path], across: bool, specs: Mapping[str, Spec]) -> Comparison:
    from megamoe.diff.differ import compare_runs
    from megamoe.diff.sides import Side, read_side
    from megamoe.records.files import read_records
    from megamoe.report.material import newest_run, record_files

    newest = newest_run()
    files = record_files(given) if given else [newest] if newest else []
    if not files:
        raise RecordError(f"--against {against}: there is no run in results/runs to compare; name the records")
    after = Side(", ".join(map(str, files)), tuple(read_records(file) for file in files))
    return compare_runs(read_side(against), after, specs, across=across)
