"""One trial of a law: a case and schedules, drawn or given, on one machine; and the hunt for a case that breaks it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import Phase, given, note, reject, settings
from hypothesis import strategies as st
from hypothesis.vendor.pretty import RepresentationPrinter

from conformance.kernels.laws.law import Bench, Law, Machine, spec_of, specs
from conformance.kernels.laws.strategies import cases, schedules
from megamoe.contract import Case, UnsupportedError, spell
from megamoe.runner.child import give_memory_back

# A machine that declines this many cases in a row without running any is taken to have no kernel for the law.
DECLINED_IN_A_ROW = 25
# Schedules of a trial whose case is given without schedules.
SCHEDULES = ("eager", "lazy", "random:0")
EXAMPLES = 12
hunting = settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
# Draws vary with the constants that Hypothesis finds in loaded modules, so allow many. A planted fault ends the search.
searching = settings(hunting, max_examples=2_000)


class OutOfScopeError(Exception):
    """The law says nothing about the given case; the text says what it covers."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The case and schedules of one trial. It prints as the rerun needs it."""

    case: Case
    schedules: tuple[str, ...]

    def __repr__(self) -> str:
        return f"{self.case.id} under {', '.join(self.schedules)}"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        # Hypothesis would print every field of a dataclass.
        printer.text(repr(self))


@dataclass(slots=True)
class Tally:
    """Counts the outcomes of one law's trials on one machine."""

    held: int = 0
    declined: int = 0


def trials(
    law: Law, case_id: str | None, given_schedules: list[str], shares: tuple[int, ...] = (1,)
) -> st.SearchStrategy[Trial]:
    """Returns trials of `law`: only of the given case, if there is one; else drawn cases within one of `shares` of the
    budget.

    OutOfScopeError if the law does not cover that case, SpecError if there is no such case.
    """
    if case_id is None:
        drawn = st.one_of([cases(law, share) for share in shares])
        return st.tuples(drawn, schedules(law.schedules)).map(lambda pair: Trial(*pair))
    if case_id.partition(":")[0] != law.op and case_id.partition(":")[0] in specs():
        raise OutOfScopeError(f"{law.name} of {law.op} says nothing about {case_id}, a case of another op")
    case = spec_of(law.op).parse_case(case_id)
    if not law.covers(case):
        scope = ", ".join([f"{name}={spell(value)}" for name, value in law.fixed.items()])
        least = ", ".join([f"{name}>={value}" for name, value in law.least.items()])
        raise OutOfScopeError(f"{law.name} says nothing about {case.id}: its cases have {scope} {least}".strip())
    return st.just(Trial(case, tuple(given_schedules) or SCHEDULES[: law.schedules]))


def conduct(law: Law, machine: Machine, trial: Trial, tally: Tally) -> None:
    """Tries `law` once. Declined cases do not count; if the machine declines all, the test is skipped."""
    try:
        law.try_on(Bench(machine, trial.schedules), trial.case)
    except UnsupportedError as error:
        tally.declined += 1
        note(f"unsupported: {error}")
        if not tally.held and tally.declined >= DECLINED_IN_A_ROW:
            pytest.skip(f"unsupported: {machine} declined the first {tally.declined} cases of {law.name}; {error}")
        reject()
    finally:
        give_memory_back()
    tally.held += 1


def hunt(law: Law, machine: Machine, how: settings = hunting) -> Tally:
    """Tries `law` on drawn cases. BrokenLawError if one breaks it."""
    tally = Tally()

    @how
    @given(data=st.data())
    def hunted(data: st.DataObject) -> None:
        conduct(law, machine, data.draw(trials(law, None, [])), tally)

    hunted()
    return tally
