"""Records of long runs, line by line: JSON, one line for each call of the tool and for each result."""

from __future__ import annotations

import json
import lzma
import os
import shlex
import subprocess
from collections.abc import Collection, Hashable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from conformance import ROOT
from megamoe.records.files import take_lock, write_file
from megamoe.records.lines import RecordError

COMPRESSED = ".xz"


class Result(Protocol):
    """A dataclass of JSON values, with tuples for lists. `id`: the last of several results with the same id counts."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def id(self) -> Hashable: ...


Kept = TypeVar("Kept", bound=Result)


@dataclass(frozen=True, slots=True)
class Ran:
    """One call of the tool: its arguments, the git tree of the machine, when it began, how much it planned."""

    command: str
    machine: str
    started: str
    planned: int

    @classmethod
    def now(cls, given: Sequence[str], planned: int) -> Ran:
        """A call with the arguments `given`, which begins now."""
        command = ["git", "rev-parse", "--short=12", "HEAD:backends/vm"]
        tree = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        return cls(shlex.join(given), tree or "unknown", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", planned)


class Journal(Generic[Kept]):
    """Results by their ids, and the calls that made them.

    A torn last line, as a kill leaves it, does not count, and the next line overwrites it. From its first line on, a
    process keeps others from writing its file. A file that ends in .xz is read only.
    """

    def __init__(self, kind: type[Kept], *paths: Path) -> None:
        """`kind`: class of the results. `paths`: files of shards; the first is written to. ValueError for another
        file."""
        self.path = paths[0]
        self.calls: list[Ran] = []
        self.by_id: dict[Hashable, Kept] = {}
        self._read_size = self._whole_size = 0
        self._descriptor: int | None = None
        for path in paths:
            self._read(kind, path)

    def _read(self, kind: type[Kept], path: Path) -> None:
        held = path.read_bytes() if path.exists() else b""
        if path.suffix == COMPRESSED:
            if not path.exists():
                raise ValueError(f"{path} does not exist, and a compressed record is only read")
            try:
                held = lzma.decompress(held)
            except lzma.LZMAError as error:
                raise ValueError(f"{path} is no file that xz has written: {error}") from None
        whole = held[: held.rfind(b"\n") + 1]
        if path == self.path:
            self._read_size, self._whole_size = len(held), len(whole)
        for number, line in enumerate(whole.splitlines() or held.splitlines(), 1):
            try:
                if not whole:
                    raise ValueError("a file without a whole line may be anybody's")
                self._keep(_line(kind, line))
            except (ValueError, TypeError, AttributeError):
                raise ValueError(
                    f"{path}:{number}: {line[:60]!r} is no line of a {kind.__name__}; name another file with --record"
                ) from None

    def _keep(self, line: Kept | Ran) -> None:
        if isinstance(line, Ran):
            self.calls.append(line)
        else:
            self.by_id[line.id] = line

    @property
    def results(self) -> list[Kept]:
        """One result of each id."""
        return list(self.by_id.values())

    def check_writable(self) -> None:
        """RecordError if nothing can be appended, as the file is compressed."""
        if self.path.suffix == COMPRESSED:
            raise RecordError(
                f"{self.path} is compressed and only read; `xz -dk` it and name the unpacked file with --record"
            )

    def append(self, line: Kept | Ran) -> None:
        """Appends a line. RecordError if another process writes the file, or has written it since it was read."""
        os.write(self._own(), _text(line).encode())
        self._keep(line)

    def leave_out(self, ids: Collection[Hashable]) -> None:
        """Rewrites the file without the results of these ids. RecordError as in `append`."""
        before = self._own()
        self.by_id = {name: one for name, one in self.by_id.items() if name not in ids}
        write_file(self.path, "".join(map(_text, (*self.calls, *self.by_id.values()))), "the lines of")
        self._read_size = self._whole_size = self.path.stat().st_size
        self._descriptor = None
        # The file is new, and the lock on the old one does not protect it.
        self._own()
        os.close(before)

    def close(self) -> None:
        """Lets others write."""
        if self._descriptor is not None:
            self._read_size = self._whole_size = os.fstat(self._descriptor).st_size
            os.close(self._descriptor)
            self._descriptor = None

    def _own(self) -> int:
        """Returns the open file, locked against other writers, positioned after its last whole line."""
        self.check_writable()
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            opened = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                take_lock(opened, f"{self.path} is being written by another process; name another --record")
                if os.fstat(opened).st_size != self._read_size:
                    raise RecordError(f"{self.path} was written by another process since it was read; call again")
                os.truncate(opened, self._whole_size)
            except (RecordError, OSError):
                os.close(opened)
                raise
            self._descriptor = opened
        return self._descriptor


def _line(kind: type[Kept], text: bytes) -> Kept | Ran:
    """ValueError, TypeError or AttributeError for a line of another file."""
    line = json.loads(text)
    if "command" in line:
        return Ran(**line)
    return kind(**{key: tuple(one) if isinstance(one, list) else one for key, one in line.items()})


def _text(line: Result | Ran) -> str:
    return f"{json.dumps(asdict(line))}\n"
