"""The committed record of the witnesses: results/witness.jsonl, its table, and the opcodes that they executed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

from conformance import ROOT

Status = Literal["pass", "wrong", "fault", "cannot run"]
RESULTS = ROOT / "results"
RECORD, TABLE, OPCODES = (RESULTS / f"witness{end}" for end in (".jsonl", ".md", "_opcodes.json"))
MEANING: Mapping[Status, str] = {
    "pass": "under the schedules eager, lazy and random:7 every output matches torch within the tolerance of its dtype",
    "wrong": "an output does not",
    "fault": "the VM stopped at a broken rule",
    "cannot run": "it did not compile, or its host code refused",
}


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of one witness.

    `error`: largest relative error of an output, None if the run did not end. `instructions`: warp instructions of the
    last run. `launches`: by its host function. Times are in seconds on the machine that made the record; `run_seconds`
    is the first schedule's.
    """

    package: str
    version: str
    kernel: str
    target: str
    options: str
    shape: str
    status: Status
    error: float | None
    instructions: int
    launches: int
    compile_seconds: float
    run_seconds: float
    reason: str

    @property
    def name(self) -> str:
        """Same as Witness.name."""
        return " ".join(filter(None, (self.package, self.kernel, self.target, self.options, self.shape)))


def read_rows(text: str) -> list[Row]:
    """Reads the rows of a record. TypeError for a line with other keys than Row's."""
    return [Row(**json.loads(line)) for line in text.splitlines()]


def rows_as_text(rows: Iterable[Any]) -> str:
    """Writes dataclasses, one JSON object a line."""
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)


def table(rows: list[Row]) -> str:
    """Returns the record for readers: a table for each package and target, then every witness that did not pass, with
    its reason."""
    lines = [
        "# Kernels written by others, in the VM",
        "",
        "`nox -s witness` writes this page together with results/witness.jsonl; a test keeps them in agreement.",
        "CuTeDSL compiles each kernel on a machine without a GPU, and its host object and PTX run in the VM. The",
        "reference is torch in float64. Error: the largest error of an element, relative to the element's size",
        "plus the root mean square of the output. Instructions: warp instructions executed. Status: "
        + "; ".join(f"`{status}`: {meaning}" for status, meaning in MEANING.items())
        + ".",
        "",
        f"{sum(row.status == 'pass' for row in rows)} of {len(rows)} pass.",
    ]
    for title, members in groupby(rows, key=lambda row: f"{row.package} {row.version}, {row.target}"):
        lines += ["", f"## {title}", ""]
        lines += ["| kernel | options | shape | status | error | instructions | compile s | run s |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        lines += [_table_row(row) for row in members]
    failed = [row for row in rows if row.status != "pass"]
    if failed:
        lines += ["", "## Why the others do not pass", ""]
        lines += [f"- `{row.kernel}`, {row.target}, {row.options}, {row.shape}: {row.reason}" for row in failed]
    return "\n".join(lines) + "\n"


def _table_row(row: Row) -> str:
    cells = [f"`{row.kernel}`", row.options, row.shape, row.status, "" if row.error is None else f"{row.error:.1e}"]
    cells += [f"{row.instructions:,}", f"{row.compile_seconds:.1f}", f"{row.run_seconds:.1f}"]
    return f"| {' | '.join(cells)} |"


def opcodes_as_text(opcodes: Mapping[str, Iterable[str]]) -> str:
    """Returns JSON of the full opcodes that passing witnesses of each package executed."""
    return json.dumps({package: sorted(opcodes[package]) for package in sorted(opcodes)}, indent=1) + "\n"
