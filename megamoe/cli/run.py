"""`megamoe run`: judges rows and records them. megamoe.cli.gate checks records against the rows that were owed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megamoe.cli import INTERRUPTED
from megamoe.cli.options import (
    Asked,
    Effort,
    Quiet,
    Rules,
    Share,
    expectations_of,
    find_modules_of_the_user,
    with_options,
)
from megamoe.cli.terminal import RunProgress, console, ended_with_its_reader, print_verdict
from megamoe.contract import DeviceFacts, Row
from megamoe.contract.counted import counted
from megamoe.contract.scratch import scratch_folder
from megamoe.gate.expected import stale_entries
from megamoe.gate.verdict import judge_run
from megamoe.judge.figures import FigureMaker
from megamoe.judge.run import Judging, RunSettings, judged
from megamoe.records.files import (
    RUNS,
    WHERE_RUNS_ARE,
    RecordWriter,
    check_place,
    locked,
    newest_run,
    read_records,
    write_file,
)
from megamoe.records.keys import Key
from megamoe.records.lines import Agreement, AnyLine, Record, RecordError, RunHeader, Shard, record_of
from megamoe.records.provenance import digests_of, installed_version, run_header
from megamoe.records.shards import Nth, cut_now
from megamoe.records.signing import private_key, signed
from megamoe.runner.process import fork_keepers_from_the_server
from megamoe.spec.load import load_specs
from megamoe.spec.selection import (
    DEFAULT_EXECUTOR,
    Selection,
    SelectionError,
    keeps_time,
    not_offered,
    owed_rows,
    parse_row,
)
from megamoe.spec.spec import Spec

FAILURES = Path("results/failures")
INTERRUPTED_BEFORE = "the run was interrupted before this row"
STOPPED_BEFORE = "the run stopped at the first failure, before this row"


@with_options
def run(
    asked: Asked,
    effort: Effort,
    share: Share,
    rules: Rules,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="FILE", help="Finish the last run of this record file.")
    ] = None,
    last_failed: Annotated[bool, typer.Option("--last-failed", help="The rows that failed in the newest run.")] = False,
    first: Annotated[bool, typer.Option("-x", help="Stop at the first row that fails unexpectedly.")] = False,
    quiet: Quiet = False,
    output: Annotated[Path | None, typer.Option("--output", help=f"Record file; a new one in {RUNS}.")] = None,
    sign: Annotated[
        Path | None, typer.Option("--sign", metavar="KEY", help="Sign the records: an Ed25519 key, PEM.")
    ] = None,
) -> None:
    """Judges rows in isolated processes, records them, and checks the records against the rows that were owed.

    Writes results/runs and results/failures in the current folder. Ctrl-C leaves a record file that --resume finishes.
    """
    fork_keepers_from_the_server()
    if output is not None:
        check_place(output, "records to")
    specs, expected = rules.specs, rules.expected
    known = load_specs(specs)
    expectations = expectations_of(expected, specs)
    if (resume or last_failed) and (asked.anything or (resume and (last_failed or output))):
        option = "--resume" if resume else "--last-failed"
        raise SelectionError(f"{option} takes its rows from a record file: drop the other options that name rows")
    if resume:
        if share.nth:
            raise SelectionError("--resume finishes the shard that the record file says: drop --shard and --run-set")
        plan = unfinished(known, resume)
    else:
        selection = _failed_last() if last_failed else asked.selection()
        plan = plan_of(known, selection, output, share.nth, digests_of(specs, expected) if share.nth else {})

    key = None if sign is None else private_key(sign)

    def stops(record: Record) -> bool:
        return first and not judge_run([record.row], [record], expectations).passed

    done = conduct(known, plan, How(specs, effort.jobs, effort.timeout, quiet, expected, effort.ray), stops)
    if key is not None and done.run:
        with RecordWriter(done.path) as writer:
            line = signed(done.run, done.path.read_bytes(), key)
            writer.append(line)
        console(quiet).print(f"signed by {line.key}", markup=False)
    stale = stale_entries(expectations, known, date.today())
    verdict = judge_run(done.rows, done.records, expectations, stale, specs=specs)
    print_verdict(verdict, done.records, quiet, done.cut_short)
    for sentence in (agreement.sentence for agreement in done.agreements if agreement.sentence):
        console().print(sentence, markup=False)
    end_if_cut_short(done)
    raise typer.Exit(0 if verdict.passed else 1)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run owes, and the record file at `path` to which it appends.

    `left`: the subset of `rows` to run now. `before`: records of the other rows, from earlier runs in the file.
    `shard`: which part of the selection the rows are; None if they are all of it.
    """

    selection: Selection
    rows: list[Row]
    left: list[Row]
    path: Path
    before: tuple[Record, ...] = ()
    shard: Shard | None = None


def plan_of(
    known: Mapping[str, Spec],
    selection: Selection,
    output: Path | None,
    nth: Nth | None = None,
    digests: Mapping[str, str] | None = None,
) -> RunPlan:
    """Plans a run of all rows that `selection` owes, or of a shard of them, into `output` or a new file.

    `digests`: used to name a run set that has no name. Raises what owed_rows and cut_now raise.
    """
    rows, shard, label = owed_rows(known, selection), None, selection.label
    if nth is not None:
        shares = cut_now(rows, nth.count)
        shard, label = shares.shard(nth, selection, digests or {}), f"{label}-{nth.index}of{nth.count}"
        rows = [*shares.shards[nth.index - 1]]
    path = output or RUNS / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{label}.jsonl"
    return RunPlan(selection, rows, rows, path, shard=shard)


def rows_of(known: Mapping[str, Spec], header: RunHeader) -> list[Row]:
    """The rows that the run of `header` owes by today's specs. RecordError for a shard whose rows have changed."""
    rows = owed_rows(known, selection_in(header))
    if header.shard is None:
        return rows
    try:
        shares = cut_now(rows, header.shard.count)
    except SelectionError:
        shares = None
    if shares is None or shares.plan != header.shard.plan:
        why = "rows, or the tracked records that say what they cost, have changed"
        raise RecordError(f"run {header.run} was {header.shard}, and shards have other rows now: {why}; run it anew")
    return [*shares.shards[header.shard.index - 1]]


def unfinished(known: Mapping[str, Spec], path: Path) -> RunPlan:
    """Plans the rest of the last run in the file at `path`. Removes lines that would contradict the rows to come.

    These are a torn last line left by a killed run, and lines that record a row as not_run.
    """
    with _sole_writer(path):
        file = read_records(path)
        if not file.headers:
            raise RecordError(f"{path} has no header of a run, so what it owed is unknown; run it anew")
        last = file.headers[-1]
        runs = {one.run for one in file.headers if (one.selection, one.shard) == (last.selection, last.shard)}
        rows = rows_of(known, last)
        before = [one for one in file.records if one.run in runs and one.status != "not_run"]
        done = {one.row for one in before}
        left = [row for row in rows if row not in done]
        again = set(left)
        # Keeps each line's text as it is, whatever version wrote it.
        texts = path.read_bytes().split(b"\n")[: len(file.lines)]
        kept = [
            text
            for text, line in zip(texts, file.lines, strict=True)
            if not (isinstance(line, Record) and line.status == "not_run" and line.row in again)
        ]
        if file.torn or len(kept) < len(texts):
            write_file(path, b"".join(text + b"\n" for text in kept), "records to")
    kept_records = tuple(one for one in before if one.row not in again)
    return RunPlan(selection_in(last), rows, left, path, kept_records, last.shard)


@contextmanager
def _sole_writer(path: Path) -> Iterator[None]:
    """Holds the lock of RecordWriter while the file is replaced by a part of itself."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    except OSError as error:
        raise RecordError(f"cannot resume {path}: {error.strerror}; {WHERE_RUNS_ARE}") from error
    with locked(descriptor, f"{path} is being written by another run; wait for it to end"):
        yield


def selection_in(header: RunHeader) -> Selection:
    """The selection of the run of `header`. RecordError if a newer megamoe wrote it."""
    if not header.selection.keys() <= {one.name for one in fields(Selection)} or "profile" not in header.selection:
        raise RecordError(
            f"run {header.run} of megamoe {header.megamoe} holds a selection that this version cannot read"
        )
    texts = {name: value for name, value in header.selection.items() if isinstance(value, str)}
    lists = {name: value for name, value in header.selection.items() if not isinstance(value, str)}
    selection = Selection(**texts, **lists)  # pyright: ignore[reportArgumentType]
    find_modules_of_the_user([*selection.backends, *selection.executors])
    find_modules_of_the_user([name for row in selection.rows for name in parse_row(row)[1:4:2]])
    return selection


def _failed_last() -> Selection:
    """The rows of the newest run that went wrong. Unsupported rows did not, and rows that were not run may not have."""
    newest = newest_run()
    if newest is None:
        raise SelectionError(f"there is no run in {RUNS} of the current folder, so nothing failed last")
    wrong = [one.row for one in read_records(newest).records if one.status not in ("passed", "unsupported", "not_run")]
    if not wrong:
        raise SelectionError(f"no row of {newest} failed: drop --last-failed")
    find_modules_of_the_user([name for row in wrong for name in (row.backend, row.executor)])
    return Selection(rows=tuple(map(str, dict.fromkeys(wrong))))


@dataclass(frozen=True, slots=True)
class How:
    """Settings of a run. `timeout`: host seconds per row. `quiet`: no progress. `ray`: the cluster that runs rows."""

    specs: Path | None
    jobs: int
    timeout: float
    quiet: bool = False
    expected: Path | None = None
    ray: str | None = None


@dataclass(frozen=True, slots=True)
class Conducted:
    """A finished run: its id and its lines. The file at `path` may also hold earlier runs.

    `cut_short`: why rows were not run, as their records say, or "". `lines`: this run's lines as they are in the file.
    If the file could not be written to the end (`unwritten` says why), the lines as they should be.
    """

    run: str
    path: Path
    rows: list[Row]
    records: list[Record]
    agreements: list[Agreement]
    specs: Path | None = None
    cut_short: str = ""
    unwritten: str = ""
    lines: tuple[AnyLine, ...] = ()


def _runs_on(record: Record) -> bool:
    return False


def conduct(
    known: Mapping[str, Spec], plan: RunPlan, how: How, stops: Callable[[Record], bool] = _runs_on
) -> Conducted:
    """Runs the rows that are left in `plan` and records them. The run ends after a record for which `stops` is true.

    Raises what RecordWriter raises.
    """
    out = console(how.quiet)
    if not plan.left:
        out.print(f"every row of {plan.path} was run already", markup=False)
        return Conducted("", plan.path, plan.rows, [*plan.before], [], how.specs)
    if not (plan.selection.targets and (plan.selection.ops or plan.selection.cases)):
        for sentence in not_offered(known, plan.selection):
            out.print(sentence, markup=False)
    header = run_header(plan.selection, len(plan.rows), how.specs, how.expected, plan.shard)
    header = header.model_copy(update={"software": _compilers()})
    with scratch_folder("run") as folder:
        outputs, programs = folder / "outputs", folder / "programs"
        outputs.mkdir()
        programs.mkdir()
        header = header.model_copy(update={"device": _device(plan.left, folder)})
        several = len({row.backend for row in plan.left}) > 1
        kept = outputs if several else None
        settings = RunSettings(
            header.run, how.jobs, how.timeout, how.specs, FAILURES, kept, programs, hidden=(plan.path,)
        )
        with _place_to_run(how):
            done = _run_and_record(out, plan, header, settings, stops, _judging(how))
    out.print(f"records: {plan.path}", markup=False)
    if plan.shard is not None:
        out.print(f"{plan.shard}: hold all of them against what was owed with megamoe gate RECORDS...", markup=False)
    return replace(done, records=[*plan.before, *done.records])


def _device(rows: Sequence[Row], folder: Path) -> DeviceFacts | None:
    """The device of the first executor that has one, as a worker process sees it; None if there is none."""
    for row in {row.executor: row for row in rows if row.executor != DEFAULT_EXECUTOR}.values():
        if keeps_time(row.executor):
            # Imported here because they import torch, which a run without a device does not need.
            from megamoe.bench.run import device_of
            from megamoe.bench.worker import BenchWorker

            with BenchWorker(folder / "progress") as worker:
                return device_of(row, worker, folder)
    return None


def _compilers() -> dict[str, str]:
    """The versions of the compilers, on which figures depend."""
    found = ((name, installed_version(name)) for name in ("nvidia-cuda-nvcc", "nvidia-cutlass-dsl"))
    return {name: version for name, version in found if version is not None}


def end_if_cut_short(done: Conducted) -> None:
    """Ends the command if records are lost or rows are left. Called once the verdict on the other rows is printed."""
    if done.unwritten:
        raise RecordError(f"{done.unwritten}; the verdict above is on rows that the file does not have")
    if not done.cut_short:
        return
    left = sum(record.status == "not_run" for record in done.records)
    interrupted = done.cut_short == INTERRUPTED_BEFORE
    resume = ["megamoe", "run", "--resume", str(done.path), *(["--specs", str(done.specs)] if done.specs else [])]
    why = "interrupted" if interrupted else "stopped at the first failure"
    told = (
        f"{why}: {counted(left, 'row', 'was', 'were')} not run; the record file is whole, and this "
        f"finishes it: {shlex.join(resume)}"
    )
    console().print(told, markup=False)
    raise typer.Exit(INTERRUPTED if interrupted else 1)


@dataclass(slots=True)
class _Lines:
    """Lines on their way to the file. If the file refuses one, recording ends and the run goes on."""

    writer: RecordWriter
    all: list[AnyLine]
    unwritten: str = ""

    def append(self, line: AnyLine) -> None:
        self.all.append(line)
        if not self.unwritten:
            try:
                self.writer.append(line)
            except RecordError as error:
                self.unwritten = str(error)


def _run_and_record(
    out: Console,
    plan: RunPlan,
    header: RunHeader,
    settings: RunSettings,
    stops: Callable[[Record], bool],
    judging: Judging,
) -> Conducted:
    """Runs the rows left and appends each record as it comes, then agreements of backends, then compiler figures.

    After Ctrl-C, or if nobody reads the output any more, it records the remaining rows as not_run.
    """
    records: list[Record] = []
    cut_short = ""
    with (
        RecordWriter(plan.path) as writer,
        RunProgress(out, len(plan.left)) as progress,
        FigureMaker(header.run, settings.programs or Path(), settings.jobs) as figures,
    ):
        writer.append(header)
        lines = _Lines(writer, [header])
        try:
            with closing(judging(plan.left, settings)) as results, ended_with_its_reader():
                for record in results:
                    lines.append(record)
                    records.append(record)
                    progress.show(record)
                    figures.begin(record.row, record.program_sha256)
                    if stops(record):
                        cut_short = STOPPED_BEFORE
                        break
        except (KeyboardInterrupt, BrokenPipeError):
            cut_short = INTERRUPTED_BEFORE
            # The interruption may have come after a record was written and before it was added to `records`.
            records = [line for line in lines.all if isinstance(line, Record)]
        if cut_short:
            done = {record.row for record in records}
            for row in plan.left:
                if row not in done:
                    records.append(record_of(header.run, row, "not_run", cut_short, specs=settings.specs))
                    lines.append(records[-1])
        together = _side_by_side(header.run, records, settings.outputs)
        programs = {Key.of(record).program: record for record in records}.values()
        for line in (*together, *(line for one in programs for line in figures.of(one.row, one.program_sha256))):
            lines.append(line)
    left = any(record.status == "not_run" for record in records)
    return Conducted(
        header.run,
        plan.path,
        plan.rows,
        records,
        together,
        settings.specs,
        cut_short if left else "",
        lines.unwritten,
        tuple(lines.all),
    )


def _place_to_run(how: How) -> AbstractContextManager[None]:
    if how.ray is None:
        return nullcontext()
    from megamoe.judge.cluster import joined

    return joined(how.ray, how.jobs)


def _judging(how: How) -> Judging:
    if how.ray is None:
        return judged
    from megamoe.judge.cluster import judged_on_cluster

    return judged_on_cluster


def _side_by_side(run: str, records: Sequence[Record], outputs: Path | None) -> list[Agreement]:
    if outputs is None:
        return []
    # Imports NumPy, which would slow down the start of every command.
    from megamoe.judge.side_by_side import agreements

    return agreements(run, records, outputs)
