"""The error of PTX that cannot be read."""

from __future__ import annotations

from typing import Protocol


class Placed(Protocol):
    """Something with a place in the text, such as a Lark token."""

    line: int | None
    column: int | None


class PtxSyntaxError(ValueError):
    """PTX text that cannot be read: a sentence with file, line, column (both from 1), what was seen and expected."""

    def __init__(self, problem: str, name: str, line: int | None, column: int | None) -> None:
        place = name if line is None or line < 1 else f"{name}, line {line}, column {column}"
        super().__init__(f"{place}: {problem}")
        self.problem = problem
        self.name = name
        self.line = line
        self.column = column


class MisreadError(ValueError):
    """The same before the file's name is known."""

    def __init__(self, problem: str, at: Placed | None = None) -> None:
        super().__init__(problem)
        self.line = at.line if at is not None else None
        self.column = at.column if at is not None else None
