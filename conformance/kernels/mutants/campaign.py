"""A campaign: runs mutants of a selection's programs until a check kills each, and records them line by line.

Killed means: a verdict other than passed, a finding of grade error or portability (or a counter of FINDINGS) that the
program itself does not have, or more of a counter of WORK. A program is a PTX text; its cases are all cases of the
selection that build this text, and some on few CTAs. A mutant runs on those that execute its line until one kills it:
`_turns` sets the order, with the most kills a second first. A mutant that survives the closest looks and is excused (it
has the same machine code, or an argument says that it is equivalent) takes as many of its further turns as the
unchanged program runs in EXCUSED_SECONDS.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Protocol

from backends.vm import executor as machine
from backends.vm.faults import Fault, Findings
from backends.vm.rules import COUNTERS
from conformance.kernels.mutants.few_ctas import on_few_ctas
from conformance.kernels.mutants.journal import Journal
from conformance.kernels.mutants.mutant import SYNCHRONISATION, Mutant, mutants, program_id
from conformance.kernels.mutants.replay import Tape, player, recorder
from megamoe.contract import (
    Case,
    Executor,
    HostProgram,
    Program,
    RunOptions,
    UnsupportedError,
    as_program,
    load_backend,
    load_executor,
)
from megamoe.contract.assembly import assembled
from megamoe.judge.guarded import GuardedCase, GuardedRun
from megamoe.judge.judge import Expected, compared, complaints, expected_of
from megamoe.judge.tolerance import Judgement
from megamoe.ops import reference
from megamoe.records.shards import WHOLE, Nth
from megamoe.runner.limits import seconds_at_most
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, owed_rows
from megamoe.spec.spec import Spec

FINDINGS = ("tmem_unwaited_overwrites", "tmem_unordered_copies", "smem_unfenced_overwrites", *COUNTERS.values())
"""Counters of the machine that are findings: an order that the ISA does not promise."""
WORK = ("mma_flops", "tma_load_bytes", "tma_store_bytes")
"""Counters of work that depend on no order. The gate compares them with the baseline and fails if one grows."""
SCHEDULES = ("eager", "lazy", "random:3", "late_warp:0", "late_cta:0")
"""The last one only for programs with clusters: without them it is the first one."""
_IN_CLUSTERS = re.compile(r"%cluster_|barrier\.cluster|mapa\.|reqnctapercluster")
MAX_COLLECTED = 1 << 18
"""Most elements of the inputs of a case that runs with its findings collected; the smallest case may have more."""
COLLECTED = "collected"
"""Stands for a schedule: the first one, with findings collected."""
FEW_CTAS = "few_ctas"
"""Stands for a schedule, with their number after a colon: the first two on few CTAs, and the first with findings
collected."""
EXCUSED_SECONDS = 2.0
"""Processor time of the unchanged program on the further turns of an excused mutant, the smallest case first. In 5 s,
19 of 842 excused mutants of synchronisation died, and later 11 of 1,820 (docs/mutants.md)."""
Argued = Callable[["Outcome"], bool]
"""Whether a survivor is equivalent by an argument."""


CRASHED = "crashed"
"""The check that kills a mutant which ends its process."""


class OverTime(Exception):
    """A run that took far longer than the unchanged program."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign runs. Of each program: `synchronisation` mutants of the classes SYNCHRONISATION and `others` of
    the rest (None: all), drawn by `seed`; of these a `shard`. `programs`: parts of the names of programs (none: all
    programs)."""

    selection: Selection
    synchronisation: int | None = None
    others: int | None = 10
    seed: int = 0
    shard: Nth = WHOLE
    programs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a mutant: a line of a record. `check`, `case` and `schedule` are empty if it survived.

    `same_code`: whether an assembler makes the same machine code of it; None if that was not checked. `reached`, if it
    lived through its first turns: whether a case with its findings collected executes the line that it changes; None
    for a changed launch. `excused`: whether an argument or the same machine code excused it then. `all_turns`, of a
    survivor: whether it had every turn on the rows of its call; None in a record that does not tell. `smoke`: the check
    that kills it in a row of the profile smoke, "" for none; None if that was not asked. `seconds`: processor time,
    without the unchanged program's, which runs once for all its mutants.
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
    reached: bool | None = None
    runs: int = 0
    seconds: float = 0.0
    smoke: str | None = None
    excused: bool = False
    all_turns: bool | None = None

    @property
    def killed(self) -> bool:
        """Whether a check noticed it."""
        return bool(self.check)

    @property
    def backend(self) -> str:
        """The backend of its program."""
        return self.program.split()[0]

    @property
    def target(self) -> str:
        """The target of its program."""
        return self.program.split()[1]

    @property
    def op(self) -> str:
        """The op of its program."""
        return self.program.split()[2].partition(":")[0]

    @property
    def theirs(self) -> bool:
        """Whether its backend is not part of the project."""
        return is_theirs(self.backend)


def is_theirs(backend: str) -> bool:
    """Whether a backend is not part of the project. `backends.cutedsl:CTA_PAIRS` is part of it."""
    return ":" in backend and not backend.startswith("backends.")


@dataclass(frozen=True, slots=True)
class Built:
    """A program for one case, and the expected outputs of a run."""

    spec: Spec
    case: Case
    program: Program | HostProgram

    @property
    def expected(self) -> Expected:
        """The inputs and references of the case."""
        return _expected(self.case)

    @property
    def size(self) -> int:
        """Elements of the inputs."""
        tensors = self.spec.tensors_of(self.case)
        return sum(prod(self.spec.shape(name, self.case)) for name, one in tensors.items() if one.role == "input")


@lru_cache(maxsize=64)
def _expected(case: Case) -> Expected:
    return expected_of(case, reference(case.op).make_inputs(case))


@dataclass(slots=True)
class _Baseline:
    counters: Mapping[str, int]
    seconds: float
    tape: Tape


@dataclass(frozen=True, slots=True)
class Collection:
    """Results of a run that collects: its findings, the PTX lines that it executed, its outcome; its launches and its
    processor time, if they are kept."""

    found: tuple[Fault, ...]
    lines: frozenset[int]
    ran: GuardedRun
    tape: Tape = field(default_factory=Tape)
    seconds: float = 0.0


@dataclass(slots=True)
class Subject:
    """One PTX text of one backend, with the cases that build it, cheapest first."""

    backend: str
    target: str
    op: str
    built: list[Built] = field(default_factory=list[Built])
    _baselines: dict[tuple[str, str], _Baseline] = field(default_factory=dict[tuple[str, str], _Baseline])
    _collections: dict[tuple[str, str], Collection] = field(default_factory=dict[tuple[str, str], Collection])
    _code: Mapping[str, str | None] | None = None
    _few: Mapping[int, Subject] | None = None
    _spent: float = 0.0

    @property
    def few_are_known(self) -> bool:
        """Whether `few` is built already."""
        return self._few is not None

    @property
    def few(self) -> Mapping[int, Subject]:
        """The program on few CTAs, by their number."""
        if self._few is None:
            first = self.built[0]
            build = partial(program_of, self.backend, self.target)
            made = on_few_ctas(build, first.spec, first.case, first.program.ptx)
            self._few = {
                count: Subject(self.backend, self.target, self.op, [Built(first.spec, *one) for one in some])
                for count, some in made.items()
            }
        return self._few

    @property
    def code(self) -> Mapping[str, str | None]:
        """The SHA-256 of its machine code by assembler, None if an assembler makes none."""
        if self._code is None:
            self._code = _code_of(self.built[0].program)
        return self._code

    @property
    def name(self) -> str:
        """Backend, target, op and the first digits of the text's SHA-256, with the first case that builds it."""
        return f"{self.backend} {self.target} {self.built[0].case.id} {program_id(self.built[0].program.ptx)}"

    @property
    def spent(self) -> float:
        """Processor time of the unchanged program's runs so far, including those on few CTAs."""
        return self._spent + sum(one.spent for one in (self._few or {}).values())

    def baseline(self, built: Built, schedule: str) -> _Baseline:
        """Runs the unchanged program. ValueError if it does not pass: then no kill means anything."""
        key = (built.case.id, schedule)
        if key not in self._baselines:
            # Drawn before the clock starts: other programs may have left them, and turns are rationed by this time.
            _ = built.expected
            known, begun, tape = self._collections.get(key), time.process_time(), Tape()
            if known is not None and not known.found:
                # No finding would have ended a run without collection, so reuse this one.
                (check, sentence), counters = judged(built, known.ran), known.ran.execution.counters
                seconds, tape = known.seconds, known.tape
            else:
                check, sentence, counters = verdict(built, built.program, RunOptions(schedule=schedule), recorder(tape))
                seconds = time.process_time() - begun
                self._spent += seconds
            if check:
                raise ValueError(f"{self.name} itself does not pass on {built.case.id}, {schedule}: {sentence}")
            self._baselines[key] = _Baseline(counters, seconds, tape)
        return self._baselines[key]

    def collection(self, built: Built, schedule: str) -> Collection:
        """Runs the unchanged program with its findings collected."""
        key = (built.case.id, schedule)
        if key not in self._collections:
            _ = built.expected
            begun, tape = time.process_time(), Tape()
            found = collected(built, built.program, RunOptions(schedule=schedule), listening=recorder(tape))
            self._collections[key] = replace(found, tape=tape, seconds=time.process_time() - begun)
            self._spent += self._collections[key].seconds
        return self._collections[key]

    def collects(self, built: Built) -> bool:
        """Whether a case runs with its findings collected: the smallest one, and those of MAX_COLLECTED elements at
        most."""
        return built is self.built[0] or built.size <= MAX_COLLECTED

    def telling(self, schedule: str) -> list[Built]:
        """The first case, and collected ones that execute a line which no smaller one does."""
        found: list[Built] = []
        seen = frozenset[int]()
        for one in filter(self.collects, self.built):
            lines = self.collection(one, schedule).lines
            if not lines <= seen:
                found.append(one)
                seen |= lines
        return found

    def executing(self, line: int, schedule: str) -> list[Built]:
        """The cases that execute a line, and those too large to be collected, where that is unknown. Line 0: all
        cases."""
        return [
            one
            for one in self.built
            if not line or not self.collects(one) or line in self.collection(one, schedule).lines
        ]


Refused = dict[str, list[str]]
"""Sentences of UnsupportedError, and the cases that backends refuse with each."""


def subjects(selection: Selection, refused: Refused | None = None) -> list[Subject]:
    """The programs of a selection: texts in the order of the rows. Rows that a backend refuses are left out, and told
    in `refused`."""
    specs = load_specs(None)
    found: dict[tuple[str, str, str], Subject] = {}
    for row in dict.fromkeys(row._replace(schedule="eager") for row in owed_rows(specs, selection)):
        spec = specs[row.op]
        case = spec.parse_case(row.case)
        try:
            program = built_program(row.backend, row.target, case)
        except UnsupportedError as error:
            if refused is not None:
                refused.setdefault(str(error), []).append(f"{case.id} on {row.backend} {row.target}")
            continue
        if program is None:
            continue
        one = found.setdefault((row.backend, row.target, program.ptx), Subject(row.backend, row.target, row.op))
        one.built.append(Built(spec, case, program))
    for one in found.values():
        one.built.sort(key=lambda built: built.size)
    return list(found.values())


def program_of(backend: str, target: str, case: Case) -> Program | HostProgram | None:
    """The program of a backend for `case`; None if it has none, or one without PTX."""
    try:
        return built_program(backend, target, case)
    except UnsupportedError:
        return None


def built_program(backend: str, target: str, case: Case) -> Program | HostProgram | None:
    """Like program_of, but raises the backend's UnsupportedError."""
    program = as_program(load_backend(backend).build(case, "sm_90a" if target == "sm_90a" else "sm_100a"), backend)
    return program if isinstance(program, (Program, HostProgram)) else None


def built_of(specs: Mapping[str, Spec], name: str) -> Built | None:
    """The program that a name (Subject.name) is about, on its case. None if its backend builds another by now."""
    backend, target, case_id, text = name.split()
    spec = specs[case_id.partition(":")[0]]
    program = program_of(backend, target, case := spec.parse_case(case_id))
    return Built(spec, case, program) if program is not None and program_id(program.ptx) == text else None


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
    return plan.shard.of(chosen)


def drawn(every: Sequence[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """Draws `count` of the mutants (None: all): one of each class in turn, within a class by the hash of seed and
    id."""
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
    subject: Subject,
    mutant: Mutant,
    schedules: Sequence[str] = SCHEDULES,
    *,
    ask_assemblers: bool = True,
    few_ctas: bool = True,
    argued: Argued | None = None,
    excused_seconds: float = EXCUSED_SECONDS,
) -> Outcome:
    """Runs a mutant on the cases of its program that execute its line until a check kills it.

    A mutant with the same machine code (if assemblers are asked), or one that is `argued` equivalent, is excused after
    its first turns. It takes the further ones that the unchanged program runs in `excused_seconds`, and dies if one
    kills it: some arguments were wrong, and such turns showed it. `few_ctas`: whether it runs on few CTAs, too.
    """
    begun, runs = time.process_time() - subject.spent, 0
    outcome = lived(subject, mutant)
    for turns in _turns(subject, mutant, schedules, few_ctas=few_ctas):
        taken = _first_of(turns, excused_seconds) if outcome.excused else turns
        for turn in taken:
            look = _found_by if turn.collects else killed_by
            check, sentence = look(turn.subject, turn.built, mutant, turn.schedule)
            runs += 1
            if check:
                spent = round(time.process_time() - subject.spent - begun, 2)
                killed = replace(outcome, check=check, case=turn.built.case.id, schedule=turn.name, runs=runs)
                return replace(killed, sentence=sentence[:160], all_turns=None, seconds=spent)
        outcome = replace(outcome, all_turns=len(taken) == len(turns))
        if outcome.reached is None and mutant.line:
            asked = [subject, *(subject.few.values() if few_ctas else ())]
            told = (one.collection(built, schedules[0]) for one in asked for built in one.telling(schedules[0]))
            outcome = replace(outcome, reached=any(mutant.line in one.lines for one in told))
        excused = argued is not None and argued(outcome)
        if outcome.same_code is None and mutant.launch is None and ask_assemblers and not excused:
            outcome = replace(outcome, same_code=_same_code(subject, mutant))
        outcome = replace(outcome, excused=excused or outcome.same_code is True)
    reached = None if outcome.same_code else outcome.reached
    return replace(outcome, reached=reached, runs=runs, seconds=round(time.process_time() - subject.spent - begun, 2))


def lived(subject: Subject, mutant: Mutant) -> Outcome:
    """The outcome of a mutant that no check has killed."""
    short = (_short(mutant.before), _short(mutant.after))
    return Outcome(mutant.id, subject.name, mutant.kind, mutant.line, *short)


def lost(subject: Subject, mutant: Mutant, sentence: str) -> Outcome:
    """The outcome of a mutant that took its process with it; `sentence` says how."""
    return replace(lived(subject, mutant), check=CRASHED, case="unknown", schedule="unknown", sentence=sentence)


def in_clusters(program: Program | HostProgram) -> bool:
    """Whether the text of `program` tells its CTA's place in a cluster, or meets the others. A CTA alone never comes
    late."""
    return _IN_CLUSTERS.search(program.ptx) is not None


@dataclass(frozen=True, slots=True)
class _Turn:
    """One run of a mutant. `name`: its schedule in an outcome. `collects`: whether findings are collected."""

    name: str
    subject: Subject
    built: Built
    schedule: str
    collects: bool = False

    @property
    def seconds(self) -> float:
        """Processor time of the unchanged program."""
        own = self.subject.collection if self.collects else self.subject.baseline
        return own(self.built, self.schedule).seconds


def _first_of(turns: Iterable[_Turn], seconds: float) -> list[_Turn]:
    """The turns by size, as many as the unchanged program runs in `seconds`. It does not run those behind."""
    taken: list[_Turn] = []
    for turn in sorted(turns, key=lambda turn: turn.built.size):
        seconds -= turn.seconds
        if seconds < 0:
            break
        taken.append(turn)
    return taken


def _turns(subject: Subject, mutant: Mutant, schedules: Sequence[str], *, few_ctas: bool) -> Iterator[list[_Turn]]:
    """The runs of a mutant: first those before an argument counts, then the further ones. Runs on few CTAs go by size:
    if only a long case executes a line on one CTA, it is shorter on three.

    Counts from a record where 905 mutants of synchronisation were killed: 780 in order, most of them on the cheapest
    case, 69 on few CTAs, where rings wrap (one of them only with each stage the first of a tile), 48 with findings
    collected, and 8 under the other schedules, which the largest case runs. Of the rest, 242 of 254 were killed in
    order; the others were guards, stores and an address. A wait without its loop is killed only by a schedule that lets
    it give up.
    """
    clustered = in_clusters(subject.built[0].program)
    first, *others = (one for one in schedules if clustered or not one.startswith("late_cta"))
    cases = subject.executing(mutant.line, first)
    judged = [_Turn(first, subject, built, first) for built in cases]
    late = [_Turn(schedule, subject, built, schedule) for schedule in others for built in cases[-1:]]
    few = [
        (f"{FEW_CTAS}:{count}", one, built)
        for count, one in (subject.few.items() if few_ctas else ())
        for built in one.executing(mutant.line, first)
    ]
    alike = [_Turn(*each, first) for each in few]
    each = {turn.name: turn for turn in reversed(alike)}
    near = sorted(each.values(), key=lambda turn: (turn.built.size, turn.name))
    rest = [turn for turn in alike if turn not in near]
    telling = [_Turn(COLLECTED, subject, built, first, True) for built in subject.telling(first) if built in cases]
    if mutant.kind not in SYNCHRONISATION:
        yield judged
        near = near if mutant.kind in ("guard", "predicate", "store", "address") else []
        rest = rest if mutant.kind == "store" else []
        yield [*near, *telling[-1:], *rest, *(late if mutant.kind in ("guard", "predicate") else ())]
        return
    told = [_Turn(*one, first, True) for one in few[:1]]
    yield [*judged[:1], *near, *telling[-1:], *told]
    lazy = [_Turn(*one, schedule) for one in few[:1] for schedule in others[:1]]
    largest, between = judged[1:][-1:], judged[1:-1]
    yield [*telling[:-1], *largest, *rest, *lazy, *late, *between]


def killed_by(subject: Subject, built: Built, mutant: Mutant, schedule: str) -> tuple[str, str]:
    """The check that kills a mutant on one case under one schedule, as a row is judged, and its sentence; or "", ""."""
    whole = subject.baseline(built, schedule)
    with _limited(whole) as steps, as_changed(whole.tape, built.program, mutant) as (program, executor):
        options = RunOptions(schedule=schedule, step_budget=steps)
        check, sentence, counters = verdict(built, program, options, executor)
    return (check, sentence) if check else _findings(counters, whole.counters)


@contextmanager
def _limited(whole: _Baseline) -> Iterator[int]:
    """Yields the step limit of a mutant; OverTime after too long. Both follow from the unchanged program's run."""
    limit = 20 + 50 * whole.seconds
    late = partial(OverTime, f"it ran for {limit:.0f} s, fifty times as long as the program itself")
    with seconds_at_most(limit, late):
        yield 10_000 + 4 * sum(count for name, count in whole.counters.items() if name.startswith("instructions_"))


def _found_by(subject: Subject, built: Built, mutant: Mutant, schedule: str) -> tuple[str, str]:
    """The first finding that the unchanged program does not have; it ends the run. Another end counts when the case is
    judged."""
    whole = subject.collection(built, schedule)
    findings = UntilNew(own=frozenset(one.site for one in whole.found))
    limited, changed = _limited(subject.baseline(built, schedule)), as_changed(whole.tape, built.program, mutant)
    with limited as steps, changed as (program, listening):
        options = RunOptions(schedule=schedule, step_budget=steps)
        try:
            found = collected(built, program, options, findings, listening)
        except Exception as error:
            return _ended_by(error)
    new = [one for one in found.found if findings.is_new(one)]
    return (f"rule:{new[0].rule}", str(new[0])) if new else ("", "")


@dataclass(slots=True)
class UntilNew(Findings):
    """Findings of a run that ends with the first one that the unchanged program does not have. `own`: sites of those it
    has."""

    own: frozenset[tuple[object, ...]] = frozenset()

    def is_new(self, fault: Fault) -> bool:
        """Whether it kills a mutant."""
        return fault.site not in self.own and fault.about.grade != "note"

    def add(self, fault: Fault, *, ends: bool) -> None:
        """Adds a fault, and raises it if it is new."""
        # A dataclass with slots is a new class, so super() without arguments fails on Python 3.11.
        Findings.add(self, fault, ends=ends)
        if not ends and self.is_new(fault):
            raise fault


@contextmanager
def as_changed(
    tape: Tape, program: Program | HostProgram, mutant: Mutant
) -> Iterator[tuple[Program | HostProgram, machine.VmExecutor]]:
    """Yields what runs for a mutant: `program`, with only the changed kernel run, or the whole mutant."""
    if (playing := player(tape, program, mutant)) is not None:
        yield program, playing
        return
    with parsed_nowhere():
        yield mutant.of(program), machine.VmExecutor()


def collected(
    built: Built,
    program: Program | HostProgram,
    options: RunOptions,
    findings: Findings | None = None,
    listening: machine.VmExecutor | None = None,
) -> Collection:
    """A run that continues after every finding that the machine can continue after, unless `findings` ends it."""
    listening = listening or machine.VmExecutor()
    listening.findings = found = Findings() if findings is None else findings
    ran = GuardedCase(built.spec, built.case, listening, built.expected.inputs).run(program, options)
    return Collection(tuple(found.by_site.values()), listening.lines_run, ran)


def _ended_by(error: Exception) -> tuple[str, str]:
    """The check for an exception, and its sentence."""
    return "timed_out" if isinstance(error, OverTime) else f"error:{type(error).__name__}", str(error)


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-70:]}"


def verdict(
    built: Built, program: Program | HostProgram, options: RunOptions, executor: Executor | None = None
) -> tuple[str, str, Mapping[str, int]]:
    """The judge's verdict: the failing check and its sentence, or two empty strings; and the counters of the run."""
    guarded = GuardedCase(built.spec, built.case, executor or load_executor("vm"), built.expected.inputs)
    try:
        ran = guarded.run(program, options)
    except Exception as error:
        return *_ended_by(error), {}
    return *judged(built, ran), ran.execution.counters


def judged(built: Built, ran: GuardedRun) -> tuple[str, str]:
    """The check that fails and its sentence, or two empty strings."""
    if ran.execution.violation:
        slug = re.match(r"\[([\w-]+)\]", ran.execution.violation)
        return f"rule:{slug[1]}" if slug else "refused", ran.execution.violation
    if damage := ran.guarded.arena.damage():
        return "guard", damage
    judgement = compared(built.spec, built.expected, ran.outputs)
    wrong = complaints(ran.guarded.arena, built.expected, judgement)
    if judgement.passed and not wrong:
        return "", ""
    return _check_of(judgement) if not judgement.passed else "unwritten", wrong or judgement.sentence


def _check_of(judgement: Judgement) -> str:
    """The first metric of a failed judgement that is over its tolerance, without the tensor's name."""
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
    for name in WORK:
        if counters.get(name, 0) > own.get(name, 0):
            return f"counter:{name}", f"{name}: {counters[name]}, and {own.get(name, 0)} in the program itself"
    return "", ""


def _same_code(subject: Subject, mutant: Mutant) -> bool | None:
    other = _code_of(mutant.of(subject.built[0].program))
    known = [name for name, digest in subject.code.items() if digest is not None and other.get(name) is not None]
    return all(subject.code[name] == other[name] for name in known) if known else None


def _code_of(program: Program | HostProgram) -> Mapping[str, str | None]:
    return {one.assembler: one.cubin_sha256 for one in assembled(program.ptx, program.target)}


@contextmanager
def parsed_nowhere() -> Iterator[None]:
    """Keeps thousands of texts that run once out of the cache of parsed modules."""
    before = machine.PARSED
    machine.PARSED = None
    try:
        yield
    finally:
        machine.PARSED = before


class Record(Journal[Outcome]):
    """A record of campaigns."""

    def __init__(self, *paths: Path) -> None:
        """`paths`: files of shards; the first is written to."""
        super().__init__(Outcome, *paths)

    def forget(self, program: str) -> None:
        """Drops the outcomes of a program's mutants, by the program's name."""
        self.leave_out({one.id for one in self.results if one.program == program})


def built_no_more(found: Iterable[Outcome]) -> list[str]:
    """Names of programs whose backend builds another text by now for the case of the name."""
    specs = load_specs(None)
    return [name for name in dict.fromkeys(one.program for one in found) if built_of(specs, name) is None]


Todo = Sequence[tuple[Subject, Mutant]]


class Examiner(Protocol):
    """Examines mutants. `unchanged`: processor time of their unchanged programs."""

    @property
    def unchanged(self) -> float: ...
    def __call__(self, todo: Todo) -> Iterator[Outcome]: ...


@dataclass(slots=True)
class Here:
    """Examines mutants in this process, in their order, and begins none after `seconds` of processor time.

    The other fields are as in `examine`.
    """

    schedules: Sequence[str] = SCHEDULES
    seconds: float | None = None
    argued: Argued | None = None
    excused_seconds: float = EXCUSED_SECONDS
    unchanged: float = 0.0

    def __call__(self, todo: Todo) -> Iterator[Outcome]:
        """Outcomes in the order of `todo`."""
        begun = time.process_time()
        for subject, mutant in todo:
            if self.seconds is not None and time.process_time() - begun > self.seconds:
                return
            before = subject.spent
            outcome = self.outcome(subject, mutant)
            self.unchanged += subject.spent - before
            yield outcome

    def outcome(self, subject: Subject, mutant: Mutant) -> Outcome:
        """What becomes of one mutant."""
        limit = self.excused_seconds
        return examine(subject, mutant, self.schedules, argued=self.argued, excused_seconds=limit)


def run(todo: Todo, record: Record, examined: Examiner, *, again: bool = False) -> Iterator[Outcome]:
    """Examines the part of `todo` that `record` lacks, and records it. `again`: all of it, whatever the record has."""
    for outcome in examined([pair for pair in todo if again or pair[1].id not in record.by_id]):
        known = record.by_id.get(outcome.id)
        kept = outcome if known is None else _with_answers_of(outcome, known)
        record.append(kept)
        yield kept


def _with_answers_of(outcome: Outcome, known: Outcome) -> Outcome:
    """An outcome with what was asked before: the rows of smoke, and an assembler that this host may lack."""
    same = known.same_code if outcome.same_code is None else outcome.same_code
    return replace(outcome, smoke=known.smoke, same_code=same, reached=None if same else outcome.reached)


DROPPED: Mapping[str, str] = {
    "sm_100a": "fmha:hd=64,t=64,s_k=800,inputs=large_logits",
    "sm_90a": "fmha:hd=64,t=4,s_k=300",
}
"""One case a target, of a raw-PTX kernel. Its key tiles wrap the ring of stages; large logits change the running
maximum, and so O's scale."""


def drops(target: str) -> list[Outcome]:
    """Removes each synchronising instruction from the program of DROPPED, one at a time, in the order of its text."""
    chosen = Selection(cases=(DROPPED[target],), backends=("ptx",), targets=(target,), executors=("vm",))
    (subject,) = subjects(chosen)
    dropped = (one for one in mutants(subject.built[0].program) if one.kind == "drop")
    # No assembler makes the same code of two texts that differ in an instruction for ordering.
    return [examine(subject, one, ask_assemblers=False) for one in dropped]
