"""Which mutants the profile smoke kills: its rows as they are judged, with no other case, schedule or collector.

A campaign stops at the first check that kills. If that was a row of smoke, the answer is known. Other mutants run on
the rows of smoke that build their program; if smoke does not build a program, it kills none of its mutants.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

from conformance.kernels.mutants.campaign import (
    CRASHED,
    SCHEDULES,
    Examiner,
    Outcome,
    Record,
    Subject,
    Todo,
    killed_by,
    lived,
)
from conformance.kernels.mutants.mutant import Mutant, mutants
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, owed_rows

SMOKE = Selection("smoke", executors=("vm",))


@cache
def rows() -> frozenset[tuple[str, str]]:
    """Cases and schedules of the profile smoke."""
    return frozenset((row.case, row.schedule) for row in owed_rows(load_specs(None), SMOKE))


def check_of(one: Outcome) -> str | None:
    """The check of smoke that kills a mutant, "" for none, None if smoke was not run."""
    if one.killed and (one.case, one.schedule) in rows():
        return one.check
    return one.smoke


def killer(subject: Subject, mutant: Mutant) -> str:
    """Returns the check of the smoke row that kills `mutant`, the smallest case first; "" for none. `subject`: of
    SMOKE."""
    turns = (
        (built, schedule)
        for built in subject.executing(mutant.line, SCHEDULES[0])
        for case, schedule in sorted(rows())
        if case == built.case.id
    )
    return next((check for built, schedule in turns if (check := killed_by(subject, built, mutant, schedule)[0])), "")


@dataclass(slots=True)
class OnSmoke:
    """Runs the rows of smoke on mutants, in their order, and begins none after `seconds` of processor time. The
    outcomes tell `smoke`, and nothing else of the runs."""

    seconds: float | None = None
    unchanged: float = 0.0
    schedules: ClassVar[Sequence[str]] = SCHEDULES[:1]

    def __call__(self, todo: Todo) -> Iterator[Outcome]:
        """Outcomes in the order of `todo`."""
        begun = time.process_time()
        for subject, mutant in todo:
            if self.seconds is not None and time.process_time() - begun > self.seconds:
                return
            before = subject.spent
            check = killer(subject, mutant)
            self.unchanged += subject.spent - before
            yield replace(lived(subject, mutant), smoke=check)


def unanswered(found: Sequence[Outcome], *, again: bool = False) -> list[Outcome]:
    """The mutants of which the record does not tell what smoke does. `again`: those that no smoke row killed, too."""
    return [one for one in found if (known := check_of(one)) is None or (again and not known)]


def todo_of(asked: Sequence[Outcome], programs: Sequence[Subject]) -> Todo:
    """The mutants of `asked` whose programs are among `programs`."""
    ids = {one.id for one in asked}
    return [(one, each) for one in programs for each in mutants(one.built[0].program) if each.id in ids]


def smoked(record: Record, todo: Todo, examined: Examiner) -> Iterator[Outcome]:
    """Runs the rows of smoke on the mutants `todo`, and records the answers."""
    for outcome in examined(todo):
        yield answered(record, outcome.id, outcome.check if outcome.check == CRASHED else outcome.smoke or "")


def answered(record: Record, name: str, check: str) -> Outcome:
    """Records the check of smoke that kills a mutant, "" for none."""
    outcome = replace(record.by_id[name], smoke=check)
    record.append(outcome)
    return outcome
