"""Record files and atomic writes: a reader sees either the old content or the new.

A line is one write(), but Linux ends a killed process's write() at a page boundary (seen on ext4). A kill at any
instant therefore leaves whole lines and at most one torn last line; the reader reports it and ignores it. A lock lets
one process write at a time, so that only the last line can be torn.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, cast, get_args

from pydantic import Field, TypeAdapter, ValidationError

from megamoe.contract import Row
from megamoe.contract.counted import counted
from megamoe.contract.plain import not_plain, plain_bytes
from megamoe.contract.scratch import unfinished
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
"""Where runs write, relative to the current folder."""
WHERE_RUNS_ARE = f"`megamoe run` writes record files to {RUNS}"
"""Ends a sentence about a record file that cannot be read."""

_KINDS = ", ".join(model.model_fields["kind"].default for model in get_args(AnyLine))
_THIS_VERSION = f'{{"schema_version":{SCHEMA_VERSION},'.encode()


@dataclass(frozen=True, slots=True)
class RecordFile:
    """The content of a record file. `torn` is a sentence about a torn last line, None if there is none.

    `older`: runs whose lines all have an older schema.
    """

    path: Path
    lines: tuple[AnyLine, ...]
    torn: str | None
    older: frozenset[str] = frozenset()

    @property
    def headers(self) -> tuple[RunHeader, ...]:
        """The headers of the runs in the file."""
        return tuple(line for line in self.lines if isinstance(line, RunHeader))

    @property
    def records(self) -> tuple[Record, ...]:
        """The verdicts on rows."""
        return tuple(line for line in self.lines if isinstance(line, Record))

    @property
    def agreements(self) -> tuple[Agreement, ...]:
        """The distances between backends."""
        return tuple(line for line in self.lines if isinstance(line, Agreement))

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The device times."""
        return tuple(line for line in self.lines if isinstance(line, Timing))

    @property
    def figures(self) -> tuple[Figures, ...]:
        """The compiler figures."""
        return tuple(line for line in self.lines if isinstance(line, Figures))

    @property
    def acceptances(self) -> tuple[Acceptance, ...]:
        """The reasons for changes to a baseline."""
        return tuple(line for line in self.lines if isinstance(line, Acceptance))


def take_lock(descriptor: int, taken: str) -> None:
    """Locks an open file or folder until it is closed. Raises RecordError(`taken`) if another process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecordError(taken) from None


@contextmanager
def locked(descriptor: int, taken: str) -> Iterator[None]:
    """Holds the lock of an open file or folder, then closes it. Raises RecordError as take_lock does."""
    try:
        take_lock(descriptor, taken)
        yield
    finally:
        os.close(descriptor)


class RecordWriter:
    """Appends lines to a record file, each by one write() to a descriptor opened with O_APPEND, then fsync.

    Raises RecordError if the file cannot be opened, has another writer, ends in a torn line, or accepts less than a
    whole line, and for a line that could not be read back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            _check_plain(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
            self._descriptor = os.open(path, flags, 0o644)
            self._take_over(path)
        except OSError as error:
            raise RecordError(f"cannot write records to {path}: {error.strerror}") from error

    def _take_over(self, path: Path) -> None:
        try:
            take_lock(self._descriptor, f"{path} is being written by another run; give another output file")
            if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
                raise RecordError(f"{path} ends in a torn line that a killed run left; give another output file")
        except (RecordError, OSError):
            os.close(self._descriptor)
            raise

    def append(self, line: AnyLine) -> None:
        """Appends one line and forces it to the disk."""
        data = line.model_dump_json().encode() + b"\n"
        try:
            _LINE.validate_json(data)
        except ValidationError as error:
            raise RecordError(f"a line of kind {line.kind} is not written to {self.path}{_complaint(error)}") from None
        before = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, data)
            os.fsync(self._descriptor)
        except OSError as error:
            self._take_back(before)
            raise RecordError(f"cannot append to {self.path}: {error.strerror}") from error
        if written != len(data):
            self._take_back(before)
            raise RecordError(
                f"{self.path} took {written} of a line's {counted(len(data), 'byte')}: the disk is probably full"
            )

    def _take_back(self, size: int) -> None:
        """Truncates a partial line, so that the file is whole and the run can resume once there is room."""
        with suppress(OSError):
            os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Closes the descriptor. Every line is already on disk."""
        os.close(self._descriptor)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_LINE: TypeAdapter[AnyLine] = TypeAdapter(Annotated[AnyLine, Field(discriminator="kind")])


def read_records(path: Path) -> RecordFile:
    """Reads a record file and reports a torn last line. Raises RecordError with the line number for any other bad
    line."""
    try:
        data = plain_bytes(path, most=None)
    except OSError as error:
        raise RecordError(f"cannot read records from {path}: {error.strerror}; {WHERE_RUNS_ARE}") from error
    return parse_records(path, data)


def newest_records(files: Iterable[RecordFile], wanted: Callable[[Record], bool]) -> dict[Row, Record]:
    """For each row, the `wanted` record of the run that started last. If that run has several, the last one."""
    found: dict[Row, tuple[str, Record]] = {}
    for file in files:
        started = {header.run: header.started for header in file.headers}
        for record in filter(wanted, file.records):
            since = started.get(record.run, "")
            if record.row not in found or since >= found[record.row][0]:
                found[record.row] = since, record
    return {row: record for row, (_, record) in found.items()}


def files_in(given: Sequence[Path]) -> list[Path]:
    """The given files, each once; a folder stands for the record files in it. Raises RecordError if it has none."""
    found: dict[Path, None] = {}
    for path in given:
        found |= dict.fromkeys(_inside(path) if path.is_dir() else [path])
    return list(found)


def _inside(folder: Path) -> list[Path]:
    if inside := record_files_of(folder):
        return inside
    others = [path.name for path in sorted(folder.glob("*.jsonl"))]
    if not others:
        raise RecordError(f"there is no *.jsonl in the folder {folder}; name record files, or folders of them")
    raise RecordError(
        f"the folder {folder} holds no record file of runs: {', '.join(others)} {'have' if others[1:] else 'has'} no "
        f"schema_version in line 1; {WHERE_RUNS_ARE}"
    )


def record_files_of(folder: Path) -> list[Path]:
    """The *.jsonl in `folder`, by name, without those of another kind, such as a campaign of mutants."""
    return [path for path in sorted(folder.glob("*.jsonl")) if not _of_another_kind(path)]


def _of_another_kind(path: Path) -> bool:
    """Whether a file was never a record of runs. A damaged record is one still, and whoever reads it is told so."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            first = file.readline()
    except OSError:
        return False
    return is_of_another_kind(first)


def is_of_another_kind(data: bytes) -> bool:
    """Whether the first line of `data` is a JSON object without a schema_version."""
    try:
        line: object = json.loads(data.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(line, dict) and "schema_version" not in line


def newest_run(home: Path = Path()) -> Path | None:
    """The record file of results/runs in `home` that was written last, or None. Equal times are ordered by name."""
    files = record_files_of(home / RUNS)
    return max(files, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)


def parse_records(path: Path, data: bytes) -> RecordFile:
    """Like read_records, from bytes; messages name them `path`."""
    *whole, tail = data.split(b"\n")
    torn = None
    if tail:
        torn = f"{path}, line {len(whole) + 1} is torn ({counted(len(tail), 'byte')} without a newline) and was ignored"
    lines = tuple(_parse_line(path, number, text) for number, text in enumerate(whole, 1))
    newer = {line.run for line, text in zip(lines, whole, strict=True) if _of_this_version(text)}
    return RecordFile(path, lines, torn, frozenset({line.run for line in lines} - newer))


class _VersionError(ValueError):
    """A line of a version that this megamoe cannot read. Messages put the text after the line number."""


def _parse_line(path: Path, number: int, text: bytes) -> AnyLine:
    try:
        # Readers disagree on which of two equal keys wins, so refuse both.
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
    """The line in the current version's form. A line that is not an object is left to validation."""
    if not isinstance(line, dict):
        return text
    known = cast("dict[str, object]", line)
    while (version := _version(known)) != SCHEMA_VERSION:
        known = UPGRADES[version](known)
    return json.dumps(known).encode()


def _of_this_version(text: bytes) -> bool:
    """Whether a readable line was written in the current version's form."""
    return text.startswith(_THIS_VERSION) or json.loads(text).get("schema_version") == SCHEMA_VERSION


def _version(line: dict[str, object]) -> int:
    """The version of a line, if this megamoe reads it. In other versions even the kinds of lines are unknown."""
    readable = f"this megamoe reads {' and '.join(f'schema {one}' for one in (*UPGRADES, SCHEMA_VERSION))}"
    if "schema_version" not in line:
        raise _VersionError(f": it has no schema_version; {readable}, and no other kind of file")
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
    """Replaces the file at `path`, and makes its folder if needed. Text becomes UTF-8.

    Raises RecordError "cannot write WHAT PATH: ..." if it cannot be written, or if `path` exists and is not a plain
    file. `durable` waits for the disk (4 ms on a shared one), so that a power loss leaves no empty file either.
    """
    try:
        _check_plain(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(path.parent) as part:
            with part.open("wb") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(part, path)
    except OSError as error:
        raise RecordError(f"cannot write {what} {path}: {error.strerror}") from error


def write_folder(folder: Path, files: Mapping[str, str], what: str) -> None:
    """Creates `folder` with `files`: text by relative path, all inside the folder.

    Raises RecordError if the folder is not empty, cannot be written, or if a path leads out of it.
    """
    try:
        if folder.is_symlink():
            raise OSError(errno.EINVAL, f"{not_plain(folder.lstat().st_mode)} nor a folder")
        if folder.exists() and any(folder.iterdir()):
            raise RecordError(f"{folder} is not empty; give a new folder, as nothing in it is overwritten")
        for name in files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise RecordError(f"cannot write {what} to {folder}: {shortened(repr(name))} leads out of it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(folder.parent, folder=True) as part:
            part.chmod(0o755)
            for name, text in files.items():
                path = part / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8", errors="backslashreplace")
            os.replace(part, folder)
    except OSError as error:
        raise RecordError(f"cannot write {what} to {folder}: {error.strerror}") from error


def check_place(path: Path, what: str) -> None:
    """Raises write_file's RecordError if `path` could not be replaced. Lets a command fail at its start, not at its
    end."""
    try:
        _check_plain(path)
    except OSError as error:
        raise RecordError(f"cannot write {what} {path}: {error.strerror}") from None


def _check_plain(path: Path) -> None:
    """Raises OSError, naming the kind, if something other than a plain file is at `path`: a device, a pipe, a link.

    Such a thing is never replaced or written to: a device would be lost, a pipe would wait for its reader forever, and
    a link leads to a place that the user did not name.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, not_plain(mode))
