"""Compares the records of a run with the rows that it owed, and fails closed.

This half needs no baseline: it finds rows that are missing or did not pass, and expectations that no longer hold.
megamoe.gate.counters is the other half: counters and compiler figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megamoe.contract import STATUSES, Row, Status
from megamoe.contract.counted import counted
from megamoe.gate.baseline import BASELINES, Baseline
from megamoe.gate.expected import Expectation
from megamoe.records.keys import Key, worst
from megamoe.records.lines import RERUN, Figures, Record

FindingKind = Literal[
    "missing",
    "status",
    "expectation",
    "empty",
    "not owed",
    "regressed",
    "new",
    "gone",
    "figures",
    "renew",
    "revision",
    "evidence",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of the gate. `row` is None if it is not about a single row.

    `closes`: whether it closes the gate. Otherwise it only asks the reader to renew a baseline that is worse than what
    was seen, or to run again what was run at another revision. `accept` is the command that accepts the change, None if
    only a fix will do.
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
    """What the gate found. `counts`: owed rows by their worst status. `records`: the worst record of each row.

    `excused`: rows whose records all failed as expected, with the entry that expects it.
    """

    findings: tuple[Finding, ...]
    counts: dict[Status, int]
    missing: int
    expected: int
    records: Mapping[Row, Record | None] = field(default_factory=dict[Row, "Record | None"])
    excused: Mapping[Row, Expectation] = field(default_factory=dict[Row, Expectation])

    @property
    def problems(self) -> tuple[str, ...]:
        """The findings that close the gate, as sentences. Empty if the gate is open."""
        return tuple(str(finding) for finding in self.findings if finding.closes)

    @property
    def asks(self) -> tuple[str, ...]:
        """Sentences that close only a strict gate."""
        return tuple(str(finding) for finding in self.findings if not finding.closes)

    @property
    def passed(self) -> bool:
        """Whether every owed row passed or failed as expected, nothing got worse, and no expectation is stale."""
        return not self.problems

    @property
    def line(self) -> str:
        """One line: "72 passed, 0 failed", then every other nonzero count."""
        parts = [f"{self.counts.get(name, 0)} {name}" for name in ("passed", "failed")]
        parts += [f"{self.counts[name]} {name}" for name in STATUSES[2:] if self.counts.get(name)]
        parts += [f"{self.missing} missing"] if self.missing else []
        parts += [f"{self.expected} of these as expected"] if self.expected else []
        for kind in ("regressed", "new", "gone"):
            found = sum(finding.kind == kind for finding in self.findings)
            parts += [f"{found} {kind}"] if found else []
        return ", ".join(parts)

    def with_findings(self, more: Iterable[Finding], strict: bool = False) -> Verdict:
        """This verdict with more findings. With `strict`, findings that only ask close the gate too."""
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
    """The verdict on a run. `stale`: sentences about expectations that no longer apply; each closes the gate.

    If a row has several records, each one must meet the expectation: none hides another. A record of a row that was not
    owed closes the gate unless it passed. `passed_before`: rows of the baseline, so that a sentence can say what got
    worse. `specs`: the spec folder of the run, used in commands.
    """
    by_row: dict[Row, list[Record]] = {}
    for record in records:
        by_row.setdefault(record.row, []).append(record)
    owed = list(dict.fromkeys(owed))
    findings = [Finding("expectation", sentence) for sentence in stale]
    if not owed:
        findings.append(Finding("empty", "no row was owed: an empty selection proves nothing"))
    excused: dict[Row, Expectation] = {}
    found: dict[Row, Record | None] = {}
    for row in owed:
        entries = [one for one in expected if one.entry.matches(row)]
        mine = by_row.pop(row, [])
        found[row] = worst(mine) if mine else None
        closing = _closing(row, mine, entries, row in passed_before, specs)
        findings += closing
        if entries and not closing:
            excused[row] = entries[0]
    findings += [
        Finding("not owed", f"not owed, and {record.status}: {record.sentence}", record.row)
        for extra in by_row.values()
        for record in extra
        if record.status != "passed"
    ]
    counts: Counter[Status] = Counter(record.status for record in found.values() if record)
    missing = sum(record is None for record in found.values())
    return Verdict(tuple(findings), dict(counts), missing, len(excused), found, excused)


def _closing(
    row: Row, records: Sequence[Record], entries: Sequence[Expectation], passed_before: bool, specs: Path | None
) -> list[Finding]:
    """Why a row closes the gate. Records that say the same give one finding."""
    if not records:
        return [Finding("missing", f"missing: there is no record of {row}{RERUN}{row.rerun_with(specs)}", row)]
    problems = dict.fromkeys(_problem(record, entries, passed_before) for record in records)
    return [Finding("expectation" if entries else "status", one, row) for one in problems if one]


def _problem(record: Record, entries: Sequence[Expectation], passed_before: bool) -> str | None:
    """Why `record` closes the gate; None if it does not."""
    other = next((one for one in entries if one.entry.status != entries[0].entry.status), None)
    if other is not None:
        return f"{entries[0].where} and {other.where} both speak about {record.row}, and say different things; keep one"
    if not entries:
        before = ", which passed in the baseline" if passed_before else ""
        return None if record.status == "passed" else f"{record.status}{before}: {record.sentence}"
    where, status = entries[0].where, entries[0].entry.status
    if record.status == "passed":
        return f"{where}: {record.row} is expected to be {status} but passed; remove the entry"
    if record.status != status:
        return f"{where}: {record.row} is expected to be {status} but is {record.status}: {record.sentence}"
    return None


def open_line(
    verdict: Verdict, baseline: Baseline | None, records: Iterable[Record], figures: Iterable[Figures]
) -> str:
    """One sentence for a verdict that passed: rows, their counters, and the figures of their programs, each counted
    once.

    `baseline`: None if the run was compared with none.
    """
    passed = {record.row: record for record in records if record.status == "passed" and record.row in verdict.records}
    if baseline is None:
        return f"the gate is open: {counted(len(passed), 'row')} passed, held against no baseline"
    held = {row: record for row, record in passed.items() if row in baseline.records}
    counters = sum(len({*record.counters} | {*baseline.records[row].counters}) for row, record in held.items())
    what = f"{counted(len(held), 'row')}, {counted(counters, 'counter')} and "
    what += counted(_compiler_figures(baseline, held, figures), "compiler figure")
    where = _shown(baseline.path)
    differs = any(finding.kind == "renew" for finding in verdict.findings)
    told = f"{what} were held against {where}, see what differs above" if differs else f"{what} are as in {where}"
    without = len(passed) - len(held)
    return f"the gate is open: {told}" + (f"; {counted(without, 'row')} passed without a line there" if without else "")


_CLOSED_BY: Mapping[FindingKind, str] = {
    "expectation": "wrong expectation",
    "empty": "empty selection",
    "not owed": "unowed row",
    "gone": "lost row",
    "figures": "unmeasured program",
    "renew": "improved row",
    "revision": "stale run",
    "evidence": "evidence fault",
}


def closed_line(verdict: Verdict) -> str:
    """One sentence for a verdict that did not pass: what closes the gate, each row counted once for each reason."""
    found: dict[str, set[object]] = {}
    for finding in verdict.findings:
        if finding.closes:
            record = verdict.records.get(finding.row) if finding.row else None
            status = record.status if record else "failed"
            name = f"{status} row" if finding.kind == "status" else _CLOSED_BY.get(finding.kind, f"{finding.kind} row")
            found.setdefault(name, set()).add(finding.row or finding.sentence)
    return f"the gate is closed: {', '.join(counted(len(of), name) for name, of in found.items())}"


def _compiler_figures(baseline: Baseline, rows: Iterable[Row], figures: Iterable[Figures]) -> int:
    programs = {Key.of(row).program for row in rows}
    keyed = ((Key.of(line), line) for line in figures)
    found = {key: line for key, line in keyed if key.program in programs and key in baseline.figures}
    return sum(len(numbers) for line in found.values() for numbers in line.kernels.values())


def _shown(path: Path) -> str:
    """One of our baselines as a path in the repository; any other path as given."""
    return str(path.relative_to(BASELINES.parents[1]) if path.is_relative_to(BASELINES) else path)
