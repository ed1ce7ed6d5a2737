"""The machine gives an H200's bits for every lane-wise spelling that was run there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from backends.vm.numerics import f32
from conformance import SILICON
from conformance.silicon.lanewise.as_ptxas import MERGED, PART
from conformance.silicon.lanewise.programs import Program, kept, operands, vm_answers

PROGRAMS = kept()
ANSWERS = np.load(SILICON / "lanewise" / "answers.npz")
SPELLINGS_A_TEST = 20
DIFFERS = {
    "vadd.s32.s32.u32.sat": MERGED,
    "vmax.s32.s32.s32.sat": MERGED,
    "vmax.s32.s32.u32": MERGED,
    "vset.s32.s32.eq": MERGED,
    "vsub.s32.s32.s32.sat": PART,
}
"""Programs where the machine follows the ISA and ptxas 13.0 does not, because it translates these to other
instructions."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def difference(program: Program) -> str | None:
    """Describes the first value that differs from the H200's; None if none does."""
    got, wanted = vm_answers(program), ANSWERS[program.opcode]
    at = np.flatnonzero(got != wanted)
    if not len(at):
        return None
    first = int(at[0])
    given = " ".join(f"{int(source[first]):#x}" for source in operands(program))
    seen = f"{int(got[first]):#x} where an H200 gave {int(wanted[first]):#x}"
    return f"{program.opcode} of {given}: {seen}; {len(at)} of {len(got)} values differ"


@pytest.mark.parametrize("start", range(0, len(PROGRAMS), SPELLINGS_A_TEST))
def test_answers_are_those_of_an_h200(start: int) -> None:
    some = [program for program in PROGRAMS[start : start + SPELLINGS_A_TEST] if program.opcode not in DIFFERS]
    wrong = [said for program in some if (said := difference(program))]
    assert not wrong, "\n".join(wrong)


def test_what_differs_still_differs() -> None:
    stale = [program.opcode for program in PROGRAMS if program.opcode in DIFFERS and not difference(program)]
    assert not stale, f"{stale} give an H200's bits now: take them out of DIFFERS"


def test_every_program_has_an_answer_and_every_answer_a_program() -> None:
    assert {program.opcode for program in PROGRAMS} == set(ANSWERS.files)


def test_one_wrong_rounding_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = f32.fma
    monkeypatch.setattr(f32, "fma", lambda a, b, c, **options: exact(a, b, c, **{**options, "rounding": "rz"}))
    program = next(
        program for program in PROGRAMS if program.opcode.startswith("fma.rm") and "ftz.f32" in program.opcode
    )
    assert (said := difference(program)) is not None
    assert program.opcode in said
    assert "where an H200 gave" in said
