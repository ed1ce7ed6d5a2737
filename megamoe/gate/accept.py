"""Taking a change into a baseline on purpose: which lines change, why, and what is refused.

A row is accepted with all that was seen of it: the counters of its record, the compiler figures of its program, its
times. Only what passed is accepted. A row that nobody owes any more leaves the baseline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median

from megamoe.contract import Row
from megamoe.diff.directions import changes
from megamoe.gate.baseline import Baseline, figures_key, rebuilt, timing_key
from megamoe.records.files import RecordFile
from megamoe.records.lines import Acceptance, Figures, Record, RunHeader, Timing
from megamoe.spec.selection import SelectionError

ROW_FORM = "CASE on BACKEND TARGET EXECUTOR SCHEDULE"
_Line = Record | Figures | Timing
_Lines = dict[tuple[str, ...], _Line]
_Programs = dict[tuple[str, ...], _Lines]


@dataclass(frozen=True, slots=True)
class Seen:
    """What runs found: their headers by run, and their lines in order. `where` names the files."""

    where: str
    headers: Mapping[str, RunHeader]
    lines: Sequence[_Line]

    @property
    def unsupported(self) -> set[Row]:
        """The rows that the machine of the run could not do: a peer that lacks a shape, say."""
        return {_row_of(line) for line in self.lines if not isinstance(line, Figures) and line.status == "unsupported"}

    @property
    def rows(self) -> dict[Row, RunHeader | None]:
        """Every row that has a record or times, with the header of the last run that saw it."""
        lines = (line for line in self.lines if not isinstance(line, Figures))
        return {_row_of(line): self.headers.get(line.run) for line in lines}


def _row_of(line: Record | Timing) -> Row:
    """The row of a line; a time has no schedule, as devices have one alone."""
    return line.row if isinstance(line, Record) else Row(line.case, line.backend, line.target, line.executor, "eager")


def seen_in(files: Sequence[RecordFile]) -> Seen:
    """What the files hold."""
    return Seen(
        " and ".join(str(file.path) for file in files) or "no record file",
        {header.run: header for file in files for header in file.headers},
        [line for file in files for line in file.lines if isinstance(line, Record | Figures | Timing)],
    )


def parse_row(text: str) -> Row:
    """The row that `text` names, in the form in which rows are printed. SelectionError if it names none."""
    case, on, rest = text.strip().partition(" on ")
    words = rest.split()
    if not on or len(words) != 4 or ":" not in case:
        raise SelectionError(f"{text!r} is no row; rows are printed as {ROW_FORM}, which a shell wants quoted")
    return Row(case.strip(), *words)


def take(
    baseline: Baseline, seen: Seen, rows: Iterable[Row], owed: Collection[Row], why: Acceptance
) -> tuple[Baseline, tuple[Acceptance, ...]]:
    """The baseline with `rows` as they were seen, and for each that changed `why`, with the row and its changes.

    `owed`: the rows that the baseline has to hold; another of its rows that was not seen leaves it. SelectionError for
    a row that is unknown, did not pass, or was not seen though it is owed: then nothing is taken.
    """
    before = _by_program((*baseline.records.values(), *baseline.figures.values(), *baseline.timings.values()))
    after = _by_program(seen.lines)
    accepted: list[Acceptance] = []
    for row in dict.fromkeys(rows):
        held = before.setdefault(row[:3], {})
        old, new = _about(row, held), _about(row, after.get(row[:3], {}))
        _check(row, old, new, owed, seen)
        steps = _steps(old, new) if new else {"row": "removed"}
        if not new:
            _drop(old, held)
        held.update(new)
        if steps:
            accepted.append(why.model_copy(update={"row": str(row), "changes": steps}))
    lines = [line for program in before.values() for line in program.values()]
    return rebuilt(baseline, lines, seen.headers, accepted), tuple(accepted)


def _by_program(lines: Iterable[_Line]) -> _Programs:
    """Lines by kind and key, of several about the same the last, under the case, the backend and the target."""
    programs: _Programs = {}
    for line in lines:
        program = programs.setdefault((line.case, line.backend, line.target), {})
        if isinstance(line, Record):
            program["record", *line.row] = line
        elif isinstance(line, Figures):
            program["figures", *figures_key(line)] = line
        else:
            program["timing", *timing_key(line)] = line
    return programs


def _about(row: Row, lines: _Lines) -> _Lines:
    """The lines of one program that are about `row`: its record, its times, and the figures if there is either."""
    own = {key: line for key, line in lines.items() if key[1:6] == row or (key[0] == "timing" and key[1:5] == row[:4])}
    return own | {key: line for key, line in lines.items() if own and key[0] == "figures"}


def _check(row: Row, old: _Lines, new: _Lines, owed: Collection[Row], seen: Seen) -> None:
    if not new and not old:
        raise SelectionError(f"unknown row {row}: there is no record of it in {seen.where}, nor in the baseline")
    if not new and row in owed:
        raise SelectionError(f"there is no record of {row} in {seen.where}: run the gate first. {row.rerun}")
    for line in new.values():
        if not isinstance(line, Figures) and line.status != "passed":
            raise SelectionError(f"{row} is {line.status}, and only what passed is accepted: {line.sentence}")


def _drop(old: _Lines, held: _Lines) -> None:
    """Takes a row out. Figures are of a program, which rows under other schedules may still run."""
    shared = sum(key[0] != "figures" for key in held) > sum(key[0] != "figures" for key in old)
    for key in old:
        if key[0] != "figures" or not shared:
            del held[key]


def _steps(old: _Lines, new: _Lines) -> dict[str, str]:
    """What differs, by name: "120 -> 124"."""
    steps: dict[str, str] = {}
    for key, line in new.items():
        before = old.get(key)
        if before is None:
            name = " ".join((key[0], key[-1])) if key[0] != "record" else "row"
            steps[name] = "new"
        elif isinstance(line, Record) and isinstance(before, Record):
            steps |= {one.name: one.step for one in changes(before.counters, line.counters)}
        elif isinstance(line, Figures) and isinstance(before, Figures):
            steps |= _figure_steps(before, line)
        elif isinstance(line, Timing) and isinstance(before, Timing) and line.samples_us != before.samples_us:
            times = f"{median(before.samples_us):.3f} -> {median(line.samples_us):.3f}"
            steps[f"{line.temperature} median us"] = times
        if before is not None and before.program_sha256 != line.program_sha256:
            steps["program"] = f"{(before.program_sha256 or 'none')[:12]} -> {(line.program_sha256 or 'none')[:12]}"
    return steps


def _figure_steps(before: Figures, after: Figures) -> dict[str, str]:
    steps = {} if before.assembler == after.assembler else {"assembler": f"{before.assembler} -> {after.assembler}"}
    for entry in sorted({*before.kernels, *after.kernels}):
        found = changes(before.kernels.get(entry, {}), after.kernels.get(entry, {}))
        steps |= {f"{entry}.{one.name}": one.step for one in found}
    return steps


def rows_matching(
    pattern: str, baseline: Baseline, seen: Seen, owed: Collection[Row], excused: Collection[Row]
) -> list[Row]:
    """The rows whose case matches the glob: those that were seen, those of the baseline that nobody owes any more.

    `excused` rows, which fail as expected, and `seen.unsupported` ones are left out.
    """
    seen_rows = seen.rows
    excused = {*excused, *seen.unsupported}
    gone = [row for row in baseline.records if row not in owed and row not in seen_rows]
    return [row for row in (*seen_rows, *gone) if fnmatchcase(row.case, pattern) and row not in excused]
