"""Comments of PTX text (PTX ISA 4.3), and its text without them."""

from __future__ import annotations

import re

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r'"[^"\n]*"')


def blanked(ptx: str) -> str:
    """The text with spaces in place of its comments: everything else keeps its place."""
    return COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), ptx)


def code_alone(ptx: str) -> str:
    """The text with spaces in place of its comments and strings."""
    return _STRING.sub(lambda found: " " * len(found[0]), blanked(ptx))
