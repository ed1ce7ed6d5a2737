"""Comments of PTX text (PTX ISA 4.3)."""

from __future__ import annotations

import re

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def blanked(ptx: str) -> str:
    """The text with spaces in place of its comments: everything else keeps its place."""
    return COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), ptx)
