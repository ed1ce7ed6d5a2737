"""What a line is about, the one key under which lines of two files meet; and which of several lines counts.

The one order of severity, where several lines speak of one row:

1. failed: the kernel ran to its end and its outputs are wrong, or it broke a rule of the machine. In production nobody
   would notice; every other status is loud.
2. crashed: the process died, and everything else in it with it.
3. timed_out: it hung. A deadlock is no better than a crash, but it costs its own row alone.
4. error: the backend or the executor refused with an exception; no kernel did wrong.
5. not_run: nothing is known, though the row was asked for. It must not hide any of the above.
6. unsupported: it is known that there is nothing to run: no kernel did wrong and nothing is left to be done. It ranks
   below not_run, as an answer must not hide an open question.
7. passed.

STATUSES of the contract only lists the names, in the order in which tables count them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeVar

from megamoe.contract import Row, Status
from megamoe.records.lines import Figures, Record, Timing

KeyedLine = Record | Timing | Figures


class Key(NamedTuple):
    """What one line is about. A field that does not apply to its kind is empty.

    `kind`: a Record gives a verdict, a Timing a time, a Figures the figures of a compiler; empty in `program` and
    `cell`, which lines of several kinds share. `assembler` is a name; the version stays in the line, so that lines of
    two versions meet.
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
        """The key of a line; that of a row is the key of its record."""
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
        """Who made the line: the executor, or the assembler."""
        return self.executor or self.assembler

    @property
    def variant(self) -> str:
        """The schedule of a verdict, the temperature of a time; empty for figures."""
        return self.schedule or self.temperature

    @property
    def program(self) -> Key:
        """What was built, whatever runs or assembles it."""
        return Key("", self.case, self.backend, self.target)

    @property
    def cell(self) -> Key:
        """What ran where, under any schedule and at any temperature of the L2."""
        return Key("", self.case, self.backend, self.target, self.executor)

    def __str__(self) -> str:
        parts = [self.case, "on", *(part for part in self[2:] if part)]
        return " ".join([*parts, f"({self.kind})"] if self.kind else parts)


SEVERITY: tuple[Status, ...] = ("failed", "crashed", "timed_out", "error", "not_run", "unsupported", "passed")
"""The worst first."""

_Line = TypeVar("_Line", bound=Record | Timing)


def worst(lines: Iterable[_Line]) -> _Line:
    """The line with the worst status; of several with that status the last. ValueError if there is none."""
    return min(reversed([*lines]), key=lambda line: SEVERITY.index(line.status))
