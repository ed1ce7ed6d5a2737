"""What differs between two lines of one key, and which direction of a counter or compiler figure is worse.

Gate, compare and accept share it. VM counters and compiler figures are integers that repeat exactly, so any difference
is a fact and needs no statistics; the table here says what it means. megamoe.diff.times decides whether two times
differ; here they are just two medians.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from megamoe.records.keys import KeyedLine
from megamoe.records.lines import Figures, Record, Timing

Direction = Literal["cost", "fact"]
Trend = Literal["worse", "vanished", "better", "changed"]

NOT_FAILED_ON: Final = (
    "lanes_unordered",
    "mbarrier_inits_unfenced",
    "setmaxnreg_unsynchronised",
    "smem_unfenced_overwrites",
    "tcgen05_fences_missing",
    "tmem_unordered_copies",
    "tmem_unordered_mmas",
    "wgmma_fences_early",
    "tmem_unwaited_overwrites",
    "waits_unread",
)
"""Orderings that the ISA requires, but whose absence does not fail a judged row."""

# "cost": more of it is worse. "fact": a property of the case that no kernel can change.
_DIRECTIONS: Mapping[str, Direction] = {
    "barrier_waits": "cost",
    # Operands for which the ISA defines no result.
    "bit_fields_beyond_255": "cost",
    "remainders_by_zero": "cost",
    "mbarrier_stalls": "cost",
    # FLOPs issued, including tile padding; `useful_flops` is what the case needs.
    "mma_flops": "cost",
    "mma_instructions": "cost",
    "smem_bank_conflicts": "cost",
    "smem_wavefronts": "cost",
    "tma_load_bytes": "cost",
    "tma_loads": "cost",
    "tma_store_bytes": "cost",
    "tma_stores": "cost",
    "tmem_columns": "cost",
    **dict.fromkeys(NOT_FAILED_ON, "cost"),
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
    """A number that differs; None if it was not counted. `trend` "vanished": a cost that is no longer counted."""

    name: str
    before: int | float | None
    after: int | float | None
    trend: Trend

    @property
    def step(self) -> str:
        """ "120 -> 124", the form that an Acceptance keeps."""
        return f"{_spelt(self.before)} -> {_spelt(self.after)}"

    def __str__(self) -> str:
        share = f" ({(self.after - self.before) / self.before:+.1%})" if self.before and self.after is not None else ""
        return f"{self.name} {self.step}{share}"


def direction(name: str) -> Direction | None:
    """What more of `name` means. None for a name that is not in the table: any change of it is just a change.

    If there are several kernels, a figure of one of them is named ENTRY.NAME and has NAME's direction.
    """
    name = name.rpartition(".")[2]
    return "cost" if name.startswith(_COST_PREFIXES) else _DIRECTIONS.get(name)


def differences(before: KeyedLine, after: KeyedLine) -> tuple[Change, ...]:
    """What differs between two lines of one key: counters, figures (ENTRY.NAME), or the median of samples in us.

    Raises TypeError for lines of two kinds.
    """
    if isinstance(before, Record) and isinstance(after, Record):
        return changes(before.counters, after.counters)
    if isinstance(before, Figures) and isinstance(after, Figures):
        return changes(*_flattened(before, after))
    if isinstance(before, Timing) and isinstance(after, Timing):
        return _medians(before, after)
    raise TypeError(f"a {before.kind} and a {after.kind} have nothing in common that could differ")


def changes(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Change, ...]:
    """Every number that differs, by name. A machine lists a cost only once it occurs, so a new one was 0 before.

    A cost that was above 0 and is now missing is "vanished", not better: perhaps nothing counts it any more.
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


def _flattened(before: Figures, after: Figures) -> tuple[dict[str, int], dict[str, int]]:
    """ENTRY.NAME -> number. If the program has a single kernel, it may be renamed: both sides then use the new name."""
    old = before.kernels
    if len(before.kernels) == len(after.kernels) == 1:
        old = dict(zip(after.kernels, before.kernels.values(), strict=True))
    old, new = (
        {f"{entry}.{name}": value for entry, numbers in kernels.items() for name, value in numbers.items()}
        for kernels in (old, after.kernels)
    )
    return old, new


def _medians(before: Timing, after: Timing) -> tuple[Change, ...]:
    """The medians, if the samples differ; None for a side without samples."""
    if before.samples_us == after.samples_us:
        return ()
    old, new = (median(line.samples_us) if line.samples_us else None for line in (before, after))
    return (Change(f"{after.temperature} median us", old, new, "changed"),)


def _spelt(value: int | float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
