"""Whether lines count as evidence: their run's header is present, specs and code match ours, and no line contradicts
itself.

results/attacks.md lists what a person who can write the file can still forge, unless it is signed.

A header without digests comes from an older megamoe. If its lines also have an older schema, or its file is committed
unchanged, the lines are accepted as they are and the gate says so; a strict gate closes. In every other case the gate
closes: otherwise removing the digests from a header would be enough to be believed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from megamoe.contract import Case, Row
from megamoe.contract.counted import counted
from megamoe.gate.verdict import Finding
from megamoe.records.files import RecordFile
from megamoe.records.lines import ERRORS, Figures, Record, RunHeader, Timing
from megamoe.records.provenance import committed
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.spec import Spec

CLOSING: Final = {"specs": "the specs", "expected": "the expected failures"}
"""Digests that must equal ours: with other bars or other expected failures, the run answered a different question."""
MAX_FINDINGS: Final = 20
"""Findings listed for one file. One more sentence counts the rest."""
MAX_BAR: Final = 0.5
"""Upper limit for the bar of an error. All-zero outputs have an error of 1. The largest bar in tracked records is
0.021."""
CODES: Final = "u8"
EXACT: Final = frozenset({"exact_sums", "lone_keys"})
"""Input distributions whose outputs may be compared bit for bit with the oracle, as codes are (see the ops'
`latitude`)."""
EXACT_STAGES: Final = frozenset({"combine"})
"""Stages with the same property."""
MACHINE: Final = "vm"
NEVER_ZERO: Final = ("minimum_bytes", "instructions_control")
"""Counters that are positive in every VM run: a kernel that ends has executed the instruction that ends it."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The files without lines that do not count, and findings that close the gate or ask for another run."""

    files: tuple[RecordFile, ...]
    findings: tuple[Finding, ...]


def checked(files: Sequence[RecordFile], ours: Mapping[str, str], specs: Mapping[str, Spec]) -> Checked:
    """Filters `files` to the lines that are evidence. `ours`: digests of the current specs, expected failures and
    code."""
    kept: list[RecordFile] = []
    findings: list[Finding] = []
    headers = [header for file in files for header in file.headers]
    for run, count in Counter(header.run for header in headers).items():
        if count > 1:
            findings.append(_closing(f"run {run} has {counted(count, 'header')}: what it was to do is not known"))
    known = {header.run: header for header in headers}
    for file in files:
        whole = tuple(line for line in file.lines if line.run in known)
        strangers = Counter(line.run for line in file.lines if line.run not in known)
        findings += [
            _closing(
                f"{file.path}: {counted(count, 'line', 'is', 'are')} of run {run}, whose header is in "
                "no file, and no evidence"
            )
            for run, count in strangers.items()
        ]
        kept.append(replace(file, lines=whole))
    for header in known.values():
        if header.digests:
            findings += _of_others(header, ours)
    findings += [_undated(header, file) for file in kept for header in file.headers if not header.digests]
    new = {run for run, header in known.items() if header.digests}
    for file in kept:
        found = list(_of_lines(file, new, specs))
        more = len(found) - MAX_FINDINGS
        findings += found[:MAX_FINDINGS]
        findings += (
            [_closing(f"{file.path}: {counted(more, 'more line', 'is', 'are')} no evidence")] if more > 0 else []
        )
    findings += _of_digests([line for file in kept for line in file.lines if line.run in new])
    return Checked(tuple(kept), tuple(findings))


def _closing(sentence: str, row: Row | None = None) -> Finding:
    return Finding("evidence", sentence, row)


def _undated(header: RunHeader, file: RecordFile) -> Finding:
    told = f"run {header.run} of megamoe {header.megamoe} has no digests"
    if header.run in file.older or committed(file.path):
        return Finding("revision", f"{told}: its lines are taken as they are", closes=False)
    return _closing(f"{told}, and {file.path} is not committed: nothing says what its rows were held to; run it again")


def _of_others(header: RunHeader, ours: Mapping[str, str]) -> Iterator[Finding]:
    for name, what in CLOSING.items():
        if header.digests.get(name) != ours.get(name):
            yield _closing(f"run {header.run} had other {what.removeprefix('the ')} than those here: run it again")
    if header.digests.get("code") != ours.get("code"):
        why = "its code (megamoe, backends, constraints) differs from what is here, so run it again"
        yield Finding("revision", f"run {header.run}: {why}", closes=False)


def _of_lines(file: RecordFile, runs: Iterable[str], specs: Mapping[str, Spec]) -> Iterator[Finding]:
    for record in file.records:
        if record.run in runs and record.status == "passed":
            what = _wrong_with(record, specs)
            if what:
                yield _closing(f"{file.path}: {record.row} passed, but {what}: it is no evidence", record.row)


def _wrong_with(record: Record, specs: Mapping[str, Spec]) -> str:
    """A reason why this record cannot be a pass; "" if there is none."""
    if record.op not in specs:
        return ""
    spec = specs[record.op]
    try:
        case = spec.parse_case(record.case)
    except SpecError as error:
        return f"its case is none: {error}"
    unbounded = [name for name, value in record.metrics.items() if not math.isfinite(value)]
    if unbounded:
        return f"its {unbounded[0]} is {record.metrics[unbounded[0]]}"
    return _outputs(record, spec, case) or _provenance(record, spec, case)


def _is_exact(case: Case) -> bool:
    return case.inputs in EXACT or dict(case.axes).get("stage") in EXACT_STAGES


def _outputs(record: Record, spec: Spec, case: Case) -> str:
    tensors = spec.tensors_of(case)
    metrics = record.metrics
    for name in (name for name, tensor in tensors.items() if tensor.role == "output"):
        if f"{name}.wrong" in metrics and (tensors[name].dtype == CODES or _is_exact(case)):
            if metrics[f"{name}.wrong"] != 0:
                return f"{metrics[f'{name}.wrong']:g} elements of {name} are wrong"
            continue
        for error in ERRORS:
            seen, bar = metrics.get(f"{name}.{error}"), metrics.get(f"{name}.{error}.bar")
            if seen is None or bar is None:
                return f"it has no {error} error of {name}, or no bar"
            if bar > MAX_BAR:
                return f"the bar of the {error} error of {name} is {bar:g}, and none is above {MAX_BAR}"
            if not 0 <= seen <= bar:
                return f"the {error} error of {name} is {seen:g}, and its bar {bar:g}"
        cosine = metrics.get(f"{name}.cosine")
        if cosine is None or (spec.published(case) and cosine < spec.tolerance.cosine):
            return f"the cosine of {name} is {cosine}, and the published bar {spec.tolerance.cosine}"
    return ""


def _provenance(record: Record, spec: Spec, case: Case) -> str:
    if record.executor != MACHINE:
        return "" if record.program_sha256 or record.artifact else "it names nothing that ran"
    if record.program_sha256 is None:
        return "it names no program"
    inputs = {name for name, tensor in spec.tensors_of(case).items() if tensor.role == "input"}
    if set(record.input_sha256) != inputs:
        return f"it has digests of {', '.join(sorted(record.input_sha256)) or 'no input'}, not of every input"
    zero = [name for name in NEVER_ZERO if not record.counters.get(name)]
    return f"its counter {zero[0]} is 0 or missing" if zero else ""


def _of_digests(lines: Sequence[object]) -> Iterator[Finding]:
    """Findings for lines of one run that name different programs, or different inputs, for the same case."""
    programs: dict[tuple[str, ...], str] = {}
    inputs: dict[tuple[str, str, str], str] = {}
    for line in lines:
        if isinstance(line, Record | Timing | Figures) and line.program_sha256:
            key = (line.run, line.case, line.backend, line.target)
            if programs.setdefault(key, line.program_sha256) != line.program_sha256:
                yield _closing(f"run {key[0]}: lines of {key[1]} on {key[2]} {key[3]} are of different programs")
        if isinstance(line, Record):
            for name, digest in line.input_sha256.items():
                if inputs.setdefault((line.run, line.case, name), digest) != digest:
                    yield _closing(f"run {line.run}: lines of {line.case} had different inputs {name}", line.row)
