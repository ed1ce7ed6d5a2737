"""Starts runners, asks them, and ends them with everything that they started.

A keeper stands in between: a small process that forks runners, adopts their orphans, passes on a limited amount of
their output, and reports how they ended. It has never run other people's code, so each runner starts clean, within 0.02
s. A worker of the judge forks its keeper before it imports anything of ours (`keeper_of_worker`). Any other process
starts a keeper as a fresh interpreter, except a command whose runners need torch: its keeper is forked from the
workers' fork server.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn

from megamoe.contract import DeviceLostError, UnsupportedError
from megamoe.contract.scratch import scratch_folder
from megamoe.runner.child import (
    UNCONFINED,
    Confinement,
    Start,
    adopt_orphans,
    become_runner,
    collect_seldom,
    keep_only,
)
from megamoe.runner.wire import MAX_SENTENCE, Frame, Json, SilenceError, WireError, receive, send

MAX_PRINTED: Final = 64 << 10
"""Bytes of a runner's output that are passed on. The rest is dropped."""
MAX_LEFT: Final = 10_000
"""Maximum number of leftover processes that a keeper ends after one runner."""
PRELOADED: Final = ("torch", "megamoe.records.lines", "megamoe.spec.ours", "megamoe.runner.requests")
"""Modules that processes are forked with, because nearly all import them. None has run a kernel or knows an output."""
_END_S: Final = 10.0
_LAST_WORDS_S: Final = 2.0
_LEAVE_S: Final = 0.2
"""Host seconds between the end of a runner's pipe and the end of the runner, if it ends by itself."""
_ASK: Final = 1 << 63
"""Flag in a runner's number that asks where the runner is. Without it, the keeper ends the runner."""
_POLL_S: Final = 0.1
_ENDED_FOR: Final = {
    1 << 16: "it held more memory than its share",
    (1 << 16) + 1: "it had more processes at a time than its share",
    (1 << 16) + 2: "it wrote more to files than its share",
}
"""Why a keeper ended a runner, by the exit code that it reports. No process exits with such a code."""
_GREEDY, _PROLIFIC, _VERBOSE = _ENDED_FOR


class RunnerDiedError(Exception):
    """The runner ended without an answer, or was ended because it gave none in time (`late`).

    The text says whose process it was and how it ended. `whereabouts`: where a late program was, or "".
    """

    def __init__(self, sentence: str, late: bool = False, whereabouts: str = "") -> None:
        super().__init__(sentence)
        self.late, self.whereabouts = late, whereabouts

    @property
    def hung(self) -> str:
        """The clause for a late row, to follow its time limit."""
        return f"it hung; when its time was up: {self.whereabouts}" if self.whereabouts else f"it hung: {self}"


class RunnerFaultError(Exception):
    """The requested function raised an exception in the runner. The text is its sentence; `trace` is the runner's
    traceback, "" for none."""

    def __init__(self, sentence: str, trace: str = "") -> None:
        super().__init__(sentence)
        self.trace = trace


def manner_of_death(exit_code: int | None) -> str:
    """How a process ended, in words that follow "died"."""
    if exit_code is None:
        return "without an exit status"
    if exit_code in _ENDED_FOR:
        return f"because {_ENDED_FOR[exit_code]}, and was ended"
    if exit_code >= 0:
        return f"with exit status {exit_code}"
    try:
        return f"of {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"of signal {-exit_code}"


# The keeper's side


@dataclass(slots=True)
class _Kept:
    """A runner as its keeper sees it. `life`: receives its exit code. `watch`: readable once it has ended; None if
    unsupported.

    `confinement`: what it may do. `ended_for`: the code for which the keeper ended it, else 0. `asked`: whether the
    asker had it ended.
    """

    pid: int
    life: int
    output: int
    watch: int | None
    scratch: ExitStack
    confinement: Confinement
    printed: int = 0
    ended_for: int = 0
    asked: bool = False


def keep(control: socket.socket, preload: Sequence[str] = ()) -> NoReturn:
    """Keeps runners for the process at the other end of `control`, and ends with it. They start with `preload`
    imported."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        adopt_orphans()
        keep_only([control.fileno()])
        collect_seldom()
        for name in preload:
            __import__(name)
        _keep(control)
    except BaseException as error:
        os.write(2, f"megamoe: a keeper of runners ends: {error!r}\n".encode())
    finally:
        os._exit(0)


def _keep(control: socket.socket) -> None:
    kept: dict[int, _Kept] = {}
    looked = 0.0
    try:
        while True:
            outputs = {one.output: one for one in kept.values() if one.output >= 0}
            watched = [control.fileno(), *outputs, *(one.watch for one in kept.values() if one.watch is not None)]
            blind = any(one.watch is None or one.confinement.watched for one in kept.values())
            ready, _, _ = select.select(watched, [], [], _POLL_S if blind else None)
            for descriptor in ready:
                if descriptor in outputs:
                    _pass_on(outputs[descriptor])
            if time.monotonic() >= looked + _POLL_S:
                looked = time.monotonic()
                _end_the_excessive(kept)
            for number, one in list(kept.items()):
                if one.watch is None or one.watch in ready:
                    _look_after(kept, number, one)
            if control.fileno() in ready:
                _obey(control, kept)
    except (SilenceError, ConnectionResetError, BrokenPipeError):
        pass
    finally:
        for number, one in list(kept.items()):
            _kill(one.pid)
            _bury(kept, number, one, os.waitpid(one.pid, 0)[1])


def _obey(control: socket.socket, kept: dict[int, _Kept]) -> None:
    request, descriptors, _, _ = socket.recv_fds(control, 8, 2)
    if not request:
        raise SilenceError(late=False)
    number = int.from_bytes(request, "little")
    if len(descriptors) == 2:
        kept[number] = _start(control, *descriptors)
    elif number & _ASK and number & ~_ASK in kept:
        os.kill(kept[number & ~_ASK].pid, signal.SIGUSR1)
    elif number in kept:
        _look_after(kept, number, kept[number])
        if number in kept:
            kept[number].asked = True
            _kill(kept[number].pid)


def _start(control: socket.socket, answers: int, life: int) -> _Kept:
    with socket.socket(fileno=answers) as pipe:
        start = Start.of(receive(pipe).told)
        scratch = ExitStack()
        start.environment["TMPDIR"] = str(scratch.enter_context(scratch_folder("runner")))
        output, prints = os.pipe()
        pid = os.fork()
        if pid == 0:
            become_runner(pipe, prints, start)
        os.close(prints)
    watch = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    return _Kept(pid, life, output, watch, scratch, start.confinement)


def _end_the_excessive(kept: dict[int, _Kept]) -> None:
    """Ends a runner that exceeds a limit. The next check follows once its leftovers have ended too.

    The keeper has adopted the processes that runners detached. It cannot tell whose they were, so it counts them
    towards the runner that was started last.
    """
    watched = [one for one in kept.values() if one.confinement.watched]
    if not watched or any(one.ended_for for one in kept.values()):
        return
    runners = {one.pid for one in kept.values()}
    families = [_family(one.pid, runners) for one in watched]
    families[-1] += _family(os.getpid(), runners)[1:]
    for one, family in zip(watched, families, strict=True):
        one.ended_for = _excess(one.confinement, family)
        if one.ended_for:
            _kill(one.pid)
            return


def _kill(pid: int) -> None:
    """Ends a runner and its process group, if it already leads one. What left the group is adopted later."""
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _excess(may: Confinement, family: list[int]) -> int:
    """The code of the limit that a runner's processes exceed, 0 if none."""
    if may.processes and len(family) > may.processes:
        return _PROLIFIC
    if may.resident and sum(map(_held, family)) > may.resident:
        return _GREEDY
    return _VERBOSE if may.written and sum(map(_written, family)) > may.written else 0


def _family(pid: int, without: set[int]) -> list[int]:
    """A process and its descendants, at most MAX_LEFT, except `without` and their descendants."""
    found = [pid]
    for one in found:
        try:
            # A process is listed under the thread that forked it.
            lists = [(task / "children").read_text() for task in Path(f"/proc/{one}/task").iterdir()]
            children = [int(child) for text in lists for child in text.split()]
        except (OSError, ValueError):
            continue
        found += [child for child in children if child not in without][: max(0, MAX_LEFT - len(found))]
    return found


def _held(pid: int) -> int:
    """Bytes of unshared memory that a process holds; 0 if it has ended."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    except (OSError, ValueError):
        return 0
    return max(0, resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _written(pid: int) -> int:
    """Bytes written by a process and by the children that it has waited for, including to in-memory files and pipes."""
    try:
        told = dict(line.split(b": ") for line in Path(f"/proc/{pid}/io").read_bytes().splitlines())
        return max(int(told[b"wchar"]), int(told[b"write_bytes"]) - int(told[b"cancelled_write_bytes"]))
    except (OSError, ValueError, KeyError):
        return 0


def _pass_on(one: _Kept) -> None:
    printed = os.read(one.output, 1 << 16)
    if not printed:
        os.close(one.output)
        one.output = -1
        return
    shown = printed[: max(0, MAX_PRINTED - one.printed)]
    enough = one.printed <= MAX_PRINTED < one.printed + len(printed)
    one.printed += len(printed)
    if shown:
        # Escape control characters: runners could use them to control the terminal.
        text = shown.decode("utf-8", "replace")
        os.write(2, "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text).encode())
    if enough:
        os.write(2, f"\nmegamoe: a kernel's process prints more than {MAX_PRINTED} bytes: dropped\n".encode())


def _look_after(kept: dict[int, _Kept], number: int, one: _Kept) -> None:
    ended, status = os.waitpid(one.pid, os.WNOHANG)
    if ended:
        _bury(kept, number, one, status)


def _bury(kept: dict[int, _Kept], number: int, one: _Kept, status: int) -> None:
    """Ends a runner's leftovers, passes on its last output, and reports how it ended, unless the asker had it ended."""
    del kept[number]
    _end_the_left({other.pid for other in kept.values()})
    while one.output >= 0 and select.select([one.output], [], [], 0)[0]:
        _pass_on(one)
    one.scratch.close()
    code = one.ended_for or os.waitstatus_to_exitcode(status)
    if not (one.asked and code == -signal.SIGKILL):
        with suppress(OSError):
            os.write(one.life, code.to_bytes(4, "little", signed=True))
    for descriptor in (one.life, one.output, one.watch):
        if descriptor is not None and descriptor >= 0:
            os.close(descriptor)


def _end_the_left(runners: set[int]) -> None:
    """Ends every child of this process except `runners`. Processes that runners started become children when
    orphaned."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    for _ in range(MAX_LEFT):
        try:
            left = {int(pid) for pid in path.read_text().split()} - runners
        except OSError:
            return
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except OSError:
                continue


# The asker's side


class Nursery:
    """The connection to one keeper. Its runners end with it."""

    def __init__(self, control: socket.socket, wait: Callable[[float], object] | None = None) -> None:
        """`wait`: waits at most that many seconds for the keeper to end, if it is a child of this process."""
        self._control, self._wait, self._count = control, wait, 0

    def runner(self, what: str, confinement: Confinement = UNCONFINED) -> Runner:
        """Starts a fresh runner. `what`: its purpose, for messages."""
        mine, its = socket.socketpair()
        life, end = os.pipe()
        self._count += 1
        start = Start(confinement, tuple(sys.path), os.getcwd(), dict(os.environ))
        with its:
            try:
                socket.send_fds(self._control, [self._count.to_bytes(8, "little")], [its.fileno(), end])
                send(mine, Frame(start.told()))
            except OSError as error:
                mine.close()
                os.close(life)
                raise RunnerDiedError(f"the process of {what} could not be started: its keeper has ended") from error
            finally:
                os.close(end)
        return Runner(self, self._count, mine, life, what)

    def end(self, number: int) -> None:
        """Ends the runner with that number, unless it has ended."""
        try:
            self._control.sendall(number.to_bytes(8, "little"))
        except OSError:
            return

    def ask_where(self, number: int) -> None:
        """Makes the runner with that number report where it is, apart from its answers."""
        self.end(number | _ASK)

    def close(self) -> None:
        """Ends the keeper and all its runners."""
        self._control.close()
        if self._wait is not None:
            self._wait(_END_S)


@dataclass(slots=True)
class Runner:
    """One process that runs other people's code. `ask` it, and `end` it."""

    nursery: Nursery
    number: int
    pipe: socket.socket
    life: int
    what: str
    ended: bool = field(default=False)

    def ask(
        self, call: str, told: Json, limit_s: float, parts: Sequence[bytes] = (), memory: int | None = None
    ) -> Frame:
        """What the function `call` ("package.module:name") of megamoe returns in the runner, within `limit_s` seconds.

        Raises UnsupportedError and DeviceLostError as the runner did, RunnerFaultError for any other exception. Raises
        RunnerDiedError if there is no answer; the runner is ended then.
        """
        deadline = time.monotonic() + limit_s
        try:
            if self.ended:
                raise SilenceError(late=False)
            send(self.pipe, Frame({"call": call, **told}, tuple(parts), memory))
            answer = receive(self.pipe, deadline, self.life)
        except SilenceError as silence:
            if silence.late:
                where = self._last_words()
                self.end()
                how = f"had not answered within {limit_s:.4g} host seconds"
                raise RunnerDiedError(f"the process of {self.what} {how}", True, where) from None
            raise self._died(f"died {manner_of_death(self.end())}") from None
        except OSError:
            raise self._died(f"died {manner_of_death(self.end())}") from None
        except WireError as error:
            self.end()
            raise self._died(f"answered with {error}") from None
        if answer.memory is not None:
            os.close(answer.memory)
        fault = answer.told.get("error")
        if fault is not None:
            raise _raised(fault)
        return answer

    def _last_words(self) -> str:
        """Where the runner is, if it reports that soon; else ""."""
        self.nursery.ask_where(self.number)
        try:
            told = receive(self.pipe, time.monotonic() + _LAST_WORDS_S, self.life).told
        except (SilenceError, WireError, OSError):
            return ""
        return printable(str(told.get("whereabouts") or ""))

    def _died(self, how: str) -> RunnerDiedError:
        return RunnerDiedError(f"the process of {self.what} {how}")

    def end(self) -> int | None:
        """Ends the process and everything that it started. Returns its exit code if its keeper did not end it for this
        call, else None."""
        if self.ended:
            return None
        self.ended = True
        if _closed(self.pipe):
            select.select([self.life], [], [], _LEAVE_S)
        self.nursery.end(self.number)
        code = None
        if select.select([self.life], [], [], _END_S)[0]:
            said = os.read(self.life, 4)
            code = int.from_bytes(said, "little", signed=True) if len(said) == 4 else None
        self.pipe.close()
        os.close(self.life)
        return code

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _closed(pipe: socket.socket) -> bool:
    """Whether the other end is closed, or has sent data that will not be read."""
    return bool(select.select([pipe], [], [], 0)[0])


def _raised(fault: object) -> Exception:
    told = fault if isinstance(fault, dict) else {}
    kind, sentence = told.get("kind"), printable(str(told.get("sentence")))
    if kind == "unsupported":
        return UnsupportedError(sentence)
    if kind == "device_lost":
        return _device_lost(sentence)
    return RunnerFaultError(sentence, printable(str(told.get("traceback")), 4 * MAX_SENTENCE))


def _device_lost(sentence: str) -> DeviceLostError:
    """The runner's DeviceLostError, without marking this process's own device as lost."""
    error = DeviceLostError.__new__(DeviceLostError)
    error.args = (sentence,)
    return error


def printable(text: str, most: int = MAX_SENTENCE) -> str:
    """`text` made safe to print: at most `most` characters, with control characters escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text[:most])


_OF_WORKER: Final[list[Nursery]] = []


def keeper_of_worker() -> None:
    """Forks this process's keeper. The process must have one thread, and of our modules no more than PRELOADED
    loads."""
    mine, its = socket.socketpair()
    if os.fork() == 0:
        mine.close()
        # The keeper ends once the socket is closed, even if this process is killed, and cleans up after its runners.
        keep(its)
    its.close()
    _OF_WORKER.append(Nursery(mine))


def environment_of_servers() -> dict[str, str]:
    """The environment for a fresh interpreter that imports this megamoe, and libraries that forks of it will share.

    The current folder is left out of the search path, because it may hold a torch/ or a queue.py. Runners get the
    caller's own search path.
    """
    places = [path for path in sys.path if os.path.isabs(path) and path != os.getcwd()]
    search = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *places])
    return {**os.environ, "PYTHONPATH": search, "PYTHONSAFEPATH": "1"}


def nursery(torch: bool = False) -> Nursery:
    """This process's keeper, started now if there is none. `torch`: its runners start with torch imported; otherwise
    the import takes each of them a second."""
    if _OF_WORKER:
        return _OF_WORKER[0]
    pid = os.getpid()
    known = _OWN.get((pid, True)) or _OWN.get((pid, torch))
    if known is None:
        known = _OWN[pid, torch] = _forked() if torch and pid in _COMMANDS else _started(PRELOADED if torch else ())
        atexit.register(known.close)
    return known


def fork_keepers_from_the_server() -> None:
    """Declares this process a command: from now on, keepers with torch are forked from the workers' fork server.

    multiprocessing has one such server per process. In a user's process the server is the user's. A daemon, such as a
    worker in a user's pool, may not have children, so nothing changes there.
    """
    from multiprocessing import current_process

    if not current_process().daemon:
        _COMMANDS.add(os.getpid())


_COMMANDS: Final[set[int]] = set()
_OWN: Final[dict[tuple[int, bool], Nursery]] = {}
"""Keepers by the process that started them, and whether they have torch loaded."""


def _started(preload: tuple[str, ...]) -> Nursery:
    mine, its = socket.socketpair()
    program = (
        "import socket\nfrom megamoe.runner.process import keep\n"
        f"keep(socket.socket(fileno={its.fileno()}), {preload!r})"
    )
    with its:
        keeper = subprocess.Popen(
            [sys.executable, "-c", program], pass_fds=[its.fileno()], env=environment_of_servers(),
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    return Nursery(mine, keeper.wait)


def _forked() -> Nursery:
    # Imported here because most commands start no fork server.
    from megamoe.runner.forks import forked_keeper

    mine, its = socket.socketpair()
    with its:
        return Nursery(mine, forked_keeper(its).join)
