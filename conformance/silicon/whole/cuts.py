"""Cuts the end off a random program, to find the statement at which an H200 and the machine part.

Cut k keeps the first k statements that write %r, %d or %p, and drops the later ones. Control flow, meetings of threads
and stores stay, so that a cut is a program without undefined behaviour as well: it stores the final contents of its
registers. This file needs only the standard library, because the device machine cuts programs, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conformance.silicon.whole.drawn import Drawn

PIECE = re.compile(r"\bL\d+:|(?:(?!\bL\d+:)[^;])+;?")
"""A label or a statement of a drawn program's text, including the text before it."""
_RESULTS = re.compile(r"[\s{}]*(?:@!?%\w+ )?([a-z][\w.:]*) (\{[^}]*\}|[^,;]*)[,;]")
_MEETING = re.compile(r"bar\.red\.")
_FIRST, _LAST = "mbarrier.init", "\nmov.u32 %t0, 0; selp.b32 %t1"


def _parts(text: str) -> tuple[str, list[str], str]:
    """The text before the drawn statements, these, and the text after them."""
    start, end = text.index("\n", text.index(_FIRST)), text.index(_LAST)
    return text[:start], PIECE.findall(text[start:end]), text[end:]


def _droppable(piece: str) -> bool:
    found = _RESULTS.match(piece)
    return bool(found and re.search(r"%[rdp]\d", found[2]) and "[" not in found[2])


def _dropped(piece: str) -> str:
    """The rest of a dropped statement: threads that met still meet."""
    found = _RESULTS.match(piece)
    lead = piece[: len(piece) - len(piece.lstrip(" \n{}"))]
    return lead + ("bar.sync 0;" if found and _MEETING.match(found[1]) else "")


def statements(program: Drawn) -> list[str]:
    """The statements that write a register, in the order of the text."""
    return [piece.strip(" \n{}") for piece in _parts(program.text)[1] if _droppable(piece)]


def cut(program: Drawn, kept: int) -> Drawn:
    """Returns the program with the first `kept` statements."""
    before, pieces, behind = _parts(program.text)
    out: list[str] = []
    for piece in pieces:
        drop = _droppable(piece) and kept <= 0
        kept -= _droppable(piece)
        out.append(_dropped(piece) if drop else piece)
    return replace(program, text=before + "".join(out) + behind)


def every_cut(program: Drawn) -> Iterator[Drawn]:
    """Yields all cuts, from none of the statements to all of them, with numbered entries."""
    for kept in range(len(statements(program)) + 1):
        one, entry = cut(program, kept), f"{program.entry}_{kept}"
        yield replace(one, entry=entry, text=_renamed(one.text, program.entry, entry))


def _renamed(text: str, entry: str, by: str) -> str:
    return text.replace(f".entry {entry}(", f".entry {by}(", 1)
