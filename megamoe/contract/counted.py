"""Numbers of things in sentences."""

from __future__ import annotations


def counted(count: int, name: str, *verbs: str) -> str:
    """ "1 row", "1,024 rows". `verbs`: for a single thing, then for any other number, as "is", "are"."""
    said = f"{count:,} {name}{'' if count == 1 else 's'}"
    return f"{said} {verbs[count != 1]}" if verbs else said
