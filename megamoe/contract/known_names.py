"""The end of a sentence about an unknown name: which known one was meant, and which there are."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

MAX_LISTED: Final = 24
"""Known names that a sentence lists. More would bury the one that was meant."""


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'NAME'?" for the end of a sentence about an unknown name, or "" if nothing known is like it."""
    found = get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def nearest_of(name: str, known: Iterable[str], listed_in: str = "") -> str:
    """As `nearest`, then the known names. `listed_in`: the page that lists them if they are many."""
    names = list(known)
    guess = nearest(name, names)
    listed = f"known: {', '.join(names) or 'none'}"
    if listed_in and len(names) > MAX_LISTED:
        listed = f"{listed_in} lists all {len(names)}"
    return f"{guess} {listed}" if guess else f"; {listed}"
