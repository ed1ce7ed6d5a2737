"""Which mutants the profile smoke kills: its rows as they are judged, with no other case, schedule or collector.

A campaign stops at the first check that kills. If that was a row of smoke, the answer is known. Other mutants run on
the rows of smoke that build their program; if smoke does not build a program, it kills none of its mutants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from conformance.kernels.mutants.campaign import (
    CRASHED,
    SCHEDULES,
    Examiner,
    Here,
    Outcome,
    Record,
    Subject,
    Todo,
    killed_by,
    lived,
)
from conformance.kernels.mutants.mutant import Mutant
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


class OnSmoke(Here):
    """Runs only the rows of smoke on each mutant. The outcomes tell `smoke`, and nothing else of the runs."""

    __slots__ = ()

    def outcome(self, subject: Subject, mutant: Mutant) -> Outcome:
        """What the rows of smoke do to one mutant."""
        return replace(lived(subject, mutant), smoke=killer(subject, mutant))


def unanswered(found: Sequence[Outcome], *, again: bool = False) -> list[Outcome]:
    """The mutants of which the record does not tell what smoke does. `again`: those that no smoke row killed, too."""
    return [one for one in found if (known := check_of(one)) is None or (again and not known)]


def smoked(record: Record, todo: Todo, examined: Examiner) -> Iterator[Outcome]:
    """Runs the rows of smoke on the mutants `todo`, and records the answers."""
    for outcome in examined(todo):
        yield answered(record, outcome.id, outcome.check if outcome.check == CRASHED else outcome.smoke or "")


def answered(record: Record, name: str, check: str) -> Outcome:
    """Records the check of smoke that kills a mutant, "" for none."""
    outcome = replace(record.by_id[name], smoke=check)
    record.append(outcome)
    return outcome
