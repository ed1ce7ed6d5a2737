"""Holds the records of a run against the rows that it owed, and fails closed.

This is the half that needs no baseline: what is missing, what did not pass, and expectations that no longer hold.
megamoe.gate.counters has the other half, counters and compiler figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megamoe.contract import STATUSES, Row, Status
from megamoe.gate.expected import Expectation
from megamoe.records.lines import Record

FindingKind = Literal[
    "missing", "status", "expectation", "empty", "not owed", "regressed", "new", "gone", "figures", "renew", "revision"
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that the gate has to say, as a sentence. `row` is None if it is about no single row.

    `closes`: whether it closes the gate. What does not only asks: to renew a baseline that is worse than what was seen,
    or to run again what was run at another revision.
    `accept` is the command that takes the change on purpose, None where nothing but a fix will do.
    """

    kind: FindingKind
    sentence: str
    row: Row | None = None
    closes: bool = True
    accept: str | None = None

    def __str__(self) -> str:
        return self.sentence if self.accept is None else f"{self.sentence}. Accept it on purpose: {self.accept}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate found. `counts` are the owed rows by their worst status, `records` the record of each that counts.

    `excused`: the rows that failed as expected, with the entry that expects it.
    """

    findings: tuple[Finding, ...]
    counts: dict[Status, int]
    missing: int
    expected: int
    records: Mapping[Row, Record | None] = field(default_factory=dict[Row, "Record | None"])
    excused: Mapping[Row, Expectation] = field(default_factory=dict[Row, Expectation])

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences, empty when the gate is open."""
        return tuple(str(finding) for finding in self.findings if finding.closes)

    @property
    def asks(self) -> tuple[str, ...]:
        """Sentences about what ought to be renewed, and closes the gate only if it is strict."""
        return tuple(str(finding) for finding in self.findings if not finding.closes)

    @property
    def passed(self) -> bool:
        """Whether every owed row passed or failed as expected, nothing got worse, and no expectation is stale."""
        return not self.problems

    @property
    def line(self) -> str:
        """One line: "72 passed, 0 failed", then every other count that is not zero."""
        parts = [f"{self.counts.get(name, 0)} {name}" for name in ("passed", "failed")]
        parts += [f"{self.counts[name]} {name}" for name in STATUSES[2:] if self.counts.get(name)]
        parts += [f"{self.missing} missing"] if self.missing else []
        parts += [f"{self.expected} of these as expected"] if self.expected else []
        for kind in ("regressed", "new", "gone"):
            found = sum(finding.kind == kind for finding in self.findings)
            parts += [f"{found} {kind}"] if found else []
        return ", ".join(parts)

    def with_findings(self, more: Iterable[Finding], strict: bool = False) -> Verdict:
        """This verdict and what else was found. `strict`: what only asks closes the gate too."""
        found = (*self.findings, *more)
        return replace(self, findings=tuple(replace(one, closes=True) for one in found) if strict else found)


def judge_run(
    owed: Iterable[Row],
    records: Iterable[Record],
    expected: Sequence[Expectation] = (),
    stale: Iterable[str] = (),
    passed_before: Collection[Row] = (),
    specs: Path | None = None,
) -> Verdict:
    """The verdict on a run. `stale` are sentences about entries that no longer mean anything: each fails the gate.

    Several records of one row: the worst counts, in the order of STATUSES. A record of a row that was not owed fails
    the gate unless it passed. `passed_before`: rows of the baseline, so that a sentence can say what got worse.
    `specs`: the folder of the specs that the run was given, for commands.
    """
    by_row = _by_row(records)
    owed = list(dict.fromkeys(owed))
    findings = [Finding("expectation", sentence) for sentence in stale]
    if not owed:
        findings.append(Finding("empty", "no row was owed: an empty selection proves nothing"))
    counts: Counter[Status] = Counter()
    excused: dict[Row, Expectation] = {}
    found: dict[Row, Record | None] = {}
    for row in owed:
        entries = [one for one in expected if one.entry.matches(row)]
        found[row] = record = worst(by_row.pop(row, ()))
        if record is None:
            again = row.rerun_with(specs)
            findings.append(Finding("missing", f"missing: there is no record of {row}. Rerun: {again}", row))
            continue
        counts[record.status] += 1
        problem = _problem(record, entries, row in passed_before)
        if problem:
            findings.append(Finding("expectation" if entries else "status", problem, row))
        elif entries:
            excused[row] = entries[0]
    findings += [
        Finding("not owed", f"not owed, and {record.status}: {record.sentence}", record.row)
        for extra in by_row.values()
        for record in extra
        if record.status != "passed"
    ]
    missing = sum(record is None for record in found.values())
    return Verdict(tuple(findings), dict(counts), missing, len(excused), found, excused)


def worst(records: Sequence[Record]) -> Record | None:
    """The record that counts among those of one row; None if there is none."""
    return max(records, key=lambda one: STATUSES.index(one.status)) if records else None


def _by_row(records: Iterable[Record]) -> dict[Row, list[Record]]:
    by_row: dict[Row, list[Record]] = {}
    for record in records:
        by_row.setdefault(record.row, []).append(record)
    return by_row


def _problem(record: Record, entries: Sequence[Expectation], passed_before: bool) -> str | None:
    if len(entries) > 1:
        return f"{entries[0].where} and {entries[1].where} both speak about {record.row}; keep one"
    if not entries:
        before = ", which passed in the baseline" if passed_before else ""
        return None if record.status == "passed" else f"{record.status}{before}: {record.sentence}"
    where, status = entries[0].where, entries[0].entry.status
    if record.status == "passed":
        return f"{where}: {record.row} is expected to be {status} but passed; remove the entry"
    if record.status != status:
        return f"{where}: {record.row} is expected to be {status} but is {record.status}: {record.sentence}"
    return None
