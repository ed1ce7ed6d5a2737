"""Counters and compiler figures are exact: any difference is a change, and more of a cost is worse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from megamoe.record import Figures

Direction = Literal["worse", "better", "changed"]

# What a kernel pays. Names of the VM (backends/vm/machine.py) and of the assemblers (megamoe.explain_assembly).
COSTS = frozenset(
    {
        "barrier_waits",
        "mbarrier_stalls",
        "mma_flops",
        "mma_instructions",
        "smem_bank_conflicts",
        "smem_wavefronts",
        "tma_load_bytes",
        "tma_loads",
        "tma_store_bytes",
        "tma_stores",
        "tmem_columns",
        "tmem_unwaited_overwrites",
        "registers",
        "spill_bytes",
        "spill_loads",
        "spill_stores",
        "stack",
        "smem_bytes",
        "static_smem",
        "code_bytes",
        "code_size",
    }
)
COST_PREFIX = "instructions_"


def is_cost(name: str) -> bool:
    """Whether more of it is worse. What is not a cost (useful_flops, minimum_bytes) can only have changed."""
    return name in COSTS or name.startswith(COST_PREFIX)


@dataclass(frozen=True, slots=True)
class Change:
    """A number that is not what it was; None where a side does not have it. `name` is "ENTRY.NAME" for figures."""

    name: str
    before: int | None
    after: int | None
    direction: Direction

    def __str__(self) -> str:
        share = ""
        if self.before and self.after is not None:
            share = f" ({self.after / self.before - 1:+.1%})"
        return f"{self.name} {_spell(self.before)} -> {_spell(self.after)}{share}"


def _spell(number: int | None) -> str:
    return "none" if number is None else str(number)


def compared_counters(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Change, ...]:
    """What differs, by name. A counter that one side does not name is 0 there: the VM names only what it counted.

    But a side without any counter did not count, so that every cost of the other one is gone or new.
    """
    absent_before, absent_after = (0 if before else None), (0 if after else None)
    names = sorted(before.keys() | after.keys())
    return _changes((name, before.get(name, absent_before), after.get(name, absent_after)) for name in names)


def compared_figures(before: Figures, after: Figures) -> tuple[Change, ...]:
    """What differs, kernel by kernel."""
    names = {(entry, name) for line in (before, after) for entry, kernel in line.kernels.items() for name in kernel}
    return _changes(
        (f"{entry}.{name}", before.kernels.get(entry, {}).get(name), after.kernels.get(entry, {}).get(name))
        for entry, name in sorted(names)
    )


def _changes(pairs: Iterable[tuple[str, int | None, int | None]]) -> tuple[Change, ...]:
    return tuple(Change(name, old, new, _direction(name, old, new)) for name, old, new in pairs if old != new)


def _direction(name: str, before: int | None, after: int | None) -> Direction:
    """A cost that is gone counts as worse: nothing holds it any more."""
    if not is_cost(name.rpartition(".")[2]) or before is None:
        return "changed"
    return "worse" if after is None or after > before else "better"
