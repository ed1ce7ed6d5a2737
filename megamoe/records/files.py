"""Record files, and writes that are all or nothing: a reader sees what was there before or what is there now.

A line is one write(), but Linux ends a write() of a killed process at a page boundary (seen on ext4). So a kill at any
instant leaves whole lines and at most one torn last line; the reader reports it and ignores it. A lock lets one process
write at a time, so that only the last line can be torn.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, cast, get_args

from pydantic import Field, TypeAdapter, ValidationError

from megamoe.records.lines import (
    SCHEMA_VERSION,
    UPGRADES,
    Acceptance,
    Agreement,
    AnyLine,
    Figures,
    Record,
    RecordError,
    RunHeader,
    Timing,
    shortened,
)

RUNS = Path("results/runs")
"""Where runs write, in the current folder."""

_KINDS = ", ".join(model.model_fields["kind"].default for model in get_args(AnyLine))
_THIS_VERSION = f'{{"schema_version":{SCHEMA_VERSION},'.encode()


@dataclass(frozen=True, slots=True)
class RecordFile:
    """The content of a record file. `torn` is a sentence about a torn last line, None if there is none."""

    path: Path
    lines: tuple[AnyLine, ...]
    torn: str | None

    @property
    def headers(self) -> tuple[RunHeader, ...]:
        """The runs whose lines the file holds."""
        return tuple(line for line in self.lines if isinstance(line, RunHeader))

    @property
    def records(self) -> tuple[Record, ...]:
        """The verdicts."""
        return tuple(line for line in self.lines if isinstance(line, Record))

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        """How far apart backends lie."""
        return tuple(line for line in self.lines if isinstance(line, Agreement))

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The device times."""
        return tuple(line for line in self.lines if isinstance(line, Timing))

    @property
    def figures(self) -> tuple[Figures, ...]:
        """The compiler's figures."""
        return tuple(line for line in self.lines if isinstance(line, Figures))

    @property
    def acceptances(self) -> tuple[Acceptance, ...]:
        """The reasons for changes of a baseline."""
        return tuple(line for line in self.lines if isinstance(line, Acceptance))


class RecordWriter:
    """Appends lines to a record file, each by one write() to a descriptor opened with O_APPEND, then fsync.

    RecordError if the file cannot be opened, has another writer, ends in a torn line, or takes less than a whole line,
    and for a line that could not be read again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._take_over(path)
        except OSError as error:
            raise RecordError(f"cannot write records to {path}: {error.strerror}") from error

    def _take_over(self, path: Path) -> None:
        refusal = None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
                refusal = f"{path} ends in a torn line that a killed run left; give another output file"
        except BlockingIOError:
            refusal = f"{path} is being written by another run; give another output file"
        if refusal:
            os.close(self._descriptor)
            raise RecordError(refusal)

    def append(self, line: AnyLine) -> None:
        """Appends one line and forces it to the disk."""
        data = line.model_dump_json().encode() + b"\n"
        try:
            _LINE.validate_json(data)
        except ValidationError as error:
            raise RecordError(f"a line of kind {line.kind} is not written to {self.path}{_complaint(error)}") from None
        try:
            written = os.write(self._descriptor, data)
            os.fsync(self._descriptor)
        except OSError as error:
            raise RecordError(f"cannot append to {self.path}: {error.strerror}") from error
        if written != len(data):
            raise RecordError(f"{self.path} took {written} of a line's {len(data)} bytes: the disk is probably full")

    def close(self) -> None:
        """Closes the descriptor. Every line is on the disk already."""
        os.close(self._descriptor)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_LINE: TypeAdapter[AnyLine] = TypeAdapter(Annotated[AnyLine, Field(discriminator="kind")])


def read_records(path: Path) -> RecordFile:
    """Reads a record file and reports a torn last line. RecordError, with its number, for any other bad line."""
    try:
        if path.is_char_device():
            raise RecordError(f"cannot read records from {path}: it is a device, which may never end")
        if path.is_fifo():
            raise RecordError(f"cannot read records from {path}: it is a pipe, to which nobody may ever write")
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read records from {path}: {error.strerror}") from error
    return parse_records(path, data)


def newest_run(home: Path = Path()) -> Path | None:
    """The file of results/runs in `home` that was written last, or None; of several at one time the last by name."""
    files = (home / RUNS).glob("*.jsonl")
    return max(files, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)


def parse_records(path: Path, data: bytes) -> RecordFile:
    """As read_records, from bytes; messages call them `path`."""
    *whole, tail = data.split(b"\n")
    torn = None
    if tail:
        torn = f"{path}, line {len(whole) + 1} is torn ({len(tail)} bytes without a newline) and was ignored"
    return RecordFile(path, tuple(_parse_line(path, number, text) for number, text in enumerate(whole, 1)), torn)


class _VersionError(ValueError):
    """A line of a version that this megamoe cannot read. Messages put the text after the number of the line."""


def _parse_line(path: Path, number: int, text: bytes) -> AnyLine:
    try:
        # Readers disagree on which of two equal keys counts.
        line: object = json.loads(text, object_pairs_hook=_once)
        return _LINE.validate_json(text if text.startswith(_THIS_VERSION) else _upgraded(line, text))
    except RecursionError:
        raise RecordError(f"{path}, line {number}: not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise RecordError(f"{path}, line {number}{_complaint(error)}") from None


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shortened(repr(twice))} stands twice in one object")
    return found


def _upgraded(line: object, text: bytes) -> bytes:
    """The line in this version's form. Validation refuses what is no object."""
    if not isinstance(line, dict):
        return text
    known = cast("dict[str, object]", line)
    while (version := _version(known)) != SCHEMA_VERSION:
        known = UPGRADES[version](known)
    return json.dumps(known).encode()


def _version(line: dict[str, object]) -> int:
    """The version of a line, if this megamoe reads it. Of other versions not even the kinds are known."""
    readable = f"this megamoe reads {' and '.join(f'schema {one}' for one in (*UPGRADES, SCHEMA_VERSION))}"
    if "schema_version" not in line:
        raise _VersionError(f": it has no schema_version; {readable}")
    version = line["schema_version"]
    if type(version) is int and (version == SCHEMA_VERSION or version in UPGRADES):
        return version
    newer = type(version) is int and version > SCHEMA_VERSION
    why = "is newer, so read it with a newer megamoe" if newer else "is unknown"
    raise _VersionError(f", key schema_version: {shortened(json.dumps(version))} {why}; {readable}")


def _complaint(error: ValueError) -> str:
    if isinstance(error, _VersionError):
        return str(error)
    if not isinstance(error, ValidationError):
        return f": not JSON: {error}"
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    key = f", key {shortened(where if where.isprintable() else repr(where))}" if where else ""
    message = first["msg"]
    if first["type"] == "union_tag_not_found":
        message = f"it has no kind; the kinds are {_KINDS}"
    elif first["type"] == "union_tag_invalid":
        message = f"its kind is {shortened(repr(first.get('ctx', {})['tag']))}; the kinds are {_KINDS}"
    return f"{key}: not a record of schema {SCHEMA_VERSION}: {message}"


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
