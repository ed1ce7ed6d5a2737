"""Files that a person names. Only a plain one is read or replaced: a pipe waits for its writer for ever, a device may
never end, and one that is replaced is gone."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

MAX_TEXT_BYTES: Final = 256 << 20
"""Of a file that is read whole as one text: a kernel, a key, findings."""


def plain_bytes(path: Path, most: int | None = MAX_TEXT_BYTES) -> bytes:
    """The content of a file. OSError, saying what it is, if it is not plain or has more than `most` bytes."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, not_plain(found.st_mode))
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, and at most {most} are read")
        return file.read()


def not_plain(mode: int) -> str:
    """What something with this `st_mode`, which is no plain file, is; the rest of a sentence."""
    kinds = {
        stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    }  # fmt: skip
    return f"it is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a plain file"
