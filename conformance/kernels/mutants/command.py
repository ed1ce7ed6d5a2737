"""Calls of the tool: run mutants of programs, or write a table of them."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path

from conformance import ROOT
from conformance.kernels.mutants.campaign import (
    DROPPED,
    SCHEDULES,
    Outcome,
    Plan,
    Record,
    built_no_more,
    drops,
    examine,
    planned,
    run,
    subjects,
)
from conformance.kernels.mutants.journal import Ran
from conformance.kernels.mutants.mutant import SYNCHRONISATION, Mutant
from conformance.kernels.mutants.options import RUNS
from conformance.kernels.mutants.search import Effort, as_row, hunts
from conformance.kernels.mutants.silicon import remember
from conformance.kernels.mutants.smoke import smoked
from conformance.kernels.mutants.table import (
    DROPS,
    RECORD,
    TABLE,
    Reason,
    drops_table,
    equivalent,
    excuses,
    kind_of,
    reason_of,
    reasons,
    survivors,
    table,
    theirs,
)
from conformance.kernels.mutants.unmutated import Watch, watch
from megamoe.contract import NoProgramError, UnsupportedError
from megamoe.records.lines import RecordError
from megamoe.records.shards import Nth
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.selection import Selection, SelectionError


def perform(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Runs a call and returns its exit status, as `__main__.main` documents it."""
    try:
        if options.table:
            return _table(Record(*_records(options, RECORD)))
        if options.forget or options.smoke:
            return _amended(Record(*_records(options, RECORD)), options)
        if options.unmutated is not None:
            return _unmutated(Watch(*(options.record or ())), options, given)
        if options.drops:
            DROPS.write_text(drops_table({target: drops(target) for target in DROPPED}, reasons()), "utf-8")
            print(f"{DROPS} is written")
            return 0
        return _campaign(options, given)
    except (SelectionError, SpecError, UnsupportedError, NoProgramError, RecordError, ValueError, OSError) as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mutants: stopped; the same call goes on where its record ends", file=sys.stderr)
        return 130


def _records(options: argparse.Namespace, default: Path) -> list[Path]:
    """The files of `--record`, or `default`; for a user's backend always the file that its campaigns write."""
    own = any(":" in name for name in options.backend or ())
    return options.record or [RUNS if own else default]


def _table(record: Record) -> int:
    if not record.results:
        raise ValueError(f"{record.path} has no mutants; name what a campaign has written with --record")
    ours = record.path.resolve() == RECORD
    place = TABLE if ours else record.path.with_suffix(".md")
    place.write_text(table(record, reasons(), ours=ours), "utf-8")
    print(f"{place}: {len(record.results)} mutants")
    return 0


def _campaign(options: argparse.Namespace, given: Sequence[str]) -> int:
    record = Record(*_records(options, RUNS))
    selection = Selection(
        options.profile,
        *(tuple(names or ()) for names in (options.op, options.case, options.where, options.backend, options.target)),
        executors=("vm",),
    )
    if options.search is not None:
        return _search(record, selection, Effort(options.search, options.seconds or 60.0))
    shard, parts = Nth.parse(options.shard), tuple(options.program or ())
    plan = Plan(selection, options.sync, options.others, options.seed, shard, parts)
    if options.id or options.text:
        return _alone(options.id, options.text, plan)
    todo, known = planned(plan, subjects(selection)), reasons()
    if options.again or options.holes:
        lived = survivors(record, known)
        chosen = {one.id for one, _ in lived} - (equivalent(lived) if options.holes else set[str]())
        todo = [pair for pair in todo if pair[1].id in chosen]
    if not todo:
        raise ValueError("no program with PTX is selected, so there is nothing to change")
    record.append(_call(given, len(todo)))
    again, ran, unexplained, spent = options.again or options.holes, set[str](), 0, 0.0
    schedules = tuple(options.schedule or SCHEDULES)

    def argued(survivor: Outcome) -> bool:
        return excuses(reason_of(survivor, known))

    for at, outcome in run(todo, record, schedules, options.seconds, again=again, argued=argued):
        ran.add(outcome.id)
        spent += outcome.seconds
        unexplained += not outcome.killed and blamed(outcome, known)
        print(f"{at}/{len(todo)} {told_of(outcome, known)}", flush=True)
    left = sum(mutant.id not in (ran if again else record.by_id) for _, mutant in todo)
    lived = survivors(record, known)
    killed, same = len(record.results) - len(lived), len(equivalent(lived))
    holes, excused = len(lived) - same, sum(not blamed(one, known) for one, _ in lived) - same
    programs = sum({id(one): one.spent for one, _ in todo}.values())
    print(f"{len(ran)} mutants took {spent:.0f} s of processor time, their programs as they are {programs:.0f} s")
    counts = f"{killed} killed, {same} equivalent, {holes} holes, of which {excused} are excused"
    print(f"{record.path}: {counts}; {left} of this call are left to run")
    return int(bool(unexplained))


def blamed(survivor: Outcome, known: Sequence[Reason]) -> bool:
    """Whether nothing excuses a survivor. Reasons about missing checks excuse only our own backends."""
    why = reason_of(survivor, known)
    return why is None or (theirs(survivor) and why.verdict == "hole")


def told_of(one: Outcome, known: Sequence[Reason]) -> str:
    """A line about a mutant's outcome; for a survivor, with the reason in `known`."""
    change = f"{one.id} `{one.before}` -> `{one.after}`, {one.runs} runs, {one.seconds:.1f} s"
    if one.killed:
        return f"{one.check} on {one.case}, {one.schedule}: {change}"
    why = reason_of(one, known)
    if why is None:
        return f"SURVIVED, a hole without a reason: {change}"
    fate = "equivalent" if excuses(why) else "a hole" if blamed(one, known) else "a hole that is excused"
    return f"SURVIVED, {fate}: {change}: {why.why}"


def _search(record: Record, selection: Selection, effort: Effort) -> int:
    """For each survivor of `record` whose reason is a hole: finds a case that kills it, and prints the rows to add."""
    lived = survivors(record, reasons())
    holes = {one.id for one, _ in lived} - equivalent(lived)
    if not holes:
        raise ValueError(f"{record.path} has no survivor that is a hole, so there is nothing to search for")
    todo = [pair for pair in planned(Plan(selection, None, None), subjects(selection)) if pair[1].id in holes]
    # A case rarely kills a mutant of an ordering instruction, so the others come first.
    todo.sort(key=lambda pair: pair[1].kind in SYNCHRONISATION)
    if not todo:
        raise ValueError(f"none of the {len(holes)} holes of {record.path} is in a program of this selection")
    print(f"{len(todo)} holes, each for up to {effort.examples} draws and {effort.seconds:g} s", flush=True)
    rows: dict[str, list[str]] = {}
    for at, one in enumerate(hunts(todo, effort), 1):
        fate = f"{one.killer.check} on {one.killer.case}, {one.killer.schedule}" if one.killer else "still lives"
        change = f"`{one.mutant.before}` -> `{one.mutant.after}`"
        drawn = f"{len(one.tried)} drawn cases build its text, {len(one.others)} another or none"
        print(f"{at}/{len(todo)} {fate}: {one.mutant.id} {change}, {drawn}", flush=True)
        if one.killer is not None:
            row = as_row(one.spec.parse_case(one.killer.case))
            rows.setdefault(f"specs/{one.subject.op}.yaml {row}", []).append(one.mutant.id)
    print(f"{sum(map(len, rows.values()))} of {len(todo)} would be killed by {len(rows)} more rows")
    for row, ids in sorted(rows.items(), key=lambda pair: -len(pair[1])):
        print(f"{row}  # kills {len(ids)}: {', '.join(ids[:3])}")
    return 0


def _amended(record: Record, options: argparse.Namespace) -> int:
    """Drops programs that are built no more; runs the rows of the profile smoke."""
    if options.forget:
        remember({str(one.id): one.killed for one in record.results})
        for name in built_no_more(record):
            record.forget(name)
            print(f"{record.path}: without {name}, which is built no more")
    if options.smoke:
        for one in smoked(record, equivalent(survivors(record, reasons())), options.seconds, again=options.again):
            print(f"{one.id}: {one.smoke or 'no row of smoke kills it'}", flush=True)
    return 0


def _unmutated(record: Watch, options: argparse.Namespace, given: Sequence[str]) -> int:
    """Runs unchanged programs until `record` has so many rows; status 1 if one has an error."""
    record.append(_call(given, options.unmutated))
    for one in watch(record, options.unmutated, options.seconds):
        fate = one.left_out or "; ".join(one.errors) or "no error"
        rows = f"{record.rows}/{options.unmutated} rows"
        print(f"{rows}, {one.case} on {one.backend} {one.target}: {fate}, {one.seconds:.1f} s", flush=True)
    print(f"{record.path}: {record.rows} rows, {len(record.wrong)} cases with an error")
    return int(bool(record.wrong))


def _alone(name: str | None, text: str | None, plan: Plan) -> int:
    """Runs one mutant by its id, or those of the instructions that have `text`, and keeps no record."""
    every = Plan(plan.selection, None, None, programs=plan.programs if name is None else (name.partition("/")[0],))
    found = planned(every, subjects(plan.selection))
    wanted = [pair for pair in found if pair[1].id == name or (text and pair[1].line and text in pair[1].before)]
    if not wanted and name:
        raise ValueError(f"no program of this selection has a mutant {name!r}; ids begin with the text's SHA-256")
    if not wanted:
        raise ValueError(_no_instruction(str(text), [mutant for _, mutant in found]))
    known = reasons()
    for subject, mutant in wanted:
        print(told_of(examine(subject, mutant), known), flush=True)
    return 0


def _no_instruction(text: str, every: Sequence[Mutant]) -> str:
    kinds = sorted({kind_of(one.before) for one in every if one.kind in SYNCHRONISATION})
    like = get_close_matches(text, kinds, 1)
    guess = f"; did you mean {like[0]}?" if like else ""
    return f"no instruction of this selection has {text!r} in its text; those that order are {', '.join(kinds)}{guess}"


def _call(given: Sequence[str], planned: int) -> Ran:
    """The record line of this call, which begins now."""
    command = ["git", "rev-parse", "--short=12", "HEAD:backends/vm"]
    tree = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return Ran(shlex.join(given), tree, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", planned)
