"""Examines mutants in several processes, which read the unchanged programs from files.

The files also carry a campaign to a host that cannot build the programs: `--pack FOLDER` here, `--packed FOLDER` there.
A process keeps to one program as long as that has mutants left, since it runs the unchanged program first.
"""

from __future__ import annotations

import lzma
import pickle
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from pebble import ProcessExpired, ProcessPool

from conformance.kernels.mutants.campaign import EXCUSED_SECONDS, SCHEDULES, Built, Here, Outcome, Subject, Todo, lost
from conformance.kernels.mutants.mutant import Mutant
from conformance.kernels.mutants.table import argued
from megamoe.contract import HostProgram, Program
from megamoe.judge.worker import end_pool, worker_pool
from megamoe.runner.forks import interrupts_held_back
from megamoe.spec.load import load_specs

PORTION = 8
"""Mutants that a process gets at once. An end of a call, or of a process, costs at most so many."""
WORTH = 16
"""Mutants for which another process repays its start, and its runs of the unchanged program."""
_SUFFIX = ".program"
Sized = tuple[str, Program | HostProgram]
"""The id of a case and its program."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A Subject in plain data. `few`: its programs on few CTAs, by their number; None to build them where they run."""

    backend: str
    target: str
    op: str
    built: Sequence[Sized]
    few: Mapping[int, Sequence[Sized]] | None = None

    @classmethod
    def of(cls, subject: Subject, *, few: bool) -> Packed:
        """`few`: whether the programs on few CTAs are built now."""
        text = subject.built[0].program.ptx

        def sized(some: Sequence[Built]) -> list[Sized]:
            # One copy of the text: pickle stores what is the same object once.
            return [(one.case.id, replace(one.program, ptx=text)) for one in some]

        fewer = {count: sized(one.built) for count, one in subject.few.items()} if few else None
        return cls(subject.backend, subject.target, subject.op, sized(subject.built), fewer)

    def subject(self) -> Subject:
        """The Subject that was packed."""
        spec = load_specs(None)[self.op]

        def of(some: Sequence[Sized], few: Mapping[int, Subject] | None) -> Subject:
            built = [Built(spec, spec.parse_case(name), program) for name, program in some]
            return Subject(self.backend, self.target, self.op, built, _few=few)

        few = None if self.few is None else {count: of(some, None) for count, some in self.few.items()}
        return of(self.built, few)

    def write(self, path: Path) -> None:
        """Writes it as one file."""
        path.write_bytes(lzma.compress(pickle.dumps(self), preset=1))


def pack(programs: Sequence[Subject], folder: Path) -> Iterator[Path]:
    """Writes each program, with all that a campaign builds of it, to a file in `folder`. ValueError if one is there."""
    folder.mkdir(parents=True, exist_ok=True)
    if there := sorted(folder.glob(f"*{_SUFFIX}")):
        raise ValueError(f"{there[0]} is of an earlier call; name another folder")
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


@lru_cache(maxsize=1)
def _read(path: Path) -> Subject:
    """Cached, so that portions of one program share the runs of the unchanged one."""
    found: Packed = pickle.loads(lzma.decompress(path.read_bytes()))
    return found.subject()


@dataclass(frozen=True, slots=True)
class _Examined:
    """What a process has done: outcomes, its processor time, and that of the unchanged program in it."""

    outcomes: Sequence[Outcome]
    seconds: float
    unchanged: float


def _examine(path: Path, some: Sequence[Mutant], how: Here) -> _Examined:
    begun, subject = time.process_time(), _read(path)
    outcomes = list(how([(subject, one) for one in some]))
    return _Examined(outcomes, time.process_time() - begun, how.unchanged)


@dataclass(slots=True)
class _Process:
    """A process, the program it keeps to, and the mutants that it examines now."""

    pool: ProcessPool
    path: Path | None = None
    some: Sequence[Mutant] = ()


@dataclass(slots=True)
class Processes:
    """Examines mutants in `jobs` processes, and begins none after `seconds` of their processor time.

    A mutant whose process ends is killed by the check `crashed`. What excuses a survivor are the reasons of
    survivors.yaml.
    """

    jobs: int
    schedules: Sequence[str] = SCHEDULES
    seconds: float | None = None
    excused_seconds: float = EXCUSED_SECONDS
    unchanged: float = 0.0
    _spent: float = 0.0
    _left: dict[Path, list[list[Mutant]]] = field(default_factory=dict[Path, list[list[Mutant]]])
    _subjects: dict[Path, Subject] = field(default_factory=dict[Path, Subject])

    def __call__(self, todo: Todo) -> Iterator[Outcome]:
        """Outcomes in the order in which they come."""
        processes = list[_Process]()
        with TemporaryDirectory(prefix="mutants-") as folder:
            self._divide(todo, Path(folder))
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

    def _conduct(self, processes: list[_Process]) -> Iterator[Outcome]:
        running: dict[Future[_Examined], _Process] = {}
        idle = list(processes)
        while True:
            while idle and (self.seconds is None or self._spent < self.seconds):
                one = idle.pop()
                one.path = self._program_for(one, Counter(each.path for each in running.values()))
                if one.path is None:
                    continue
                one.some = self._left[one.path].pop(0)
                how = Here(self.schedules, None, argued, self.excused_seconds)
                with interrupts_held_back():
                    running[one.pool.schedule(_examine, args=(one.path, one.some, how))] = one
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                one = running.pop(future)
                yield from self._taken(one, future)
                idle.append(one)

    def _program_for(self, one: _Process, users: Counter[Path | None]) -> Path | None:
        """The program that the process is at; else the one with the most work for each of its processes."""
        if one.path is not None and self._left[one.path]:
            return one.path
        left = {path: len(portions) / (1 + users[path]) ** 2 for path, portions in self._left.items() if portions}
        return max(left, key=lambda path: left[path]) if left else None

    def _taken(self, one: _Process, future: Future[_Examined]) -> Sequence[Outcome]:
        """The outcomes of a portion. If its process has ended, its mutants run one by one, and one alone has died."""
        assert one.path is not None, "a portion has a program"
        try:
            found = future.result()
        except ProcessExpired as gone:
            end_pool(one.pool)
            one.pool = _pool()
            if len(one.some) == 1:
                return [
                    lost(self._subjects[one.path], one.some[0], f"its process ended with exit code {gone.exitcode}")
                ]
            self._left[one.path][:0] = [[each] for each in one.some]
            return ()
        self._spent += found.seconds
        self.unchanged += found.unchanged
        return found.outcomes


def _pool() -> ProcessPool:
    return worker_pool(1, __name__)
