"""The process that runs other people's code: its restrictions, and how it answers requests.

It is forked from a keeper that has imported nothing of ours that runs a kernel or knows an output. A request names a
function of megamoe, which takes a Frame and returns one. Where the system can, a runner is denied:

- descriptors other than its own pipe, so that it cannot impersonate the process that started it;
- the folders in `Confinement.hidden`, by Landlock (Linux 5.13), which also keeps it from tracing and (6.12) signalling
  processes outside;
- the references, by refusing to `import` them. Alone, this only prevents accidents: a file can be read in other ways;
- more memory, larger files and core dumps than `Confinement` grants, by resource limits. Its keeper ends it for excess
  resident memory, processes or written bytes.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import resource
import signal
import socket
import stat
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn, cast

from megamoe.runner.limits import address_space
from megamoe.runner.wire import MAX_SENTENCE, Frame, Json, SilenceError, receive, send

MAX_KEPT_MIB: Final = 128
MAX_FILE_BYTES: Final = 4 << 30
"""Limit for one file that a runner writes."""
REFERENCES: Final = "megamoe.ops"


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a runner may do. `hidden`: folders that it can neither read nor write. `references`: whether it may import
    them.

    `memory`: bytes of address space beyond what it starts with, 0 for no limit, because CUDA reserves terabytes.
    `resident`: bytes of unshared memory that it and its descendants may hold, 0 for no limit. `processes`: how many of
    these may exist at a time. `written`: bytes that they may write to files. Its keeper checks every tenth of a second.
    """

    hidden: tuple[str, ...] = ()
    references: bool = False
    memory: int = 0
    resident: int = 0
    processes: int = 0
    written: int = 0

    @property
    def watched(self) -> bool:
        """Whether the keeper has anything to check."""
        return bool(self.resident or self.processes or self.written)


UNCONFINED: Final = Confinement()


@dataclass(frozen=True, slots=True)
class Start:
    """What a new runner gets: its confinement, and the caller's search path, folder and environment."""

    confinement: Confinement
    path: tuple[str, ...]
    folder: str
    environment: dict[str, str]

    def told(self) -> Json:
        """The start as JSON data."""
        return asdict(self)

    @classmethod
    def of(cls, told: Json) -> Start:
        """Inverse of `told`."""
        confinement = told["confinement"]
        return cls(
            Confinement(**{**confinement, "hidden": tuple(confinement["hidden"])}),
            tuple(told["path"]),
            told["folder"],
            told["environment"],
        )


def become_runner(pipe: socket.socket, output: int, start: Start) -> NoReturn:
    """Turns this process, a fresh fork, into a runner that answers on `pipe` until the pipe is closed. Never
    returns."""
    code = 1
    try:
        spare_shared_pages()
        os.setsid()
        with_parent_dies()
        keep_only([pipe.fileno(), output])
        _take_up(output, start)
        confine(start.confinement)
        _serve(pipe)
        code = 0
    except (SilenceError, BrokenPipeError, ConnectionResetError):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def keep_only(descriptors: Iterable[int]) -> None:
    """Closes every descriptor except the standard ones and `descriptors`."""
    kept = {0, 1, 2, *descriptors}
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else map(str, range(3, 1024)):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                continue


def _take_up(output: int, start: Start) -> None:
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for from_, to in ((nowhere, 0), (output, 1), (output, 2)):
        os.dup2(from_, to)
    os.close(nowhere)
    os.close(output)
    for name in (signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(name, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(start.environment)
    if os.path.isdir(start.folder):
        os.chdir(start.folder)
    sys.path[:] = start.path
    # tempfile has cached the keeper's folder.
    tempfile.tempdir = None


def confine(confinement: Confinement) -> None:
    """Applies the limits and locks to this process; they cannot be undone."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    if confinement.memory:
        _lower(resource.RLIMIT_AS, address_space() + confinement.memory)
    if not confinement.references:
        for name in [name for name in sys.modules if name.startswith(f"{REFERENCES}.")]:
            del sys.modules[name]
        sys.meta_path.insert(0, ReferenceLock())
    hide(confinement.hidden)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


class ReferenceLock(MetaPathFinder):
    """Refuses to import the references, which know the right outputs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        if fullname.startswith(f"{REFERENCES}."):
            raise ImportError(f"{fullname} is not for the process that runs a kernel: it knows the right outputs")
        return None


_TELLING: Final[list[Callable[[], str]]] = []


@contextmanager
def telling(whereabouts: Callable[[], str] | None) -> Iterator[None]:
    """Within the context, this process answers SIGUSR1 with `whereabouts`: its keeper asks what takes so long."""
    if whereabouts is not None:
        _TELLING.append(whereabouts)
    try:
        yield
    finally:
        _TELLING.clear()


def _serve(pipe: socket.socket) -> None:
    def tell(*_: object) -> None:
        said = ""
        with suppress(Exception):
            said = str(_TELLING[-1]())[:MAX_SENTENCE]
        send(pipe, Frame({"whereabouts": said}))

    signal.signal(signal.SIGUSR1, tell)
    while True:
        request = receive(pipe)
        answer = _answered(request)
        send(pipe, answer)
        give_memory_back()


def _answered(request: Frame) -> Frame:
    try:
        module, _, name = str(request.told["call"]).partition(":")
        function = cast("Callable[[Frame], Frame]", getattr(import_module(module), name))
        answer = function(request)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        answer = Frame({"error": fault_of(error)})
    finally:
        if request.memory is not None:
            os.close(request.memory)
    return answer


def fault_of(error: BaseException) -> Json:
    """An exception as data: its kind, a sentence, and the traceback."""
    from megamoe.contract import DeviceLostError, UnsupportedError

    kind = "error"
    if isinstance(error, UnsupportedError):
        kind = "unsupported"
    elif isinstance(error, DeviceLostError):
        kind = "device_lost"
    said = str(error) if kind != "error" else explain_error(error)
    lines = "".join(traceback.format_exception(error))
    return {"kind": kind, "sentence": said[:MAX_SENTENCE], "traceback": lines[-4 * MAX_SENTENCE :]}


def explain_error(error: BaseException) -> str:
    """An exception as a sentence: type, message, file, line and function."""
    # Skip frames of the import machinery.
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<")]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {str(error) or 'no message'}{where}"


# Resident memory when `give_memory_back` last collected.
_resident_mib = 0.0


def collect_seldom() -> None:
    """Raises the collector's thresholds. A launch makes many objects and few cycles, and with Python's own thresholds
    collection takes a twelfth of its time; an eighth of the import of torch."""
    gc.set_threshold(100_000, 50, 100)


def spare_shared_pages() -> None:
    """For a fresh fork: counts memory growth from here, and excludes existing objects from collection.

    Collecting the keeper's modules copies their pages. That took half of a runner's time for a small row.
    """
    global _resident_mib
    gc.freeze()
    collect_seldom()
    _resident_mib = resident_mib()


def give_memory_back() -> None:
    """Returns freed memory to the system once the process has grown by MAX_KEPT_MIB.

    First it trims what malloc keeps. If that is not enough, it collects cycles too. What remains are decoded kernels: a
    million objects without cycles. They are excluded from collection, because each scan of them takes 0.3 s.
    """
    global _resident_mib
    if not _has_grown():
        return
    _trim()
    if not _has_grown():
        return
    gc.collect()
    gc.freeze()
    _trim()
    _resident_mib = resident_mib()


def _has_grown() -> bool:
    return resident_mib() >= _resident_mib + MAX_KEPT_MIB


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_mib() -> float:
    """Resident memory of this process in MiB; infinite if the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return math.inf
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


# Linux constants from prctl.h and landlock.h, and system calls 444 to 446, which have these numbers on every
# architecture.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _BENEATH, _SCOPE_SIGNAL = 1, 1, 2
_WRITE_FILE, _READ_FILE, _TRUNCATE = 1 << 1, 1 << 2, 1 << 14
_OF_FOLDERS = sum(1 << bit for bit in range(4, 13))
_REFER = 1 << 13


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def with_parent_dies() -> None:
    """Ends this process when its parent ends."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes this process the parent of every orphaned descendant, so that none escapes it."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def landlock_version() -> int:
    """The kernel's Landlock version, 0 for none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


def hide(folders: Sequence[str]) -> bool:
    """Denies this process the files beneath `folders`, and signalling or tracing processes that it did not start.

    Returns whether that worked. The process cannot create files beside a hidden folder or in the folders above it
    either.
    """
    version = landlock_version()
    if not version or not folders:
        return False
    rights = _WRITE_FILE | _READ_FILE | _OF_FOLDERS | (_REFER if version > 1 else 0) | (_TRUNCATE if version > 2 else 0)
    libc = _libc()
    # The fields are fs, then net (version 4), then scoped (version 6).
    given = struct.pack("<QQQ", rights, 0, _SCOPE_SIGNAL)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = int(libc.syscall(_CREATE_RULESET, given, ctypes.c_size_t(len(given)), 0))
    if ruleset < 0:
        return False
    of_files = rights & (_WRITE_FILE | _READ_FILE | _TRUNCATE)
    for path in _beside({os.path.realpath(folder) for folder in folders}):
        _allow(libc, ruleset, path, rights, of_files)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    done = int(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    return done == 0


def _beside(hidden: set[str]) -> Iterable[str]:
    """Every unhidden path in a folder above a hidden one. Together they cover all that is not hidden."""
    above = {str(parent) for folder in hidden for parent in Path(folder).parents}
    for folder in sorted(above):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for path in (os.path.join(folder, name) for name in names):
            if path not in above and path not in hidden:
                yield path


def _allow(libc: Any, ruleset: int, path: str, of_folders: int, of_files: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        kind = os.fstat(opened).st_mode
        if not stat.S_ISLNK(kind):
            rule = struct.pack("<Qi", of_folders if stat.S_ISDIR(kind) else of_files, opened)
            libc.syscall(_ADD_RULE, ruleset, _BENEATH, rule, 0)
    finally:
        os.close(opened)
