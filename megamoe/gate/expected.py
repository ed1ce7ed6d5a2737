"""Rows that are known not to work: conformance/expected.yaml, read and checked.

Every entry gives its reason, the day on which it expires and one pinned case that shows it. No entry excuses a row
silently: the gate refuses one that has expired, matches no known row, or whose rows pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megamoe.contract import Row, Target, backend_names, executor_names
from megamoe.spec.marked_yaml import MarkedYaml, Plain, SpecError, read_marked_yaml
from megamoe.spec.selection import MAX_SEEDS, SelectionError, checked_names, known_cases, spec_of
from megamoe.spec.spec import Spec

MAX_DAYS = 180
"""Latest expiry of an entry, in days from now, so that each entry is reviewed again."""
_KINDS = ("random", "late_cta", "late_warp")
_SCHEDULES = ("eager", "lazy", *(f"{kind}:{number}" for kind in _KINDS for number in range(MAX_SEEDS)))


class ExpectedError(Exception):
    """A file of expected failures that cannot be used. The text names file, line and key, and says what is right."""


class ExpectedEntry(BaseModel):
    """One known failure. `case` and `schedule` are exact names or globs; `example` is the id of one case that shows
    it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    case: str = Field(min_length=1)
    backend: str = Field(min_length=1)
    target: Target
    executor: str = Field(min_length=1)
    status: Literal["failed", "error", "crashed", "timed_out", "unsupported"]
    reason: str = Field(min_length=10)
    expires: date
    example: str = Field(min_length=1)
    schedule: str = Field(default="*", min_length=1)

    @model_validator(mode="after")
    def _example_matches(self) -> ExpectedEntry:
        if not fnmatchcase(self.example, self.case):
            raise ValueError(f"the example {self.example!r} does not match the case {self.case!r}")
        return self

    def matches(self, row: Row) -> bool:
        """Whether this entry applies to `row`."""
        return (
            (self.backend, self.target, self.executor) == (row.backend, row.target, row.executor)
            and fnmatchcase(row.case, self.case)
            and fnmatchcase(row.schedule, self.schedule)
        )


@dataclass(frozen=True, slots=True)
class Expectation:
    """An entry and its place in the file, such as "expected.yaml, line 12"."""

    entry: ExpectedEntry
    where: str

    def staleness(self, specs: Mapping[str, Spec], today: date) -> str | None:
        """A sentence that says why this entry is stale; None if it is not."""
        entry = self.entry
        if entry.expires < today:
            return f"{self.where}: the entry for {entry.case} expired on {entry.expires}; fix the kernel or renew it"
        latest = today + timedelta(days=MAX_DAYS)
        if entry.expires > latest:
            return (
                f"{self.where}: the entry for {entry.case} expires on {entry.expires}, more than {MAX_DAYS} days from "
                f"now; {latest} is the latest day, so that somebody looks at it again"
            )
        try:
            checked_names("executor", [entry.executor], executor_names())
            checked_names("backend", [entry.backend], backend_names())
        except SelectionError as error:
            return f"{self.where}: the entry matches no known row: {error}"
        if not any(fnmatchcase(name, entry.schedule) for name in _SCHEDULES):
            known = "eager, lazy, random:SEED, late_cta:RANK and late_warp:INDEX"
            return f"{self.where}: no schedule matches {entry.schedule!r}; they are {known}"
        try:
            spec_of(specs, entry.example).parse_case(entry.example)
        except (SelectionError, SpecError) as error:
            return f"{self.where}: the example is not a case: {error}"
        if not any(fnmatchcase(case, entry.case) for spec in specs.values() for case in known_cases(spec)):
            return f"{self.where}: the entry for {entry.case} matches no case of any matrix; remove or correct it"
        return None


def stale_entries(expected: Iterable[Expectation], specs: Mapping[str, Spec], today: date) -> tuple[str, ...]:
    """One sentence for each stale entry."""
    return tuple(sentence for one in expected if (sentence := one.staleness(specs, today)))


def read_expected(path: Path) -> tuple[Expectation, ...]:
    """Reads and validates the entries of one YAML file, a list under the key `expected`. Raises ExpectedError."""
    try:
        document = read_marked_yaml(path, days=True)
    except SpecError as error:
        raise ExpectedError(f"cannot read {error}") from error
    keys = list(document.value) if isinstance(document.value, dict) else None
    if not isinstance(document.value, dict) or keys != ["expected"]:
        raise ExpectedError(f"{path}, line 1: the file must hold one key, `expected`, with a list; it holds {keys}")
    entries = document.value["expected"]
    if not isinstance(entries, list):
        line = document.line(("expected",))
        raise ExpectedError(f"{path}, line {line}: `expected` must be a list, [] if empty")
    return tuple(_expectation(document, i, entry) for i, entry in enumerate(entries))


def _expectation(document: MarkedYaml, i: int, entry: Plain) -> Expectation:
    where = f"{document.file}, line {document.line(('expected', i))}"
    if not isinstance(entry, dict):
        raise ExpectedError(f"{where}: an entry must be a mapping with case, backend, target, ...")
    try:
        return Expectation(ExpectedEntry.model_validate(entry), where)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        about = f"line {document.line(('expected', i, key))}" + (f", key {key!r}" if key else "")
        keys = ", ".join(ExpectedEntry.model_fields)
        raise ExpectedError(f"{document.file}, {about}: {first['msg']} (keys: {keys})") from error
