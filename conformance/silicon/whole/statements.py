"""Splits a drawn program's text into instructions and joins them again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conformance.silicon.whole.cuts import PIECE

INSTRUCTION = re.compile(r"[\s{}]*(@!?%\w+ )?([a-z][\w.:]*) (\{[^}]*\}|[^,;]*)(?:, ([^;]*))?;")
"""Groups: the guard, the opcode, the first operand, the others."""
_NO_RESULT = re.compile(r"st\.|red\.|bra|brx|bar\.(sync|arrive|warp)|barrier|fence|cp\.|wgmma\.(fence|commit|wait)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """Instruction of piece `at`: `guard` with its @ and a trailing space, or ""; `into` its first operand, `rest` the
    others."""

    at: int
    guard: str
    opcode: str
    into: str
    rest: str

    @property
    def text(self) -> str:
        """The statement."""
        return f"{self.guard}{self.opcode} {self.into}{', ' if self.rest else ''}{self.rest};"

    @property
    def unguarded(self) -> str:
        """The statement without its guard."""
        return self.text[len(self.guard) :]

    @property
    def unless(self) -> str:
        """The negated guard; "" for none."""
        return self.guard.replace("@!", "@") if "!" in self.guard else self.guard.replace("@", "@!")

    @property
    def results(self) -> frozenset[str]:
        """Registers that it writes."""
        none = _NO_RESULT.match(self.opcode) or "[" in self.into
        return frozenset() if none else frozenset(re.findall(r"%\w+", self.into))

    @property
    def reads(self) -> frozenset[str]:
        """Registers of its operands and of its guard."""
        return frozenset(re.findall(r"%\w+", f"{self.guard} {self.rest}"))


Program = Sequence[Instruction]
"""Instructions in the order of the text."""


def instructions(pieces: Sequence[str]) -> list[Instruction]:
    """Returns the pieces that are instructions."""
    found = [(at, INSTRUCTION.match(one)) for at, one in enumerate(pieces)]
    return [Instruction(at, *(part or "" for part in one.groups())) for at, one in found if one]


def parted(text: str) -> tuple[str, list[str]]:
    """Splits a text into the frame and the pieces after its first barrier."""
    start = text.index("\n", text.index("mbarrier.init"))
    return text[:start], PIECE.findall(text[start:])


def joined(pieces: Sequence[str], instead: Mapping[int, str]) -> str:
    """Joins the pieces, some of them replaced; braces before them stay."""
    leads = [one[: len(one) - len(one.lstrip(" \n{}"))] for one in pieces]
    return "".join(leads[at] + instead[at] if at in instead else one for at, one in enumerate(pieces))
