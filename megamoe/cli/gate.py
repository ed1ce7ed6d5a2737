"""`megamoe gate` and `megamoe accept`: check a run against the baseline, and accept an intended change into it.

The gate closes on rows that are missing, did not pass, or got worse than the tracked baseline.
"""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated

import typer

from megamoe import CHECKOUT
from megamoe.cli.options import (
    Asked,
    Effort,
    Expected,
    Rules,
    Share,
    Specs,
    expectations_of,
    with_options,
)
from megamoe.cli.run import Conducted, How, conduct, end_if_cut_short, plan_of, selection_in
from megamoe.cli.terminal import console, on_one_line, print_verdict
from megamoe.contract import Row
from megamoe.contract.counted import counted
from megamoe.gate.accept import Seen, glob_of, rows_matching, seen_in, take
from megamoe.gate.baseline import VM_BASELINE, Baseline, baseline_for, read_baseline, sole_writer, write_baseline
from megamoe.gate.counters import Claim, against_baseline
from megamoe.gate.evidence import checked
from megamoe.gate.excuse import as_yaml, excusing
from megamoe.gate.expected import Expectation, stale_entries
from megamoe.gate.shards import Absent, Again, absent_shards, changed_since, shards_twice
from megamoe.gate.verdict import Finding, Verdict, closed_line, judge_run, open_line
from megamoe.records.files import RUNS, RecordFile, check_place, files_in, newest_run, read_records
from megamoe.records.lines import Acceptance, Figures, Record, RecordError, RunHeader, Signature
from megamoe.records.provenance import digests_of, git_revision
from megamoe.records.shards import Nth, cut_now
from megamoe.records.signing import distrusted, trusted_keys
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, SelectionError, owed_rows, parse_row
from megamoe.spec.spec import Spec

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RECORDS", help="Record files or folders. Without any, the rows run now."),
]
BaselineFile = Annotated[
    Path | None,
    typer.Option("--baseline", metavar="FILE", help="Baseline.  [default: results/baselines/vm.jsonl, for our specs]"),
]
Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write the verdict as JUnit XML.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Also fail on rows that got better and on records of another revision.")
]


@with_options
def gate(
    asked: Asked,
    effort: Effort,
    share: Share,
    rules: Rules,
    records: Files = None,
    baseline: BaselineFile = None,
    junit: Junit = None,
    strict: Strict = False,
    output: Annotated[Path | None, typer.Option("--output", help="Record file for rows that run now.")] = None,
    trusted: Annotated[
        Path | None,
        typer.Option("--trusted", metavar="KEYS", help="Accept only records signed by one of these public keys."),
    ] = None,
) -> None:
    """Checks a run, either the smoke profile run now or record files, against the rows that it owed and the baseline.

    Records owe the rows that the options select. Without options they owe the rows that their runs owed; shards owe the
    rows of the whole set.
    """
    out = console()
    for place, what in ((junit, "JUnit XML to"), (output, "records to")):
        if place is not None:
            check_place(place, what)
    specs, expected = rules.specs, rules.expected
    known = load_specs(specs)
    expectations = expectations_of(expected, specs)
    with _nothing_collected():
        held = _baseline(baseline, specs)
    keys = None if trusted is None else trusted_keys(trusted)
    if keys is not None and not records:
        raise RecordError("--trusted is about record files: name them; what is run here needs no signature")
    done = None
    if not records:
        digests = digests_of(specs, expected) if share.nth else {}
        plan = plan_of(known, asked.selection(), output, share.nth, digests)
        done = conduct(known, plan, How(specs, effort.jobs, effort.timeout, expected=expected, ray=effort.ray))
    command = _accept_command(records or ([done.path] if done else []), baseline, specs)
    with _nothing_collected():
        files = [read_records(path) for path in files_in(records or ())]
        files += [_of_run(done)] if done else []
        taken = checked(files, digests_of(specs, expected), known)
        evidence = _evidence(
            taken.files, Asked() if done else asked, known, _shard_command(taken.files, rules), share.nth
        )
        verdict = _verdict(evidence, known, expectations, held, lambda row: command(str(row)), specs)
    unsigned = [] if keys is None else [text for file in files for text in _unsigned(file, keys)]
    taken = replace(taken, findings=(*taken.findings, *(Finding("evidence", text) for text in unsigned)))
    verdict = verdict.with_findings((*taken.findings, *evidence.elsewhere), strict)
    for note in evidence.notes:
        out.print(note, markup=False)
    print_verdict(verdict, evidence.records, summed_up=done.cut_short if done else "")
    changed = {finding.row for finding in verdict.findings if finding.accept and finding.row}
    if len(changed) > 1:
        out.print(f"All of these at once: {command('--all-of', glob_of(changed))}", markup=False)
    if junit is not None:
        from megamoe.export.junit import write_junit

        with _nothing_collected():
            write_junit(junit, verdict, evidence.figures, evidence.started)
        out.print(f"JUnit XML: {junit}", markup=False)
    if verdict.passed:
        told, colour = open_line(verdict, held, evidence.records, evidence.figures), "bold green"
    else:
        _tell_of_excuses(verdict, known, rules)
        told, colour = closed_line(verdict), "bold red"
    out.print(told, style=colour, markup=False, highlight=False, soft_wrap=True)
    if done is not None:
        end_if_cut_short(done)
    raise typer.Exit(0 if verdict.passed else 1)


def _tell_of_excuses(verdict: Verdict, known: Mapping[str, Spec], rules: Rules) -> None:
    """Prints entries for the rows that a backend does not support, and where they go."""
    out, entries = console(), excusing(verdict, known, date.today())
    if not entries:
        return
    if rules.expected is None and rules.specs is not None:
        where = "a file whose first line is `expected:`, named with --expected FILE"
    else:
        where = str(rules.expected or "conformance/expected.yaml")
    out.print(f"A row that a backend does not support needs an entry in {where}. For rows of a matrix these do:")
    for entry in entries:
        out.print(on_one_line(as_yaml(entry)), markup=False, highlight=False, soft_wrap=True)


def _unsigned(file: RecordFile, keys: frozenset[str]) -> list[str]:
    signatures = {line.run: line for line in file.lines if isinstance(line, Signature)}
    return distrusted(file.path, file.path.read_bytes(), signatures, keys)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Stops the garbage collector, which would search hundreds of thousands of lines that are all in use."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _baseline(path: Path | None, specs: Path | None) -> Baseline | None:
    """The baseline to compare rows with. None for the user's own specs, because our baseline does not cover them."""
    if path is not None and not path.exists():
        raise RecordError(f"there is no baseline {path}; `megamoe accept` makes one")
    if path is None and specs is not None:
        return None
    return read_baseline(path or VM_BASELINE)


@dataclass(frozen=True, slots=True)
class _Evidence:
    """What is to be judged. `notes` are for the reader; `changed` are sentences that close the gate.

    `elsewhere`: findings about runs of another revision, which close a strict gate. `absent`: missing shards; `rows`
    does not include the rows that it covers.
    """

    rows: list[Row]
    selections: list[Selection]
    records: list[Record]
    figures: list[Figures]
    started: str
    notes: list[str]
    changed: list[str]
    elsewhere: list[Finding]
    absent: Absent


def _of_run(done: Conducted) -> RecordFile:
    """The run's lines as its file has them. If the file could not be written to the end, as they should be."""
    if done.unwritten:
        return RecordFile(done.path, done.lines, None)
    file = read_records(done.path)
    return replace(file, lines=tuple(line for line in file.lines if line.run == done.run))


def _evidence(
    files: Sequence[RecordFile], asked: Asked, known: Mapping[str, Spec], again: Again, nth: Nth | None = None
) -> _Evidence:
    """`nth`: the one shard to judge; None if the files must be complete. `again`: see absent_shards."""
    headers = [header for file in files for header in file.headers]
    selections = [asked.selection()] if asked.anything else [selection_in(header) for header in headers]
    if not selections:
        raise RecordError(f"{files[0].path} has no header of a run, so the rows owed are unknown; name them by options")
    owed = {selection: owed_rows(known, selection) for selection in selections}
    held = [] if asked.anything or nth else list(zip(headers, (owed[one] for one in selections), strict=True))
    records = _all_records(files)
    absent = absent_shards(held, {record.row for record in records}, cut_now, again)
    absent = replace(absent, findings=(*absent.findings, *shards_twice(headers, records)))
    if nth is not None:
        owed = {selection: [*cut_now(rows, nth.count).shards[nth.index - 1]] for selection, rows in owed.items()}
    changed = [
        changed_since(f"run {header.run}", header.owed_rows, len(rows))
        for header, rows in held
        if header.shard is None and header.owed_rows != len(rows)
    ]
    notes = [file.torn for file in files if file.torn]
    unknown, elsewhere = _of_other_revisions(headers)
    notes += unknown
    started = headers[0].started if headers else datetime.now(UTC).isoformat(timespec="seconds")
    return _Evidence(
        list(dict.fromkeys(row for rows in owed.values() for row in rows if row not in absent.rows)),
        selections,
        records,
        _all_figures(files),
        started,
        notes,
        changed,
        elsewhere,
        absent,
    )


def _shard_command(files: Sequence[RecordFile], rules: Rules) -> Again:
    """Makes commands for shards of the runs in `files`, complete enough to paste where the files were made."""
    timed = {line.run for file in files for line in file.timings}
    given = [("--specs", rules.specs), ("--expected", rules.expected)]
    extra = [word for option, path in given if path is not None for word in (option, str(path))]

    def command(header: RunHeader, index: str) -> str:
        assert header.shard is not None
        # For several shards the index is a shell variable, which must not be quoted.
        tail = f"--shard {index}/{header.shard.count} {shlex.join(['--run-set', header.shard.run_set, *extra])}"
        try:
            options = selection_in(header).options
        except SelectionError:
            return f"as {header.run} was run, with {tail}"
        start = ["nox", "-s", "bench", "--"] if header.run in timed else ["megamoe", "run"]
        return f"{shlex.join([*start, *options])} {tail}"

    return command


def _all_records(files: Sequence[RecordFile]) -> list[Record]:
    return [record for file in files for record in file.records]


def _all_figures(files: Sequence[RecordFile]) -> list[Figures]:
    return [line for file in files for line in file.figures]


def _verdict(
    evidence: _Evidence,
    known: Mapping[str, Spec],
    expectations: Sequence[Expectation],
    baseline: Baseline | None,
    accept: Callable[[Row], str],
    specs: Path | None,
) -> Verdict:
    stale = [*stale_entries(expectations, known, date.today()), *evidence.changed]
    before = baseline.records if baseline else ()
    verdict = judge_run(evidence.rows, evidence.records, expectations, stale, before, specs)
    verdict = replace(
        verdict.with_findings(evidence.absent.findings), missing=verdict.missing + len(evidence.absent.rows)
    )
    if baseline is None:
        return verdict
    whole = owed_rows(known, Selection()) if baseline.path == VM_BASELINE else evidence.rows
    claim = Claim(frozenset(whole), evidence.selections, accept)
    more = against_baseline(baseline, claim, evidence.rows, evidence.records, evidence.figures)
    return verdict.with_findings(more)


def _accept_command(records: Sequence[Path], baseline: Path | None, specs: Path | None) -> Callable[..., str]:
    """Returns a function from arguments of `megamoe accept` to the complete command for these files."""
    options = [part for path in records for part in ("--from", str(path))]
    options += [] if baseline is None else ["--baseline", str(baseline)]
    options += [] if specs is None else ["--specs", str(specs)]
    tail = shlex.join(options)

    def command(*words: str) -> str:
        return f'megamoe accept {shlex.join(words)} --reason "..."{" " if tail else ""}{tail}'

    return command


def _of_other_revisions(headers: Iterable[RunHeader]) -> tuple[list[str], list[Finding]]:
    """Notes about runs if their revision, or ours, is unknown (no git history); findings about runs of another."""
    here = git_revision(CHECKOUT)
    notes: list[str] = []
    found: list[Finding] = []
    for header in headers:
        about, there = f"run {header.run} is of revision {header.git_revision}", f"checked out is {here}"
        if header.git_revision is None or here is None:
            notes += [] if header.git_revision == here else [f"{about}; {there}"]
        elif header.git_revision != here:
            why = "the records are not about this code, so run it again"
            found.append(Finding("revision", f"{about}; {there}: {why}", closes=False))
    return list(dict.fromkeys(notes)), list(dict.fromkeys(found))


# Intended changes


Rows = Annotated[list[str] | None, typer.Argument(metavar="ROW...", help="Rows as the gate prints them.")]
AllOf = Annotated[
    str | None, typer.Option("--all-of", metavar="CASE-GLOB", help="All rows whose case matches, instead of ROW.")
]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why the change is right; kept in the baseline.")]
From = Annotated[
    list[Path] | None,
    typer.Option(
        "--from", metavar="RECORDS", help=f"Records that have the rows.  [default: the newest file in {RUNS}]"
    ),
]
ChangedFile = Annotated[
    Path | None,
    typer.Option("--baseline", metavar="FILE", help="Baseline to change.  [default: vm.jsonl, or the device's]"),
]


def accept(
    reason: Reason,
    rows: Rows = None,
    all_of: AllOf = None,
    records: From = None,
    baseline: ChangedFile = None,
    specs: Specs = None,
    expected: Expected = None,
) -> None:
    """Accepts rows, as a run has seen them, into the baseline that the gate compares runs with.

    A row brings its counters, the compiler figures of its program and its times. A row that is no longer owed leaves
    the baseline. A row that did not pass is refused.
    """
    out = console()
    text = _checked(reason)
    if bool(rows) == bool(all_of):
        raise SelectionError("name rows as the gate prints them, or give --all-of CASE-GLOB, and not both")
    seen = seen_in([read_records(path) for path in files_in(records or _newest())])
    owed = frozenset(owed_rows(load_specs(specs), Selection()))
    wanted = (
        [parse_row(row) for row in _quoted(rows)]
        if rows
        else _matching(all_of or "", seen, baseline, owed, expectations_of(expected, specs))
    )
    path = _one_path(wanted, seen, baseline)
    why = Acceptance(
        run="accept",
        row="*",
        reason=text,
        accepted=datetime.now(UTC).isoformat(timespec="milliseconds"),
        git_revision=git_revision(CHECKOUT),
    )
    with sole_writer(path):
        after, accepted = take(read_baseline(path), seen, wanted, owed, why)
        if not accepted:
            raise SelectionError(f"there is nothing to accept: {path} says the same as {seen.where}")
        write_baseline(after)
    for one in accepted:
        steps = ", ".join(f"{name} {step}" for name, step in one.changes.items())
        out.print(f"accepted: {one.row}: {steps}", markup=False)
    left_out = len(seen.unsupported) if all_of else 0
    if left_out:
        out.print(f"left out, as unsupported where it was run: {counted(left_out, 'row')}")
    out.print(
        f"{counted(len(accepted), 'row')} of {path} changed; commit it with the change that it is about", markup=False
    )


def _checked(reason: str) -> str:
    """The reason on one line. SelectionError if it says nothing, like the dots in the command that the gate prints."""
    text = " ".join(reason.split())
    if not any(character.isalnum() for character in text):
        raise SelectionError(
            f"--reason {reason!r} says nothing; write why the change is right, for those who come later"
        )
    return text


def _newest() -> list[Path]:
    newest = newest_run()
    return [newest] if newest else []


def _quoted(words: list[str]) -> list[str]:
    """The rows, if they were quoted; else a single row, which the shell has split into words."""
    return words if all(" on " in word for word in words) else [" ".join(words)]


def _matching(
    pattern: str, seen: Seen, baseline: Path | None, owed: Collection[Row], expectations: Sequence[Expectation]
) -> list[Row]:
    excused = {row for row in seen.rows if any(one.entry.matches(row) for one in expectations)}
    found = rows_matching(pattern, read_baseline(baseline or VM_BASELINE), seen, owed, excused)
    if not found:
        raise SelectionError(f"no row of {seen.where} or of the baseline has a case that matches {pattern!r}")
    return found


def _one_path(rows: list[Row], seen: Seen, baseline: Path | None) -> Path:
    """The one baseline file that holds all of `rows`. SelectionError if there are several."""
    if baseline is not None:
        return baseline
    headers = seen.rows
    paths = sorted({baseline_for(row.executor, headers.get(row)) for row in rows})
    if len(paths) > 1:
        names = " and ".join(path.name for path in paths)
        raise SelectionError(f"these rows belong to {names}: name the rows of one, or the file with --baseline")
    return paths[0]
