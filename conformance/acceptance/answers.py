"""What ptxas answered: for each question and target the first PTX version that has it, in a file and as a page.

ptxas parses for a virtual architecture (`-arch compute_90a`) without generating code and reports every instruction that
it refuses, so a file of all questions takes seconds. An early error hides later ones, so refused lines are removed and
the rest is assembled again until nothing is refused.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from backends.ptx.assembler import find_ptxas
from backends.vm.bind.availability import Version
from backends.vm.bind.forms import REFUSED
from conformance import ROOT
from conformance.acceptance.machine import why_not_available, why_not_bound
from conformance.acceptance.spellings import FRAME, Question
from megamoe.contract.scratch import scratch_folder

DATA = ROOT / "results" / "acceptance.json.gz"
TABLE = ROOT / "results" / "acceptance.md"
MAX_ROUNDS = 40
VERSIONS: tuple[Version, ...] = (
    (9, 5), (9, 4), (9, 3), (9, 2), (9, 1), (9, 0), (8, 8), (8, 7), (8, 6), (8, 5), (8, 4), (8, 3), (8, 2), (8, 1),
    (8, 0),
)  # fmt: skip
TARGETS: Mapping[str, Version] = {
    "sm_90a": (8, 0), "sm_100a": (8, 6), "sm_103a": (8, 8), "sm_120a": (8, 7),
    "sm_100f": (8, 8), "sm_103f": (8, 8), "sm_120f": (8, 8), "sm_90": (8, 0), "sm_100": (8, 6),
}  # fmt: skip
"""The first PTX version to ask for, by target: one architecture (a), a family (f), or all later ones."""


@dataclass(frozen=True, slots=True)
class Answers:
    """`since`: for each question the first PTX version by target. `ptxas`: the version of ptxas itself."""

    ptxas: str
    since: Mapping[Question, Mapping[str, Version]]


def asked(every: Sequence[Question], held: Answers | None = None) -> Answers:
    """Asks the newest ptxas on this host. UnsupportedError without one.

    `held`: answers to keep if this ptxas gave them, so that only what they lack is asked.
    """
    ptxas = find_ptxas()
    said = subprocess.run([str(ptxas), "--version"], capture_output=True, text=True, check=True).stdout
    version = re.findall(r"V([\d.]+)", said)[-1]
    known = held.since if held is not None and held.ptxas == version else {}
    new = _since(ptxas, [one for one in every if one not in known])
    return Answers(version, {one: known[one] if one in known else new[one] for one in every})


def _since(ptxas: Path, every: Sequence[Question]) -> Mapping[Question, Mapping[str, Version]]:
    since: dict[Question, dict[str, Version]] = {one: {} for one in every}
    with scratch_folder("acceptance") as folder:
        for target, oldest in TARGETS.items():
            left: Sequence[Question] = every
            for version in VERSIONS:
                if version < oldest or not left:
                    break
                left = _taken(ptxas, folder, left, target, version)
                for one in left:
                    since[one][target] = version
    return since


def _taken(ptxas: Path, folder: Path, given: Sequence[Question], target: str, version: Version) -> Sequence[Question]:
    """Returns the questions that ptxas takes."""
    source = folder / "questions.ptx"
    frame = FRAME
    left = list(given)
    if version < (8, 3):
        frame, left = frame.replace(".reg .b128 %q;", ""), [one for one in left if "q" not in one.operands]
    head = f".version {version[0]}.{version[1]}\n.target {target}\n.address_size 64\n{frame}\n"
    before = head.count("\n") + 1
    command = [str(ptxas), "-arch", target.replace("sm", "compute"), "-o", str(folder / "nothing"), str(source)]
    for _ in range(MAX_ROUNDS):
        source.write_text(head + "".join(one.text() + "\n" for one in left) + "ret;\n}\n", encoding="utf-8")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return left
        lines = re.findall(r"line (\d+); (?:error|fatal)", done.stdout + done.stderr)
        refused = {int(line) - before for line in lines}
        if not refused & set(range(len(left))):
            raise RuntimeError(f"ptxas refused more than the questions: {done.stderr[:300]}")
        left = [one for index, one in enumerate(left) if index not in refused]
    raise RuntimeError(f"ptxas still refused instructions after {MAX_ROUNDS} rounds")


def write_answers(answers: Answers) -> None:
    """Groups opcodes by answer, which keeps the file small. The same answers give the same bytes."""
    groups: dict[str, list[str]] = defaultdict(list)
    for one, since in answers.since.items():
        shared = " ".join(f"{target}:{version[0]}.{version[1]}" for target, version in since.items())
        groups[shared].append(f"{one.opcode} {one.operands}")
    text = json.dumps({"ptxas": answers.ptxas, "answers": groups}, indent=0)
    DATA.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    read_answers.cache_clear()


@cache
def read_answers() -> Answers:
    """Reads the committed answers."""
    held = json.loads(gzip.decompress(DATA.read_bytes()))
    since: dict[Question, dict[str, Version]] = {}
    for shared, lines in held["answers"].items():
        found: dict[str, Version] = {}
        for target, version in (each.split(":") for each in shared.split()):
            major, minor = version.split(".")
            found[target] = int(major), int(minor)
        for line in lines:
            opcode, _, operands = line.partition(" ")
            since[Question(opcode, operands)] = found
    return Answers(held["ptxas"], since)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Opcodes by who takes them, over all targets. `only_ours` holds sentences and must be empty."""

    both: frozenset[str]
    only_ptxas: frozenset[str]
    neither: frozenset[str]
    only_ours: tuple[str, ...]
    refused_there: tuple[str, ...]


def compared(answers: Answers) -> Comparison:
    """Puts each question to the machine, for each target and for two PTX versions: the first that has it, and the one
    before."""
    both, theirs, neither = set[str](), set[str](), set[str]()
    only_ours: list[str] = []
    refused: list[str] = []
    for one, since in answers.since.items():
        bound = why_not_bound(one) is None
        (both if bound and since else theirs if since else neither).add(one.opcode)
        for target, oldest in TARGETS.items():
            for version, takes in _asked_of_machine(since.get(target), oldest):
                unavailable = why_not_available(one, target, version)
                where = f"`{one.text()}` for {target}, PTX {version[0]}.{version[1]}"
                if takes and unavailable:
                    refused.append(f"{where}: {unavailable}")
                elif bound and not takes and not unavailable:
                    only_ours.append(where)
    theirs -= both
    return Comparison(frozenset(both), frozenset(theirs), frozenset(neither - both - theirs), tuple(only_ours),
                      tuple(refused))  # fmt: skip


def _asked_of_machine(first: Version | None, oldest: Version) -> list[tuple[Version, bool]]:
    if first is None:
        return [(VERSIONS[0], False)]
    earlier = VERSIONS[VERSIONS.index(first) + 1] if first != VERSIONS[-1] else oldest
    return [(first, True), *([(earlier, False)] if earlier >= oldest and earlier < first else [])]


def as_markdown(answers: Answers, found: Comparison) -> str:
    """Returns the page: counts by family, and what only ptxas takes."""
    lines = [
        "# What ptxas accepts, and what the machine accepts",
        "",
        "`python -m conformance.acceptance` writes this page; a test keeps it current. Each spelling is one",
        "instruction. The spellings come from the machine's forms (a sample where a form has many) and from a grammar",
        f"of the ISA's syntax. ptxas {answers.ptxas} was asked whether it accepts each for {', '.join(TARGETS)}",
        "and each PTX version from 8.0 on; acceptance.json.gz has its answers. Spellings that neither accepts are not",
        "listed.",
        "",
        f"{len(found.both)} spellings are accepted by both, {len(found.only_ptxas)} by ptxas alone, "
        f"{len(found.only_ours)} by the machine alone.",
        "",
        "| opcode | both | ptxas alone |",
        "|---|---:|---:|",
    ]
    both, theirs = _by_family(found.both), _by_family(found.only_ptxas)
    families = sorted({*both, *theirs})
    lines += [f"| `{family}` | {len(both[family])} | {len(theirs[family])} |" for family in families]
    lines += [
        "",
        "## Accepted by ptxas alone",
        "",
        "One line per opcode, with the words that follow it in its spellings.",
        "",
    ]
    for family in sorted(theirs):
        rest = theirs[family]
        if rest:
            words = sorted({word for one in rest for word in one.split(".")[family.count(".") + 1 :]})
            lines.append(f"- `{family}` ({len(rest)}): {' '.join(f'`{word}`' for word in words)}")
    lines += ["", "## Refused by name", "", "Of these, the machine refuses some with a reason of its own.", ""]
    for pattern, reason in REFUSED.items():
        lines.append(f"- {sum(bool(re.match(pattern, one)) for one in found.only_ptxas)} of `{pattern}`: {reason}")
    return "\n".join(lines) + "\n"


def _by_family(opcodes: Iterable[str]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for one in opcodes:
        found[_family(one)].append(one)
    return found


_LONG = frozenset(
    ("tcgen05", "cp", "mma", "wgmma", "wmma", "multimem", "mbarrier", "st", "red", "tensormap", "createpolicy")
)
_SUBFAMILY = re.compile(
    r"(async|bulk|reduce|prefetch|tensor|mma|mma_async|sp(::ordered_metadata)?|ws|ld_reduce|red|st|ld|load|store|cc|"
    r"replace|range|fractional|alloc|dealloc|commit|cp|shift|wait|init|arrive)$"
)


def _family(opcode: str) -> str:
    parts = opcode.split(".")
    if parts[0] not in _LONG:
        return parts[0]
    count = 1
    while count < len(parts) and _SUBFAMILY.match(parts[count]):
        count += 1
    return ".".join(parts[:count])
