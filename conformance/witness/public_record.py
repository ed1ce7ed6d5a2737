"""The record of public kernels: results/public.jsonl, a row a case, and its table for readers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from conformance import ROOT

PublicStatus = Literal[
    "ok", "argued", "defect", "finding", "wrong", "unsupported", "timed_out", "crashed", "uncompiled", "not_run"
]
RECORD, TABLE = ROOT / "results" / "public.jsonl", ROOT / "results" / "public.md"
DOORS = ROOT / "results" / "doors.json"
"""The cost of a launch through a door beyond the machine's own."""
ARGUED = Path(__file__).with_name("argued.yaml")
"""Known findings of grade `error` in public kernels, each with its reason, as suppressions."""
MEANING: Mapping[PublicStatus, str] = {
    "ok": "the result matches torch, and no finding counts in the default profile",
    "argued": "the result matches torch, and every finding that counts is argued below",
    "defect": "a defect of the kernel, argued below, ended the launch or made its result differ from torch",
    "finding": "a finding that nobody has argued yet counts, or ended the launch",
    "wrong": "the result differs from torch",
    "unsupported": "the doors or the machine lack something that the kernel needs",
    "timed_out": "it did not end in time",
    "crashed": "its process ended",
    "uncompiled": "this version of its own compiler refuses its source",
    "not_run": "the checkout, a package or a compiler is missing",
}


@dataclass(frozen=True, slots=True)
class PublicRow:
    """The outcome of one case.

    `source`: 12 hexadecimal digits of the file's SHA-256, "" if there is no file. `errors`: findings of grade `error`;
    `told`: the others. `cpu_seconds`: includes compilation.
    """

    family: str
    repository: str
    commit: str
    path: str
    source: str
    call: str
    target: str
    compiler: str
    status: PublicStatus
    reason: str = ""
    errors: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    launches: int = 0
    cpu_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """Same as PublicCase.name."""
        return " ".join((self.family, self.path, self.call, self.target))

    @property
    def right(self) -> bool:
        """Whether its results are right and every finding that counts is argued."""
        return self.status in ("ok", "argued")


def read_rows(text: str) -> list[PublicRow]:
    """Reads the rows of a record. TypeError for a line with other keys than PublicRow's."""
    lines = map(json.loads, text.splitlines())
    return [PublicRow(**{**one, **{name: tuple(one.get(name, ())) for name in ("errors", "told")}}) for one in lines]


def table(rows: list[PublicRow]) -> str:
    """Returns the record for readers: outcomes of each family, then each case that is not plainly right, with its
    reason."""
    ran = [row for row in rows if row.status not in ("uncompiled", "not_run")]
    right, seconds = sum(row.right for row in ran), sum(row.cpu_seconds for row in ran)
    share = f" ({right / len(ran):.1%})" if ran else ""
    lines = [
        "# Kernels of public repositories, in the VM",
        "",
        "`nox -s witness -- --sources DIR` writes this page together with results/public.jsonl; a test keeps them in",
        "agreement. Each case calls an unmodified function of a checkout through a door of megamoe and compares the",
        "result with torch. Status: "
        + "; ".join(f"`{status}`: {meaning}" for status, meaning in MEANING.items())
        + ".",
        "",
        f"{right} of {len(ran)} cases that ran are right{share}, in {seconds / 60:.0f} minutes of CPU time; "
        f"{len(rows) - len(ran)} did not run.",
        "",
        *_doors(),
        f"| family | target | {' | '.join(MEANING)} | CPU s |",
        "|---|---|" + "---|" * (len(MEANING) + 1),
    ]
    for (family, target), members in _grouped(rows):
        counts = " | ".join(str(sum(row.status == status for row in members) or "") for status in MEANING)
        lines.append(f"| {family} | {target} | {counts} | {sum(row.cpu_seconds for row in members):.0f} |")
    lines += ["", "Checkouts:", ""]
    lines += [
        f"- {repository} at {commit}, with {' and '.join(sorted({row.compiler for row in members if row.compiler}))}"
        for (repository, commit), members in _by_checkout(rows)
    ]
    lines += _findings(rows)
    for (family, target), members in _grouped(rows):
        lines += [
            "",
            f"## {family}, {target}",
            "",
            "| case | status | launches | CPU s | reason |",
            "|---|---|---|---|---|",
        ]
        lines += [_table_row(row) for row in members]
    return "\n".join(lines) + "\n"


def _doors() -> list[str]:
    if not DOORS.is_file():
        return []
    costs = json.loads(DOORS.read_text("utf-8"))
    said = ", ".join(f"{one['median_ms']} ms with {door} (at most {one['most_ms']})" for door, one in costs.items())
    return [f"A door adds to each launch, in CPU time of one thread: {said}.", ""]


def _grouped(rows: list[PublicRow]) -> list[tuple[tuple[str, str], list[PublicRow]]]:
    found: dict[tuple[str, str], list[PublicRow]] = {}
    for row in rows:
        found.setdefault((row.family, row.target), []).append(row)
    return list(found.items())


def _by_checkout(rows: list[PublicRow]) -> list[tuple[tuple[str, str], list[PublicRow]]]:
    ordered = sorted(rows, key=lambda row: (row.repository, row.commit))
    return [(key, list(members)) for key, members in groupby(ordered, key=lambda row: (row.repository, row.commit))]


def _findings(rows: list[PublicRow]) -> list[str]:
    """Each finding of grade `error`, with its number of cases and its argument."""
    found: dict[tuple[str, str], list[PublicRow]] = {}
    for row in rows:
        for one in row.errors:
            found.setdefault((row.path, one), []).append(row)
    if not found:
        return []
    lines = ["", "## Findings of grade `error`", "", "| finding | cases | argued |", "|---|---|---|"]
    for (_, one), members in sorted(found.items()):
        said = next((row.reason for row in members if row.status in ("argued", "defect")), "")
        lines.append(f"| {_plain(one)} | {len(members)} | {_plain(said)} |")
    return lines


def _table_row(row: PublicRow) -> str:
    reason = "see above" if row.status in ("argued", "defect") else row.reason
    case = f"{row.path.rpartition('/')[2]} `{row.call}`"
    cells = (case, row.status, str(row.launches), f"{row.cpu_seconds:.1f}", reason)
    return f"| {' | '.join(map(_plain, cells))} |"


def _plain(text: str) -> str:
    return text.replace("|", "\\|")
