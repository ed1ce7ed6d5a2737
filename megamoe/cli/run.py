"""`megamoe run`: judges rows and records them. megamoe.cli.gate holds records against the rows that were owed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from megamoe.cli import options as cli_options
from megamoe.cli.options import (
    JOBS,
    Asked,
    Expected,
    Jobs,
    Specs,
    TimeLimit,
    in_ci,
    with_selection,
)
from megamoe.cli.progress import RunProgress
from megamoe.cli.verdict import expectations_of, print_verdict
from megamoe.contract import DeviceFacts, Row, TimedExecutor, load_executor
from megamoe.gate.expected import stale_entries
from megamoe.gate.verdict import judge_run
from megamoe.judge.figures import FigureMaker
from megamoe.judge.run import DEFAULT_TIMEOUT_S, RunSettings, judged
from megamoe.records.files import RecordWriter, read_records
from megamoe.records.keys import Key
from megamoe.records.lines import Agreement, Record, RunHeader, record_of
from megamoe.records.provenance import installed_version, run_header
from megamoe.spec.load import load_specs
from megamoe.spec.selection import DEFAULT_EXECUTOR, Selection, not_offered, owed_rows
from megamoe.spec.spec import Spec

RUNS = Path("results/runs")
FAILURES = Path("results/failures")
INTERRUPTED = 130


@with_selection
def run(
    asked: Asked,
    jobs: Jobs = JOBS,
    timeout: TimeLimit = DEFAULT_TIMEOUT_S,
    output: Annotated[Path | None, typer.Option("--output", help=f"Record file; a new one in {RUNS}.")] = None,
    specs: Specs = None,
    expected: Expected = None,
) -> None:
    """Judges rows in isolated processes, records them, and holds the records against the rows that were owed."""
    console = cli_options.console()
    known = load_specs(specs)
    expectations = expectations_of(expected)
    done = conduct(console, known, asked.selection(), How(output, specs, jobs, timeout))
    verdict = judge_run(
        done.rows, done.records, expectations, stale_entries(expectations, known, date.today()), specs=specs
    )
    print_verdict(console, verdict, done.records)
    for sentence in (agreement.sentence for agreement in done.agreements if agreement.sentence):
        console.print(sentence, markup=False)
    end_if_interrupted(console, done)
    raise typer.Exit(0 if verdict.passed else 1)


@dataclass(frozen=True, slots=True)
class How:
    """Settings of a run. `output`: the record file, None for a new one. `timeout`: host seconds a row."""

    output: Path | None
    specs: Path | None
    jobs: int
    timeout: float


@dataclass(frozen=True, slots=True)
class Conducted:
    """A finished run: its id and its lines. The file at `path` may hold earlier runs too."""

    run: str
    path: Path
    rows: list[Row]
    records: list[Record]
    agreements: list[Agreement]


def conduct(console: Console, known: Mapping[str, Spec], selection: Selection, how: How) -> Conducted:
    """Runs the rows that `selection` owes and records them. Raises what owed_rows and RecordWriter raise."""
    rows = owed_rows(known, selection)
    if not (selection.targets and (selection.ops or selection.cases)):
        for sentence in not_offered(known, selection):
            console.print(sentence, markup=False)
    header = run_header(selection, len(rows)).model_copy(update={"software": _compilers()})
    path = how.output or RUNS / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{selection.label}.jsonl"
    with TemporaryDirectory(prefix="megamoe-") as name:
        outputs, programs = Path(name, "outputs"), Path(name, "programs")
        outputs.mkdir()
        programs.mkdir()
        header = header.model_copy(update={"device": _device(rows, Path(name))})
        several = len({row.backend for row in rows}) > 1
        kept = outputs if several else None
        settings = RunSettings(header.run, how.jobs, how.timeout, how.specs, FAILURES, kept, programs)
        records, together = _run_and_record(console, rows, path, header, settings)
    console.print(f"records: {path}", markup=False)
    return Conducted(header.run, path, rows, records, together)


def _device(rows: Sequence[Row], folder: Path) -> DeviceFacts | None:
    """The device of the first executor that has one, as a worker process finds it; None if there is none."""
    for name in dict.fromkeys(row.executor for row in rows if row.executor != DEFAULT_EXECUTOR):
        # These import torch, which a run on the VM alone need not pay for here.
        from megamoe.bench.run import device_of
        from megamoe.bench.worker import BenchWorker

        if isinstance(load_executor(name), TimedExecutor):
            with BenchWorker(folder / "progress") as worker:
                return device_of(name, worker, folder)
    return None


def _compilers() -> dict[str, str]:
    """The versions of the compilers, on which figures depend."""
    found = ((name, installed_version(name)) for name in ("nvidia-cuda-nvcc", "nvidia-cutlass-dsl"))
    return {name: version for name, version in found if version is not None}


def end_if_interrupted(console: Console, done: Conducted) -> None:
    """Ends the command with status INTERRUPTED if rows were left, once the verdict on the others is printed."""
    left = sum(record.status == "not_run" for record in done.records)
    if left:
        console.print(f"interrupted: {left} rows were not run; the record file is whole and readable")
        raise typer.Exit(INTERRUPTED)


def _run_and_record(
    console: Console, rows: Sequence[Row], path: Path, header: RunHeader, settings: RunSettings
) -> tuple[list[Record], list[Agreement]]:
    """Runs `rows` and appends each record as it comes, then agreements of backends, then compiler figures.

    After Ctrl-C it records the remaining rows as not_run.
    """
    records: list[Record] = []
    bar = console.is_terminal and not in_ci()
    with (
        RecordWriter(path) as writer,
        RunProgress(console, len(rows), bar) as progress,
        FigureMaker(header.run, settings.programs or Path(), settings.jobs) as figures,
    ):
        writer.append(header)
        try:
            with closing(judged(rows, settings)) as results:
                for record in results:
                    writer.append(record)
                    records.append(record)
                    progress.show(record)
                    figures.begin(record.row, record.program_sha256)
        except KeyboardInterrupt:
            # Read the file: the interruption may have come after a record was written and before it was kept.
            records = [record for record in read_records(path).records if record.run == header.run]
            done, why = {record.row for record in records}, "the run was interrupted before this row"
            for row in rows:
                if row not in done:
                    records.append(record_of(header.run, row, "not_run", why, specs=settings.specs))
                    writer.append(records[-1])
        together = _side_by_side(header.run, records, settings.outputs)
        programs = {Key.of(record).program: record for record in records}.values()
        for line in (*together, *(line for one in programs for line in figures.of(one.row, one.program_sha256))):
            writer.append(line)
    return records, together


def _side_by_side(run: str, records: Sequence[Record], outputs: Path | None) -> list[Agreement]:
    if outputs is None:
        return []
    # This imports NumPy, which would slow down the start of every command.
    from megamoe.judge.side_by_side import agreements

    return agreements(run, records, outputs)
