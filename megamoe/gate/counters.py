"""Compares counters and compiler figures with a tracked baseline. Both are integers that repeat exactly.

megamoe.diff finds the differences; this module decides what they mean for the gate. A cost that grew is a regression
and closes the gate. So does a row or a program that the baseline lacks, or a baseline line whose row is no longer owed:
nothing enters or leaves the baseline unseen. A change for the better, or a neutral one, does not close the gate but
asks to be accepted. Until it is accepted, the gain can be lost again without notice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megamoe.contract import Row
from megamoe.diff.differ import ComparedRow, compare_lines
from megamoe.diff.sides import Lines, by_key
from megamoe.gate.baseline import Baseline
from megamoe.gate.verdict import Finding
from megamoe.records.keys import Key
from megamoe.records.lines import Figures, Record
from megamoe.spec.selection import DEFAULT_PROFILE, Selection

REPEATABLE = "vm"
"""The executor whose counters are the same on every machine."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What the baseline must hold. `rows`: what a whole run owes; one that the baseline lacks is new.

    `selections`: the selections of the current run. A baseline line that they cover must be among `rows`. `accept`
    returns the command that accepts a row as it is now.
    """

    rows: Collection[Row]
    selections: Sequence[Selection]
    accept: Callable[[Row], str]

    def speaks_of(self, row: Row) -> bool:
        """Whether a run with one of the selections would include this row, if it were still owed."""
        return any(_would_hold(selection, row) for selection in self.selections)


def _would_hold(selection: Selection, row: Row) -> bool:
    partly = selection.cases or selection.where or selection.schedules or selection.rows
    if partly or selection.profile != DEFAULT_PROFILE:
        return False
    executors = selection.executors or (REPEATABLE,)
    wanted = ((selection.ops, row.op), (selection.backends, row.backend), (selection.targets, row.target))
    return all(not names or name in names for names, name in (*wanted, (executors, row.executor)))


def against_baseline(
    baseline: Baseline, claim: Claim, owed: Iterable[Row], records: Iterable[Record], figures: Iterable[Figures]
) -> Iterator[Finding]:
    """Compares the rows of `owed` that passed with the baseline. judge_run handles the rows that did not pass."""
    passed = _passed(owed, records)
    # Drop input digests, which a device's baseline has: counters are compared even if the inputs differ.
    held = (baseline.records[row].model_copy(update={"input_sha256": {}}) for row in passed if row in baseline.records)
    programs = _programs(row for row in passed if row in claim.rows or row in baseline.records)
    old = Lines(by_key(held), {}, by_key(_of(programs, baseline.figures.values())))
    new = Lines(by_key(line for lines in passed.values() for line in lines), {}, by_key(_of(programs, figures)))
    counted: dict[Key, ComparedRow] = {}
    assembled: dict[Key, list[ComparedRow]] = {program: [] for program in programs}
    for found in compare_lines(old, new, {}):
        if found.key.kind == "figures":
            assembled[found.key.program].append(found)
        else:
            counted[found.key] = found
    for row in passed:
        yield from _of_row(counted[Key.of(row)], row, claim)
    for program, row in programs.items():
        yield from _of_program(assembled[program], row, baseline, new, claim)
    for row in baseline.records:
        if row not in claim.rows and claim.speaks_of(row):
            sentence = f"gone: the baseline holds {row}, which nobody owes any more: a case, backend or target is gone"
            yield Finding("gone", sentence, row, accept=claim.accept(row))


def _passed(owed: Iterable[Row], records: Iterable[Record]) -> dict[Row, list[Record]]:
    """The rows of `owed` that have records, if all of these passed."""
    found: dict[Row, list[Record]] = {row: [] for row in owed}
    for record in records:
        if record.row in found:
            found[record.row].append(record)
    return {row: lines for row, lines in found.items() if lines and all(line.status == "passed" for line in lines)}


def _programs(rows: Iterable[Row]) -> dict[Key, Row]:
    """Programs, each with the first row that runs it. One accept command covers both."""
    programs: dict[Key, Row] = {}
    for row in rows:
        programs.setdefault(Key.of(row).program, row)
    return programs


def _of(programs: Collection[Key], figures: Iterable[Figures]) -> Iterator[Figures]:
    return (line for line in figures if Key.of(line).program in programs)


def _of_row(found: ComparedRow, row: Row, claim: Claim) -> Iterator[Finding]:
    if found.call == "NEW":
        if row in claim.rows:
            yield Finding("new", f"new: the baseline has no line for {row}", row, accept=claim.accept(row))
    elif found.changes:
        yield _differing(str(row), found, _whose_change(found.same_program, "what runs it"), row, claim)


def _whose_change(same_program: bool | None, maker: str) -> str:
    if same_program is None:
        return ""
    return f"; the program is the same, so {maker} has changed" if same_program else "; the program has changed"


def _differing(about: str, found: ComparedRow, why: str, row: Row, claim: Claim) -> Finding:
    """The finding for counters or figures that differ."""
    if found.regression:
        return Finding("regressed", f"regressed: {about}: {found.sentence}{why}", row, accept=claim.accept(row))
    word = "better" if all(one.trend == "better" for one in found.changes) else "changed"
    sentence = f"{word}: {about}: {found.sentence}{why}; the baseline does not hold it yet"
    return Finding("renew", sentence, row, closes=False, accept=claim.accept(row))


def _of_program(
    assembled: Sequence[ComparedRow], row: Row, baseline: Baseline, new: Lines, claim: Claim
) -> Iterator[Finding]:
    """Findings about the compiler figures of the program of `row`."""
    if not assembled and row in claim.rows:
        sentence = f"no compiler figures: {row.case} on {row.backend} {row.target} was not assembled"
        yield Finding("figures", sentence, row)
    for found in assembled:
        about = f"{row.case} on {row.backend} {row.target}, assembled by {found.key.assembler}"
        if found.call == "MISSING":
            sentence = f"no compiler figures: the baseline has those of {about}, the records have none"
            yield Finding("figures", sentence, row)
        elif found.call == "NEW":
            # If the whole row is new, its own finding is enough.
            if row in claim.rows and row in baseline.records:
                sentence = f"new: the baseline has no compiler figures of {about}"
                yield Finding("new", sentence, row, accept=claim.accept(row))
        elif found.changes:
            was = baseline.figures[found.key].assembler
            now = " and ".join(sorted({line.assembler for line in new.figures[found.key]}))
            why = _whose_change(found.same_program, "the assembler")
            why += "" if was == now else f"; {was} before, {now} now"
            yield _differing(f"compiler figures of {about}", found, why, row, claim)
