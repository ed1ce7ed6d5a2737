"""One row of a comparison, and the lines of one side by key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, TypeVar, get_args

from megamoe.contract import Status
from megamoe.diff.directions import Change
from megamoe.diff.sides import ComparisonError, Side
from megamoe.records.keys import Key, KeyedLine
from megamoe.records.lines import Figures, Record, Timing

Call = Literal[
    "STATUS-CHANGED", "SLOWER", "WORSE", "MISSING", "AMBIGUOUS", "CHANGED", "NEW", "FASTER", "BETTER", "SAME"
]
CALLS: tuple[Call, ...] = get_args(Call)
"""The most severe first."""


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One row and what became of it. What does not apply is None or empty.

    `regression`: whether this row alone makes the comparison fail. `sentence` says why the call is what it is.
    `before_us`, `after_us`: centre of the samples, microseconds a launch. `ratio` is after over before; with confidence
    99 % it lies between `low` and `high`, which may be infinite. `threshold`: how far from 1 it may be, from the spec.
    `samples`: how many, before and after. `changes`: counters and figures that differ.
    `same_program`: whether both sides ran the same PTX, None if that is unknown.
    """

    key: Key
    call: Call
    regression: bool = False
    sentence: str = ""
    before_status: Status | None = None
    after_status: Status | None = None
    before_us: float | None = None
    after_us: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    threshold: float | None = None
    samples: tuple[int, int] | None = None
    changes: tuple[Change, ...] = ()
    same_program: bool | None = None


class Lines(NamedTuple):
    """The lines of a side by key; several lines of one key in their order."""

    verdicts: dict[Key, list[Record]]
    timings: dict[Key, list[Timing]]
    figures: dict[Key, list[Figures]]

    def keys(self) -> list[Key]:
        """Every key."""
        return [*self.verdicts, *self.timings, *self.figures]


_Line = TypeVar("_Line", bound=KeyedLine)


def by_key(lines: Iterable[_Line]) -> dict[Key, list[_Line]]:
    """`lines` by what they are about."""
    found: dict[Key, list[_Line]] = {}
    for line in lines:
        found.setdefault(Key.of(line), []).append(line)
    return found


def lines_of(side: Side, only: Sequence[str] = ()) -> Lines:
    """The lines of `side` whose key, as text, matches any of the globs `only`, or all if there are none.

    ComparisonError if one run has two times of one key: a run takes one, and copies of it would outvote other runs.
    """
    _refuse_copies(side)
    return Lines(
        _matching(by_key(line for file in side.files for line in file.records), only),
        _matching(by_key(line for file in side.files for line in file.timings), only),
        _matching(by_key(line for file in side.files for line in file.figures), only),
    )


def _refuse_copies(side: Side) -> None:
    places: dict[tuple[Key, str], str] = {}
    for file in side.files:
        for number, line in enumerate(file.lines, 1):
            if not isinstance(line, Timing):
                continue
            key, place = Key.of(line), f"{file.path}, line {number}"
            if (first := places.get((key, line.run))) is not None:
                raise ComparisonError(
                    f"{place}: run {line.run} has a second time of {key}; the first is at {first}. "
                    f"A run times a row once, so that copies count no more than it; keep one of them"
                )
            places[key, line.run] = place


def _matching(lines: dict[Key, list[_Line]], only: Sequence[str]) -> dict[Key, list[_Line]]:
    if not only:
        return lines
    return {key: found for key, found in lines.items() if any(fnmatchcase(str(key), glob) for glob in only)}
