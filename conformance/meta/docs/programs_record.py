"""Writes what an H200 did with the programs of pages: a paragraph on each page, and docs/compute-sanitizer.md.

`python -m conformance.meta.docs.programs_record` rewrites both from results/records/h200-programs.json, made by
programs_on_device.py, and from h200-racecheck.json in the same folder.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from conformance import ROOT
from conformance.meta.docs.programs_on_device import TOOLS

Answer = Mapping[str, Any]
RECORD = ROOT / "results" / "records" / "h200-programs.json"
RACECHECK = ROOT / "results" / "records" / "h200-racecheck.json"
TABLE = ROOT / "docs" / "compute-sanitizer.md"
WIDTH = 120
_PRINTED, _OR_MORE = 20_000, " or more"
_MADE = "made by conformance/meta/docs/programs_on_device.py."
_LINK = f"Record: [results/records/{RECORD.name}](../../results/records/{RECORD.name}), {_MADE}"
_UNKNOWN = re.compile(
    r"\bNot run\.|What silicon\s+does with\s+the\s+kernels?\s+of\s+this\s+page\s+was\s+not\s+measured\."
)
_PARAGRAPH = re.compile(r"^On an H200,? (?:(?!\n\n).)*?programs_on_device\.py\.", re.MULTILINE | re.DOTALL)


def recorded() -> dict[str, Answer]:
    """Program name -> the device's answer."""
    return json.loads(RECORD.read_text("utf-8"))["programs"]


def happened(answer: Answer) -> str:
    """One clause about what happened."""
    launches = f"{answer['launches']:,} launches"
    if answer["error"] == "it did not end":
        return "a launch did not end"
    if answer["error"]:
        return f"launch {answer['launches'] + 1:,} failed with `{answer['error']}`"
    if answer["gave_up"]:
        return f"{answer['gave_up']:,} waits timed out in {launches}"
    if not answer["elements"]:
        return f"{launches} ended without an error"
    if answer["wrong"]:
        bad = f"{answer['launches_with_wrong']:,} of {launches}"
        return f"{answer['wrong']:,} of {answer['elements']:,} values were wrong, in {bad}"
    return f"none of {answer['elements']:,} values was wrong in {launches}"


def right(answer: Answer) -> bool:
    """Whether launches ended and every value was the one that the page asserts."""
    return bool(answer["launches"]) and not (answer["error"] or answer["wrong"] or answer["gave_up"])


def reported(answer: Answer) -> list[str]:
    """The compute-sanitizer tools that report something."""
    return [tool for tool, one in answer.get("sanitizer", {}).items() if one["errors"] > 0]


def looked(answer: Answer) -> list[str]:
    """The tools that report something, or that let launches end without a report."""
    said = answer.get("sanitizer", {})
    return [tool for tool, one in said.items() if one["errors"] > 0 or (one["launches"] and not one["errors"])]


def complaints(programs: Mapping[str, Answer]) -> list[str]:
    """What a record should not have: mended programs with wrong results, and tools that launched nothing."""
    said = list[str]()
    for name, answer in programs.items():
        if not answer["rule"] and not right(answer):
            said.append(f"{name} is mended, and {happened(answer)}")
        said += [f"{name}: {tool} saw no launch" for tool in answer.get("sanitizer", {}) if tool not in looked(answer)]
    return said


def paragraphs(programs: Mapping[str, Answer]) -> dict[str, str]:
    """Page, as folder/stem -> its paragraph, for every page without its own record."""
    told = dict[str, str]()
    for page in dict.fromkeys(name.split(" ")[0] for name in programs):
        here = {name.partition(" ")[2]: one for name, one in programs.items() if name.split(" ")[0] == page}
        if page.startswith("control/"):
            continue
        broken = {number: one for number, one in here.items() if one["rule"] and not number.endswith(" late")}
        clauses = list[str]()
        for number, one in broken.items():
            late = here.get(f"{number} late")
            rule = f"`{one['rule']}`: " if len(broken) > 1 else ""
            clauses.append(rule + happened(one) + (f"; with one side delayed, {happened(late)}" if late else ""))
        mended = [one for one in here.values() if not one["rule"]]
        wrong = [happened(one) for one in mended if not right(one)]
        launches = sum(one["launches"] for one in mended)
        fixed = f"With the fix, {'; '.join(wrong) if wrong else f'all {launches:,} launches were right'}."
        many = "On an H200, in the order of the kernels below: " if len(broken) > 1 else "On an H200, "
        told[page] = f"{many}{'. '.join(clauses)}. {fixed} {_of_tools(list(broken.values()))} {_LINK}"
    return told


def _of_tools(broken: list[Answer]) -> str:
    found = [f"`{tool}` reports `{one['rule']}`" for one in broken for tool in reported(one)]
    missed = [f"`{one['rule']}`" for one in broken if not reported(one)]
    tools = list(dict.fromkeys(tool for one in broken if not reported(one) for tool in looked(one)))
    if missed:
        named = " or ".join(dict.fromkeys(missed))
        *others, last = [f"`{tool}`" for tool in tools] or ["no tool"]
        if others:
            found.append(f"{', '.join(others)} and {last} do not report {named}")
        else:
            found.append(f"{last} {'does not report' if tools else 'reports'} {named}")
    return f"In compute-sanitizer, {'; '.join(dict.fromkeys(found))}."


def table(programs: Mapping[str, Answer]) -> str:
    """docs/compute-sanitizer.md without its last part."""
    shown = {name: one for name, one in programs.items() if not name.startswith("control/")}
    plain = {name: one for name, one in shown.items() if not name.endswith(" late")}
    broken = {name: one for name, one in plain.items() if one["rule"]}
    mended = {name: one for name, one in plain.items() if not one["rule"]}
    noticed = sum(bool(reported(one)) for one in broken.values())
    wrong = sum(not (right(one) and right(shown.get(f"{name} late", one))) for name, one in broken.items())
    alarms = [f"{name} ({', '.join(reported(one))})" for name, one in mended.items() if reported(one)]
    head = (
        f"docs/rules and docs/found have {len(broken)} programs for sm_90a with a defect. The machine reports each of "
        "them, and tests run the pages. An H200 ran each as written, and some also with a delay on one side of the "
        f"race: {wrong} went wrong. compute-sanitizer reports {noticed}. "
        f"It also reports {len(alarms)} of {len(mended)} correct programs: {', '.join(alarms) or 'none'}. "
        "racecheck checks shared memory, memcheck addresses, and synccheck barriers and masks. "
        "Most rules about asynchronous units have no tool there."
    )
    source = (
        "`python -m conformance.meta.docs.programs_record` writes this page from "
        f"[results/records/{RECORD.name}](../results/records/{RECORD.name}). "
        "The columns of the tools count errors and warnings in three launches."
    )
    lines = ["# compute-sanitizer compared with the machine", "", *_lines(head), "", *_lines(source), ""]
    lines.append(f"| program | the machine | the H200 | with one side delayed | {' | '.join(TOOLS)} |")
    lines.append("|---|---|---|---|" + "---|" * len(TOOLS))
    for name, one in broken.items():
        page, _, number = name.partition(" ")
        late = shown.get(f"{name} late")
        counts = " | ".join(_count(one, tool) for tool in TOOLS)
        said = f"{happened(one)} | {happened(late) if late else ''}"
        lines.append(f"| [{page}]({page}.md) {number} | `{one['rule']}` | {said} | {counts} |")
    return "\n".join(lines) + "\n"


def arrivals(changed: Sequence[Answer]) -> str:
    """That page's part about false reports. `changed`: programs of ours, each unchanged and changed."""
    paragraphs = (
        "An arrival at an mbarrier releases what its own thread did, and what other threads did before a barrier with "
        "that thread: causality is transitive (PTX ISA 8.9.4). racecheck only treats the arriving thread's own "
        "accesses as ordered. So it reports our unchanged programs where the lanes of a warp synchronise with "
        "bar.warp.sync and one lane then arrives for all. In attention, it reports the row factors that the other "
        "lanes stored; in the NVFP4 layer, the weights that they loaded. Where every lane arrives, it reports nothing. "
        "With bar.sync of the warps in place of bar.warp.sync, and with neither of the two, it reports the same as "
        "before, so its report does not tell the right program from the wrong one. The same holds for the smallest "
        "kernel of [rules/lanes.md](rules/lanes.md), where an H200 shows which program is right. With neither barrier, "
        "the machine reports `lanes-unordered` for the attention kernel; in the NVFP4 layer, mma.sync still gathers "
        "the lanes. Attention releases what it has read after elect.sync, which also gathers the lanes; the ISA says "
        "nothing about the memory order of elect.sync.",
        "The programs are those of "
        "[results/records/h200-racecheck.json](../results/records/h200-racecheck.json). The table counts the launches "
        "whose bits differ from the unchanged program's, and the hazards of one launch; racecheck prints at most "
        f"{_PRINTED:,}.",
    )
    lines = ["", "## What racecheck reports about arrivals", ""]
    for one in paragraphs:
        lines += [*_lines(one), ""]
    lines += ["| program | changed | launches that differ | hazards |", "|---|---|---|---|"]
    for one in changed:
        hazards = ", ".join(
            f"{count:,}{_OR_MORE * (count == _PRINTED)} {kind}" for kind, count in one["hazards"].items()
        )
        differ = f"{one['wrong']:,} of {one['launches']:,}"
        lines.append(f"| `{one['program']}` | {one['change']} | {differ} | {hazards or 'none'} |")
    return "\n".join(lines) + "\n"


def sanitizer_page() -> str:
    """docs/compute-sanitizer.md, from both records."""
    return table(recorded()) + arrivals(json.loads(RACECHECK.read_text("utf-8")))


def _count(answer: Answer, tool: str) -> str:
    if tool not in answer.get("sanitizer", {}):
        return ""
    return str(max(answer["sanitizer"][tool]["errors"], 0)) if tool in looked(answer) else "not known"


def _lines(paragraph: str) -> list[str]:
    return textwrap.wrap(" ".join(paragraph.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def renewed(text: str, paragraph: str) -> str:
    """The text of a page with its paragraph, in place of the previous one or of the words for "not run yet".

    Raises ValueError if the page has neither. These words may end a paragraph, and others may follow them.
    """
    wrapped = "\n".join(_lines(paragraph))
    if _PARAGRAPH.search(text):
        return _PARAGRAPH.sub(lambda _: wrapped, text, count=1)
    before, *rest = _UNKNOWN.split(text, maxsplit=1)
    if not rest:
        raise ValueError("the page says neither what the H200 did nor that nobody has looked")
    following, _, others = rest[0].partition("\n\n")
    parts = [before.rstrip(), wrapped, "\n".join(_lines(following)), others]
    return "\n\n".join(part for part in parts if part.strip()).rstrip("\n") + "\n"


def main() -> None:
    """Rewrites the pages. A page with its own record, or one that says nothing about silicon, stays as it is."""
    programs = recorded()
    TABLE.write_text(sanitizer_page(), "utf-8")
    for page, paragraph in paragraphs(programs).items():
        path = ROOT / "docs" / f"{page}.md"
        text = path.read_text("utf-8")
        try:
            path.write_text(renewed(text, paragraph), "utf-8")
        except ValueError as kept:
            print(f"{page}: {kept}")
    for complaint in complaints(programs):
        print(f"complaint: {complaint}", file=sys.stderr)


if __name__ == "__main__":
    main()
