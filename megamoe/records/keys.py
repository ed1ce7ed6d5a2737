"""The key of a line, under which lines of two files are compared, and the severity that decides between several lines.

The order of severity, for several lines about one row:

1. failed: the kernel ran to its end with wrong outputs, or broke a rule of the machine. In production nobody would
   notice; every other status is loud.
2. crashed: the process died, with everything else in it.
3. timed_out: it hung. A deadlock is no better than a crash, but it costs only its own row.
4. error: the backend or the executor refused with an exception; no kernel did wrong.
5. not_run: nothing is known although the row was requested. It must not hide any of the above.
6. unsupported: it is known that there is nothing to run: no kernel did wrong and nothing is left to do. It ranks below
   not_run, because an answer must not hide an open question.
7. passed.

The contract's STATUSES only lists the names, in the order of table columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeVar

from megamoe.contract import Row, Status
from megamoe.records.lines import Figures, Record, Timing

KeyedLine = Record | Timing | Figures


class Key(NamedTuple):
    """The subject of a line. A field that does not apply to the line's kind is empty.

    `kind`: "verdict" for a Record, "timing" for a Timing, "figures" for a Figures; empty in `program` and `cell`, which
    lines of several kinds share. `assembler` is the name only; the version stays in the line, so that lines of two
    versions match.
    """

    kind: Literal["verdict", "timing", "figures", ""]
    case: str
    backend: str
    target: str
    executor: str = ""
    schedule: str = ""
    temperature: str = ""
    assembler: str = ""

    @classmethod
    def of(cls, line: KeyedLine | Row) -> Key:
        """The key of a line. For a row, the key of its record."""
        what = (line.case, line.backend, line.target)
        if isinstance(line, Figures):
            return cls("figures", *what, assembler=line.assembler.partition(" ")[0])
        if isinstance(line, Timing):
            return cls("timing", *what, executor=line.executor, temperature=line.temperature)
        return cls("verdict", *what, executor=line.executor, schedule=line.schedule)

    @property
    def op(self) -> str:
        """The op of the case."""
        return self.case.partition(":")[0]

    @property
    def by(self) -> str:
        """What made the line: the executor, or the assembler."""
        return self.executor or self.assembler

    @property
    def variant(self) -> str:
        """The schedule of a verdict or the temperature of a time; empty for figures."""
        return self.schedule or self.temperature

    @property
    def program(self) -> Key:
        """The key of the built program, whatever runs or assembles it."""
        return Key("", self.case, self.backend, self.target)

    @property
    def cell(self) -> Key:
        """What ran where, under any schedule and at any L2 temperature."""
        return Key("", self.case, self.backend, self.target, self.executor)

    def __str__(self) -> str:
        parts = [self.case, "on", *(part for part in self[2:] if part)]
        return " ".join([*parts, f"({self.kind})"] if self.kind else parts)


SEVERITY: tuple[Status, ...] = ("failed", "crashed", "timed_out", "error", "not_run", "unsupported", "passed")
"""Statuses, worst first."""

_Line = TypeVar("_Line", bound=Record | Timing)


def worst(lines: Iterable[_Line]) -> _Line:
    """The line with the worst status; the last one if several have it. Raises ValueError if there is none."""
    return min(reversed([*lines]), key=lambda line: SEVERITY.index(line.status))
