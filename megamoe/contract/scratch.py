"""Temporary folders and unfinished files that disappear when the process that made them is gone.

The process holds a lock (flock) on each one for as long as it lives, and the system drops the locks of a killed
process. So if one of ours can be locked, a kill left it behind, and the next process that looks there removes it. Files
of other users and of live processes stay.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = ".megamoe."
"""Prefix of every name made here. No other program uses it, so foreign files are never taken for ours."""
MAX_PLACE: Final = 44
"""Longest path of a temporary folder for which a socket path two of our folders deep has fewer than 108 characters."""
_cleared: set[tuple[int, Path]] = set()
_of_multiprocessing: list[ExitStack] = []


@contextmanager
def scratch_folder(what: str, parent: Path | None = None) -> Iterator[Path]:
    """A new folder (mode 0700) in `parent`, by default the system's temporary folder. Removed at the end.

    `what` becomes part of its name. Raises OSError if the folder cannot be made.
    """
    place = parent or Path(tempfile.gettempdir())
    clear_abandoned(place)
    folder, lock = _locked(lambda: tempfile.mkdtemp(prefix=f"{PREFIX}{what}.", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def keep_temporary_files_together() -> None:
    """Makes multiprocessing keep its sockets in a scratch folder, because a killed process does not clear
    multiprocessing's own.

    Does nothing if the temporary folder's path is so long that a socket path below it would not fit.
    """
    if _of_multiprocessing or len(tempfile.gettempdir()) > MAX_PLACE:
        return
    from multiprocessing import util

    folder = ExitStack()
    before = tempfile.tempdir
    try:
        tempfile.tempdir = str(folder.enter_context(scratch_folder("sockets")))
        util.get_temp_dir()
    finally:
        tempfile.tempdir = before
    # Runs after multiprocessing has removed its own folder, at priority -100.
    util.Finalize(None, folder.close, exitpriority=-200)
    _of_multiprocessing.append(folder)


@contextmanager
def unfinished(parent: Path, folder: bool = False) -> Iterator[Path]:
    """An empty file (mode 0600) or folder (0700) next to its final place; the caller fills it and renames it.

    Removed at the end unless it was renamed. Raises OSError if it cannot be made.
    """
    clear_abandoned(parent)
    part, lock = _locked(lambda: tempfile.mkdtemp("", PREFIX, parent) if folder else _new_file(parent))
    try:
        yield part
    finally:
        _remove(part)
        os.close(lock)


def clear_abandoned(parent: Path) -> None:
    """Removes from `parent` what killed processes left there. Looks once per process; raises nothing."""
    seen = os.getpid(), parent.absolute()
    if seen in _cleared:
        return
    _cleared.add(seen)
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                _clear(Path(entry.path))


def _clear(path: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
        finally:
            os.close(descriptor)


def _locked(make: Callable[[], str]) -> tuple[Path, int]:
    """Calls `make` and returns the path and a descriptor that holds its lock.

    Another process may remove the path before it is locked or even opened; then `make` is called again.
    """
    while True:
        path = Path(make())
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():
            return path, descriptor
        os.close(descriptor)


def _new_file(parent: Path) -> str:
    descriptor, name = tempfile.mkstemp("", PREFIX, parent)
    os.close(descriptor)
    return name


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
