"""Examines mutants in several processes, which read the unchanged programs from files.

The files also carry a campaign to a host that cannot build the programs: `--pack FOLDER` here, `--packed FOLDER` there.
A process keeps to one program as long as that has mutants left, since it runs the unchanged program first.
"""

from __future__ import annotations

import lzma
import pickle
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from pebble import ProcessExpired, ProcessPool

from conformance.kernels.mutants.campaign import Built, Here, Outcome, Subject, Todo, lost
from conformance.kernels.mutants.mutant import Mutant
from megamoe.contract import HostProgram, Program
from megamoe.contract.scratch import scratch_folder, unfinished
from megamoe.judge.worker import end_pool, had_no_turn, worker_pool
from megamoe.runner.forks import interrupts_held_back
from megamoe.spec.load import load_specs

PORTION, PORTION_SECONDS = 8, 20.0
"""Mutants that a process gets at once, and the processor time after which it begins none of them. What it has not begun
goes back. An end of a call costs the outcomes of at most so much."""
MAX_UNBORN = 3
"""Processes in a row that end before they take a portion, after which a campaign gives up."""
WORTH = 16
"""Mutants for which another process repays its start, and its runs of the unchanged program."""
_SUFFIX = ".program"
_PROFILE = "profile"
"""The file of a pack with the name of its profile."""
CaseProgram = tuple[str, Program | HostProgram]
"""The id of a case and its program."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A Subject in plain data. `few`: its programs on few CTAs, by their number; None to build them where they run."""

    backend: str
    target: str
    op: str
    built: Sequence[CaseProgram]
    few: Mapping[int, Sequence[CaseProgram]] | None = None

    @classmethod
    def of(cls, subject: Subject, *, few: bool) -> Packed:
        """`few`: whether the programs on few CTAs are built now."""
        text = subject.built[0].program.ptx

        def sized(some: Sequence[Built]) -> list[CaseProgram]:
            # One copy of the text: pickle stores what is the same object once.
            return [(one.case.id, replace(one.program, ptx=text)) for one in some]

        fewer = {count: sized(one.built) for count, one in subject.few.items()} if few else None
        return cls(subject.backend, subject.target, subject.op, sized(subject.built), fewer)

    def subject(self) -> Subject:
        """The Subject that was packed."""
        spec = load_specs(None)[self.op]

        def of(some: Sequence[CaseProgram], few: Mapping[int, Subject] | None) -> Subject:
            built = [Built(spec, spec.parse_case(name), program) for name, program in some]
            return Subject(self.backend, self.target, self.op, built, _few=few)

        few = None if self.few is None else {count: of(some, None) for count, some in self.few.items()}
        return of(self.built, few)

    def write(self, path: Path) -> None:
        """Writes it as one file, whole or not at all."""
        with unfinished(path.parent) as part:
            part.write_bytes(lzma.compress(pickle.dumps(self), preset=1))
            part.rename(path)


def pack(programs: Sequence[Subject], folder: Path, profile: str = "") -> Iterator[Path]:
    """Writes each program, with all that a campaign builds of it, to a file in `folder`. ValueError if one is there.

    `profile`: the profile of which each program has all rows, if there is one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if there := sorted(folder.glob(f"*{_SUFFIX}")):
        raise ValueError(f"{there[0]} is of an earlier call; name another folder")
    (folder / _PROFILE).write_text(profile, "utf-8")
    for at, one in enumerate(programs, 1):
        path = folder / f"{at:04}{_SUFFIX}"
        Packed.of(one, few=True).write(path)
        yield path


def unpacked(folder: Path) -> list[Subject]:
    """The programs that `pack` has written, in its order. ValueError if there is none.

    The files are pickles: unpack only what you have packed.
    """
    paths = sorted(folder.glob(f"*{_SUFFIX}"))
    if not paths:
        raise ValueError(f"{folder} has no programs; --pack writes them")
    return [_read(path) for path in paths]


def profile_of(folder: Path) -> str:
    """The profile of which the programs of a pack have all rows; "" if that is unknown."""
    path = folder / _PROFILE
    return path.read_text("utf-8") if path.exists() else ""


@lru_cache(maxsize=1)
def _read(path: Path) -> Subject:
    """Cached, so that portions of one program share the runs of the unchanged one."""
    try:
        found = pickle.loads(lzma.decompress(path.read_bytes()))
    except (lzma.LZMAError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError) as error:
        raise ValueError(f"{path} is no program that --pack has written from this tree: {error}") from None
    if not isinstance(found, Packed):
        raise ValueError(f"{path} holds a {type(found).__name__}; --pack writes programs")
    return found.subject()


@dataclass(frozen=True, slots=True)
class _Examined:
    """What a process has done: outcomes of the first mutants of its portion, its processor time, and that of the
    unchanged program in it. `error`: why it does not go on, "" if it may."""

    outcomes: Sequence[Outcome]
    seconds: float
    unchanged: float
    error: str = ""


def _examine(path: Path, some: Sequence[Mutant], how: Here) -> _Examined:
    begun, outcomes, error = time.process_time(), list[Outcome](), ""
    try:
        subject = _read(path)
        outcomes.extend(how([(subject, one) for one in some]))
    except ValueError as wrong:
        error = str(wrong)
    return _Examined(outcomes, time.process_time() - begun, how.unchanged, error)


def _run_unchanged(path: Path, schedule: str) -> None:
    subject = _read(path)
    subject.baseline(subject.built[0], schedule)


@dataclass(slots=True)
class _Process:
    """A process, the program it keeps to, and the mutants that it examines now."""

    pool: ProcessPool
    path: Path | None = None
    some: Sequence[Mutant] = ()


@dataclass(slots=True)
class Processes:
    """Examines mutants in `jobs` processes as `how` does in one; its `seconds` are the sum of their processor time.

    A mutant that ends its process twice is killed by the check CRASHED, unless the unchanged program does so too.
    ValueError if an unchanged program does not pass, or if the system ends processes.
    """

    jobs: int
    how: Here
    unchanged: float = 0.0
    _spent: float = 0.0
    _unborn: int = 0
    _ended: Counter[str] = field(default_factory=Counter[str])
    _left: dict[Path, list[list[Mutant]]] = field(default_factory=dict[Path, list[list[Mutant]]])
    _subjects: dict[Path, Subject] = field(default_factory=dict[Path, Subject])

    def __call__(self, todo: Todo) -> Iterator[Outcome]:
        """Outcomes in the order in which they come."""
        if not todo:
            return
        processes = list[_Process]()
        with scratch_folder("mutants") as folder:
            self._divide(todo, folder)
            try:
                processes += [_Process(_pool()) for _ in range(min(self.jobs, max(1, len(todo) // WORTH)))]
                yield from self._conduct(processes)
            finally:
                for one in processes:
                    end_pool(one.pool)

    def _divide(self, todo: Todo, folder: Path) -> None:
        by_subject: dict[int, Path] = {}
        for subject, mutant in todo:
            path = by_subject.get(id(subject))
            if path is None:
                path = by_subject[id(subject)] = folder / f"{len(by_subject):04}{_SUFFIX}"
                Packed.of(subject, few=subject.few_are_known).write(path)
                self._subjects[path], self._left[path] = subject, []
            portions = self._left[path]
            if not portions or len(portions[-1]) == PORTION:
                portions.append([])
            portions[-1].append(mutant)

    def _conduct(self, processes: Sequence[_Process]) -> Iterator[Outcome]:
        running: dict[Future[_Examined], _Process] = {}
        while True:
            for one in processes:
                if one not in running.values() and self._left_of(PORTION_SECONDS) > 0:
                    self._give(one, running)
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield from self._taken(running.pop(future), future)

    def _give(self, one: _Process, running: dict[Future[_Examined], _Process]) -> None:
        """Gives a process a portion, if there is one."""
        one.path = self._program_for(one, Counter(each.path for each in running.values()))
        if one.path is None:
            return
        one.some = self._left[one.path].pop(0)
        how = replace(self.how, seconds=self._left_of(PORTION_SECONDS))
        with interrupts_held_back():
            running[one.pool.schedule(_examine, args=(one.path, one.some, how))] = one

    def _left_of(self, seconds: float) -> float:
        """Of `seconds` of processor time, what the call still has."""
        return seconds if self.how.seconds is None else min(seconds, self.how.seconds - self._spent)

    def _program_for(self, one: _Process, users: Counter[Path | None]) -> Path | None:
        """The program that the process is at; else the one with the most work for each of its processes."""
        if one.path is not None and self._left[one.path]:
            return one.path
        left = {path: len(portions) / (1 + users[path]) ** 2 for path, portions in self._left.items() if portions}
        return max(left, key=lambda path: left[path]) if left else None

    def _taken(self, one: _Process, future: Future[_Examined]) -> Iterator[Outcome]:
        """The outcomes of a portion; what is left of it goes back. If its process has ended, its mutants run alone."""
        assert one.path is not None, "a portion has a program"
        try:
            # Not result(): it would raise a SystemExit of the process here.
            error = future.exception()
        except CancelledError as cancelled:
            error = cancelled
        if error is not None:
            yield from self._after_end(one, one.path, error)
            return
        found, self._unborn = future.result(), 0
        self._spent += found.seconds
        self.unchanged += found.unchanged
        yield from found.outcomes
        if found.error:
            raise ValueError(found.error)
        if rest := one.some[len(found.outcomes) :]:
            self._left[one.path].insert(0, list(rest))

    def _after_end(self, one: _Process, path: Path, error: BaseException) -> Iterator[Outcome]:
        end_pool(one.pool)
        one.pool = _pool()
        self._left[path][:0] = [[each] for each in one.some]
        if had_no_turn(error):
            self._unborn += 1
            if self._unborn == MAX_UNBORN:
                raise ValueError(f"{MAX_UNBORN} processes in a row ended before they began: {error!r}")
            return
        if not isinstance(error, ProcessExpired | SystemExit):
            raise error
        if len(one.some) > 1:
            return
        (mutant,), name = one.some, self._subjects[path].name
        self._ended[mutant.id] += 1
        if self._ended[mutant.id] < 2:
            return
        code = error.exitcode if isinstance(error, ProcessExpired) else error.code
        if code == -signal.SIGKILL:
            raise ValueError(
                f"the system killed the process of {mutant.id} twice; is memory too small for {self.jobs} jobs?"
            )
        ended = one.pool.schedule(_run_unchanged, args=(path, self.how.schedules[0])).exception()
        if ended is not None:
            raise ValueError(f"{name} itself does not end well: {ended!r}")
        self._left[path].pop(0)
        yield lost(self._subjects[path], mutant, f"its process ended with exit code {code}")


def _pool() -> ProcessPool:
    return worker_pool(1, __name__)
