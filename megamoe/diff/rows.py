"""One row of a comparison of two runs, and the rows of one side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, TypeVar, get_args

from megamoe.contract import STATUSES, Status
from megamoe.diff.directions import Change
from megamoe.diff.sides import ComparisonError, Side
from megamoe.records.lines import AnyLine, Figures, Record, Timing

Kind = Literal["verdict", "timing", "figures"]
Call = Literal[
    "STATUS-CHANGED", "SLOWER", "WORSE", "MISSING", "AMBIGUOUS", "CHANGED", "NEW", "FASTER", "BETTER", "SAME"
]
CALLS: tuple[Call, ...] = get_args(Call)  # the most severe first


class RowKey(NamedTuple):
    """What is compared. For figures, `executor` is the assembler without its version.

    `variant` is the schedule of a verdict, the temperature of a timing, and empty for figures.
    """

    kind: Kind
    case: str
    backend: str
    target: str
    executor: str
    variant: str

    @property
    def op(self) -> str:
        """The op of the case."""
        return self.case.partition(":")[0]

    def __str__(self) -> str:
        return " ".join([self.case, "on", *(part for part in self[2:] if part), f"({self.kind})"])


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One row and what became of it. What does not apply is None or empty.

    `regression`: whether this row alone makes the comparison fail. `sentence` says why the call is what it is.
    `before_us`, `after_us`: centre of the samples, microseconds a launch. `ratio` is after over before; with confidence
    99 % it lies between `low` and `high`, which may be infinite. `threshold`: how far from 1 it may be, from the spec.
    `samples`: how many, before and after. `changes`: counters and figures that are not what they were.
    `same_program`: whether both sides ran the same PTX, None if that is unknown.
    """

    key: RowKey
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


class SideRows(NamedTuple):
    """The lines of a side by row."""

    verdicts: dict[RowKey, list[Record]]
    timings: dict[RowKey, list[Timing]]
    figures: dict[RowKey, list[Figures]]

    def keys(self) -> list[RowKey]:
        """Every row."""
        return [*self.verdicts, *self.timings, *self.figures]


def rows_of(side: Side, only: Sequence[str] = ()) -> SideRows:
    """The rows of `side` whose text matches any of the globs `only`, or all if there are none.

    Raises ComparisonError if the side has two times of one row, one temperature and one run: a run takes one, and
    copies of it would outvote the times of other runs.
    """
    rows = SideRows({}, {}, {})
    timed: dict[tuple[RowKey, str], str] = {}
    for place, line in _lines(side):
        if isinstance(line, Record):
            key = RowKey("verdict", line.case, line.backend, line.target, line.executor, line.schedule)
            rows.verdicts.setdefault(key, []).append(line)
        elif isinstance(line, Timing):
            key = RowKey("timing", line.case, line.backend, line.target, line.executor, line.temperature)
            _note_place(timed, key, line.run, place)
            rows.timings.setdefault(key, []).append(line)
        elif isinstance(line, Figures):
            key = RowKey("figures", line.case, line.backend, line.target, line.assembler.partition(" ")[0], "")
            rows.figures.setdefault(key, []).append(line)
    if not only:
        return rows
    return SideRows(_matching(rows.verdicts, only), _matching(rows.timings, only), _matching(rows.figures, only))


def _lines(side: Side) -> Iterator[tuple[str, AnyLine]]:
    """Each line and where it is."""
    for file in side.files:
        for number, line in enumerate(file.lines, 1):
            yield f"{file.path}, line {number}", line


def _note_place(timed: dict[tuple[RowKey, str], str], key: RowKey, run: str, place: str) -> None:
    first = timed.get((key, run))
    if first is not None:
        raise ComparisonError(
            f"{place}: run {run} has a second time of {key}; the first is at {first}. "
            f"A run times a row once, so that copies count no more than it; keep one of them"
        )
    timed[key, run] = place


_Line = TypeVar("_Line", Record, Timing, Figures)


def _matching(rows: dict[RowKey, list[_Line]], only: Sequence[str]) -> dict[RowKey, list[_Line]]:
    return {key: lines for key, lines in rows.items() if any(fnmatchcase(str(key), glob) for glob in only)}


_Judged = TypeVar("_Judged", Record, Timing)


def worst(lines: Sequence[_Judged]) -> _Judged:
    """The line that counts where a side has several of one row: the last of those with the worst status."""
    return max(reversed(lines), key=lambda line: STATUSES.index(line.status))
