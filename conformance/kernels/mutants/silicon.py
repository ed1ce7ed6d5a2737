"""Mutants on an H200 and under compute-sanitizer: their record, and their part of results/mutants.md.

`python -m conformance.kernels.mutants.silicon ROWS.json MUTANTS.json` writes the record from the files of carried.py
and on_device.py. `.. ROWS.json MUTANTS.json --into` merges answers of tools into the existing record, `.. --patient`
those of programs whose waits give up (`carried --hanging`), and `.. --more` adds rows that the record lacks (`carried
--more`).
"""

from __future__ import annotations

import argparse
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
from megamoe.contract.counted import counted
from megamoe.records.files import write_file

SILICON = ROOT / "results" / "records" / "h200-mutants.json"
_BITS = [tool for tool in TOOLS if tool != "initcheck"]
"""Tools under which outputs are filled before a launch, so that their bits can be compared."""
FATES = ("right", "wrong", "fault", "hang")
"""Outcomes of a mutant without a tool. Wrong: the bits of a launch differ from the unchanged program's."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A mutant on an H200, or an unchanged program if `id` is empty. `base`: the program, with the case that it ran on.

    `fate`: one of FATES. `wrong` of `launches` had other bits than the unchanged program. `tools`: how often a tool
    made each kind of report; a missing tool did not run, or crashed. `patient`: the same with waits that give up. `vm`:
    whether the machine killed it; None if unknown, or if the record of campaigns has it.
    """

    id: str
    kind: str
    base: str
    fate: str
    wrong: int = 0
    launches: int = 0
    tools: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    patient: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    vm: bool | None = None

    @property
    def reporting(self) -> tuple[str, ...]:
        """The tools that reported anything."""
        return tuple(tool for tool in TOOLS if self.tools.get(tool))


def seen_of(rows: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> list[Seen]:
    """Reads the rows of rows.json and the list of mutants.json. Rows that did not run alone are left out."""
    by_number = _by_number(answers)
    found: list[Seen] = []
    for row in rows:
        asked = by_number.get(row["number"], {})
        if (alone := asked.get(ALONE)) is None:
            continue
        fate = "fault" if alone["status"] == "died" else str(alone["status"])
        counts = (alone.get("wrong", 0), alone.get("of", 0))
        found.append(Seen(row["id"], row["kind"], row["base"], fate, *counts, _told_by(asked)))
    return found


def _by_number(answers: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Mapping[str, Any]]]:
    found: dict[int, dict[str, Mapping[str, Any]]] = {}
    for one in answers:
        found.setdefault(one["number"], {})[one["tool"]] = one
    return found


def _told_by(asked: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Reports of the tools, without tools that crashed before reporting."""
    return {
        tool: dict(asked[tool]["reports"])
        for tool in TOOLS
        if tool in asked and (asked[tool]["reports"] or asked[tool]["status"] != "died")
    }


def with_tools(
    seen: Sequence[Seen], rows: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]], *, patient: bool
) -> list[Seen]:
    """Adds answers of tools to the record. `patient`: they come from programs whose waits give up. If an unchanged
    program has other bits then, its waits gave up before it was done: the tool made it too slow, and its answers are
    dropped."""
    by_number = _by_number(answers)
    more: dict[tuple[str, str], dict[str, dict[str, int]]] = {}
    hasty: set[tuple[str, str]] = set()
    for row in rows:
        asked = {tool: one for tool, one in by_number.get(row["number"], {}).items() if tool != ALONE}
        more[row["base"], row["id"]] = _told_by(asked)
        if patient and not row["id"]:
            hasty |= {(row["base"], tool) for tool, one in asked.items() if one["status"] != "right" and tool in _BITS}
    said = [(one, more.get((one.base, one.id), {})) for one in seen]
    told = [(one, {tool: of for tool, of in new.items() if (one.base, tool) not in hasty}) for one, new in said]
    if patient:
        return [replace(one, patient=one.patient | new) for one, new in told]
    return [replace(one, tools=one.tools | new) for one, new in told]


def with_more(seen: Sequence[Seen], later: Sequence[Seen]) -> list[Seen]:
    """Adds the mutants and the unchanged programs of a later session that the record lacks."""
    known = {(one.id, one.base if not one.id else "") for one in seen}
    return [*seen, *(one for one in later if (one.id, one.base if not one.id else "") not in known)]


def read(path: Path = SILICON) -> list[Seen]:
    """Reads the record; empty if there is none."""
    return [Seen(**one) for one in json.loads(path.read_text("utf-8"))] if path.exists() else []


def remember(killed: Mapping[str, bool], path: Path = SILICON) -> None:
    """Keeps the machine's verdict on mutants, by id, before their programs are forgotten."""
    seen = read(path)
    told = [replace(one, vm=killed.get(one.id, one.vm)) for one in seen]
    if told != seen:
        _write(told, path)


def told(seen: Sequence[Seen], killed: Collection[str], lived: Collection[str], programs: Collection[str]) -> list[str]:
    """Markdown. `killed`, `lived`: ids of mutants that the machine kills, and of those that it does not; `seen` has the
    verdict on all others. `programs`: the ids of the texts in today's campaigns."""
    killed = {*killed, *(one.id for one in seen if one.vm and one.id not in lived)}
    lived = {*lived, *(one.id for one in seen if one.vm is False and one.id not in killed)}
    whole = [one for one in seen if not one.id]
    mutants = [_without_false_alarms(one, whole) for one in seen if one.id]
    if not mutants:
        return []
    texts = {one.base.split()[1] for one in seen}
    return [
        "## On an H200 and under compute-sanitizer",
        "",
        "`results/records/h200-mutants.json` has mutants of sm_90a programs, each on the case that kills it in the VM.",
        "Each was launched alone (20 launches, bits compared with the unchanged program's), then once under each tool",
        "of compute-sanitizer (`conformance/kernels/mutants/carried.py` and `on_device.py` in that folder). The",
        f"programs are the kernels of those sessions: {counted(len(texts), 'text')}, {len(texts & set(programs))}",
        "of them among those of the rest of this page, and the others of older kernels.",
        "",
        "A later session added mutants of synchronisation (`carried --more`), drawn from those that do not deadlock",
        "in the VM. Its mutants that hang are not in the record, because a device was lost in a session with many of",
        "them. The tools ran on the rest of it in a third session (`carried --untold`). In the whole record, no tool",
        f"ran on {counted(sum(not one.tools for one in mutants), 'mutant')}.",
        "",
        f"Unchanged programs: {len(whole)}, {sum(one.fate == 'right' for one in whole)} right; {_tools_of(whole)}.",
        "",
        *(f"- {tool} reports the unchanged `{one.base}`" for one in whole for tool in one.reporting),
        *(
            [
                "",
                "docs/compute-sanitizer.md says why these reports of racecheck are wrong. initcheck reports entries of",
                "the table of tiles: a CTA loads its entry together with the number of entries, and uses it only if it",
                "exists.",
            ]
            if any(one.reporting for one in whole)
            else []
        ),
        "",
        "A tool's cell has the number of mutants that it reports, of those that it ran on. Mutants of a program that",
        "it reports unchanged are left out. Mutants that hang ran only under `racecheck, deadlocks`; what the other",
        "tools report for them is below.",
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
        *_hanging(seen),
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
    """Differences between the two verdicts."""
    asked = [one for one in mutants if one.id in killed or one.id in lived]
    shows = [one for one in asked if one.fate != "right"]
    missed = [one for one in shows if one.id in lived]
    silent = sum(one.id in killed and one.fate == "right" for one in asked)
    tools = [one for one in asked if one.tools]
    alone = sum(one.id in killed and not one.reporting for one in tools)
    blamed = [one for one in tools if one.id in lived and one.reporting]
    return [
        f"The VM ran {len(asked)} of them. It kills {len(shows) - len(missed)} of {len(shows)} that are wrong, fault "
        f"or hang on the H200. {silent} that it kills are right on the H200 in every launch.",
        f"A tool ran on {len(tools)} of these. The VM kills {alone} that no tool reports, and a tool reports "
        f"{len(blamed)} that survive in the VM.",
        *(f"- `{one.id}` is {one.fate} on the H200 and survives in the VM" for one in missed),
        *(f"- `{one.id}` survives in the VM, and {', '.join(one.reporting)} reports it" for one in blamed),
    ]


def _reports(mutants: Sequence[Seen]) -> list[str]:
    counts = Counter((tool, kind) for one in mutants for tool in one.reporting for kind in one.tools[tool])
    if not counts:
        return []
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return ["| tool | what it reports | mutants |", "|---|---|---|",
            *(f"| {tool} | {kind} | {count} |" for (tool, kind), count in ranked), ""]  # fmt: skip


def _hanging(seen: Sequence[Seen]) -> list[str]:
    """Tools' reports on mutants that hang, once their waits give up."""
    alarmed = {(one.base, tool) for one in seen if not one.id for tool in TOOLS if one.patient.get(tool)}
    ran = {
        tool: [one for one in seen if one.id and tool in one.patient and (one.base, tool) not in alarmed]
        for tool in TOOLS
    }
    if not any(ran.values()):
        return []
    lines = [
        "Mutants that hang ran once more with mbarrier waits that give up 150 ms after the start of their kernel",
        "(`carried --hanging`): a thread whose wait gives up exits, so the launch ends. initcheck then reports that",
        "the next kernel reads what the one that gave up has not written. That is not a finding about the mutant.",
        "",
        "| tool | ran on | reports | what |",
        "|---|---|---|---|",
    ]
    for tool, some in ran.items():
        kinds = Counter(kind for one in some for kind in one.patient[tool])
        what = "; ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
        if some:
            lines.append(f"| {tool} | {len(some)} | {sum(bool(one.patient[tool]) for one in some)} | {what} |")
    return [*lines, ""]


def _write(seen: Sequence[Seen], path: Path) -> None:
    rows = ",\n".join(json.dumps(asdict(one)) for one in seen)
    write_file(path, f"[\n{rows}\n]\n", "what the H200 said")


def main(given: Sequence[str]) -> None:
    """Runs the command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--into", action="store_true")
    parser.add_argument("--patient", action="store_true")
    parser.add_argument("--more", action="store_true")
    options = parser.parse_args(given)
    rows = json.loads(options.rows.read_text("utf-8"))["rows"]
    answers = json.loads(options.answers.read_text("utf-8"))
    if options.into or options.patient:
        seen = with_tools(read(), rows, answers, patient=options.patient)
    elif options.more:
        seen = with_more(read(), seen_of(rows, answers))
    else:
        seen = seen_of(rows, answers)
    _write(seen, SILICON)
    print(f"{SILICON}: {counted(len(seen), 'row')}")


if __name__ == "__main__":
    main(sys.argv[1:])
