"""Holds the records of a run against the rows that it owed, and fails closed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megamoe.expected import Expectation
from megamoe.record import STATUSES, Record, Row, Status


@dataclass(frozen=True, slots=True)
class Verdict:
    """`problems` are sentences, empty when the gate is open; `counts` the owed rows by their worst status."""

    problems: tuple[str, ...]
    counts: dict[Status, int]
    missing: int
    expected: int

    @property
    def passed(self) -> bool:
        """Whether every owed row passed or failed as expected, and no expectation is stale."""
        return not self.problems

    @property
    def line(self) -> str:
        """One line: "72 passed, 0 failed", then every other count that is not zero."""
        parts = [f"{self.counts.get(name, 0)} {name}" for name in ("passed", "failed")]
        parts += [f"{self.counts[name]} {name}" for name in STATUSES[2:] if self.counts.get(name)]
        parts += [f"{self.missing} missing"] if self.missing else []
        parts += [f"{self.expected} of these as expected"] if self.expected else []
        return ", ".join(parts)


def judge_run(
    owed: Iterable[Row], records: Iterable[Record], expected: Sequence[Expectation] = (), stale: Iterable[str] = ()
) -> Verdict:
    """The verdict on a run. `stale` are sentences about entries that no longer mean anything: each fails the gate.

    Several records of one row: the worst counts, in the order of STATUSES. A record of a row that was not owed fails
    the gate unless it passed.
    """
    by_row: dict[Row, list[Record]] = {}
    for record in records:
        by_row.setdefault(record.row, []).append(record)
    owed = list(dict.fromkeys(owed))
    problems = list(stale)
    if not owed:
        problems.append("no row was owed: an empty selection proves nothing")
    counts: Counter[Status] = Counter()
    as_expected = missing = 0
    for row in owed:
        entries = [one for one in expected if one.entry.matches(row)]
        if row not in by_row:
            missing += 1
            problems.append(f"missing: there is no record of {row}. Rerun: {row.rerun}")
            continue
        record = max(by_row.pop(row), key=lambda one: STATUSES.index(one.status))
        counts[record.status] += 1
        problem = _problem(record, entries)
        if problem:
            problems.append(problem)
        elif entries:
            as_expected += 1
    problems += [
        f"not owed, and {record.status}: {record.sentence}"
        for extra in by_row.values()
        for record in extra
        if record.status != "passed"
    ]
    return Verdict(tuple(problems), dict(counts), missing, as_expected)


def _problem(record: Record, entries: Sequence[Expectation]) -> str | None:
    if len(entries) > 1:
        return f"{entries[0].where} and {entries[1].where} both speak about {record.row}; keep one"
    if not entries:
        return None if record.status == "passed" else f"{record.status}: {record.sentence}"
    where, status = entries[0].where, entries[0].entry.status
    if record.status == "passed":
        return f"{where}: {record.row} is expected to be {status} but passed; remove the entry"
    if record.status != status:
        return f"{where}: {record.row} is expected to be {status} but is {record.status}: {record.sentence}"
    return None
