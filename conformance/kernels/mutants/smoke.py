"""Which mutants the profile smoke kills: its rows as they are judged, with no other case, schedule or collector.

A campaign stops at the first check that kills. If that was a row of smoke, the answer is known. Other mutants run on
the rows of smoke that build their program; if smoke does not build a program, it kills none of its mutants.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache

from conformance.kernels.mutants.campaign import CRASHED, Outcome, Record, Subject, killed_by, subjects
from conformance.kernels.mutants.mutant import Mutant, mutants, program_id
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
    turns = ((built, schedule) for built in subject.built for case, schedule in sorted(rows()) if case == built.case.id)
    return next((check for built, schedule in turns if (check := killed_by(subject, built, mutant, schedule)[0])), "")


def smoked(
    record: Record,
    excused: Collection[str] = (),
    seconds: float | None = None,
    *,
    again: bool = False,
    selection: Selection = SMOKE,
) -> Iterator[Outcome]:
    """Runs smoke on the mutants without an answer in `record`, for at most `seconds` of processor time, and records the
    answers.

    `excused`: ids of mutants that are not asked about. `again`: also repeats mutants that no smoke row killed before.
    `selection`: rows of smoke, or fewer.
    """
    begun = time.process_time()
    # What ends its process would end this one.
    asked = [one for one in record.results if one.id not in excused and one.check != CRASHED]
    # The rows of smoke are of registered backends; with `megamoe run --backend`, those of a user's backend are, too.
    own = tuple(dict.fromkeys(one.backend for one in asked if one.theirs))
    programs = subjects(replace(selection, backends=own)) if own else []
    programs += subjects(selection) if any(not one.theirs for one in asked) else []
    built = {program_id(one.built[0].program.ptx): one for one in programs}
    of_program: dict[str, dict[str, Mutant]] = {}
    for one in asked:
        known = check_of(one)
        if known is not None and (known or not again):
            continue
        if seconds is not None and time.process_time() - begun > seconds:
            return
        text = one.id.partition("/")[0]
        subject = built.get(text)
        answer = ""
        if subject is not None:
            if text not in of_program:
                of_program = {text: {each.id: each for each in mutants(subject.built[0].program)}}
            answer = killer(subject, of_program[text][one.id])
        record.append(replace(one, smoke=answer))
        yield record.by_id[one.id]
