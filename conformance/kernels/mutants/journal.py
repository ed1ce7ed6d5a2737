"""What long runs leave line by line: JSON, one line a call of the tool and one a result."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Hashable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from megamoe.records.files import write_file


class Result(Protocol):
    """A dataclass of what JSON holds, with tuples for lists. `id`: of results with one id the last counts."""

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


class Journal(Generic[Kept]):
    """Results by their ids, and the calls that made them.

    A torn last line, as a kill leaves it, counts for nothing, and the next line is written over it.
    """

    def __init__(self, kind: type[Kept], *paths: Path) -> None:
        """`kind`: of the results. `paths`: files of shards; the first is written to. ValueError for another file."""
        self.path = paths[0]
        self.calls: list[Ran] = []
        self.by_id: dict[Hashable, Kept] = {}
        self._whole: int | None = None
        for path in paths:
            self._read(kind, path)

    def _read(self, kind: type[Kept], path: Path) -> None:
        held = path.read_bytes() if path.exists() else b""
        whole = held[: held.rfind(b"\n") + 1]
        if path == self.path and whole != held:
            self._whole = len(whole)
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
        """One of each id."""
        return list(self.by_id.values())

    def append(self, line: Kept | Ran) -> None:
        """Write one more line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._whole is not None:
            os.truncate(self.path, self._whole)
            self._whole = None
        with self.path.open("a", encoding="utf-8") as out:
            out.write(_text(line))
        self._keep(line)

    def leave_out(self, ids: Collection[Hashable]) -> None:
        """Write the file anew without the results of these ids."""
        self.by_id = {name: one for name, one in self.by_id.items() if name not in ids}
        write_file(self.path, "".join(map(_text, (*self.calls, *self.by_id.values()))), "the lines of")
        self._whole = None


def _line(kind: type[Kept], text: bytes) -> Kept | Ran:
    """ValueError, TypeError or AttributeError for a line of another file."""
    line = json.loads(text)
    if "command" in line:
        return Ran(**line)
    return kind(**{key: tuple(one) if isinstance(one, list) else one for key, one in line.items()})


def _text(line: Result | Ran) -> str:
    return f"{json.dumps(asdict(line))}\n"
