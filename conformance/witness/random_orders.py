"""Public kernels under many random orders: `nox -s witness -- --sources DIR --orders K` writes results/others.jsonl.

A call that is right in order, and cheap, runs under K orders of its own in one process, which compiles it once where
its compiler keeps programs. No finding may be an error that argued.yaml does not argue, and its result must stay right.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pebble import ProcessPool

from conformance.kernels.mutants.unmutated import OTHERS, Watch, Watched, followed
from conformance.witness.apart import LostError, result_of
from conformance.witness.public import RECORDED, PublicCase, blank, cases, ran, settle
from conformance.witness.public_record import RECORD, PublicRow, read_rows
from megamoe.contract import Target

MAX_SECONDS = 2.0
"""Processor time of a call in order, by results/public.jsonl; a slower call is left out."""
RIGHT = ("ok", "argued", "defect")
"""Outcomes with no finding that nobody has argued."""
LACKING = ("not_run", "uncompiled", "unsupported")
"""Outcomes of a call that cannot run here."""
MAX_ERROR = 300
"""Characters of an error in the record."""


def watched(case: PublicCase, sources: str, seeds: range) -> Watched:
    """Runs a call once in order and then under random:SEED for each of `seeds`. `settle` has prepared this process."""
    first, _ = ran(case, sources, RECORDED)
    if first.status in LACKING:
        return left_out(case, first.reason, first.source)
    errors, spent = _errors(first, RECORDED), first.cpu_seconds
    relied, notes, argued = Counter[str](), Counter[str](), Counter[str]()
    for schedule in (f"random:{seed}" for seed in seeds):
        row, found = ran(case, sources, schedule)
        spent += row.cpu_seconds
        errors += _errors(row, schedule, first.errors)
        relied.update({one.rule for one in found if one.grade == "portability"})
        notes.update({one.rule for one in found if one.grade == "note"})
        argued.update(row.errors if row.status in RIGHT else ())
    return Watched(
        *_id(case), seeds.start, len(seeds), tuple(errors), dict(relied), dict(notes), seconds=round(spent, 1),
        text=first.source, argued=dict(argued),
    )  # fmt: skip


def _errors(row: PublicRow, schedule: str, in_order: tuple[str, ...] = ()) -> list[str]:
    """What is wrong with a row, less the findings of the run `in_order`."""
    if row.status in RIGHT:
        return []
    found = [one for one in row.errors if one not in in_order] or [f"{row.status}, {row.reason}"]
    return [f"{schedule}: {one}"[:MAX_ERROR] for one in found]


def left_out(case: PublicCase, why: str, source: str) -> Watched:
    """The line of a call that does not run. `source`: the digest of its file."""
    return Watched(*_id(case), left_out=why, text=source)


def _id(case: PublicCase) -> tuple[str, str, str]:
    return case.family, case.target, f"{case.path} {case.call}"


# In the deciding process.


@dataclass(frozen=True, slots=True)
class Turn:
    """A call, the seeds of its orders, and why it is left out, if it is."""

    case: PublicCase
    seeds: range
    left_out: str = ""


def planned(orders: int, only: str = "") -> list[Turn]:
    """The calls whose name contains `only`, by the record of public kernels: `orders` for each that is right and
    cheap."""
    known = {row.name: row for row in read_rows(RECORD.read_text("utf-8"))}
    found = list[Turn]()
    for place, case in enumerate(cases()):
        row = known[case.name]
        why = "" if row.status in RIGHT else row.status
        if row.cpu_seconds > MAX_SECONDS:
            why = f"more than {MAX_SECONDS:g} s in order"
        found.append(Turn(case, range(place * orders, (place + 1) * orders), why))
    return [one for one in found if only in one.case.name]


def watch(record: Watch, sources: Path, plan: Sequence[Turn], seconds: float | None = None) -> Iterator[Watched]:
    """Watches what `record` lacks of a plan, and yields each line that it adds. Calls of a target and compiler share a
    process.

    `seconds`: processor time of the calls, after which none begins.
    """
    places = dict[tuple[Target, str], list[Turn]]()
    for turn in _owed(record, sources, plan):
        _, package = turn.case.checkout.package(sources) or ("", "")
        places.setdefault((turn.case.target, package), []).append(turn)
    spent, spawn = 0.0, multiprocessing.get_context("spawn")
    for place, members in places.items():
        if seconds is not None and spent > seconds:
            return
        with ProcessPool(1, context=spawn, initializer=settle, initargs=place) as pool:
            for turn in members:
                if seconds is not None and spent > seconds:
                    return
                try:
                    line = result_of(pool, watched, turn.case, str(sources), turn.seeds)
                except LostError as lost:
                    line = _lost(turn, str(lost))
                spent += line.seconds
                record.append(line)
                yield line


def _owed(record: Watch, sources: Path, plan: Sequence[Turn]) -> Iterator[Turn]:
    """The calls of which `record` has no line, or one with an error, of another file or with fewer orders. It gets the
    lines of those that cannot run."""
    for turn in plan:
        row, known = blank(turn.case, sources), record.by_id.get(_id(turn.case))
        if why := turn.left_out or row.reason:
            line = left_out(turn.case, why, row.source)
            # What another checkout or compiler has shown stays.
            if known is None or (known.left_out and known != line):
                record.append(line)
        elif known is None or known.errors or known.text != row.source or known.rows < len(turn.seeds):
            yield turn


def _lost(turn: Turn, why: str) -> Watched:
    seeds = turn.seeds
    return Watched(*_id(turn.case), seeds.start, 0, (f"random:{seeds.start} to {seeds.stop - 1}: {why}",))


def renew(
    sources: Path, orders: int, only: str, seconds: float | None, path: Path | None, given: Sequence[str]
) -> bool:
    """Runs what the record at `path`, or the tracked one, lacks. Returns whether no line of it has an error.

    RecordError if another process writes it.
    """
    with closing(Watch(path or OTHERS)) as record:
        plan = planned(orders, only)
        of_plan = {_id(turn.case) for turn in plan}
        rows = sum(len(turn.seeds) for turn in plan if not turn.left_out)
        rows += sum(one.rows for one in record.results if one.id not in of_plan)
        return not followed(record, rows, given, watch(record, sources, plan, seconds))
