"""Files that a user names. Only plain files are read or replaced: a pipe may block for ever, a device may never end,
and replacing either destroys it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

MAX_TEXT_BYTES: Final = 256 << 20
"""Limit for a file that is read whole as one text: a kernel, a key, findings."""


def plain_bytes(path: Path, most: int | None = MAX_TEXT_BYTES) -> bytes:
    """The content of a file. Raises OSError with the reason if the file is not plain or has more than `most` bytes."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, not_plain(found.st_mode))
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, and at most {most} are read")
        return file.read()


def not_plain(mode: int) -> str:
    """Says what kind of non-plain file has this `st_mode`, as the rest of a sentence."""
    kinds = {
        stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    }  # fmt: skip
    return f"it is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a plain file"
