"""Writes that are all or nothing: a reader sees what was there before or what is there now, never a part."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megamoe.records.lines import RecordError


def write_file(path: Path, data: str | bytes, what: str, durable: bool = True) -> None:
    """Replaces the file at `path`, and makes its folder if need be. Text becomes UTF-8.

    RecordError "cannot write WHAT PATH: ..." if it cannot be written. `durable` waits for the disk (4 ms on a shared
    one), so that a loss of power leaves no empty file either.
    """
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
        with open(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        if part is not None:
            Path(part).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise RecordError(f"cannot write {what} {path}: {error.strerror}") from error
        raise


def write_folder(folder: Path, files: Mapping[str, str], what: str) -> None:
    """Makes `folder` with `files`, text by relative path. RecordError if it holds something or cannot be written."""
    part = None
    try:
        if folder.exists() and any(folder.iterdir()):
            raise RecordError(f"{folder} is not empty; give a new folder, as nothing in it is overwritten")
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        part.chmod(0o755)
        for name, text in files.items():
            path = part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        os.replace(part, folder)
    except BaseException as error:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise RecordError(f"cannot write {what} to {folder}: {error.strerror}") from error
        raise
