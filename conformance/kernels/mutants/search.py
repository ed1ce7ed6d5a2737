"""Finds a case that kills a surviving mutant: Hypothesis draws cases from the spec's ranges and shrinks the killer.

A drawn case counts if it builds the mutant's text: axes that choose a kernel (those with a list of values, as `hd` and
`stage`) stay as in the first case of the program; the others are drawn as the laws draw them. A killer belongs into a
matrix of specs/OP.yaml.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import Phase, find, settings
from hypothesis.errors import NoSuchExample

from conformance.kernels.laws.law import Law, laws_of
from conformance.kernels.laws.strategies import cases
from conformance.kernels.mutants.campaign import SCHEDULES, Built, Outcome, Subject, built_program, examine
from conformance.kernels.mutants.mutant import Mutant
from megamoe.contract import Case, UnsupportedError
from megamoe.contract.counted import counted
from megamoe.spec.spec import Spec


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits for one hunt: `examples` drawn cases before the first kill, `seconds` of processor time in all."""

    examples: int = 40
    seconds: float = 60.0
    schedules: Sequence[str] = SCHEDULES


@dataclass(slots=True)
class Hunt:
    """The search for one mutant. `tried`: the cases that built its text. `others`: those that built another text, or a
    program without PTX. `refused`: those that the backend does not take. `known`: cases that were tried before any
    was drawn. `again`: draws of a case that was drawn before. `late`: the time was up. `killer`: the
    smallest case that killed it."""

    subject: Subject
    mutant: Mutant
    effort: Effort
    tried: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    others: set[str] = field(default_factory=set[str])
    refused: set[str] = field(default_factory=set[str])
    known: int = 0
    again: int = 0
    late: bool = False
    killer: Outcome | None = None
    _begun: float = field(default_factory=time.process_time)

    def kills(self, case: Case) -> bool:
        """Whether `case` builds the mutant's text and a check kills the mutant on it. ValueError if the unchanged
        program fails there, which is another kind of finding."""
        if case.id in self.tried:
            self.again += 1
            return self.tried[case.id].killed
        if case.id in self.others or case.id in self.refused:
            self.again += 1
            return False
        if time.process_time() - self._begun > self.effort.seconds:
            self.late = True
            return False
        try:
            built = self._built(case)
        except UnsupportedError:
            self.refused.add(case.id)
            return False
        if built is None:
            self.others.add(case.id)
            return False
        alone = replace(self.subject, built=[built])
        found = examine(alone, self.mutant, self.effort.schedules, ask_assemblers=False, few_ctas=False)
        self.tried[case.id] = found = replace(found, program=self.subject.name)
        if found.killed:
            self.killer = found
        return found.killed

    def _built(self, case: Case) -> Built | None:
        program = built_program(self.subject.backend, self.subject.target, case)
        if program is None or program.ptx != self.subject.built[0].program.ptx:
            return None
        return Built(self.spec, case, program)

    @property
    def draws(self) -> int:
        """How often a case was drawn."""
        return len(self.tried) + len(self.others) + len(self.refused) - self.known + self.again

    @property
    def ended(self) -> str:
        """Why the search ended without a killer; "" if it has one."""
        if self.killer is not None:
            return ""
        if self.late:
            return f"the {self.effort.seconds:g} s were up"
        if self.draws >= self.effort.examples:
            twice = f", {self.again} of them of a case drawn before" if self.again else ""
            return f"{counted(self.effort.examples, 'draw', 'was', 'were')} made{twice}"
        return f"the ranges of the spec have no further case after {counted(self.draws, 'draw')}"

    @property
    def spec(self) -> Spec:
        """The spec of the program's op."""
        return self.subject.built[0].spec

    @property
    def law(self) -> Law:
        """`matches_reference`, on the cases that may build the text."""
        first = self.subject.built[0].case
        pinned = {name: first[name] for name, axis in self.spec.axes.items() if axis.choices is not None}
        return replace(laws_of(self.subject.op)["matches_reference"], fixed=pinned)


def hunt(subject: Subject, mutant: Mutant, effort: Effort, first: Sequence[Case] = ()) -> Hunt:
    """Looks for a case that kills `mutant`: first the cases in `first`, then drawn ones, and keeps the smallest."""
    one = Hunt(subject, mutant, effort)
    if any(one.kills(case) for case in first):
        return one
    one.known, one.again = one.draws, 0
    drawn = settings(max_examples=effort.examples, derandomize=True, database=None, deadline=None,
                     phases=[Phase.generate, Phase.shrink])  # fmt: skip
    try:
        smallest = find(cases(one.law), one.kills, settings=drawn)
    except NoSuchExample:
        return one
    one.killer = one.tried[smallest.id]
    return one


def hunts(todo: Sequence[tuple[Subject, Mutant]], effort: Effort) -> Iterator[Hunt]:
    """Hunts each mutant. A case that killed one is tried first on the others of its op."""
    found: dict[str, list[Case]] = {}
    for subject, mutant in todo:
        known = found.setdefault(subject.op, [])
        one = hunt(subject, mutant, effort, known)
        if one.killer is not None and one.killer.case not in [case.id for case in known]:
            known.append(one.spec.parse_case(one.killer.case))
        yield one


def as_row(case: Case) -> str:
    """Writes `case` as a row of a matrix in specs/OP.yaml, without the axes at their defaults."""
    return f"- {{{case.id.partition(':')[2].replace('=', ': ').replace(',', ', ')}}}"
