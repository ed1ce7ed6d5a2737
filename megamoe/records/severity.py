"""Which status counts where several lines speak of one row: the one order of severity.

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
from typing import TypeVar

from megamoe.contract import Status
from megamoe.records.lines import Record, Timing

SEVERITY: tuple[Status, ...] = ("failed", "crashed", "timed_out", "error", "not_run", "unsupported", "passed")
"""The worst first."""

_Line = TypeVar("_Line", bound=Record | Timing)


def worst(lines: Iterable[_Line]) -> _Line:
    """The line with the worst status; of several with that status the last. ValueError if there is none."""
    return min(reversed([*lines]), key=lambda line: SEVERITY.index(line.status))
