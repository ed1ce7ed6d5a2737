"""The sentence of a deadlock: who waits for what, and what has already left."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp


def report(warps: list[Warp]) -> str:
    """One clause a parked warp, equal ones counted together."""
    clauses: dict[str, list[str]] = {}
    for warp in warps:
        for strand in warp.strands:
            if strand.wait is not None:
                line = warp.code.blocks[strand.block].instructions[-1].line
                clauses.setdefault(f"at PTX line {line} for {strand.wait.reason()}", []).append(warp.name)
    if not clauses:
        return "no warp can move"
    return "nobody can move: " + "; ".join(f"{_names(names)} waits {clause}" for clause, names in clauses.items())


def _names(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    return unique[0] if len(unique) == 1 else f"{unique[0]} and {len(unique) - 1} more"
