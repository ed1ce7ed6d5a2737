"""`pytest -p conformance.forked_workers --forks 2`: tests run in processes that are forked once all are collected.

A worker of pytest-xdist is a fresh interpreter that imports and collects everything by itself. Forks share that, in
time and in memory, and the process that has collected runs no test, so that a fork that dies is replaced by another
that begins as clean. So is one that has grown too much. A worker takes the tests of one module at a time, so that what
they share is made once.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Final, NoReturn, cast

import pytest

from megamoe.runner.child import resident_mib, with_parent_dies
from megamoe.runner.process import manner_of_death

MOST_AT_A_TIME: Final = 64
"""Tests of one module that a worker takes at once: the last worker shall not have much to do when the others end."""
MAX_GROWTH_MIB: Final = 512
"""Resident memory that a worker may have more than at its fork, or it gives way to another after the tests it has."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--forks`."""
    group = parser.getgroup("megamoe")
    group.addoption("--forks", default="0", help="run tests in that many forks of this process; auto: one a core")


def pytest_configure(config: pytest.Config) -> None:
    """Takes over the loop where tests shall run in forks."""
    asked = str(config.getoption("--forks"))
    count = _cores() if asked == "auto" else int(asked) if asked.isdecimal() else -1
    if count < 0:
        raise pytest.UsageError(f"--forks is {asked!r}; it must be a number of processes, or auto")
    if count and not config.getoption("usepdb") and not config.getoption("collectonly"):
        config.pluginmanager.register(ForkedWorkers(count))


def _cores() -> int:
    """Those that this process may use, where the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(slots=True)
class Worker:
    """A fork. `doing`: the number of the test that it runs; `left`: those of tests that it was given for later."""

    pid: int
    pipe: Connection
    doing: int | None = None
    left: deque[int] = field(default_factory=deque[int])


class ForkedWorkers:
    """Hands out tests, and reports what became of them. `count`: of forks."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._workers: list[Worker] = []
        self._queue: deque[list[int]] = deque()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """In place of the loop of pytest."""
        if session.testsfailed or not session.items:
            return None
        # All make their folders in one.
        cast("Any", session.config)._tmp_path_factory.getbasetemp()
        self._queue.extend(pieces([item.nodeid.partition("::")[0] for item in session.items]))
        try:
            for _ in range(min(self._count, len(self._queue))):
                self._fork(session)
            while self._workers:
                heard = wait([worker.pipe for worker in self._workers])
                for worker in [worker for worker in self._workers if worker.pipe in heard]:
                    self._hear(session, worker)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
        finally:
            for worker in self._workers:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
        return True

    def _fork(self, session: pytest.Session) -> None:
        mine, its = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for pipe in (mine, *(worker.pipe for worker in self._workers)):
                pipe.close()
            session.config.pluginmanager.unregister(self)
            _become_worker(session, its)
        its.close()
        self._workers.append(Worker(pid, mine))

    def _hear(self, session: pytest.Session, worker: Worker) -> None:
        kind, told = _received(worker.pipe)
        hook = session.config.hook
        match kind:
            case "next":
                piece = self._queue.popleft() if self._queue else []
                worker.left.extend(piece)
                worker.pipe.send(piece)
            case "begin":
                worker.left.remove(told)
                worker.doing = told
            case "done":
                worker.doing = None
            case "report":
                report = hook.pytest_report_from_serializable(config=session.config, data=told)
                hook.pytest_runtest_logreport(report=report)
            case "warning":
                hook.pytest_warning_recorded.call_historic(kwargs=_warned(told))
            case _:
                self._bury(session, worker)

    def _bury(self, session: pytest.Session, worker: Worker) -> None:
        """Reports the test in which a worker has died, if any; another takes the tests that are left."""
        self._workers.remove(worker)
        worker.pipe.close()
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if worker.doing is not None:
            session.config.hook.pytest_runtest_logreport(report=death_of(session.items[worker.doing], status))
        elif status:
            raise pytest.UsageError(f"a worker of tests died {manner_of_death(status)} between two of them")
        if worker.left:
            self._queue.appendleft([*worker.left])
        if self._queue:
            self._fork(session)


def _received(pipe: Connection) -> tuple[str, Any]:
    """A message of a worker: its kind, and what it tells. It is "dead" where there is none any more."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return "dead", None


def _warned(told: Mapping[str, Any]) -> dict[str, object]:
    """The arguments of pytest_warning_recorded. The class of the warning need not exist here: its name does."""
    category = type(told["category"], (Warning,), {})
    message = warnings.WarningMessage(category(told["message"]), category, told["filename"], told["lineno"])
    return {"warning_message": message, **{name: told[name] for name in ("when", "nodeid", "location")}}


def pieces(modules: Sequence[str]) -> Iterator[list[int]]:
    """The numbers of tests that are handed out together. `modules`: that of each test."""
    for _, numbers in groupby(range(len(modules)), key=modules.__getitem__):
        of_module = [*numbers]
        for first in range(0, len(of_module), MOST_AT_A_TIME):
            yield of_module[first : first + MOST_AT_A_TIME]


def death_of(item: pytest.Item, status: int) -> pytest.TestReport:
    """The report of a test whose worker has ended with exit code `status`."""
    sentence = f"the worker of {item.nodeid} died {manner_of_death(status)}"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", sentence, "call")


# The worker's side


def _become_worker(session: pytest.Session, pipe: Connection) -> NoReturn:
    """Runs what `pipe` asks for. Never returns."""
    status = 1
    try:
        with_parent_dies()
        _stand_apart(session.config)
        teller = _Teller(session.config, pipe)
        session.config.pluginmanager.register(teller)
        teller.begun = True
        _run(session, pipe)
        atexit._run_exitfuncs()
        status = 0
    except KeyboardInterrupt:
        status = 2
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def _stand_apart(config: pytest.Config) -> None:
    """Files and streams of its own: those that were open at the fork have one position for all workers."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    reporter._tw._file = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    if capture.is_globally_capturing():
        capture.stop_global_capturing()
        capture.start_global_capturing()
    temporary: Any = cast("Any", config)._tmp_path_factory
    temporary._basetemp = temporary.mktemp("worker")


def _run(session: pytest.Session, pipe: Connection) -> None:
    given, at_first = deque[int](), resident_mib()

    def take() -> int | None:
        if not given and resident_mib() < at_first + MAX_GROWTH_MIB:
            pipe.send(("next", None))
            given.extend(pipe.recv())
        return given.popleft() if given else None

    number = take()
    while number is not None:
        following = take()
        pipe.send(("begin", number))
        item, after = session.items[number], None if following is None else session.items[following]
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        pipe.send(("done", None))
        number = following


@dataclass(eq=False, slots=True)
class _Teller:
    """Passes on what is reported in a worker. `begun`: pytest tells a new plugin of all warnings before it, too."""

    config: pytest.Config
    pipe: Connection
    begun: bool = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See pytest."""
        told = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.pipe.send(("report", told))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        """See pytest. A warning may hold what does not travel; its text does."""
        told = {
            "message": str(warning_message.message),
            "category": warning_message.category.__name__,
            "filename": warning_message.filename,
            "lineno": warning_message.lineno,
            "when": when,
            "nodeid": nodeid,
            "location": location,
        }
        if self.begun:
            self.pipe.send(("warning", told))
