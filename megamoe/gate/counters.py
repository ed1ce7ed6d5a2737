"""Holds counters and compiler figures against a tracked baseline. Both are whole numbers that repeat exactly.

More of a cost is a regression and closes the gate; so does a row or a program that the baseline lacks, and a line of
the baseline for which there is no row any more: nothing leaves or enters the baseline unseen. What got better, or is
merely different, does not close it, but asks to be accepted: until then the gain may be lost again unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megamoe.contract import Row
from megamoe.diff.directions import Change, changes
from megamoe.gate.baseline import Baseline, FiguresKey, figures_key
from megamoe.gate.verdict import Finding
from megamoe.records.lines import Figures, Record
from megamoe.spec.selection import DEFAULT_PROFILE, Selection

_Program = tuple[str, str, str]
_Lines = tuple[Figures, ...]
REPEATABLE = "vm"
"""The executor whose counters are the same on every machine."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What the baseline has to hold. `rows`: what a whole run owes; a row of it that the baseline lacks is new.

    `selections`: what was asked of the run at hand; a line of the baseline that they speak of must be among `rows`.
    `accept` makes the command that accepts what a row is now.
    """

    rows: Collection[Row]
    selections: Sequence[Selection]
    accept: Callable[[Row], str]

    def speaks_of(self, row: Row) -> bool:
        """Whether a run of one of the selections would have this row, if it were still owed."""
        return any(_would_hold(selection, row) for selection in self.selections)


def _would_hold(selection: Selection, row: Row) -> bool:
    if selection.cases or selection.where or selection.schedules or selection.profile != DEFAULT_PROFILE:
        return False
    wanted = (selection.ops, selection.backends, selection.targets, selection.executors or (REPEATABLE,))
    return all(not names or name in names for names, name in zip(wanted, (row.op, *row[1:4]), strict=True))


def against_baseline(
    baseline: Baseline, claim: Claim, owed: Iterable[Row], records: Iterable[Record], figures: Iterable[Figures]
) -> Iterator[Finding]:
    """What the baseline says of the rows of `owed` that passed: those that did not are the verdict's business."""
    passed: dict[Row, list[Record]] = {}
    failed: set[Row] = set()
    for record in records:
        if record.status == "passed":
            passed.setdefault(record.row, []).append(record)
        else:
            failed.add(record.row)
    seen = [row for row in dict.fromkeys(owed) if row in passed and row not in failed]
    for row in seen:
        yield from _of_row(baseline.records.get(row), passed[row], row, claim)
    yield from _of_programs(baseline, figures, seen, claim)
    for row in baseline.records:
        if row not in claim.rows and claim.speaks_of(row):
            sentence = f"gone: the baseline holds {row}, which nobody owes any more: a case, backend or target is gone"
            yield Finding("gone", sentence, row, accept=claim.accept(row))


def _of_row(before: Record | None, found: Sequence[Record], row: Row, claim: Claim) -> Iterator[Finding]:
    if before is None:
        if row in claim.rows:
            yield Finding("new", f"new: the baseline has no line for {row}", row, accept=claim.accept(row))
        return
    for record in found:
        differing = changes(before.counters, record.counters)
        if differing:
            why = _whose_change(before.program_sha256, record.program_sha256)
            yield _counted(f"{row}", differing, why, row, claim)
            return


def _whose_change(before: str | None, after: str | None) -> str:
    if before is None or after is None:
        return ""
    return "; the program is the same, so what runs it has changed" if before == after else "; the program has changed"


def _counted(about: str, differing: Sequence[Change], why: str, row: Row, claim: Claim) -> Finding:
    """The finding about counters or figures that differ: those that close the gate come first in the sentence."""
    closing = [one for one in differing if one.trend in ("worse", "vanished")]
    rest = [one for one in differing if one.trend not in ("worse", "vanished")]
    listed = ", ".join(str(one) for one in (*closing, *rest))
    if closing:
        return Finding("regressed", f"regressed: {about}: {listed}{why}", row, accept=claim.accept(row))
    word = "better" if all(one.trend == "better" for one in rest) else "changed"
    sentence = f"{word}: {about}: {listed}{why}; the baseline does not hold it yet"
    return Finding("renew", sentence, row, closes=False, accept=claim.accept(row))


def _of_programs(
    baseline: Baseline, figures: Iterable[Figures], seen: Sequence[Row], claim: Claim
) -> Iterator[Finding]:
    """What compilers say, program by program. A row stands for each, so that one command accepts both."""
    rows: dict[_Program, Row] = {}
    for row in seen:
        if row in claim.rows or row in baseline.records:
            rows.setdefault(row[:3], row)
    before = _by_program({key: (line,) for key, line in baseline.figures.items()})
    after = _by_program(_by_key(figures))
    for program, row in rows.items():
        was, now = before.get(program, {}), after.get(program, {})
        for key in {**was, **now}:
            found = _worst_of_assembler(key, was.get(key, ()), now.get(key, ()), row, claim)
            # Of a row that is new as a whole, one finding is enough.
            if found is not None and (found.kind != "new" or row in baseline.records):
                yield found
        if not was and not now and row in claim.rows:
            sentence = f"no compiler figures: {row.case} on {row.backend} {row.target} was not assembled"
            yield Finding("figures", sentence, row)


def _by_key(figures: Iterable[Figures]) -> dict[FiguresKey, tuple[Figures, ...]]:
    lines: dict[FiguresKey, tuple[Figures, ...]] = {}
    for line in figures:
        lines[figures_key(line)] = (*lines.get(figures_key(line), ()), line)
    return lines


def _by_program(figures: Mapping[FiguresKey, _Lines]) -> dict[_Program, dict[FiguresKey, _Lines]]:
    programs: dict[_Program, dict[FiguresKey, _Lines]] = {}
    for key, lines in figures.items():
        programs.setdefault(key[:3], {})[key] = lines
    return programs


def _worst_of_assembler(key: FiguresKey, before: _Lines, after: _Lines, row: Row, claim: Claim) -> Finding | None:
    """As for records: of several lines of one program the worst counts, whichever was written last."""
    was = before[0] if before else None
    found = [one for now in after or (None,) if (one := _of_assembler(key, was, now, row, claim)) is not None]
    return next((one for one in found if one.closes), found[0] if found else None)


def _of_assembler(
    key: FiguresKey, before: Figures | None, after: Figures | None, row: Row, claim: Claim
) -> Finding | None:
    if after is None:
        return Finding("figures", f"no compiler figures: the baseline has those of {key}, the records have none", row)
    if before is None:
        if row not in claim.rows:
            return None
        return Finding("new", f"new: the baseline has no compiler figures of {key}", row, accept=claim.accept(row))
    differing = changes(_flat(before), _flat(after))
    if not differing:
        return None
    version = "" if before.assembler == after.assembler else f"; {before.assembler} before, {after.assembler} now"
    why = _whose_change(before.program_sha256, after.program_sha256).replace("what runs it", "the assembler")
    return _counted(f"compiler figures of {key}", differing, why + version, row, claim)


def _flat(figures: Figures) -> dict[str, int]:
    """ "ENTRY.NAME" -> number; only the name if there is one kernel, which may then be renamed."""
    if len(figures.kernels) == 1:
        (numbers,) = figures.kernels.values()
        return dict(numbers)
    return {f"{entry}.{name}": value for entry, numbers in figures.kernels.items() for name, value in numbers.items()}
