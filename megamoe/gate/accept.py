"""Accepts a change into a baseline on purpose: decides which lines change, records why, and refuses the rest.

Accepting a row takes everything that was measured for it: the counters of its record, the compiler figures of its
program and its times. A row that did not pass is refused. A row that is no longer owed leaves the baseline.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile

from megamoe.contract import Row
from megamoe.diff.directions import differences
from megamoe.diff.sides import by_key
from megamoe.gate.baseline import Baseline, rebuilt
from megamoe.records.files import RecordFile
from megamoe.records.keys import Key, KeyedLine
from megamoe.records.lines import Acceptance, Figures, Record, RunHeader, Timing
from megamoe.spec.selection import SelectionError

_Lines = dict[Key, list[KeyedLine]]


@dataclass(frozen=True, slots=True)
class Seen:
    """Run headers by run id, and the lines of the runs in order. `where` names the files, for messages."""

    where: str
    headers: Mapping[str, RunHeader]
    lines: Sequence[KeyedLine]

    @property
    def unsupported(self) -> set[Row]:
        """Rows that the run's machine could not execute, such as a shape that a peer lacks."""
        return {_row_of(line) for line in self.lines if not isinstance(line, Figures) and line.status == "unsupported"}

    @property
    def rows(self) -> dict[Row, RunHeader | None]:
        """Every row that has a record or times, with the header of the last run that saw it."""
        lines = (line for line in self.lines if not isinstance(line, Figures))
        return {_row_of(line): self.headers.get(line.run) for line in lines}


def _row_of(line: Record | Timing) -> Row:
    """The row of a line. A time has no schedule: a device has only one, "eager"."""
    return line.row if isinstance(line, Record) else Row(line.case, line.backend, line.target, line.executor, "eager")


def seen_in(files: Sequence[RecordFile]) -> Seen:
    """The headers and the lines of the files."""
    return Seen(
        " and ".join(str(file.path) for file in files) or "no record file",
        {header.run: header for file in files for header in file.headers},
        [line for file in files for line in file.lines if isinstance(line, KeyedLine)],
    )


def take(
    baseline: Baseline, seen: Seen, rows: Iterable[Row], owed: Collection[Row], why: Acceptance
) -> tuple[Baseline, tuple[Acceptance, ...]]:
    """Returns the baseline with `rows` as seen, and one acceptance per changed row: `why`, plus the row and its
    changes.

    `owed`: rows that the baseline must hold. A row of `rows` that is neither owed nor seen is removed. Raises
    SelectionError, and changes nothing, if a row is unknown, did not pass, or is owed but was not seen.
    """
    before = _by_program((*baseline.records.values(), *baseline.figures.values(), *baseline.timings.values()))
    after = _by_program(seen.lines)
    accepted: list[Acceptance] = []
    for row in dict.fromkeys(rows):
        held = before.setdefault(Key.of(row).program, {})
        old, new = _about(row, held), _about(row, after.get(Key.of(row).program, {}))
        _check(row, old, new, owed, seen)
        steps = _steps(old, new) if new else {"row": "removed"}
        if not new:
            _drop(old, held)
        held.update(new)
        if steps:
            accepted.append(why.model_copy(update={"row": str(row), "changes": steps}))
    lines = [lines[-1] for program in before.values() for lines in program.values()]
    return rebuilt(baseline, lines, seen.headers, accepted), tuple(accepted)


def _by_program(lines: Iterable[KeyedLine]) -> dict[Key, _Lines]:
    """Lines by program and key. If several runs saw a key, only the last run's lines are kept."""
    programs: dict[Key, _Lines] = {}
    for key, found in by_key(lines).items():
        programs.setdefault(key.program, {})[key] = [line for line in found if line.run == found[-1].run]
    return programs


def _about(row: Row, lines: _Lines) -> _Lines:
    """The lines of one program that belong to `row`: its record and its times, and the figures if it has either."""
    mine = Key.of(row)
    own = {key for key in lines if key == mine or (key.kind == "timing" and key.cell == mine.cell)}
    return {key: found for key, found in lines.items() if key in own or (own and key.kind == "figures")}


def _check(row: Row, old: _Lines, new: _Lines, owed: Collection[Row], seen: Seen) -> None:
    if not new and not old:
        raise SelectionError(f"unknown row {row}: there is no record of it in {seen.where}, nor in the baseline")
    if not new and row in owed:
        raise SelectionError(f"there is no record of {row} in {seen.where}: run the gate first. {row.rerun}")
    for line in (line for lines in new.values() for line in lines):
        if not isinstance(line, Figures) and line.status != "passed":
            raise SelectionError(f"{row} is {line.status}, and only what passed is accepted: {line.sentence}")


def _drop(old: _Lines, held: _Lines) -> None:
    """Removes a row. The figures of its program stay while another row runs the same program."""
    shared = sum(key.kind != "figures" for key in held) > sum(key.kind != "figures" for key in old)
    for key in old:
        if key.kind != "figures" or not shared:
            del held[key]


def _steps(old: _Lines, new: _Lines) -> dict[str, str]:
    """What differs, by name, in the form "120 -> 124"."""
    steps: dict[str, str] = {}
    for key, lines in new.items():
        if key not in old:
            steps["row" if key.kind == "verdict" else f"{key.kind} {key.assembler or key.temperature}"] = "new"
            continue
        before, after = old[key][-1], lines[-1]
        if isinstance(before, Figures) and isinstance(after, Figures) and before.assembler != after.assembler:
            steps["assembler"] = f"{before.assembler} -> {after.assembler}"
        steps |= {one.name: one.step for one in differences(before, after)}
        if before.program_sha256 != after.program_sha256:
            steps["program"] = f"{(before.program_sha256 or 'none')[:12]} -> {(after.program_sha256 or 'none')[:12]}"
    return steps


def glob_of(rows: Iterable[Row]) -> str:
    """A narrow glob that the cases of all `rows` match: their common axes, the one case of all, or the whole op."""
    first, *others = {row.case for row in rows}
    if not others:
        return first
    words = zip(*(re.split(r"(?<=[:,])", case) for case in (first, *others)), strict=False)
    return "".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, words)) + "*"


def rows_matching(
    pattern: str, baseline: Baseline, seen: Seen, owed: Collection[Row], excused: Collection[Row]
) -> list[Row]:
    """Rows whose case matches the glob, among those seen and those in the baseline that are no longer owed.

    Leaves out `excused` rows, which fail as expected, and `seen.unsupported`.
    """
    seen_rows = seen.rows
    excused = {*excused, *seen.unsupported}
    gone = [row for row in baseline.records if row not in owed and row not in seen_rows]
    return [row for row in (*seen_rows, *gone) if fnmatchcase(row.case, pattern) and row not in excused]
