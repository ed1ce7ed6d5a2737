"""Calls of the tool: run mutants of programs, or write a table of them."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from conformance.kernels.mutants.campaign import (
    DROPPED,
    EXCUSED_SECONDS,
    SCHEDULES,
    Examiner,
    Here,
    Outcome,
    Plan,
    Record,
    Refused,
    Subject,
    built_no_more,
    drops,
    examine,
    is_theirs,
    planned,
    run,
    subjects,
)
from conformance.kernels.mutants.claims import claimed, held
from conformance.kernels.mutants.journal import COMPRESSED, Ran
from conformance.kernels.mutants.mutant import ID, SYNCHRONISATION, Mutant
from conformance.kernels.mutants.options import RUNS
from conformance.kernels.mutants.processes import WORTH, Processes, pack, profile_of, unpacked
from conformance.kernels.mutants.search import Effort, Hunt, as_row, hunts
from conformance.kernels.mutants.silicon import remember
from conformance.kernels.mutants.smoke import SMOKE, OnSmoke, answered, smoked, unanswered
from conformance.kernels.mutants.table import (
    DROPS,
    RECORD,
    TABLE,
    Reason,
    argued,
    drops_table,
    equivalent,
    excuses,
    kind_of,
    reason_of,
    reasons,
    survivors,
    table,
)
from conformance.kernels.mutants.unmutated import Watch, followed, watch
from megamoe.contract import NoProgramError, UnsupportedError, file_name
from megamoe.contract.counted import counted
from megamoe.contract.known_names import nearest
from megamoe.records.lines import RecordError
from megamoe.records.shards import Nth
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.selection import Selection, SelectionError

_BACKEND, _TARGET, _OP = attrgetter("backend"), attrgetter("target"), attrgetter("op")


def perform(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Runs a call and returns its exit status, as `__main__.main` documents it."""
    try:
        if options.table:
            return _table(Record(*_records(options, RECORD)), options)
        if options.argued:
            return _argued(Record(*_records(options, RECORD)), options)
        if options.forget or options.smoke:
            with closing(Record(*_records(options, RUNS))) as record:
                return _amended(record, options, given)
        if options.unmutated is not None:
            with closing(Watch(*(options.record or ()))) as record:
                return followed(record, options.unmutated, given, watch(record, options.unmutated, options.seconds))
        if options.pack:
            whole = "" if options.case or options.where else options.profile
            return _pack(_programs(_selection(options)), options.pack, whole)
        if options.drops:
            DROPS.write_text(drops_table({target: drops(target) for target in DROPPED}, reasons()), "utf-8")
            print(f"{DROPS} is written")
            return 0
        with closing(Record(*_records(options, RUNS))) as record:
            return _campaign(record, options, given)
    except (SelectionError, SpecError, UnsupportedError, NoProgramError, RecordError, ValueError, OSError) as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = "" if options.id or options.text or options.pack else "; the same call goes on where its record ends"
        print(f"mutants: stopped{kept}", file=sys.stderr)
        return 130


def _records(options: argparse.Namespace, default: Path) -> list[Path]:
    """The files of `--record`, or `default`; for a user's backend always the file that its campaigns write."""
    return options.record or [RUNS if any(map(is_theirs, options.backend or ())) else default]


def chosen(record: Record, options: argparse.Namespace) -> list[Outcome]:
    """The part of a record that `--backend`, `--target`, `--op` and `--program` select. ValueError if it is empty."""
    found = record.results
    if not found:
        raise ValueError(f"{record.path} has no mutants; name what a campaign has written with --record")
    for option, of in (("backend", _BACKEND), ("target", _TARGET), ("op", _OP)):
        given = getattr(options, option)
        if not given:
            continue
        there = sorted(set(map(of, record.results)))
        if absent := [name for name in given if name not in there]:
            like = nearest(absent[0], there)
            raise ValueError(
                f"{record.path} has no mutants of the {option} {absent[0]!r}; it has {', '.join(there)}{like}"
            )
        found = [one for one in found if of(one) in given]
    if options.program:
        found = [one for one in found if any(part in one.program for part in options.program)]
    if not found:
        raise ValueError(f"{record.path} has no mutants of this selection")
    return found


def _table(record: Record, options: argparse.Namespace) -> int:
    found = chosen(record, options)
    part = found if len(found) < len(record.results) else None
    place, ours = _place(record.path, options if part else None)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(table(record, reasons(), ours=ours, chosen=part), "utf-8")
    print(f"{place}: {counted(len(found), 'mutant')}")
    return 0


def _argued(record: Record, options: argparse.Namespace) -> int:
    """Runs the survivors that a reason says leave the same bits; status 1 if one leaves others."""
    claims, wrong, gone = claimed(chosen(record, options), reasons()), 0, 0
    if not claims:
        raise ValueError(f"no reason says of a survivor of {record.path} that it leaves the same bits")
    for at, claim in enumerate(held(claims), 1):
        wrong, gone = wrong + bool(claim.changed), gone + (claim.changed is None)
        print(f"{at}/{len(claims)} {claim.told}", flush=True)
    same, many = len(claims) - wrong - gone, counted(len(claims), "mutant")
    print(f"{record.path}: {same} of {many} leave the same bits, {wrong} others; programs of {gone} are built no more")
    return int(wrong > 0)


def _place(record: Path, part: argparse.Namespace | None) -> tuple[Path, bool]:
    """Where the table of a record, or of a part of it, is written; whether it is the tracked one."""
    stem = record.name.removesuffix(COMPRESSED).removesuffix(".jsonl")
    ours = record.resolve() in (RECORD, RECORD.with_suffix(""))
    if part is None:
        return TABLE if ours else record.with_name(f"{stem}.md"), ours
    names = [name for given in (part.backend, part.target, part.op, part.program) for name in given or ()]
    folder = RUNS.parent if ours else record.parent
    return folder / f"{stem}-{file_name('-'.join(names))}.md", False


def _selection(options: argparse.Namespace) -> Selection:
    chosen = (options.op, options.case, options.where, options.backend, options.target)
    return Selection(options.profile, *(tuple(names or ()) for names in chosen), executors=("vm",))


def _campaign(record: Record, options: argparse.Namespace, given: Sequence[str]) -> int:
    selection, schedules = _selection(options), tuple(options.schedule or SCHEDULES)
    shard, parts = Nth.parse(options.shard), tuple(options.program or ())
    plan = Plan(selection, options.sync, options.others, options.seed, shard, parts)
    if options.search is None and not options.id and not options.text:
        record.check_writable()
    programs = unpacked(options.packed) if options.packed else _programs(selection)
    if options.search is not None:
        effort = Effort(options.search, options.seconds or 60.0, schedules)
        return _search(record, plan, programs, effort, options.id)
    if options.id or options.text:
        return _alone(options.id, options.text, plan, programs, schedules)
    todo, known, again = planned(plan, programs), reasons(), options.again or options.holes
    if again:
        lived = survivors(record.results, known)
        wanted = {one.id for one, _ in lived} - (equivalent(lived) if options.holes else set[str]())
        todo = [pair for pair in todo if pair[1].id in wanted]
    if not todo:
        which = " that lived" if again else ""
        raise ValueError(f"this call draws no mutant{which}: see --sync, --others, --shard and --program")
    record.append(Ran.now(given, len(todo)))
    ran, spent = set[str](), 0.0
    print(f"{counted(len(todo), 'mutant')}; an id is {ID}", flush=True)
    before = 0 if again else sum(mutant.id in record.by_id for _, mutant in todo)
    examined = _examiner(options, schedules, len(todo) - before)
    for outcome in run(todo, record, examined, again=again):
        ran.add(outcome.id)
        spent += outcome.seconds
        print(f"{before + len(ran)}/{len(todo)} {told_of(outcome, known)}", flush=True)
    left = sum(mutant.id not in (ran if again else record.by_id) for _, mutant in todo)
    lived = survivors(record.results, known)
    killed, same = len(record.results) - len(lived), len(equivalent(lived))
    holes, excused = len(lived) - same, sum(not blamed(one, known) for one, _ in lived) - same
    print(
        f"{counted(len(ran), 'mutant')} took {spent:.0f} s of processor time, their programs as they are "
        f"{examined.unchanged:.0f} s"
    )
    counts = f"{killed} killed, {same} equivalent, {counted(holes, 'hole')}, {excused} of them excused"
    print(f"{record.path}: {counts}; {left} of this call left to run")
    of_call = [one for _, mutant in todo if (one := record.by_id.get(mutant.id)) is not None]
    return int(any(not one.killed and blamed(one, known) for one in of_call))


def _examiner(options: argparse.Namespace, schedules: Sequence[str], mutants: int) -> Examiner:
    """Examines in this process if there is no work for two."""
    excused = options.excused
    if excused is None:
        excused = math.inf if options.again or options.holes else EXCUSED_SECONDS
    here = Here(schedules, options.seconds, argued, excused)
    return Processes(options.jobs, here) if options.jobs > 1 and mutants >= 2 * WORTH else here


def _pack(programs: Sequence[Subject], folder: Path, profile: str) -> int:
    """Writes the programs of a selection to files, for a host that cannot build them."""
    for at, path in enumerate(pack(programs, folder, profile), 1):
        print(f"{at}/{len(programs)} {path}: {programs[at - 1].name}", flush=True)
    return 0


def blamed(survivor: Outcome, known: Sequence[Reason]) -> bool:
    """Whether nothing excuses a survivor. Reasons about missing checks excuse only our own backends."""
    why = reason_of(survivor, known)
    return why is None or (survivor.theirs and why.verdict == "hole")


def told_of(one: Outcome, known: Sequence[Reason]) -> str:
    """A line about a mutant's outcome; for a survivor, or what died although excused, with the reason in `known`."""
    program = one.program.rpartition(" ")[0]
    change = f"{program}, {one.id} `{one.before}` -> `{one.after}`, {counted(one.runs, 'run')}, {one.seconds:.1f} s"
    why = reason_of(one, known)
    if one.killed:
        wrong = f"; this excused it, and is wrong here: {why.why}" if one.excused and why is not None else ""
        return f"{one.check} on {one.case}, {one.schedule}: {change}{wrong}"
    if why is None:
        return f"SURVIVED, a hole without a reason: {change}"
    fate = "equivalent" if excuses(why) else "a hole" if blamed(one, known) else "a hole that is excused"
    return f"SURVIVED, {fate}: {change}: {why.why}"


def _programs(selection: Selection) -> list[Subject]:
    """The programs of a selection. Prints what is left out; ValueError with it if there is no program."""
    refused: Refused = {}
    programs = subjects(selection, refused)
    told = [
        f"{counted(len(some), 'case', 'is', 'are')} left out, as the backend refuses ({some[0]}): {sentence}"
        for sentence, some in refused.items()
    ]
    if not programs:
        raise ValueError("; ".join(["no program with PTX is selected, so there is nothing to change", *told]))
    for one in told:
        print(one, flush=True)
    return programs


def _search(record: Record, plan: Plan, programs: Sequence[Subject], effort: Effort, wanted: str | None) -> int:
    """For each survivor of `record` whose reason is a hole, or for the `wanted` one: finds a case that kills it, and
    prints the rows to add."""
    lived = survivors(record.results, reasons())
    holes = {one.id for one, _ in lived} - equivalent(lived)
    if not holes:
        raise ValueError(f"{record.path} has no survivor that is a hole, so there is nothing to search for")
    if wanted is not None and wanted not in holes:
        raise ValueError(f"{wanted} is no hole of {record.path}; it has {counted(len(holes), 'hole')}")
    holes = holes if wanted is None else {wanted}
    every = Plan(plan.selection, None, None, programs=plan.programs)
    todo = [pair for pair in planned(every, programs) if pair[1].id in holes]
    # A case rarely kills a mutant of an ordering instruction, so the others come first.
    todo.sort(key=lambda pair: pair[1].kind in SYNCHRONISATION)
    if not todo:
        raise ValueError(f"no hole of {record.path} ({len(holes):,} in all) is in a program of this selection")
    draws = counted(effort.examples, "draw")
    print(f"{counted(len(todo), 'hole')}, each for up to {draws} and {effort.seconds:g} s", flush=True)
    rows: dict[str, list[str]] = {}
    for at, one in enumerate(hunts(todo, effort), 1):
        fate = f"{one.killer.check} on {one.killer.case}, {one.killer.schedule}" if one.killer else "still lives"
        change = f"`{one.mutant.before}` -> `{one.mutant.after}`"
        program = one.subject.name.rpartition(" ")[0]
        print(f"{at}/{len(todo)} {fate}: {program}, {one.mutant.id} {change}, {drawn_of(one)}", flush=True)
        if one.killer is not None:
            row = as_row(one.spec.parse_case(one.killer.case))
            rows.setdefault(f"specs/{one.subject.op}.yaml {row}", []).append(one.mutant.id)
    print(f"{sum(map(len, rows.values()))} of {len(todo)} would be killed by {counted(len(rows), 'more row')}")
    for row, ids in sorted(rows.items(), key=lambda pair: -len(pair[1])):
        print(f"{row}  # kills {len(ids)}: {', '.join(ids[:3])}")
    return 0


def drawn_of(one: Hunt) -> str:
    """What became of the cases that were drawn for a mutant, and why no more were if it lives."""
    cases = len(one.tried) + len(one.others) + len(one.refused)
    ended = f"; the search ended because {one.ended}" if one.ended else ""
    return (
        f"of {counted(cases, 'drawn case')} {len(one.tried)} built its text, {len(one.others)} another, and the "
        f"backend refused {len(one.refused)}{ended}"
    )


def _amended(record: Record, options: argparse.Namespace, given: Sequence[str]) -> int:
    """Drops programs that are built no more; runs the rows of the profile smoke."""
    record.check_writable()
    if options.forget:
        remember({str(one.id): one.killed for one in record.results})
        for name in built_no_more(chosen(record, options)):
            record.forget(name)
            print(f"{record.path}: without {name}, which is built no more")
    if options.smoke:
        _ask_smoke(record, options, given)
    return 0


def _ask_smoke(record: Record, options: argparse.Namespace, given: Sequence[str]) -> None:
    """Runs the rows of the profile smoke on what is not equivalent and has no answer; with --again, also on what no row
    of smoke killed before."""
    same = equivalent(survivors(record.results, reasons()))
    asked = unanswered([one for one in chosen(record, options) if one.id not in same], again=options.again)
    if options.packed and profile_of(options.packed) != SMOKE.profile:
        raise ValueError(f"{options.packed} may lack rows of smoke; pack it without --profile, --case and --where")
    programs = unpacked(options.packed) if options.packed else _of_smoke(asked)
    ids = {one.id for one in asked}
    todo = [pair for pair in planned(Plan(SMOKE, None, None), programs) if pair[1].id in ids]
    if asked:
        record.append(Ran.now(given, len(asked)))
    built = {mutant.id for _, mutant in todo}
    for one in asked:
        if not options.packed and one.id not in built:
            # Smoke does not build its program.
            answered(record, one.id, "")
    # A mutant that ended its process before would end this one.
    examined = Processes(options.jobs, OnSmoke(SCHEDULES[:1], options.seconds))
    for at, one in enumerate(smoked(record, todo, examined), 1):
        program = one.program.rpartition(" ")[0]
        print(f"{at}/{len(todo)} {one.smoke or 'no row of smoke kills it'}: {program}, {one.id}", flush=True)
    left = len(unanswered([record.by_id[one.id] for one in asked]))
    where = " or in no program of the pack" if options.packed else ""
    print(f"{record.path}: {counted(len(asked), 'mutant')} without an answer before; {left} left to run{where}")


def _of_smoke(asked: Sequence[Outcome]) -> list[Subject]:
    """The programs of smoke of the backends of some mutants."""
    # Smoke has the rows of registered backends; `megamoe run --backend` gives a user's backend the same rows.
    own = tuple(dict.fromkeys(one.backend for one in asked if one.theirs))
    programs = subjects(replace(SMOKE, backends=own)) if own else []
    return programs + (subjects(SMOKE) if any(not one.theirs for one in asked) else [])


def _alone(
    name: str | None, text: str | None, plan: Plan, programs: Sequence[Subject], schedules: Sequence[str]
) -> int:
    """Runs one mutant by its id, or those of the instructions that have `text`, and keeps no record. Returns 1 if one
    lives that nothing excuses."""
    every = Plan(plan.selection, None, None, programs=plan.programs if name is None else (name.partition("/")[0],))
    found = planned(every, programs)
    wanted = [pair for pair in found if pair[1].id == name or (text and pair[1].line and text in pair[1].before)]
    if not wanted and name:
        raise ValueError(f"no program of this selection has a mutant {name!r}; ids begin with the text's SHA-256")
    if not wanted:
        raise ValueError(_no_instruction(str(text), [mutant for _, mutant in found]))
    known, unexplained = reasons(), 0
    for subject, mutant in wanted:
        outcome = examine(subject, mutant, schedules)
        unexplained += not outcome.killed and blamed(outcome, known)
        print(told_of(outcome, known), flush=True)
    return int(bool(unexplained))


def _no_instruction(text: str, every: Sequence[Mutant]) -> str:
    kinds = sorted({kind_of(one.before) for one in every if one.kind in SYNCHRONISATION})
    ordering = f"those that order are {', '.join(kinds)}{nearest(text, kinds)}"
    return f"no instruction of this selection has {text!r} in its text; {ordering}"
