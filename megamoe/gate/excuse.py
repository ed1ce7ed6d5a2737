"""Entries of conformance/expected.yaml that would excuse the rows that a backend does not support.

A glob of an entry covers only rows that are unsupported, because an entry whose rows pass closes the gate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from fnmatch import fnmatchcase

from megamoe.contract import Row
from megamoe.gate.expected import MAX_DAYS, Expectation, ExpectedEntry
from megamoe.gate.verdict import Verdict
from megamoe.records.lines import Record, without_rerun
from megamoe.spec.spec import Spec


def excusing(verdict: Verdict, specs: Mapping[str, Spec], today: date) -> list[ExpectedEntry]:
    """Entries that excuse the unsupported rows that close the gate. A row of no matrix has none, because its entry
    would be stale."""
    closing = {finding.row for finding in verdict.findings if finding.closes and finding.kind == "status"}
    records = [record for record in verdict.records.values() if record is not None]
    wanted = [one for one in records if one.row in closing and one.status == "unsupported"]
    found: list[ExpectedEntry] = []
    for place, kind in dict.fromkeys((_place(one), _kind(one)) for one in wanted):
        left = [one for one in wanted if (_place(one), _kind(one)) == (place, kind)]
        others = [one.case for one in records if _place(one) == place and one.status != "unsupported"]
        while left := [one for one in left if not any(entry.matches(one.row) for entry in found)]:
            glob, example = _widest(left, others)
            entry = _entry(glob, example, today)
            if Expectation(entry, "").staleness(specs, today) is None:
                found.append(entry)
            left = [one for one in left if not fnmatchcase(one.case, glob)]
    return found


def as_yaml(entry: ExpectedEntry) -> str:
    """The entry as one line of the file."""
    texts = {name: str(getattr(entry, name)) for name in ExpectedEntry.model_fields if name != "schedule"}
    quoted = ("case", "reason", "example", "backend")
    return f"  - {{{', '.join(f'{k}: {json.dumps(text) if k in quoted else text}' for k, text in texts.items())}}}"


def _kind(record: Record) -> str:
    """The reason without its numbers, so that an entry gives a reason of all its rows."""
    return re.sub(r"\d+", "#", without_rerun(record.sentence))


def _place(record: Record) -> tuple[str, str, str, str]:
    return record.op, record.backend, record.target, record.executor


def _widest(left: Sequence[Record], others: Sequence[str]) -> tuple[str, Record]:
    """The glob that covers most of `left` and none of `others`, and the first record that it covers."""
    globs = dict.fromkeys(glob for one in left for glob in _globs(one))
    cases = {glob: [one for one in left if fnmatchcase(one.case, glob)] for glob in globs}
    sound = [glob for glob in globs if not any(fnmatchcase(case, glob) for case in others)]
    # If another schedule of a case passed, no glob is sound. Its own id then names it alone. Of equal globs the last is
    # best: an id ends with the axes that are unusual.
    best = max(reversed(sound), key=lambda glob: len(cases[glob])) if sound else left[0].case
    return best, cases[best][0]


def _globs(record: Record) -> Iterator[str]:
    op, _, axes = record.case.partition(":")
    yield record.case
    yield f"{op}:*"
    first, *rest = axes.split(",")
    yield f"{op}:{first},*"
    for axis in rest:
        # A number must end where it ends in the id: s_k=1 is no s_k=128.
        end = "*" if not axis[-1].isdigit() else "" if axis == rest[-1] else ",*"
        yield f"{op}:*,{axis}{end}"


def _entry(glob: str, example: Record, today: date) -> ExpectedEntry:
    row: Row = example.row
    return ExpectedEntry.model_validate(
        {
            "case": glob,
            "backend": row.backend,
            "target": row.target,
            "executor": row.executor,
            "status": "unsupported",
            "reason": f"The backend refuses it: {without_rerun(example.sentence)}",
            "expires": today + timedelta(days=MAX_DAYS),
            "example": row.case,
        }
    )
