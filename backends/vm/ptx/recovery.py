"""Reading on behind a syntax error, so that all errors of a text are told at once.

An instruction declares nothing: without it, the rest of the text means what it meant. So only the statement of an
instruction is skipped. Behind an error anywhere else nobody can tell which later errors follow from it.
"""

from __future__ import annotations

import re
from typing import Final

from backends.vm.ptx.comments import code_alone

_BEFORE: Final = re.compile(r"(?:\s+|[{}]|[\w$%]+\s*:(?!:)|\.(?:loc|file|section)\b[^\n]*\n)*")
"""What may stand between two instructions: scopes, labels and lines for debuggers."""
_INSTRUCTION: Final = re.compile(r"(?:@!?\s*[\w$%]+\s+)?[a-z]\w*(?:\.[\w:]+)*")
_PAIRS: Final = ("{}", "()")
"""Calls often have their parentheses on lines of their own."""
_DIRECTIVE: Final = re.compile(r"(?<![\w.])\.\s*[a-z]|^[^\n]*[\w$%]\s*:(?!:)", re.MULTILINE)


def without_statement(text: str, line: int | None, column: int | None) -> str | None:
    """`text` with spaces in place of the instruction at a place (from 1); None if none is there for certain."""
    if line is None or column is None or line < 1:
        return None
    lines = text.split("\n")
    if line > len(lines):
        return None
    place = sum(len(one) + 1 for one in lines[: line - 1]) + column - 1
    code = code_alone(text)
    end = code.find(";", place)
    if end < 0:
        return None
    begin = code.rfind(";", 0, place) + 1
    skipped = _BEFORE.match(code, begin)
    begin = skipped.end() if skipped is not None else begin
    statement = code[begin:end]
    if begin > place or not _INSTRUCTION.match(statement):
        return None
    # A brace too many has ended the function.
    if code.count("{", 0, begin) <= code.count("}", 0, begin):
        return None
    # What is behind a missing semicolon, and is no instruction, would be lost with it.
    if _DIRECTIVE.search(statement) or any(statement.count(one) != statement.count(end) for one, end in _PAIRS):
        return None
    return text[:begin] + re.sub(r"[^\n]", " ", text[begin : end + 1]) + text[end + 1 :]
