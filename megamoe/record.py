"""One line of JSON a result, written so that a kill at any instant leaves whole lines and at most one torn last one.

A record file holds header lines (`kind: run`, the provenance of one run), record lines (`kind: record`) and, where
several backends ran, lines that hold them against each other (`kind: agreement`), each carrying the id of its run, so
that files can be concatenated. A line is one write(), but Linux ends a write() of a killed process at a page boundary
(seen on ext4), so a last line may lack its end: it is reported and ignored on reading. A file has one writer at a time,
which a lock ensures, so that a torn line can only be the last.
"""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

Status = Literal["passed", "failed", "error", "crashed", "timed_out", "unsupported", "not_run"]
STATUSES: tuple[Status, ...] = get_args(Status)
SCHEMA_VERSION = 1


class RecordError(Exception):
    """A record file that cannot be read or written; the text says which file, which line and why."""


class Row(NamedTuple):
    """What one record is about, and the key under which the gate looks for it. `case` is a Case.id."""

    case: str
    backend: str
    target: str
    executor: str
    schedule: str

    @property
    def op(self) -> str:
        """The op of the case."""
        return self.case.partition(":")[0]

    @property
    def rerun(self) -> str:
        """The command line that judges exactly this row again."""
        options = [part for name, value in self._asdict().items() for part in (f"--{name}", value)]
        return shlex.join(["megamoe", "run", *options])

    def __str__(self) -> str:
        return f"{self.case} on {self.backend} {self.target} {self.executor} {self.schedule}"


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    schema_version: Literal[1] = SCHEMA_VERSION
    run: str


class RunHeader(_Line):
    """Where a run's records come from. `started` is UTC, ISO 8601; versions are None for what is not installed."""

    kind: Literal["run"] = "run"
    started: str
    selection: Mapping[str, str | tuple[str, ...]]
    owed_rows: int
    git_revision: str | None
    megamoe: str
    python: str
    torch: str | None
    numpy: str | None
    platform: str
    machine: str
    cpu_count: int | None


class Record(_Line):
    """The verdict on one row.

    `judge_host_seconds` is what the judge took on this host, comparison included, and the reference unless the row
    before was of the same case: never a time of a GPU. None when the judge did not finish.
    `program_sha256` is the digest of the PTX text, None when no program was built; `input_sha256` those of the inputs.
    `metrics` come from the comparison, `counters` from the executor and the reference. `bundle` is the folder with the
    evidence of a failure.
    """

    kind: Literal["record"] = "record"
    case: str
    op: str
    backend: str
    target: str
    executor: str
    schedule: str
    status: Status
    sentence: str
    metrics: Mapping[str, float] = Field(default_factory=dict)
    counters: Mapping[str, int] = Field(default_factory=dict)
    judge_host_seconds: float | None = Field(ge=0)
    program_sha256: str | None = None
    input_sha256: Mapping[str, str] = Field(default_factory=dict)
    bundle: str | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Record:
        if (self.status == "passed") != (self.sentence == ""):
            raise ValueError(f"status {self.status!r} with the sentence {self.sentence!r}; only a pass has none")
        if self.op != self.row.op:
            raise ValueError(f"op {self.op!r} with the case {self.case!r}")
        return self

    @property
    def row(self) -> Row:
        """The key of this record."""
        return Row(self.case, self.backend, self.target, self.executor, self.schedule)


class Agreement(_Line):
    """What two or more backends made of one case: how far their outputs lie apart, and who stands alone.

    `metrics` has ONE~OTHER.TENSOR.max, .rms (absolute, where both are finite) and .unequal (share of elements). How far
    each is from the oracle is in the metrics of its own record. `alone` is the backend whose verdict no other shares.
    """

    kind: Literal["agreement"] = "agreement"
    case: str
    op: str
    target: str
    executor: str
    schedule: str
    backends: tuple[str, ...]
    metrics: Mapping[str, float]
    alone: str | None = None
    sentence: str = ""


def record_of(
    run: str,
    row: Row,
    status: Status,
    sentence: str,
    host_seconds: float | None = None,
    metrics: Mapping[str, float] | None = None,
    counters: Mapping[str, int] | None = None,
    program_sha256: str | None = None,
    bundle: str | None = None,
    input_sha256: Mapping[str, str] | None = None,
) -> Record:
    """The record of `row`; a sentence about anything but a pass ends with the command that reruns the row."""
    if status != "passed":
        sentence = f"{sentence.strip().rstrip('.')}. Rerun: {row.rerun}"
    return Record(
        run=run,
        **row._asdict(),
        op=row.op,
        status=status,
        sentence=sentence,
        metrics=metrics or {},
        counters=counters or {},
        judge_host_seconds=None if host_seconds is None else round(host_seconds, 4),
        program_sha256=program_sha256,
        input_sha256=input_sha256 or {},
        bundle=bundle,
    )


AnyLine = RunHeader | Record | Agreement


@dataclass(frozen=True, slots=True)
class RecordFile:
    """The content of a record file. `torn` is a sentence about a torn last line, None when there is none."""

    path: Path
    headers: tuple[RunHeader, ...]
    records: tuple[Record, ...]
    torn: str | None
    agreements: tuple[Agreement, ...] = ()


class RecordWriter:
    """Appends lines to a record file, each by one write() to a descriptor opened with O_APPEND, then fsync.

    Raises RecordError when the file cannot be opened, has another writer, already ends in a torn line, or takes less
    than a whole line.
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
            written = os.write(self._descriptor, data)
            os.fsync(self._descriptor)
        except OSError as error:
            raise RecordError(f"cannot append to {self.path}: {error.strerror}") from error
        if written != len(data):
            raise RecordError(f"{self.path} took {written} of a line's {len(data)} bytes: the disk is probably full")

    def close(self) -> None:
        """Closes the descriptor; every line appended so far is on the disk already."""
        os.close(self._descriptor)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_LINE: TypeAdapter[AnyLine] = TypeAdapter(Annotated[AnyLine, Field(discriminator="kind")])


def read_records(path: Path) -> RecordFile:
    """Reads a record file; a torn last line is reported, any other bad line raises RecordError with its number."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read records from {path}: {error.strerror}") from error
    *whole, tail = data.split(b"\n")
    torn = None
    if tail:
        torn = f"{path}, line {len(whole) + 1} is torn ({len(tail)} bytes without a newline) and was ignored"
    headers: list[RunHeader] = []
    records: list[Record] = []
    agreements: list[Agreement] = []
    for number, text in enumerate(whole, 1):
        line = _parse_line(path, number, text)
        if isinstance(line, RunHeader):
            headers.append(line)
        elif isinstance(line, Agreement):
            agreements.append(line)
        else:
            records.append(line)
    return RecordFile(path, tuple(headers), tuple(records), torn, tuple(agreements))


def _parse_line(path: Path, number: int, text: bytes) -> AnyLine:
    try:
        return _LINE.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        key = f", key {where}" if where else ""
        raise RecordError(
            f"{path}, line {number}{key}: not a record of schema {SCHEMA_VERSION}: {first['msg']}"
        ) from None
