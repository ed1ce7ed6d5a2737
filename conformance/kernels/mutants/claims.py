"""The claim `same_bits` of survivors.yaml, run: a mutant leaves every output of a case as the program leaves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from conformance.kernels.mutants.campaign import Outcome, Subject, as_changed, built_of, collected
from conformance.kernels.mutants.mutant import Mutant, mutants
from conformance.kernels.mutants.table import Reason, survivors
from megamoe.contract import RunOptions
from megamoe.spec.load import load_specs

SCHEDULE = "eager"


@dataclass(frozen=True, slots=True)
class Claim:
    """A survivor and what became of its claim. `changed`: outputs with other bits; None if its program is built no
    more."""

    one: Outcome
    changed: tuple[str, ...] | None

    @property
    def told(self) -> str:
        """A sentence about it."""
        program, _, _ = self.one.program.rpartition(" ")
        change = f"{self.one.id} `{self.one.before}` -> `{self.one.after}`"
        if self.changed is None:
            return f"{program} is built no more, so nobody knows what {change} leaves"
        fate = f"leaves other bits in {', '.join(self.changed)}" if self.changed else "leaves the same bits"
        return f"{change} {fate} of {program}"


def claimed(found: Iterable[Outcome], known: Sequence[Reason]) -> list[Outcome]:
    """The survivors that a reason says leave the same bits, those of one program together."""
    said = [one for one, why in survivors(found, known) if why is not None and why.same_bits]
    return sorted(said, key=lambda one: one.program)


def held(claims: Iterable[Outcome]) -> Iterator[Claim]:
    """Runs each mutant on the case in the name of its program, in order, with findings collected."""
    for one in claims:
        if (subject := _subject_of(one.program)) is None:
            yield Claim(one, None)
            continue
        (mutant,) = (each for each in mutants(subject.built[0].program) if each.id == one.id)
        yield Claim(one, tuple(changed(subject, mutant)))


def changed(subject: Subject, mutant: Mutant) -> list[str]:
    """Outputs of the subject's first case where a mutant leaves other bits than the unchanged program."""
    built = subject.built[0]
    whole = subject.collection(built, SCHEDULE)
    with as_changed(whole.tape, built.program, mutant) as (program, listening):
        ran = collected(built, program, RunOptions(schedule=SCHEDULE), listening=listening).ran
    own, other = whole.ran.settled, ran.settled
    return [name for name in own if not torch.equal(own[name].view(torch.uint8), other[name].view(torch.uint8))]


@lru_cache(maxsize=1)
def _subject_of(name: str) -> Subject | None:
    """The program of a name on its case, kept while its claims run: it runs once for all of them."""
    if (built := built_of(load_specs(None), name)) is None:
        return None
    backend, target, *_ = name.split()
    return Subject(backend, target, built.case.op, [built])
