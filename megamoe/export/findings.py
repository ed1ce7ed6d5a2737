"""Findings of a run as text, JSON, SARIF 2.1.0 and JUnit XML.

`read_findings` reads the JSON back, because `megamoe check` runs test suites in separate processes. Code hosts show
SARIF next to the source; for a kernel compiled without line information it can only name a place in the PTX.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from os.path import normpath
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from megamoe.contract.machine import Grade
from megamoe.contract.plain import plain_bytes
from megamoe.findings import KernelFinding, Ledger, SourceLine

Format = Literal["text", "json", "sarif", "junit"]
SUFFIXES: dict[str, Format] = {".txt": "text", ".json": "json", ".sarif": "sarif", ".xml": "junit"}
"""File suffix -> format."""
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS: dict[Grade, str] = {"error": "error", "portability": "warning", "note": "note"}
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong and no finding. `kind`: a few words, such as "refused instruction". `place`: if it has one."""

    kind: str
    sentence: str
    place: SourceLine | None = None

    @property
    def name(self) -> str:
        """The kind and the place."""
        return f"{self.kind} at {self.place}" if self.place is not None else self.kind


@dataclass(slots=True)
class CheckedRun:
    """A run: its ledger, `said` about what was clean, and `failures`, everything else that is wrong."""

    ledger: Ledger
    said: list[str] = field(default_factory=list[str])
    failures: list[Complaint] = field(default_factory=list[Complaint])

    @property
    def failed(self) -> bool:
        """Whether anything counts."""
        return bool(self.failures or self.ledger.failing)


def rendered(checked: CheckedRun, form: Format) -> str:
    """The run in a format, ending in a newline."""
    if form == "text":
        return _text(checked)
    if form == "junit":
        # Imported here because JUnit's writer imports the gate's rooms.
        from megamoe.export.junit import findings_as_junit

        return findings_as_junit(checked.ledger, [(one.name, one.sentence) for one in checked.failures])
    plain = _plain(checked) if form == "json" else _sarif(checked)
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def form_of(path: Path) -> Format:
    """The format of a file, by its suffix. ValueError for an unknown one."""
    if path.suffix not in SUFFIXES:
        known = ", ".join(f"{suffix} ({form})" for suffix, form in SUFFIXES.items())
        raise ValueError(f"{path}: the name of a file of findings ends in one of {known}")
    return SUFFIXES[path.suffix]


# Text


def _text(checked: CheckedRun) -> str:
    ledger = checked.ledger
    said = [one.sentence for one in checked.failures]
    for one in ledger.findings:
        said.append(ledger.text_of(one))
        if (suppressed := ledger.suppression_of(one)) is not None:
            said.append(f"  suppressed: {suppressed.reason} ({suppressed.where})")
    # What was clean would bury what is wrong.
    said += [*checked.said, *ledger.remarks]
    if ledger.findings:
        said.append(ledger.tally)
    return "\n".join(said) + "\n" if said else ""


# JSON


def _plain(checked: CheckedRun) -> dict[str, Any]:
    ledger = checked.ledger
    number_of = {one.site: number for number, one in enumerate(ledger.findings)}
    return {
        "megamoe_findings": _FORMAT,
        "megamoe": version("megamoe"),
        "profile": ledger.profile,
        "findings": [
            {
                **asdict(one),
                "kernel_name": one.kernel_name,
                "sentence": one.sentence,
                "counts": ledger.counts(one),
                "suppressed": _reason(ledger, one),
                "may_follow_from": _cause(ledger, one, number_of),
            }
            for one in ledger.findings
        ],
        "stale_suppressions": [asdict(one) for one in ledger.stale],
        "suppressions_without_effect": [asdict(one) for one in ledger.without_effect],
        "failures": [one.sentence for one in checked.failures],
        "said": checked.said,
    }


def _reason(ledger: Ledger, finding: KernelFinding) -> str | None:
    suppression = ledger.suppression_of(finding)
    return None if suppression is None else suppression.reason


def _cause(
    ledger: Ledger, finding: KernelFinding, number_of: Mapping[tuple[object, ...], int]
) -> dict[str, Any] | None:
    """The place of the cause in the list of findings, and what the other formats say of it."""
    cause = ledger.cause_of(finding)
    return None if cause is None else {"finding": number_of[cause.site], "said": cause.short}


def read_findings(path: Path) -> list[KernelFinding]:
    """The findings in a JSON file. ValueError if it holds none."""
    try:
        document = json.loads(plain_bytes(path))
        if document["megamoe_findings"] != _FORMAT:
            raise KeyError("megamoe_findings")
        return [KernelFinding.from_plain(one) for one in document["findings"]]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{path} holds no findings of megamoe: {problem!r}") from None


# SARIF (sections of the OASIS standard, version 2.1.0)


def _sarif(checked: CheckedRun) -> dict[str, Any]:
    ledger = checked.ledger
    slugs = list(dict.fromkeys(one.rule for one in ledger.findings))
    first = {one.rule: one for one in reversed(ledger.findings)}
    driver = {
        "name": "megamoe",
        "version": version("megamoe"),
        "rules": [_sarif_rule(first[slug]) for slug in slugs],
    }
    notices = [_notice(one.sentence, "error", one.place) for one in checked.failures]
    notices += [_notice(one, "warning") for one in ledger.remarks]
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_sarif_result(one, slugs.index(one.rule), ledger) for one in ledger.findings],
        "invocations": [{"executionSuccessful": not checked.failures, "toolExecutionNotifications": notices}],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _notice(text: str, level: str, place: SourceLine | None = None) -> dict[str, Any]:
    located = {} if place is None else {"locations": [_sarif_location(place)]}
    return {"message": {"text": text}, "level": level, **located}


def _sarif_rule(finding: KernelFinding) -> dict[str, Any]:
    promised = f" PTX ISA {finding.section}." if finding.section else ""
    return {
        "id": finding.rule,
        "shortDescription": {"text": finding.rule.replace("-", " ")},
        "fullDescription": {"text": (finding.wrong or finding.rule) + promised},
        "help": {"text": finding.mend or finding.wrong or finding.rule},
        "defaultConfiguration": {"level": _LEVELS[finding.grade]},
    }


def _sarif_result(finding: KernelFinding, index: int, ledger: Ledger) -> dict[str, Any]:
    shown, cause = finding.own_place, ledger.cause_of(finding)
    location = _sarif_location(shown)
    function = {"name": finding.kernel_name or "a host function", "kind": "function"}
    mangled = {"decoratedName": finding.kernel} if finding.kernel != finding.kernel_name else {}
    location["logicalLocations"] = [{**function, **mangled}]
    follows = ledger.said_of_cause(finding)
    said = [f"{finding.sentence}.", finding.mend, follows and f"It may follow from {follows}."]
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": _LEVELS[finding.grade],
        "message": {"text": " ".join(filter(None, said))},
        "locations": [location],
        "occurrenceCount": finding.times,
        "partialFingerprints": {"site/v2": _fingerprint(finding)},
    }
    inlined = finding.source.index(shown) if shown in finding.source else 0
    related = [(one, "inlined here") for one in finding.source[:inlined]]
    related += [(one, "called from here") for one in finding.source[inlined + 1 :]]
    if finding.other is not None and finding.other.source:
        related.append((finding.other.source[0], str(finding.other)))
        related += [(one, "the other access is called from here") for one in finding.other.source[1:]]
    if cause is not None:
        related.append((cause.own_place, f"it may follow from {follows}"))
    if related:
        result["relatedLocations"] = [
            {"id": number, "message": {"text": text}, **_sarif_location(place)}
            for number, (place, text) in enumerate(related)
        ]
    if (suppression := ledger.suppression_of(finding)) is not None:
        result["suppressions"] = [{"kind": "external", "justification": suppression.reason}]
    return result


def _fingerprint(finding: KernelFinding) -> str:
    """What distinguishes findings: the rule, the kernel, the places of both accesses, and whether two CTAs make them;
    not warps and addresses.

    A module without a file, or whose source lines have none, is named by its digest.
    """
    lines = sorted({finding.line, finding.other.line if finding.other else finding.line})
    source = finding.source[0] if finding.source else None
    home = finding.origin or (source.file if source and Path(source.file).is_absolute() else "")
    named = f"{_uri(home) if home else finding.module}{f':{source.line}' if source else ''}"
    between = ":between CTAs" if finding.other is not None and finding.other.elsewhere else ""
    return f"{finding.rule}:{finding.kernel}:{named}:{'-'.join(map(str, lines))}{between}"


def _sarif_location(place: SourceLine) -> dict[str, Any]:
    region = {"startLine": max(place.line, 1), **({"startColumn": place.column} if place.column else {})}
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(place.file)}, "region": region}}


def _uri(file: str) -> str:
    """The URI of a file: relative below the run's folder, as code hosts require, absolute elsewhere."""
    path = Path(normpath(file))
    if not path.is_absolute():
        return quote(path.as_posix())
    here = Path.cwd()
    return quote(path.relative_to(here).as_posix()) if path.is_relative_to(here) else path.as_uri()
