"""Detects remembered results: reruns a row that passed, in ways that its code could not foresee.

The program runs on other inputs, from a seed drawn now, and must be right on them. An output that was cached,
precomputed or read from a file is wrong there. Then it runs on the first inputs again, in the same process and in a new
one. An executor that repeats bit for bit must give the same bits and counters; another one must give a right result.

That costs three runs and one oracle, so it is done for a sample. Of each op, backend, target, executor and shapes of
large inputs, the row with the least work is audited, unless it ran for more than MAX_CHOSEN_S. Of the rows that ran for
at most MAX_DRAWN_S, one in AUDITED_OF is drawn at random. A kernel that is wrong only in rows that are not audited, and
that can tell them apart, goes unnoticed.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from megamoe.judge.comparison import Expected, compared, complaints, expected_of
from megamoe.ops import reference

if TYPE_CHECKING:
    from megamoe.contract import Row
    from megamoe.judge.guarded import Built, Ran
    from megamoe.judge.isolated import Processes
    from megamoe.spec.spec import Spec

MAX_CHOSEN_S: Final = 5.0
MAX_DRAWN_S: Final = 0.5
AUDITED_OF: Final = 24
REPEATABLE: Final = "vm"


@dataclass(frozen=True, slots=True)
class Audits:
    """Which rows are audited: the chosen ones, and some at random."""

    chosen: frozenset[Row]

    def due(self, row: Row, seconds: float) -> bool:
        """Whether to audit `row`, which passed after a run of `seconds`."""
        if row in self.chosen:
            return seconds <= MAX_CHOSEN_S
        return seconds <= MAX_DRAWN_S and secrets.randbelow(AUDITED_OF) == 0


@dataclass(frozen=True, slots=True)
class Audit:
    """One row, its program, and the run that passed."""

    row: Row
    spec: Spec
    expected: Expected
    built: Built
    first: Ran
    runners: Processes
    deadline: float

    def complaint(self) -> str:
        """What differs when the row is run again; "" if nothing does."""
        return self._on_other_inputs() or self._again("in the same process") or self._again("in a new process", True)

    def _on_other_inputs(self) -> str:
        case = self.spec.vary(self.expected.case, seed=secrets.randbelow(1 << 31))
        expected = expected_of(case, reference(case.op).make_inputs(case, self.expected.device))
        wrong = self._wrong(expected, self._run(expected))
        return f"on other inputs, of a seed drawn after it was built: {wrong}" if wrong else ""

    def _again(self, where: str, fresh: bool = False) -> str:
        ran = self._run(self.expected, fresh)
        if self.row.executor == REPEATABLE:
            differing = [name for name, seen in self.first.outputs.items() if not _same(seen, ran.outputs[name])]
            counted = _differing(self.first.counters, ran.counters)
            wrong = f"{' and '.join(differing)} has other bits than at first" if differing else counted
        else:
            wrong = self._wrong(self.expected, ran)
        return f"run again {where}: {wrong}" if wrong else ""

    def _run(self, expected: Expected, fresh: bool = False) -> Ran:
        built = self.built
        if fresh and built.call is not None:
            # A Python call lives in its process, so a new process has to build it again.
            self.runners.end_builder(self.row)
            built = self.runners.build(self.row, self.expected.case, self.deadline)
        tensors = (self.spec, expected.case, expected.inputs)
        return self.runners.run(self.row, built, tensors, self.deadline, fresh)

    def _wrong(self, expected: Expected, ran: Ran) -> str:
        if ran.violation:
            return ran.violation
        judgement = compared(self.spec, expected, ran.outputs)
        return complaints(ran.arena, expected, judgement)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _differing(one: Mapping[str, int], other: Mapping[str, int]) -> str:
    found = [f"{name} {one.get(name)} then {other.get(name)}" for name in one.keys() | other.keys()
             if one.get(name) != other.get(name)]  # fmt: skip
    return f"other counters: {', '.join(sorted(found)[:4])}" if found else ""
