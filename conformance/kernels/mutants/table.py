"""results/mutants.md: kills by class, by check and by case, and the survivors, each with its reason.

results/mutations.md: the synchronising instructions of two programs, and which of them the VM misses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal, TypeGuard

from conformance import ROOT
from conformance.kernels.mutants.campaign import DROPPED, SCHEDULES, Outcome, Record
from conformance.kernels.mutants.journal import Ran
from conformance.kernels.mutants.mutant import ID, KINDS, MEANINGS, SYNCHRONISATION
from conformance.kernels.mutants.silicon import read as read_silicon
from conformance.kernels.mutants.silicon import told as told_of_silicon
from conformance.kernels.mutants.smoke import check_of
from conformance.kernels.mutants.unmutated import OTHERS, Watch
from conformance.kernels.mutants.unmutated import told as told_of_rows
from megamoe.contract.counted import counted
from megamoe.spec.marked_yaml import read_marked_yaml

RECORD = ROOT / "results" / "mutants.jsonl.xz"
"""The campaign over our programs."""
TABLE = ROOT / "results" / "mutants.md"
DROPS = ROOT / "results" / "mutations.md"
REASONS = Path(__file__).with_name("survivors.yaml")
FLAGS = ("reached", "same_bits", "any_program")
"""Boolean keys of a reason."""
Globs = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why mutants survive. `kind`, `before`, `after` and `program` are globs over those of an Outcome; of several, one
    has to fit.

    "equivalent": no run on silicon can tell, and `why` argues it. "hole": a check or a case is missing. `reached`: the
    reason is about mutants of lines that a case executes with its findings collected (true), or that no case does
    (false). `same_bits`: all outputs of the case in the name of the mutant's program equal the program's own, bit for
    bit; test_survivors.py runs them. `law`: the test that checks `why`, of test_survivors.py or `file::test`.
    `any_program`: it rests on PTX alone, not on how our programs are made.
    """

    verdict: Literal["equivalent", "hole"]
    why: str
    kind: Globs = "*"
    before: Globs = "*"
    after: Globs = "*"
    program: Globs = "*"
    reached: bool | None = None
    same_bits: bool = False
    law: str = ""
    any_program: bool = False

    def explains(self, one: Outcome) -> bool:
        """Whether the reason applies to an outcome. A user's program is covered only by reasons that rest on PTX alone,
        or on the machine's own run of this mutant."""
        if one.theirs and not (self.any_program or (self.reached and self.program == "*")):
            return False
        pairs = ((one.kind, self.kind), (one.before, self.before), (one.after, self.after), (one.program, self.program))
        fits = self.reached is None or one.reached is self.reached
        return fits and all(any(fnmatchcase(seen, glob) for glob in _each(globs)) for seen, globs in pairs)


def reasons(path: Path = REASONS) -> list[Reason]:
    """Reads the reasons of a file, a list of mappings. ValueError for a key or a verdict that does not exist."""
    found = read_marked_yaml(path).value
    if not isinstance(found, list):
        raise ValueError(f"{path}: it holds a {type(found).__name__}; it must be a list of reasons")
    made: list[Reason] = []
    for number, entry in enumerate(found, 1):
        keys = set(entry) if isinstance(entry, dict) else set[str]()
        unknown = keys - set(Reason.__dataclass_fields__)
        if not isinstance(entry, dict) or unknown or not {"verdict", "why"} <= keys:
            raise ValueError(f"{path}, entry {number}: its keys are {sorted(keys)}; needed are verdict and why")
        if entry["verdict"] not in ("equivalent", "hole"):
            raise ValueError(f"{path}, entry {number}: verdict {entry['verdict']!r} is neither equivalent nor hole")
        for name in FLAGS:
            if not isinstance(entry.get(name, True), bool):
                raise ValueError(f"{path}, entry {number}: {name} {entry[name]!r} is neither true nor false")
        words = {name: one if name in FLAGS else _words(one) for name, one in entry.items()}
        made.append(Reason(**words))  # pyright: ignore[reportArgumentType]
    return made


def _words(value: object) -> Globs:
    """A text with single spaces between its words, or a tuple of such texts."""
    if isinstance(value, list):
        return tuple(" ".join(str(one).split()) for one in value)
    return " ".join(str(value).split())


def _each(globs: Globs) -> tuple[str, ...]:
    return (globs,) if isinstance(globs, str) else globs


def reason_of(one: Outcome, known: Sequence[Reason]) -> Reason | None:
    """The first reason that explains a survivor."""
    if one.same_code:
        return Reason("equivalent", "the assembler produces the same machine code")
    return next((each for each in known if each.explains(one)), None)


def survivors(found: Iterable[Outcome], known: Sequence[Reason]) -> list[tuple[Outcome, Reason | None]]:
    """The mutants that no check killed, each with the reason that explains it."""
    return [(one, reason_of(one, known)) for one in found if not one.killed]


def checked_by(one: Outcome, why: Reason) -> str:
    """What checks that a survivor is equivalent, in words; "" for nothing."""
    if one.same_code:
        return "ptxas"
    if why.law:
        return f"`{why.law.rpartition(':')[2]}`"
    if why.same_bits:
        return "the same bits"
    # The machine reports a missing order, not an output that nobody reads.
    return "its run" if why.reached and one.kind in SYNCHRONISATION else ""


def excuses(why: Reason | None) -> TypeGuard[Reason]:
    """Whether a survivor of this reason is equivalent."""
    return why is not None and why.verdict == "equivalent"


@cache
def _standing() -> list[Reason]:
    return reasons()


def argued(survivor: Outcome) -> bool:
    """Whether a reason of survivors.yaml says that a survivor is equivalent."""
    return excuses(reason_of(survivor, _standing()))


def equivalent(told: Iterable[tuple[Outcome, Reason | None]]) -> set[str]:
    """Ids of survivors that no run on silicon can tell."""
    return {one.id for one, why in told if excuses(why)}


def table(
    record: Record, known: Sequence[Reason], *, ours: bool = True, chosen: Sequence[Outcome] | None = None
) -> str:
    """Returns a record as Markdown. `ours`: includes the runs of the project's unchanged programs, and those on a
    device. `chosen`: the part of the record to tell of, if not all of it."""
    found = record.results if chosen is None else chosen
    told = survivors(found, known)
    equal = equivalent(told)
    ordering = [one for one in found if one.kind in SYNCHRONISATION]
    lines = [
        "# Mutants",
        "",
        "A mutant is a program with one change; the VM runs it until a check kills it. `nox -s mutants -- --table`",
        f"writes this page from `{record.path.name}` (docs/mutants.md). `conformance/kernels/mutants/survivors.yaml`",
        "has the reasons. A mutant is killed by a verdict other than passed, or by a finding that the unchanged",
        "program does not have. The schedule `collected` is eager with findings collected, as at the doors;",
        "`few_ctas:N` is N persistent CTAs (`few_ctas.py` in that folder).",
        "",
        f"An id is {ID}.",
        "`nox -s mutants -- --id ID`, with the `--backend` and a `--case` of its program, runs one mutant again.",
        "",
        *([] if chosen is None else _of_a_part(found, record)),
        *(_of_their_programs() if any(one.theirs for one in found) else ()),
        _sum("All", found, equal),
        _sum("Synchronisation only", ordering, equal),
        *_turns_of_excused(found, ordering, equal),
        *_checked(told),
        *_by_smoke(found, equal),
        "",
        "Synchronisation is drawn more often than the rest, so compare the shares by class.",
        "",
        *_by_kernel(found, equal),
        *(_of_our_programs(found) if ours else ()),
        "## By class",
        "",
        "| class | a mutant of it | mutants | killed | equivalent | holes | killed of those not equivalent |",
        "|---|---|---|---|---|---|---|",
        *(_class(kind, [one for one in found if one.kind == kind], equal) for kind in KINDS if _any(found, kind)),
        "",
        "## By check",
        "",
        *_counted("check", found, lambda one: one.check),
        "",
        "## By case",
        "",
        "The case that killed the mutant. Cases of a program run from the smallest to the largest.",
        "",
        *_counted("case", found, lambda one: one.case),
        "",
        "## By schedule",
        "",
        *_counted("schedule", found, lambda one: one.schedule),
        "",
        "## By program",
        "",
        "| program | mutants | killed | equivalent | holes |",
        "|---|---|---|---|---|",
        *(_program(some, equal) for some in _by_program(found)),
        "",
        "## Survivors that are not equivalent",
        "",
        *_holes(told),
        "## Survivors that are equivalent",
        "",
        "What checks it: ptxas, which makes the same machine code; the same bits, which `--argued` runs and compares;",
        "its run, in which the machine executed the line with its findings collected and had none of a missing order;",
        "or a test of `test_survivors.py`, or of the file that `survivors.yaml` names.",
        "",
        "| why | checked by | mutants | classes |",
        "|---|---|---|---|",
        *_equivalents(told),
        "",
        *_wrongly_excused(found, known),
        "## What was run",
        "",
        "Each line has the options, the number of mutants that they draw (`--seconds` may leave some of them), the",
        "time, and the git tree of `backends/vm`. If a mutant was run again, its last outcome counts.",
        "",
        *_calls(record.calls, "mutant"),
    ]
    return "\n".join(lines) + "\n"


def _of_a_part(found: Sequence[Outcome], record: Record) -> list[str]:
    return [f"This is a part of the record: {counted(len(found), 'mutant')} of {len(record.results):,}.", ""]


def _of_their_programs() -> list[str]:
    return [
        "`survivors.yaml` is about the project's own programs. Here it excuses only what rests on PTX alone, or on the",
        "machine's own run of the mutant: whether an order was missing at a line that a case executes.",
        "",
    ]


def _of_our_programs(found: Sequence[Outcome]) -> list[str]:
    rows, others = Watch(), Watch(OTHERS)
    return [
        "## Unchanged programs",
        "",
        "Findings are collected, and the bits must equal those of the run in order. The calls that made "
        "`results/unmutated.jsonl`:",
        "",
        *_calls(rows.calls, "row"),
        "",
        *told_of_rows(rows),
        *(_of_public_kernels(others) if others.results else []),
        *told_of_silicon(
            read_silicon(),
            {one.id for one in found if one.killed},
            {one.id for one in found if not one.killed},
            {one.id.partition("/")[0] for one in found},
        ),
    ]


def _of_public_kernels(others: Watch) -> list[str]:
    return [
        "### Kernels of public repositories",
        "",
        "Each call of [public.md](public.md) that is right and cheap in order runs under random orders of its own. Its",
        "result must agree with the reference each time, and each finding of grade error must be argued in",
        "`conformance/witness/argued.yaml`. The calls that made `results/others.jsonl`:",
        "",
        *_calls(others.calls, "row"),
        "",
        *told_of_rows(others, others=True),
    ]


def _calls(calls: Iterable[Ran], planned: str) -> list[str]:
    """A line for each call; `planned`: the noun for what it runs."""
    return [
        f"- `{one.command}`: {counted(one.planned, planned)}, {one.started}, `backends/vm` {one.machine}"
        for one in calls
    ]


def _any(found: Iterable[Outcome], kind: str) -> bool:
    return any(one.kind == kind for one in found)


def _by_program(found: Iterable[Outcome]) -> list[list[Outcome]]:
    """Groups mutants by text. A text may have several names, because a name has the first case of a call."""
    texts: dict[str, list[Outcome]] = {}
    for one in sorted(found, key=lambda each: each.program):
        texts.setdefault(one.program.rpartition(" ")[2], []).append(one)
    return list(texts.values())


def _sum(what: str, found: Sequence[Outcome], equal: set[str]) -> str:
    killed, same = sum(one.killed for one in found), sum(one.id in equal for one in found)
    share = f" ({killed / (len(found) - same):.1%})" if len(found) > same else ""
    every = counted(len(found), "mutant")
    return f"{what}: {every}, {same:,} equivalent; {killed:,} of the other {len(found) - same:,} killed{share}."


def _turns_of_excused(found: Sequence[Outcome], ordering: Sequence[Outcome], equal: set[str]) -> list[str]:
    """How many survivors that are equivalent had every turn, if the record tells that of any."""
    lines: list[str] = []
    for what, some in (("all", found), ("synchronisation", ordering)):
        turns = Counter(one.all_turns for one in some if one.id in equal)
        if turns[True] + turns[False]:
            lines += [
                f"Turns of the equivalent ones, {what}: {turns[True]:,} had all, {turns[False]:,} only those that are "
                f"cheap; of {turns[None]:,} the record does not tell."
            ]
    return lines


def _checked(told: Sequence[tuple[Outcome, Reason | None]]) -> list[str]:
    """How many survivors are equivalent by what kind of check."""
    ways = [checked_by(one, why) for one, why in told if excuses(why)]
    by = Counter("a test" if way.startswith("`") else way for way in ways).most_common()
    return [f"What checks that they are equivalent: {', '.join(f'{way} {many:,}' for way, many in by)}."] if by else []


def _wrongly_excused(found: Iterable[Outcome], known: Sequence[Reason]) -> list[str]:
    """Mutants that died after their first turns although they were excused, with what still excuses them."""
    lines: list[str] = []
    for one in found:
        if one.killed and one.excused:
            why = reason_of(one, known)
            said = f"excused because: {why.why}" if why is not None else "what excused it is gone"
            lines += [f"- `{one.id}` `{one.before}` → `{one.after}`: {one.check} on {one.case}, {one.schedule}; {said}"]
    return ["## Killed although excused", "", *lines, ""] if lines else []


def _by_smoke(found: Sequence[Outcome], equal: set[str]) -> list[str]:
    """Kills of the profile smoke alone: its rows as they are judged, and the counters that the gate compares."""
    asked = [(one, check) for one in found if one.id not in equal and (check := check_of(one)) is not None]
    killed = sum(bool(check) for _, check in asked)
    every = len(found) - len(equal)
    left = every - len(asked)
    if left and all(one.smoke is None for one in found):
        return [
            "What rows of the profile smoke alone kill was not measured; `nox -s mutants -- --smoke` runs them on "
            f"the {counted(left, 'mutant')} that another check killed or that lived."
        ]
    least, most = (f"{number / every:.1%}" if every else "" for number in (killed, killed + left))
    share = f" ({least})" if least and not left else ""
    more = f"; {counted(left, 'other', 'has', 'have')} not run there, so the share is {least} to {most}" if left else ""
    return [
        "Rows of the profile smoke alone, with the counters that the gate compares for them, kill "
        f"{killed:,} of {len(asked):,} that are not equivalent{share}{more}."
    ]


def _by_kernel(found: Sequence[Outcome], equal: set[str]) -> list[str]:
    """Backends and targets side by side, with what the rows of smoke kill alone. Nothing if smoke was not asked."""
    if any(check_of(one) is None for one in found if one.id not in equal):
        return []
    groups: dict[str, list[Outcome]] = {}
    for one in sorted(found, key=lambda each: (each.backend, each.target, each.op)):
        groups.setdefault(f"{one.backend} {one.target} {one.op}", []).append(one)
    return [
        "## By kernel",
        "",
        "| programs | mutants | killed by smoke | killed by others only | equivalent | holes | "
        "killed of those not equivalent |",
        "|---|---|---|---|---|---|---|",
        *(_kernel(name, some, equal) for name, some in (*groups.items(), ("all", found))),
        "",
    ]


def _kernel(name: str, found: Sequence[Outcome], equal: set[str]) -> str:
    same = sum(one.id in equal for one in found)
    smoke = sum(bool(check_of(one)) for one in found)
    other = sum(one.killed and not check_of(one) for one in found)
    holes = len(found) - same - smoke - other
    share = f"{(smoke + other) / (len(found) - same):.1%}" if len(found) > same else ""
    return f"| {name} | {len(found):,} | {smoke:,} | {other:,} | {same:,} | {holes:,} | {share} |"


def _class(kind: str, found: Sequence[Outcome], equal: set[str]) -> str:
    killed, same = sum(one.killed for one in found), sum(one.id in equal for one in found)
    share = f"{killed / (len(found) - same):.0%}" if len(found) > same else ""
    return f"| {kind} | {MEANINGS[kind]} | {len(found)} | {killed} | {same} | {len(found) - killed - same} | {share} |"


def _program(found: Sequence[Outcome], equal: set[str]) -> str:
    killed, same = sum(one.killed for one in found), sum(one.id in equal for one in found)
    return f"| `{found[0].program}` | {len(found)} | {killed} | {same} | {len(found) - killed - same} |"


def _counted(what: str, found: Sequence[Outcome], of: Callable[[Outcome], str]) -> list[str]:
    counts = Counter(of(one) for one in found if one.killed)
    rows = [f"| `{name}` | {count} |" for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))]
    return [f"| {what} | killed |", "|---|---|", *rows]


def _holes(told: Sequence[tuple[Outcome, Reason | None]]) -> list[str]:
    groups: dict[str, list[Outcome]] = {}
    for one, why in told:
        if why is None or why.verdict == "hole":
            groups.setdefault("no reason is known" if why is None else why.why, []).append(one)
    lines: list[str] = []
    for why, members in groups.items():
        lines += [f"{len(members)}: {why}", ""]
        lines += [f"- `{one.id}` `{one.before}` → `{one.after}`" for one in members]
        lines += [""]
    return lines


def _equivalents(told: Sequence[tuple[Outcome, Reason | None]]) -> list[str]:
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for one, why in told:
        if excuses(why):
            groups.setdefault((why.why, checked_by(one, why)), []).append(one)
    return [
        f"| {why} | {how} | {len(members)} | {', '.join(sorted({one.kind for one in members}))} |"
        for (why, how), members in groups.items()
    ]


def drops_table(found: Mapping[str, Sequence[Outcome]], known: Sequence[Reason]) -> str:
    """Markdown of the result of `drops`, by target and kind: how many were removed, and how many were missed."""
    lines = [
        "# Mutations",
        "",
        "Raw-PTX kernels with one of their synchronising instructions removed, each run under "
        f"{', '.join(SCHEDULES)} until a check notices.",
        "`nox -s mutants -- --drops` writes this page; a test keeps it current.",
    ]
    for target, outcomes in found.items():
        kinds: dict[str, list[Outcome]] = {}
        for one in outcomes:
            kinds.setdefault(kind_of(one.before), []).append(one)
        lines += [
            "",
            f"## `{DROPPED[target]}` on {target}",
            "",
            f"Noticed: {sum(one.killed for one in outcomes)} of {len(outcomes)}.",
            "",
            "| instruction | removed | noticed | first under | why not all |",
            "|---|---|---|---|---|",
            *(_dropped(kind, items, known) for kind, items in sorted(kinds.items())),
        ]
    return "\n".join(lines) + "\n"


def _dropped(kind: str, items: Sequence[Outcome], known: Sequence[Reason]) -> str:
    schedules = Counter(one.schedule for one in items if one.killed)
    first = ", ".join(f"{name} {count}" for name, count in schedules.items())
    given = (reason_of(one, known) for one in items if not one.killed)
    why = " ".join(dict.fromkeys("no reason is known" if each is None else each.why for each in given))
    return f"| `{kind}` | {len(items)} | {schedules.total()} | {first} | {why} |"


def kind_of(instruction: str) -> str:
    """The opcode without its variants: "mbarrier.arrive", "tcgen05.wait::st", ..."""
    word = instruction.split()[1] if instruction.startswith("@") else instruction.split()[0]
    parts = word.rstrip(";").split(".")
    if parts[0] == "tcgen05":
        return ".".join(parts[:2]).replace("::before_thread_sync", "").replace("::after_thread_sync", "")
    return ".".join(parts[: 3 if parts[0] in ("bar", "fence") and parts[1] in ("warp", "proxy") else 2])
