"""Which way a counter or a compiler figure gets worse: the one table that the gate and the comparison share.

Counters of the VM and figures of a compiler are whole numbers that repeat exactly, so that any difference is a fact and
needs no statistics; what it means is what this table says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Direction = Literal["cost", "fact"]
Trend = Literal["worse", "vanished", "better", "changed"]

# "cost": more of it is worse. "fact": a property of the case, which no kernel can change.
_DIRECTIONS: Mapping[str, Direction] = {
    "barrier_waits": "cost",
    "mbarrier_stalls": "cost",
    # FLOPs issued, padding of tiles included; `useful_flops` is what the case needs.
    "mma_flops": "cost",
    "mma_instructions": "cost",
    "smem_bank_conflicts": "cost",
    "smem_wavefronts": "cost",
    "tma_load_bytes": "cost",
    "tma_loads": "cost",
    "tma_store_bytes": "cost",
    "tma_stores": "cost",
    "tmem_columns": "cost",
    "tmem_unordered_copies": "cost",
    "tmem_unwaited_overwrites": "cost",
    "useful_flops": "fact",
    "minimum_bytes": "fact",
    "registers": "cost",
    "spill_bytes": "cost",
    "spill_stores": "cost",
    "spill_loads": "cost",
    "stack_bytes": "cost",
    "stack": "cost",
    "smem_bytes": "cost",
    "static_smem": "cost",
    "code_bytes": "cost",
    "code_size": "cost",
}
_COST_PREFIXES = ("instructions_",)


@dataclass(frozen=True, slots=True)
class Change:
    """A counter that differs. None: it was not there. `trend` "vanished": a cost that is no longer counted at all."""

    name: str
    before: int | None
    after: int | None
    trend: Trend

    @property
    def step(self) -> str:
        """ "120 -> 124", the form that an Acceptance keeps."""
        return f"{_spelt(self.before)} -> {_spelt(self.after)}"

    def __str__(self) -> str:
        share = f" ({(self.after - self.before) / self.before:+.1%})" if self.before and self.after is not None else ""
        return f"{self.name} {self.step}{share}"


def direction(name: str) -> Direction | None:
    """What more of `name` means; None for a name that the table does not have, of which any change is just a change.

    A figure of one kernel of several is named ENTRY.NAME, and gets worse as NAME does.
    """
    name = name.rpartition(".")[2]
    return "cost" if name.startswith(_COST_PREFIXES) else _DIRECTIONS.get(name)


def changes(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Change, ...]:
    """Every counter that differs, by name. A machine names a cost only once it arises: one that appears was 0 before.

    One that was more than 0 and is not there any more is "vanished", not better: perhaps nobody counts it now.
    """
    names = sorted({*before, *after})
    found = ((name, before.get(name), after.get(name)) for name in names)
    return tuple(Change(name, old, new, trend) for name, old, new in found if (trend := _trend(name, old, new)))


def _trend(name: str, before: int | None, after: int | None) -> Trend | None:
    if before == after:
        return None
    if direction(name) != "cost":
        return "changed"
    if after is None:
        return "vanished" if before else None
    if (before or 0) == after:
        return None
    return "worse" if after > (before or 0) else "better"


def _spelt(value: int | None) -> str:
    return "none" if value is None else str(value)
