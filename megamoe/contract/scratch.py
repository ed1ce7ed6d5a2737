"""What a process leaves for a while: folders and unfinished files that are gone once their maker is.

The maker holds a lock (flock) on each for as long as it lives, and the system drops the lock of a killed process. So
whatever of ours can be locked was left by a kill: the next process that looks there removes it. The work of another
user, and of a process that lives, stays.
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
"""Of every name that is made here. No other program has such names, so that theirs are never taken for ours."""
MAX_PLACE: Final = 44
"""Characters of a temporary folder below which a socket's path, with two folders of ours, has fewer than 108."""
_cleared: set[tuple[int, Path]] = set()
_of_multiprocessing: list[ExitStack] = []


@contextmanager
def scratch_folder(what: str, parent: Path | None = None) -> Iterator[Path]:
    """A new folder (mode 0700) in `parent`, the system's temporary folder by default. Removed at the end.

    `what` becomes a part of its name. OSError if it cannot be made.
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
    """Makes multiprocessing keep its sockets in a scratch folder: it clears its own folder only if nobody kills it.

    Not below a folder whose name is so long that a socket there could have no name.
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
    # After multiprocessing, at -100, has removed what is its own.
    util.Finalize(None, folder.close, exitpriority=-200)
    _of_multiprocessing.append(folder)


@contextmanager
def unfinished(parent: Path, folder: bool = False) -> Iterator[Path]:
    """An empty file (mode 0600), or folder (0700), beside its later place: whoever has filled it renames it.

    Removed at the end unless it was renamed. OSError if it cannot be made.
    """
    clear_abandoned(parent)
    part, lock = _locked(lambda: tempfile.mkdtemp("", PREFIX, parent) if folder else _new_file(parent))
    try:
        yield part
    finally:
        _remove(part)
        os.close(lock)


def clear_abandoned(parent: Path) -> None:
    """Removes from `parent` what a killed process left there. Looks once in a process; raises nothing."""
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
    """What `make` makes, and a descriptor that holds its lock.

    Another process may clear it before it is locked, even before it is opened: then it is made again.
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
