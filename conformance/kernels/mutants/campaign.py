"""A campaign: mutants of the programs of a selection, run until a check kills each, on record line by line.

Killed means: a verdict other than passed, or a finding (a counter of FINDINGS) that the program itself has not. A
program is a PTX text; its cases are all cases of the selection that build this text. A mutant runs on each of them,
the first schedule first, until one kills it.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from backends.vm import executor as machine
from conformance.kernels.mutants.mutant import SYNCHRONISATION, Mutant, mutants, program_id
from megamoe.contract import Case, HostProgram, Program, RunOptions, UnsupportedError, load_backend, load_executor
from megamoe.contract.assembly import assembled
from megamoe.judge.guarded import GuardedCase
from megamoe.judge.judge import Expected, compared, complaints, expected_of
from megamoe.judge.tolerance import Judgement
from megamoe.ops import reference
from megamoe.runner.limits import seconds_at_most
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, owed_rows
from megamoe.spec.spec import Spec

FINDINGS = ("tmem_unwaited_overwrites", "tmem_unordered_copies")
"""Counters of the machine that are findings: an order that the ISA does not promise."""
SCHEDULES = ("eager", "lazy", "random:3")
LATER_CASES = 2
"""How many cases of a program, the largest, run under schedules beyond the first."""


class OverTime(Exception):
    """A run that took far longer than the program itself."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign runs. Of each program: `synchronisation` mutants of the classes SYNCHRONISATION and `others` of
    the rest (None: all), drawn by `seed`. Shard `shard[0]` of `shard[1]`, from 1. `programs`: parts of the names of
    programs (none: all programs)."""

    selection: Selection
    synchronisation: int | None = None
    others: int | None = 10
    seed: int = 0
    shard: tuple[int, int] = (1, 1)
    programs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant: a line of a record. `check`, `case` and `schedule` are empty where it survived.

    `same_code`: whether an assembler makes the same machine code of it; None where it was not asked.
    """

    id: str
    program: str
    kind: str
    line: int
    before: str
    after: str
    check: str = ""
    case: str = ""
    schedule: str = ""
    sentence: str = ""
    same_code: bool | None = None
    runs: int = 0
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        """Whether a check noticed it."""
        return bool(self.check)


@dataclass(frozen=True, slots=True)
class Built:
    """A program for one case, and what a run of it must show."""

    spec: Spec
    case: Case
    program: Program | HostProgram
    expected: Expected


@dataclass(slots=True)
class _Baseline:
    counters: Mapping[str, int]
    seconds: float


@dataclass(slots=True)
class Subject:
    """One PTX text of one backend, with the cases that build it, cheapest first."""

    backend: str
    target: str
    op: str
    built: list[Built] = field(default_factory=list[Built])
    _baselines: dict[tuple[str, str], _Baseline] = field(default_factory=dict[tuple[str, str], _Baseline])
    _code: Mapping[str, str | None] | None = None

    @property
    def code(self) -> Mapping[str, str | None]:
        """The SHA-256 of its machine code by assembler, None where one makes none."""
        if self._code is None:
            self._code = _code_of(self.built[0].program)
        return self._code

    @property
    def name(self) -> str:
        """Backend, target, op and the first digits of the text's SHA-256, with the first case that builds it."""
        return f"{self.backend} {self.target} {self.built[0].case.id} {program_id(self.built[0].program.ptx)}"

    def baseline(self, built: Built, schedule: str) -> _Baseline:
        """What the program itself does. ValueError if it does not pass: then no kill means anything."""
        key = (built.case.id, schedule)
        if key not in self._baselines:
            begun = time.process_time()
            check, sentence, counters = _verdict(built, built.program, RunOptions(schedule=schedule))
            if check:
                raise ValueError(f"{self.name} itself does not pass on {built.case.id}, {schedule}: {sentence}")
            self._baselines[key] = _Baseline(counters, time.process_time() - begun)
        return self._baselines[key]


def subjects(selection: Selection) -> list[Subject]:
    """The programs of a selection: texts in the order of the rows. Rows that a backend cannot build are left out."""
    specs = load_specs(None)
    found: dict[tuple[str, str, str], Subject] = {}
    expected: dict[str, Expected] = {}
    for row in dict.fromkeys(row._replace(schedule="eager") for row in owed_rows(specs, selection)):
        spec = specs[row.op]
        case = spec.parse_case(row.case)
        program = program_of(row.backend, row.target, case)
        if program is None:
            continue
        if case.id not in expected:
            expected[case.id] = expected_of(case, reference(case.op).make_inputs(case))
        one = found.setdefault((row.backend, row.target, program.ptx), Subject(row.backend, row.target, row.op))
        one.built.append(Built(spec, case, program, expected[case.id]))
    for one in found.values():
        one.built.sort(key=lambda built: _size(built))
    return list(found.values())


def program_of(backend: str, target: str, case: Case) -> Program | HostProgram | None:
    """The program of a backend for `case`; None where it has none, or one without PTX."""
    try:
        program = load_backend(backend).build(case, "sm_90a" if target == "sm_90a" else "sm_100a")
    except UnsupportedError:
        return None
    return program if isinstance(program, (Program, HostProgram)) else None


def _size(built: Built) -> int:
    return sum(tensor.numel() for tensor in built.expected.inputs.values())


def planned(plan: Plan, programs: Sequence[Subject]) -> list[tuple[Subject, Mutant]]:
    """The mutants of a plan in the order in which they run: program by program, drawn alike on every machine."""
    chosen: list[tuple[Subject, Mutant]] = []
    for subject in programs:
        if plan.programs and not any(part in subject.name for part in plan.programs):
            continue
        every = list(mutants(subject.built[0].program))
        ordering = [one for one in every if one.kind in SYNCHRONISATION]
        rest = [one for one in every if one.kind not in SYNCHRONISATION]
        chosen += [(subject, one) for one in drawn(ordering, plan.synchronisation, plan.seed)]
        chosen += [(subject, one) for one in drawn(rest, plan.others, plan.seed)]
    return chosen[plan.shard[0] - 1 :: plan.shard[1]]


def drawn(every: Sequence[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """`count` of the mutants (None: all): one of each class in turn, within a class by the hash of seed and id."""
    if count is None:
        return list(every)
    kinds: dict[str, list[Mutant]] = {}
    for one in every:
        kinds.setdefault(one.kind, []).append(one)
    ranked = [
        (place, _lot(seed, kind), _lot(seed, one.id), one)
        for kind, members in kinds.items()
        for place, one in enumerate(sorted(members, key=lambda each: _lot(seed, each.id)))
    ]
    return [one for *_, one in sorted(ranked, key=lambda each: each[:3])[:count]]


def _lot(seed: int, text: str) -> str:
    return hashlib.sha256(f"{seed} {text}".encode()).hexdigest()


def examine(
    subject: Subject, mutant: Mutant, schedules: Sequence[str] = SCHEDULES, *, ask_assemblers: bool = True
) -> Outcome:
    """Run a mutant on every case of its program until a check kills it.

    Schedules beyond the first are for mutants of synchronisation alone, and for the largest cases: nothing else depends
    on them. What is the same machine code, if assemblers are asked after the first run, is left alone.
    """
    begun, runs, same = time.process_time(), 0, None
    about = (mutant.id, subject.name, mutant.kind, mutant.line, _short(mutant.before), _short(mutant.after))
    later = schedules[1:] if mutant.kind in SYNCHRONISATION else ()
    turns = [(schedules[0], built) for built in subject.built]
    turns += [(schedule, built) for schedule in later for built in subject.built[-LATER_CASES:]]
    for schedule, built in turns:
        check, sentence = _killed_by(subject, built, mutant, schedule)
        runs += 1
        spent = round(time.process_time() - begun, 2)
        if check:
            return Outcome(*about, check, built.case.id, schedule, sentence[:160], same, runs, spent)
        if runs == 1 and mutant.launch is None and ask_assemblers:
            same = _same_code(subject, mutant)
        if same:
            break
    return Outcome(*about, same_code=same, runs=runs, seconds=round(time.process_time() - begun, 2))


def _killed_by(subject: Subject, built: Built, mutant: Mutant, schedule: str) -> tuple[str, str]:
    whole = subject.baseline(built, schedule)
    steps = 10_000 + 4 * sum(count for name, count in whole.counters.items() if name.startswith("instructions_"))
    limit = 20 + 50 * whole.seconds
    late = partial(OverTime, f"it ran for {limit:.0f} s, fifty times as long as the program itself")
    with seconds_at_most(limit, late):
        options = RunOptions(schedule=schedule, step_budget=steps)
        check, sentence, counters = _verdict(built, mutant.of(built.program), options)
    return (check, sentence) if check else _findings(counters, whole.counters)


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-70:]}"


def _verdict(built: Built, program: Program | HostProgram, options: RunOptions) -> tuple[str, str, Mapping[str, int]]:
    """The check that fails and its sentence, or two empty strings; and the counters of the run."""
    guarded = GuardedCase(built.spec, built.case, load_executor("vm"), built.expected.inputs)
    try:
        ran = guarded.run(program, options)
    except OverTime as late:
        return "timed_out", str(late), {}
    except Exception as error:
        return f"error:{type(error).__name__}", str(error), {}
    counters = ran.execution.counters
    if ran.execution.violation:
        slug = re.match(r"\[([\w-]+)\]", ran.execution.violation)
        return f"rule:{slug[1]}" if slug else "refused", ran.execution.violation, counters
    if damage := guarded.arena.damage():
        return "guard", damage, counters
    judgement = compared(built.spec, built.expected, ran.outputs)
    wrong = complaints(guarded.arena, built.expected, judgement)
    if judgement.passed and not wrong:
        return "", "", counters
    return _check_of(judgement) if not judgement.passed else "unwritten", wrong or judgement.sentence, counters


def _check_of(judgement: Judgement) -> str:
    """The first metric of a failed judgement that is over its bar, by its name without the tensor's."""
    metrics = judgement.metrics
    over = [name for name, value in metrics.items() if f"{name}.bar" in metrics and not value <= metrics[f"{name}.bar"]]
    over += [name for name, value in metrics.items() if name.endswith(".wrong") and value]
    if over:
        return f"metric:{over[0].rpartition('.')[2]}"
    return "metric:cosine" if metrics else "metric:nonfinite"


def _findings(counters: Mapping[str, int], own: Mapping[str, int]) -> tuple[str, str]:
    for name in FINDINGS:
        if counters.get(name, 0) and not own.get(name, 0):
            return f"finding:{name}", f"{name}: {counters[name]}, and none in the program itself"
    return "", ""


def _same_code(subject: Subject, mutant: Mutant) -> bool | None:
    other = _code_of(mutant.of(subject.built[0].program))
    known = [name for name, digest in subject.code.items() if digest is not None and other.get(name) is not None]
    return all(subject.code[name] == other[name] for name in known) if known else None


def _code_of(program: Program | HostProgram) -> Mapping[str, str | None]:
    return {one.assembler: one.cubin_sha256 for one in assembled(program.ptx, program.target)}


@contextmanager
def _parsed_nowhere() -> Iterator[None]:
    """Keeps thousands of texts that run once out of the cache of parsed modules."""
    before = machine.PARSED
    machine.PARSED = None
    try:
        yield
    finally:
        machine.PARSED = before


@dataclass(frozen=True, slots=True)
class Ran:
    """One call of the tool: its arguments, the git tree of the machine, when it began, how many mutants it planned."""

    command: str
    machine: str
    started: str
    planned: int


class Record:
    """A record of campaigns: JSON lines, one a mutant and one a call. A torn last line is cut off."""

    def __init__(self, *paths: Path) -> None:
        """`paths`: files of shards; the first is written to."""
        self.path = paths[0]
        self.calls: list[Ran] = []
        self.outcomes: list[Outcome] = []
        for path in paths:
            self._read(path)
        self.ids = {one.id for one in self.outcomes}

    def _read(self, path: Path) -> None:
        text = path.read_text("utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, "utf-8")
        for line in whole.splitlines():
            found = json.loads(line)
            if "command" in found:
                self.calls.append(Ran(**found))
            else:
                self.outcomes.append(Outcome(**found))

    def append(self, line: Outcome | Ran) -> None:
        """Write one more line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as out:
            out.write(f"{json.dumps(asdict(line))}\n")
        if isinstance(line, Ran):
            self.calls.append(line)
        else:
            self.outcomes.append(line)
            self.ids.add(line.id)


def run(
    todo: Sequence[tuple[Subject, Mutant]], record: Record, schedules: Sequence[str], seconds: float | None = None
) -> Iterator[tuple[int, Outcome]]:
    """Examine what `record` lacks of `todo`, for at most `seconds` of processor time: places in `todo`, outcomes."""
    begun = time.process_time()
    for at, (subject, mutant) in enumerate(todo, 1):
        if mutant.id in record.ids:
            continue
        if seconds is not None and time.process_time() - begun > seconds:
            return
        with _parsed_nowhere():
            outcome = examine(subject, mutant, schedules)
        record.append(outcome)
        yield at, outcome


DROPPED: Mapping[str, str] = {
    "sm_100a": "fmha:hd=64,t=64,s_k=800,inputs=large_logits",
    "sm_90a": "fmha:hd=64,t=4,s_k=300",
}
"""A case a target, of a raw-PTX kernel. Its key tiles wrap the ring of stages; large logits change the running maximum,
and so O's scale."""


def drops(target: str) -> list[Outcome]:
    """Takes each synchronising instruction out of the program of DROPPED, one at a time, in the order of its text."""
    chosen = Selection(cases=(DROPPED[target],), backends=("ptx",), targets=(target,), executors=("vm",))
    (subject,) = subjects(chosen)
    dropped = (one for one in mutants(subject.built[0].program) if one.kind == "drop")
    # No assembler makes the same code of two texts that differ in an instruction which orders something.
    return [examine(subject, one, ask_assemblers=False) for one in dropped]
