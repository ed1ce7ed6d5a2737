"""What an H200 and compute-sanitizer said of mutants, as a record, and as a part of results/mutants.md.

`python -m conformance.kernels.mutants.silicon ROWS.json MUTANTS.json` writes the record from what carried.py wrote and
what on_device.py brought back.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from conformance import ROOT
from conformance.kernels.mutants.mutant import KINDS, SYNCHRONISATION
from conformance.kernels.mutants.on_device import ALONE, TOOLS
from megamoe.records.files import write_file

SILICON = ROOT / "results" / "records" / "h200-mutants.json"
FATES = ("right", "wrong", "fault", "hang")
"""What comes of a mutant without a tool. Wrong: the bits of a launch are not those of the program as it is."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A mutant on an H200, or with no `id` a program as it is. `base`: the program, with the case that it ran on.

    `fate`: one of FATES. `wrong` of `launches` had other bits than the program as it is. `tools`: how often a tool made
    each kind of report; a tool that is not there did not run, or died.
    """

    id: str
    kind: str
    base: str
    fate: str
    wrong: int = 0
    launches: int = 0
    tools: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    @property
    def reporting(self) -> tuple[str, ...]:
        """The tools that reported anything."""
        return tuple(tool for tool in TOOLS if self.tools.get(tool))


def seen_of(rows: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> list[Seen]:
    """From the rows of rows.json and the list of mutants.json. Rows that did not run alone are left out."""
    by_number: dict[int, dict[str, Mapping[str, Any]]] = {}
    for one in answers:
        by_number.setdefault(one["number"], {})[one["tool"]] = one
    found: list[Seen] = []
    for row in rows:
        asked = by_number.get(row["number"], {})
        if (alone := asked.get(ALONE)) is None:
            continue
        fate = "fault" if alone["status"] == "died" else str(alone["status"])
        tools = {
            tool: dict(asked[tool]["reports"])
            for tool in TOOLS
            if tool in asked and (asked[tool]["reports"] or asked[tool]["status"] != "died")
        }
        counts = (alone.get("wrong", 0), alone.get("of", 0))
        found.append(Seen(row["id"], row["kind"], row["base"], fate, *counts, tools))
    return found


def read(path: Path = SILICON) -> list[Seen]:
    """The record; nothing where there is none."""
    return [Seen(**one) for one in json.loads(path.read_text("utf-8"))] if path.exists() else []


def told(seen: Sequence[Seen], killed: Collection[str], lived: Collection[str]) -> list[str]:
    """Markdown. `killed`, `lived`: ids of mutants that the machine kills, and of those that it does not."""
    whole = [one for one in seen if not one.id]
    mutants = [_without_false_alarms(one, whole) for one in seen if one.id]
    if not mutants:
        return []
    return [
        "## On an H200, and under compute-sanitizer",
        "",
        "Mutants of sm_90a programs on the case that kills them in the VM, from `results/records/h200-mutants.json`:",
        "launched alone (20 launches, bits compared with those of the program as it is), then once under each tool of",
        "compute-sanitizer. `conformance/kernels/mutants/carried.py` and `on_device.py` there say how.",
        "",
        f"Programs as they are: {len(whole)}, {sum(one.fate == 'right' for one in whole)} right; {_tools_of(whole)}.",
        "",
        *(f"- {tool} reports `{one.base}` as it is" for one in whole for tool in one.reporting),
        "",
        "A cell of a tool: mutants that it reports, of those that it was run on. Mutants of a program that it reports",
        "as it is are left out. What hangs was run under none, for want of time.",
        "",
        "| class | mutants | right | wrong | fault | hang | VM kills | " + " | ".join(TOOLS) + " | any tool |",
        "|---" * (8 + len(TOOLS)) + "|",
        *(
            _row(kind, [one for one in mutants if one.kind == kind], killed, lived)
            for kind in KINDS
            if _any(kind, mutants)
        ),
        _row("synchronisation", [one for one in mutants if one.kind in SYNCHRONISATION], killed, lived),
        _row("all", mutants, killed, lived),
        "",
        *_compared(mutants, killed, lived),
        "",
        *_reports(mutants),
    ]


def _without_false_alarms(one: Seen, whole: Sequence[Seen]) -> Seen:
    blamed = {tool for each in whole if each.base == one.base for tool in each.reporting}
    return replace(one, tools={tool: said for tool, said in one.tools.items() if tool not in blamed})


def _any(kind: str, mutants: Sequence[Seen]) -> bool:
    return any(one.kind == kind for one in mutants)


def _tools_of(some: Sequence[Seen]) -> str:
    ran = {tool: [one for one in some if tool in one.tools] for tool in TOOLS}
    return ", ".join(
        f"{tool} reports {sum(bool(one.tools[tool]) for one in ran[tool])} of {len(ran[tool])}" for tool in ran
    )


def _row(name: str, some: Sequence[Seen], killed: Collection[str], lived: Collection[str]) -> str:
    fates = Counter(one.fate for one in some)
    asked = [one for one in some if one.id in killed or one.id in lived]
    cells = [str(fates[fate]) for fate in FATES]
    cells.append(f"{sum(one.id in killed for one in asked)} of {len(asked)}")
    for tool in TOOLS:
        ran = [one for one in some if tool in one.tools]
        cells.append(f"{sum(bool(one.tools[tool]) for one in ran)} of {len(ran)}" if ran else "")
    ran = [one for one in some if one.tools]
    cells.append(f"{sum(bool(one.reporting) for one in ran)} of {len(ran)}" if ran else "")
    return f"| {name} | {len(some)} | {' | '.join(cells)} |"


def _compared(mutants: Sequence[Seen], killed: Collection[str], lived: Collection[str]) -> list[str]:
    """What one of the two knows and the other does not."""
    asked = [one for one in mutants if one.id in killed or one.id in lived]
    shows = [one for one in asked if one.fate != "right"]
    missed = [one for one in shows if one.id in lived]
    silent = sum(one.id in killed and one.fate == "right" for one in asked)
    tools = [one for one in asked if one.tools]
    alone = sum(one.id in killed and not one.reporting for one in tools)
    blamed = [one for one in tools if one.id in lived and one.reporting]
    return [
        f"The VM was asked about {len(asked)} of them. Of {len(shows)} that are wrong, fault or hang on the H200 it "
        f"kills {len(shows) - len(missed)}. {silent} that it kills are right on the H200 in every launch.",
        f"Of {len(tools)} of them that a tool ran on, the VM kills {alone} of which no tool says anything, and a tool "
        f"reports {len(blamed)} that the VM lets live.",
        *(f"- `{one.id}` is {one.fate} on the H200, and lives in the VM" for one in missed),
        *(f"- `{one.id}` lives in the VM, and {', '.join(one.reporting)} reports it" for one in blamed),
    ]


def _reports(mutants: Sequence[Seen]) -> list[str]:
    counts = Counter((tool, kind) for one in mutants for tool in one.reporting for kind in one.tools[tool])
    if not counts:
        return []
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return ["| tool | what it reports | mutants |", "|---|---|---|",
            *(f"| {tool} | {kind} | {count} |" for (tool, kind), count in ranked), ""]  # fmt: skip


def main(rows: Path, answers: Path) -> None:
    """See above."""
    seen = seen_of(json.loads(rows.read_text("utf-8"))["rows"], json.loads(answers.read_text("utf-8")))
    rows_of = ",\n".join(json.dumps(asdict(one)) for one in seen)
    write_file(SILICON, f"[\n{rows_of}\n]\n", "what the H200 said")
    print(f"{SILICON}: {len(seen)} rows")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
