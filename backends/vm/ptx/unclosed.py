"""Which bracket has no end, where a syntax error follows from that. What the grammar expects there would mislead."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from backends.vm.ptx.comments import code_alone

_CLOSES: Final = {"[": "]", "(": ")", "{": "}"}
_TERMINALS: Final = {"]": "RSQB", ")": "RPAR", "}": "RBRACE"}
_BRACKET: Final = re.compile(r"[][(){}]")
_BRACE: Final = re.compile(r"[{}]")
_OF_MODULE: Final = re.compile(r"\.(?:visible|extern|weak|common|entry|func)\b")
"""What begins a function and stands in none."""
_PARENTHESES: Final = r"\([^(){}]*(?:\([^(){}]*\)[^(){}]*)*\)"
_FUNCTION: Final = re.compile(
    rf"\.(entry|func)\b(?:\s*\.attribute\s*{_PARENTHESES})?(?:\s*{_PARENTHESES})?\s*([\w$%]+)"
)


def unclosed(text: str, place: int, expected: Collection[str]) -> tuple[str, str]:
    """The bracket that should stand at `place`, an offset in `text`, and whose it is; "" and "" if none is missing.

    `expected`: the terminals that the grammar takes there.
    """
    code = code_alone(text)
    if "OPCODE" in expected:
        return _body(code, place) if place >= len(code.rstrip()) or _OF_MODULE.match(code, place) else ("", "")
    begin, end = code.rfind(";", 0, place) + 1, code.find(";", place)
    left = _open(code, begin, place)
    if not left:
        return "", ""
    opened = left[-1]
    closes = _CLOSES[code[opened]]
    # The brace of a body is open in each of its statements.
    if closes == "}" and _TERMINALS[closes] not in expected:
        return "", ""
    if opened not in _open(code, begin, end if end >= 0 else len(code)):
        return "", ""
    line, column = _line(code, opened), opened - code.rfind("\n", 0, opened)
    where = f"column {column}" if line == _line(code, place) else f"line {line}, column {column}"
    return closes, f"the {code[opened]!r} in {where}"


def _open(code: str, begin: int, end: int) -> list[int]:
    """The offsets of the brackets between two offsets that are not closed there, the innermost last."""
    left = list[int]()
    for found in _BRACKET.finditer(code, begin, end):
        if found[0] in _CLOSES:
            left.append(found.start())
        elif left and _CLOSES[code[left[-1]]] == found[0]:
            left.pop()
    return left


def _body(code: str, place: int) -> tuple[str, str]:
    """The end of the function whose body `place` is in."""
    depth = opened = 0
    for found in _BRACE.finditer(code, 0, place):
        if depth == 0:
            opened = found.start()
        depth += 1 if found[0] == "{" else -1
    heads = list(_FUNCTION.finditer(code, 0, opened))
    if depth <= 0 or not heads:
        return "", ""
    kind = "entry" if heads[-1][1] == "entry" else "function"
    return "}", f"{kind} {heads[-1][2]} (line {_line(code, heads[-1].start())})"


def _line(code: str, place: int) -> int:
    return code.count("\n", 0, place) + 1
