"""The verdict of the gate as JUnit XML, in the form that Ant's and Jenkins's schemas both allow; GitLab reads it too.

A suite is an OP.BACKEND.TARGET.EXECUTOR and a test case is a row: `name` is the case and its schedule. A finding that
closes the gate is a failure with its sentence; an expected failure is skipped. Neither schema allows properties in a
test case, so counters and compiler figures are properties of the suite, named after the row. Findings that do not close
the gate are its system-out. Findings about rows that are not owed are cases of the suite "gate".

Kernel findings take the same form: a suite is a kernel, a test case is a site.

junitparser makes the elements. It lacks a suite's system-out and the `package` and `id` that Ant's schema requires, and
it lets characters through that XML cannot hold. This module adds the former and replaces the latter.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from junitparser import (
    Attr,
    Failure,
    IntAttr,
    JUnitXml,
    Properties,
    Property,
    Skipped,
    SystemErr,
    SystemOut,
    TestCase,
    TestSuite,
)

from megamoe.contract import Row
from megamoe.findings import KernelFinding, Ledger
from megamoe.gate.verdict import Finding, Verdict
from megamoe.records.files import write_file
from megamoe.records.keys import Key
from megamoe.records.lines import Figures, Record

# XML 1.0 cannot hold these characters, not even escaped (section 2.2).
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class _SuiteElement(TestSuite):
    package = Attr()
    id = IntAttr()


@dataclass(slots=True)
class _Suite:
    """The content of one suite. `properties` by name; `said`: the lines of its system-out."""

    cases: list[TestCase] = field(default_factory=list[TestCase])
    properties: dict[str, str] = field(default_factory=dict[str, str])
    said: list[str] = field(default_factory=list[str])


def write_junit(path: Path, verdict: Verdict, figures: Iterable[Figures], started: str) -> None:
    """Replaces the file. `started`: UTC in ISO 8601, when the run began. RecordError if it cannot be written."""
    write_file(path, _written(_suites(verdict, figures), started), "JUnit XML to")


def findings_as_junit(ledger: Ledger, failures: Sequence[tuple[str, str]]) -> str:
    """XML with a failure for each finding that counts, a skipped case for a suppressed one, and `failures`: names and
    sentences.

    One case passes if there is nothing to tell, because some readers refuse a report without any.
    """
    suites: dict[str, _Suite] = {}
    for number, one in enumerate(ledger.findings, 1):
        suite = suites.setdefault(f"megamoe.{one.kernel_name or 'host'}", _Suite())
        suite.cases.append(_case_of(one, number, ledger))
        suite.said.append(ledger.text_of(one))
    others = suites.setdefault("megamoe.check", _Suite())
    for number, (name, sentence) in enumerate(failures, 1):
        case = _case("megamoe.check", f"{number}. {name}", 0.0)
        case.append(Failure(_clean(sentence), "failure"))
        others.cases.append(case)
    if not ledger.findings and not failures:
        others.cases.append(_case("megamoe.check", "nothing was found", 0.0))
    others.said += [*ledger.remarks, ledger.tally]
    return _written(suites, datetime.now(UTC).isoformat()).decode()


def _case_of(finding: KernelFinding, number: int, ledger: Ledger) -> TestCase:
    case = _case(f"megamoe.{finding.kernel_name or 'host'}", f"{number}. {finding.rule} at {finding.own_place}", 0.0)
    if (suppression := ledger.suppression_of(finding)) is not None:
        case.append(Skipped(_clean(f"{suppression.reason} ({suppression.where})")))
    elif ledger.counts(finding):
        failure = Failure(_clean(finding.sentence), finding.rule)
        failure.text = _clean(ledger.text_of(finding))
        case.append(failure)
    return case


def _written(suites: Mapping[str, _Suite], started: str) -> bytes:
    root = JUnitXml()
    for number, (name, suite) in enumerate(suites.items()):
        root.append(_element(number, name, suite, started))
    text = io.BytesIO()
    root.write(text)
    return text.getvalue() + b"\n"


def _suites(verdict: Verdict, figures: Iterable[Figures]) -> dict[str, _Suite]:
    about: dict[Row | None, list[Finding]] = {}
    for finding in verdict.findings:
        about.setdefault(finding.row if finding.row in verdict.records else None, []).append(finding)
    suites: dict[str, _Suite] = {}
    suite_of: dict[Key, _Suite] = {}
    for row, record in verdict.records.items():
        group = f"{row.op}.{row.backend}.{row.target}.{row.executor}"
        suite = suite_of[Key.of(row).program] = suites.setdefault(group, _Suite())
        _add_row(suite, group, row, record, about.get(row, ()), verdict)
    for line in figures:
        suite = suite_of.get(Key.of(line).program)
        if suite is not None:
            suite.properties |= _numbers_of(line)
    others = about.get(None, ())
    if others:
        suites["gate"] = suite = _Suite()
        for number, finding in enumerate(others, 1):
            case = _case("gate", f"{number}. {finding.kind} {finding.row or ''}", 0.0)
            _conclude(case, [finding])
            suite.cases.append(case)
            suite.said += [] if finding.closes else [str(finding)]
    return suites


def _numbers_of(line: Figures) -> dict[str, str]:
    return {
        f"{line.case} {line.assembler} {entry}.{name}": str(value)
        for entry, numbers in line.kernels.items()
        for name, value in numbers.items()
    }


def _add_row(
    suite: _Suite, group: str, row: Row, record: Record | None, findings: Sequence[Finding], verdict: Verdict
) -> None:
    name = f"{row.case} {row.schedule}"
    case = _case(group, name, (record.judge_host_seconds or 0.0) if record else 0.0)
    _conclude(case, findings)
    excuse = verdict.excused.get(row)
    if excuse is not None and case.is_passed:
        entry = excuse.entry
        message = f"{entry.status} as expected until {entry.expires}: {entry.reason} ({excuse.where})"
        case.append(Skipped(_clean(message)))
    suite.cases.append(case)
    suite.properties |= {f"{name} {key}": str(value) for key, value in (record.counters if record else {}).items()}
    suite.said += [str(finding) for finding in findings if not finding.closes]


def _case(group: str, name: str, seconds: float) -> TestCase:
    return TestCase(_clean(name).strip(), _clean(group), round(seconds, 3))


def _conclude(case: TestCase, findings: Sequence[Finding]) -> None:
    """Adds one failure, because only one fits: its message is the first closing sentence, its text all of them."""
    closing = [finding for finding in findings if finding.closes]
    if closing:
        failure = Failure(_clean(closing[0].sentence), closing[0].kind)
        failure.text = _clean("\n".join(str(finding) for finding in closing))
        case.append(failure)


def _element(number: int, name: str, suite: _Suite, started: str) -> TestSuite:
    found = _SuiteElement(_clean(name))
    found.package, found.id, found.hostname = "megamoe", number, "localhost"
    found.timestamp = started[: len("2026-01-31T12:00:00")]
    properties = Properties()
    for key, value in suite.properties.items():
        properties.add_property(Property(_clean(key), value))
    found.append(properties)
    found.add_testcases(suite.cases)
    found.time = found.time or 0.0
    found.append(SystemOut(_clean("\n".join(suite.said))))
    found.append(SystemErr())
    return found


def _clean(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
