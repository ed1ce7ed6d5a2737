"""Whether the machine has an instruction for a target and a PTX version: it finds, binds and offers the instruction."""

from __future__ import annotations

from backends.vm.bind.availability import Version, missing
from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import find, in_order
from backends.vm.bind.function import misused
from backends.vm.faults import UnknownInstructionError
from backends.vm.machine.code import RegisterRows
from conformance.acceptance.spellings import REGISTERS, Question


def why_not_bound(question: Question) -> str | None:
    """The machine's refusal of the instruction for any target; None if it takes it."""
    rows = RegisterRows.of(
        {f"%{letter}": kind[1:] for letter, kind in REGISTERS.items()}, {"buf": "shared", "par": "param"}
    )
    instruction = in_order(question.instruction())
    try:
        form, words = find(instruction)
        binder = Binder(instruction, words, rows)
        form.bind(binder)
        if (reason := misused(instruction, rows)) is not None:
            raise binder.error(reason)
    except UnknownInstructionError as refusal:
        return str(refusal)
    return None


def why_not_available(question: Question, target: str, version: Version) -> str | None:
    """The machine's refusal for this target and version; None if they have the instruction."""
    return missing(in_order(question.instruction()), target, version)
