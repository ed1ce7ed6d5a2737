"""Finds the source lines of a PTX instruction from `.file` and `.loc` (PTX ISA 11.5.2 and 11.5.3).

The text is read on demand: a kernel without faults pays nothing.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field
from functools import lru_cache

from backends.vm.faults import SourcePlace

MAX_FRAMES = 16
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_LOC = re.compile(
    r"^\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)"
    r"(?:\s*,?\s*function_name\s+([\w$]+)(?:\s*\+\s*(\d+))?\s*,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?"
)
_FUNCTION = re.compile(r"^\s*(?:\.\w+\s+)*\.(?:entry|func)\b")
_INLINE = re.compile(r"^\s*// (begin|end) inline asm")
_LABEL = re.compile(r"^\s*([\w$]+):\s*$")
_BYTES = re.compile(r"^\s*\.b8\s+(.*?);?\s*$")


@dataclass(frozen=True, slots=True)
class _Loc:
    """A `.loc`: file number, line and column. For inlined code: label and offset of its name, and the call's place."""

    at: tuple[int, int, int]
    name: tuple[str, int] | None = None
    inlined_at: tuple[int, int, int] | None = None


@dataclass(slots=True)
class _Table:
    """`locs`: the `.loc` of each PTX line, from 1. `strings`: bytes of the name section, by label."""

    files: dict[int, str] = field(default_factory=dict[int, str])
    locs: list[_Loc | None] = field(default_factory=list[_Loc | None])
    strings: dict[str, bytearray] = field(default_factory=dict[str, bytearray])

    def name(self, loc: _Loc) -> str:
        """The name of the inlined function, "" if there is none."""
        if loc.name is None or loc.name[0] not in self.strings:
            return ""
        return bytes(self.strings[loc.name[0]][loc.name[1] :]).partition(b"\0")[0].decode("utf-8", "replace")


def source_of(ptx: str, line: int) -> tuple[SourcePlace, ...]:
    """The source places of PTX `line` (from 1), innermost first, then its callers; () if the PTX names none."""
    table = _table(ptx)
    loc = table.locs[line] if 0 < line < len(table.locs) else None
    found: list[SourcePlace] = []
    earlier = line
    while loc is not None and len(found) < MAX_FRAMES:
        number, row, column = loc.at
        found.append(SourcePlace(table.files.get(number, f"file {number}"), row, column, table.name(loc)))
        call = loc.inlined_at
        if call is None:
            break
        # An earlier .loc describes the call itself and says where the call was inlined.
        earlier = next((at for at in range(earlier - 1, 0, -1) if (one := table.locs[at]) and one.at == call), 0)
        loc = table.locs[earlier] if earlier else _Loc(call)
    return tuple(found)


@lru_cache(maxsize=8)
def _table(ptx: str) -> _Table:
    table = _Table(locs=[None])
    current: _Loc | None = None
    label, inline = "", False
    for text in ptx.splitlines():
        if "inline asm" in text and (matched := _INLINE.match(text)):
            inline = matched[1] == "begin"
        elif matched := _LOC.match(text):
            # LLVM counts on through the lines of inline assembly, but all of them come from one source line.
            current = current if inline and current is not None else _loc(matched)
        elif matched := _FILE.match(text):
            folder, name = (matched[2], matched[3]) if matched[3] else ("", matched[2])
            table.files[int(matched[1])] = posixpath.join(folder, name)
        elif _FUNCTION.match(text):
            current = None
        elif matched := _LABEL.match(text):
            label = matched[1]
        elif matched := _BYTES.match(text):
            table.strings.setdefault(label, bytearray()).extend(_numbers(matched[1]))
        table.locs.append(current)
    return table


def _loc(matched: re.Match[str]) -> _Loc:
    at = int(matched[1]), int(matched[2]), int(matched[3])
    if matched[4] is None:
        return _Loc(at)
    return _Loc(at, (matched[4], int(matched[5] or 0)), (int(matched[6]), int(matched[7]), int(matched[8])))


def _numbers(text: str) -> bytes:
    return bytes(int(part, 0) & 0xFF for part in re.findall(r"0[xX][0-9a-fA-F]+|\d+", text))
