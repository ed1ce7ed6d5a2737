"""The claim `same_bits` of survivors.yaml, run: a mutant leaves every output of a case as the program leaves it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from conformance.kernels.mutants.campaign import Built, Outcome, collected, program_of
from conformance.kernels.mutants.mutant import mutants, program_id
from conformance.kernels.mutants.table import Reason, reason_of
from megamoe.contract import HostProgram, Program, RunOptions
from megamoe.spec.load import load_specs


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


def claimed(survivors: Iterable[Outcome], known: Sequence[Reason]) -> list[Outcome]:
    """The survivors that a reason says leave the same bits, those of one program together."""
    found = [
        one for one in survivors if not one.killed and (why := reason_of(one, known)) is not None and why.same_bits
    ]
    return sorted(found, key=lambda one: one.program)


def held(claims: Iterable[Outcome]) -> Iterator[Claim]:
    """Runs each mutant on the case in the name of its program, in order, with findings collected."""
    for one in claims:
        if (built := built_of(one.program)) is None:
            yield Claim(one, None)
            continue
        (mutant,) = (each for each in mutants(built.program) if each.id == one.id)
        yield Claim(one, tuple(changed(built, mutant.of(built.program))))


def changed(built: Built, program: Program | HostProgram) -> list[str]:
    """Outputs of a case where `program` leaves other bits than the unchanged program."""
    own, other = _outputs(built, built.program), _outputs(built, program)
    return [name for name in own if not torch.equal(own[name].view(torch.uint8), other[name].view(torch.uint8))]


@lru_cache(maxsize=1)
def built_of(name: str) -> Built | None:
    """Builds a program on the case in its name (Subject.name); None if its backend builds another by now."""
    backend, target, case_id, text = name.split()
    spec = load_specs(None)[case_id.partition(":")[0]]
    program = program_of(backend, target, case := spec.parse_case(case_id))
    return Built(spec, case, program) if program is not None and program_id(program.ptx) == text else None


def _outputs(built: Built, program: Program | HostProgram) -> dict[str, torch.Tensor]:
    return dict(collected(built, program, RunOptions(schedule="eager")).ran.settled)
