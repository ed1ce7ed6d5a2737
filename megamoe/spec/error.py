"""SpecError: why a spec or a case id is refused."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class SpecError(ValueError):
    """A sentence that names file, line (from 1) and key, gives the value seen and says what would be right."""

    def __init__(self, sentence: str, *, file: Path | None = None, line: int | None = None, key: str = "") -> None:
        place = "" if file is None else f"{file}:{line}: " if line is not None else f"{file}: "
        super().__init__(f"{place}{key}: {sentence}" if key else f"{place}{sentence}")
        self.sentence, self.file, self.line, self.key = sentence, file, line, key


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known name, then all of them."""
    names = list(known)
    close = get_close_matches(name, names, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}known: {', '.join(names) or 'none'}"
