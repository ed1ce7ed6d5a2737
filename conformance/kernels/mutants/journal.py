"""What long runs leave line by line: JSON, one line a call of the tool and one a result."""

from __future__ import annotations

import json
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
    """Results by their ids, and the calls that made them. A torn last line of a file is cut off."""

    def __init__(self, kind: type[Kept], *paths: Path) -> None:
        """`kind`: of the results. `paths`: files of shards; the first is written to."""
        self.path = paths[0]
        self.calls: list[Ran] = []
        self.by_id: dict[Hashable, Kept] = {}
        for path in paths:
            self._read(kind, path)

    def _read(self, kind: type[Kept], path: Path) -> None:
        text = path.read_text("utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, "utf-8")
        for line in map(json.loads, whole.splitlines()):
            if "command" in line:
                self._keep(Ran(**line))
            else:
                self._keep(kind(**{key: tuple(one) if isinstance(one, list) else one for key, one in line.items()}))

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
        with self.path.open("a", encoding="utf-8") as out:
            out.write(_text(line))
        self._keep(line)

    def leave_out(self, ids: Collection[Hashable]) -> None:
        """Write the file anew without the results of these ids."""
        self.by_id = {name: one for name, one in self.by_id.items() if name not in ids}
        write_file(self.path, "".join(map(_text, (*self.calls, *self.by_id.values()))), "the lines of")


def _text(line: Result | Ran) -> str:
    return f"{json.dumps(asdict(line))}\n"
