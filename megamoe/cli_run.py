"""`megamoe run` and `megamoe gate`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from datetime import UTC, date, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from megamoe import cli_options
from megamoe.cli_options import (
    Backends,
    Cases,
    Executors,
    Expected,
    Ops,
    ProfileName,
    Schedules,
    Specs,
    Targets,
    Wheres,
    find_modules_of_the_user,
    in_ci,
    selection_of,
)
from megamoe.cli_progress import RunProgress
from megamoe.expected import Expectation, read_expected, stale_entries
from megamoe.gate import Verdict, judge_run
from megamoe.provenance import git_revision, run_header
from megamoe.record import (
    STATUSES,
    Agreement,
    Record,
    RecordError,
    Row,
    RunHeader,
    record_of,
)
from megamoe.record_file import RecordWriter, read_records
from megamoe.rows import Selection, not_offered, owed_rows
from megamoe.run import DEFAULT_TIMEOUT_S, RunSettings, judged
from megamoe.spec import Spec, load_specs

RUNS = Path("results/runs")
FAILURES = Path("results/failures")
EXPECTED = Path(__file__).resolve().parents[1] / "conformance" / "expected.yaml"
INTERRUPTED = 130


def run(
    profile: ProfileName = None,
    op: Ops = None,
    case: Cases = None,
    where: Wheres = None,
    backend: Backends = None,
    target: Targets = None,
    executor: Executors = None,
    schedule: Schedules = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Worker processes.")] = os.cpu_count() or 1,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Host seconds a row.")] = DEFAULT_TIMEOUT_S,
    output: Annotated[Path | None, typer.Option("--output", help=f"Record file; a new one in {RUNS}.")] = None,
    specs: Specs = None,
    expected: Expected = None,
) -> None:
    """Judges rows in isolated processes, records them, and holds the records against what was owed."""
    console = cli_options.console()
    known = load_specs(specs)
    selection = selection_of(profile, op, case, where, backend, target, executor, schedule)
    rows = owed_rows(known, selection)
    if not (selection.targets and (selection.ops or selection.cases)):
        for sentence in not_offered(known, selection):
            console.print(sentence, markup=False)
    expectations = _expectations(expected)
    header = run_header(selection, len(rows))
    path = output or RUNS / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{selection.label}.jsonl"
    with TemporaryDirectory(prefix="megamoe-") as outputs:
        several = len({row.backend for row in rows}) > 1
        settings = RunSettings(header.run, jobs, timeout, specs, FAILURES, Path(outputs) if several else None)
        records, together = _run_and_record(console, rows, path, header, settings)
    console.print(f"records: {path}", markup=False)
    verdict = _verdict(known, rows, records, expectations)
    interrupted = sum(record.status == "not_run" for record in records)
    _print_verdict(console, verdict, records)
    for sentence in (agreement.sentence for agreement in together if agreement.sentence):
        console.print(sentence, markup=False)
    if interrupted:
        console.print(f"interrupted: {interrupted} rows were not run; the record file is whole and readable")
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(0 if verdict.passed else 1)


def _run_and_record(
    console: Console, rows: Sequence[Row], path: Path, header: RunHeader, settings: RunSettings
) -> tuple[list[Record], list[Agreement]]:
    """Runs `rows` and appends each record as it comes, then what holds the backends against each other.

    After Ctrl-C the rows that are left are recorded as not_run.
    """
    records: list[Record] = []
    bar = console.is_terminal and not in_ci()
    with RecordWriter(path) as writer, RunProgress(console, len(rows), bar) as progress:
        writer.append(header)
        try:
            with closing(judged(rows, settings)) as results:
                for record in results:
                    writer.append(record)
                    records.append(record)
                    progress.show(record)
        except KeyboardInterrupt:
            done, why = {record.row for record in records}, "the run was interrupted before this row"
            for row in rows:
                if row not in done:
                    records.append(record_of(header.run, row, "not_run", why, specs=settings.specs))
                    writer.append(records[-1])
        together = _side_by_side(header.run, records, settings.outputs)
        for agreement in together:
            writer.append(agreement)
    return records, together


def _side_by_side(run: str, records: Sequence[Record], outputs: Path | None) -> list[Agreement]:
    if outputs is None:
        return []
    # NumPy, which no other command of this family needs, would slow down the start of all of them.
    from megamoe.side_by_side import agreements

    return agreements(run, records, outputs)


def gate(
    records: Annotated[list[Path], typer.Argument(metavar="RECORDS", help="Record files of one run.")],
    profile: ProfileName = None,
    op: Ops = None,
    case: Cases = None,
    where: Wheres = None,
    backend: Backends = None,
    target: Targets = None,
    executor: Executors = None,
    schedule: Schedules = None,
    specs: Specs = None,
    expected: Expected = None,
) -> None:
    """Holds record files against the rows owed: those of the options, or, with none, those the run itself owed."""
    console = cli_options.console()
    known = load_specs(specs)
    files = [read_records(path) for path in records]
    for torn in (one.torn for one in files if one.torn):
        console.print(torn)
    headers = [header for one in files for header in one.headers]
    asked = any((profile, op, case, where, backend, target, executor, schedule))
    if asked:
        selections = [selection_of(profile, op, case, where, backend, target, executor, schedule)]
    else:
        selections = [_selection_in(header) for header in headers]
    if not selections:
        raise RecordError(f"{records[0]} has no header of a run, so the rows owed are unknown; name them by options")
    rows = list(dict.fromkeys(row for selection in selections for row in owed_rows(known, selection)))
    records_of_all = [record for one in files for record in one.records]
    changed = [] if asked else [text for header in headers for text in _changed_since(header, known)]
    expectations = _expectations(expected)
    stale = [*stale_entries(expectations, known, date.today()), *changed]
    verdict = judge_run(rows, records_of_all, expectations, stale)
    for note in dict.fromkeys(_other_revision(header) for header in headers):
        console.print(note, markup=False, end="\n" if note else "")
    _print_verdict(console, verdict, records_of_all)
    raise typer.Exit(0 if verdict.passed else 1)


def _changed_since(header: RunHeader, specs: Mapping[str, Spec]) -> list[str]:
    """A sentence if the selection of a run holds another number of rows by now: specs, backends or the file changed."""
    now = len(owed_rows(specs, _selection_in(header)))
    if now == header.owed_rows:
        return []
    return [f"run {header.run} owed {header.owed_rows} rows when it began, its selection holds {now} now; run it again"]


def _other_revision(header: RunHeader) -> str:
    """A note if the records are not about the code that is checked out."""
    here = git_revision(Path(__file__).parent)
    same = header.git_revision == here
    return "" if same else f"run {header.run} is of revision {header.git_revision}; checked out is {here}"


def _selection_in(header: RunHeader) -> Selection:
    """What the run of `header` was asked for. RecordError if another version of megamoe wrote it."""
    if set(header.selection) != {one.name for one in fields(Selection)}:
        raise RecordError(
            f"run {header.run} of megamoe {header.megamoe} holds a selection that this version cannot read"
        )
    texts = {name: value for name, value in header.selection.items() if isinstance(value, str)}
    lists = {name: value for name, value in header.selection.items() if not isinstance(value, str)}
    selection = Selection(**texts, **lists)  # pyright: ignore[reportArgumentType]
    find_modules_of_the_user([*selection.backends, *selection.executors])
    return selection


def _expectations(path: Path | None) -> tuple[Expectation, ...]:
    """The entries of `path`, which must exist if it is named; an installation without the file expects no failure."""
    if path is None and not EXPECTED.exists():
        return ()
    return read_expected(path or EXPECTED)


def _verdict(
    specs: Mapping[str, Spec], owed: Sequence[Row], records: Sequence[Record], expectations: Sequence[Expectation]
) -> Verdict:
    return judge_run(owed, records, expectations, stale_entries(expectations, specs, date.today()))


def _print_verdict(console: Console, verdict: Verdict, records: Sequence[Record]) -> None:
    if records:
        console.print(_table(records))
    for problem in verdict.problems:
        console.print(problem, markup=False)
    console.print(verdict.line, style="bold green" if verdict.passed else "bold red")


def _table(records: Sequence[Record]) -> Table:
    """Counts by op, backend, target, executor and status, with the host seconds that judging took."""
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
