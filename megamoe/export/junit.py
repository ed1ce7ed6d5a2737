"""The verdict of the gate as JUnit XML, in the form that Ant's schema and Jenkins's both allow; GitLab reads it too.

A suite an OP.BACKEND.TARGET.EXECUTOR, a test case a row: `name` is the case and its schedule. What closes the gate is a
failure with its sentence, an expected failure is skipped. Neither schema has properties in a test case, so counters and
compiler figures are properties of the suite, named after the row; what only asks to be accepted is its system-out. What
is about no row that is owed is a case of the suite "gate".
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from megamoe.contract import Row
from megamoe.gate.verdict import Finding, Verdict
from megamoe.records.lines import Figures, Record, RecordError

# XML 1.0 has no way to write these characters, not even escaped (section 2.2).
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(slots=True)
class _Suite:
    """What one suite will hold. `properties` by name, `said` the lines of its system-out."""

    cases: list[ElementTree.Element] = field(default_factory=list[ElementTree.Element])
    properties: dict[str, str] = field(default_factory=dict[str, str])
    said: list[str] = field(default_factory=list[str])


def write_junit(path: Path, verdict: Verdict, figures: Iterable[Figures], started: str) -> None:
    """Writes the file at once. `started`: UTC, ISO 8601, when the run began. RecordError if it cannot be written."""
    document = _document(_suites(verdict, figures), started)
    data = ElementTree.tostring(document, encoding="utf-8", xml_declaration=True) + b"\n"
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".xml.part", dir=path.parent)
        with open(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise RecordError(f"cannot write JUnit XML to {path}: {error.strerror}") from error


def _suites(verdict: Verdict, figures: Iterable[Figures]) -> dict[str, _Suite]:
    about: dict[Row | None, list[Finding]] = {}
    for finding in verdict.findings:
        about.setdefault(finding.row if finding.row in verdict.records else None, []).append(finding)
    suites: dict[str, _Suite] = {}
    suite_of: dict[tuple[str, ...], _Suite] = {}
    for row, record in verdict.records.items():
        group = f"{row.op}.{row.backend}.{row.target}.{row.executor}"
        suite = suite_of[row[:3]] = suites.setdefault(group, _Suite())
        _add_row(suite, group, row, record, about.get(row, ()), verdict)
    for line in figures:
        suite = suite_of.get((line.case, line.backend, line.target))
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
    kernels = line.kernels.items()
    return {
        f"{line.case} {line.assembler} {entry}.{name}": str(value)
        for entry, numbers in kernels
        for name, value in numbers.items()
    }


def _add_row(
    suite: _Suite, group: str, row: Row, record: Record | None, findings: Sequence[Finding], verdict: Verdict
) -> None:
    name = f"{row.case} {row.schedule}"
    case = _case(group, name, (record.judge_host_seconds or 0.0) if record else 0.0)
    _conclude(case, findings)
    excuse = verdict.excused.get(row)
    if excuse is not None and not len(case):
        entry = excuse.entry
        message = f"{entry.status} as expected until {entry.expires}: {entry.reason} ({excuse.where})"
        ElementTree.SubElement(case, "skipped", message=_clean(message))
    suite.cases.append(case)
    suite.properties |= {f"{name} {key}": str(value) for key, value in (record.counters if record else {}).items()}
    suite.said += [str(finding) for finding in findings if not finding.closes]


def _case(group: str, name: str, seconds: float) -> ElementTree.Element:
    return ElementTree.Element("testcase", classname=_clean(group), name=_clean(name).strip(), time=f"{seconds:.3f}")


def _conclude(case: ElementTree.Element, findings: Sequence[Finding]) -> None:
    """One failure, as there is no room for more: its message is the first sentence that closes, its text are all."""
    closing = [finding for finding in findings if finding.closes]
    if closing:
        found = ElementTree.SubElement(case, "failure", type=closing[0].kind, message=_clean(closing[0].sentence))
        found.text = _clean("\n".join(str(finding) for finding in closing))


def _document(suites: Mapping[str, _Suite], started: str) -> ElementTree.Element:
    root = ElementTree.Element("testsuites")
    for number, (name, suite) in enumerate(suites.items()):
        counts = {
            "tests": len(suite.cases),
            "failures": sum(case.find("failure") is not None for case in suite.cases),
            "errors": 0,
            "skipped": sum(case.find("skipped") is not None for case in suite.cases),
        }
        attributes = {"name": _clean(name), "package": "megamoe", "id": str(number), "hostname": "localhost"}
        attributes |= {"timestamp": started[: len("2026-01-31T12:00:00")]}
        attributes |= {"time": f"{sum(float(case.attrib['time']) for case in suite.cases):.3f}"}
        element = ElementTree.SubElement(root, "testsuite", attributes | {key: str(n) for key, n in counts.items()})
        properties = ElementTree.SubElement(element, "properties")
        for key, value in suite.properties.items():
            ElementTree.SubElement(properties, "property", name=_clean(key), value=value)
        element.extend(suite.cases)
        ElementTree.SubElement(element, "system-out").text = _clean("\n".join(suite.said))
        ElementTree.SubElement(element, "system-err")
    return root


def _clean(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
