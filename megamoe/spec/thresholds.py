"""How far apart two device times of a case may be before the difference counts, as its spec says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megamoe.contract import AxisValue, Case

if TYPE_CHECKING:
    from megamoe.contract import Temperature

DEFAULT_THRESHOLD = 0.02


@dataclass(frozen=True, slots=True)
class Override:
    """A threshold for some cases. What is None or empty selects nothing away.

    `cases`: ids, those of a matrix. `where`: the values that an axis may have. `temperature`: of the L2.
    """

    threshold: float
    reason: str
    cases: frozenset[str] | None = None
    where: Mapping[str, tuple[AxisValue, ...]] = field(default_factory=dict[str, tuple[AxisValue, ...]])
    temperature: Temperature | None = None

    def speaks_of(self, case: Case) -> bool:
        """Whether `case` is one of its cases, at some temperature."""
        return (self.cases is None or case.id in self.cases) and all(
            case[axis] in values for axis, values in self.where.items()
        )


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The threshold of an op, as a share (0.02 is 2 %), and where another one holds: the first that matches."""

    default: float = DEFAULT_THRESHOLD
    overrides: tuple[Override, ...] = ()

    def of(self, case: Case, temperature: Temperature) -> float:
        """The threshold of `case` at one temperature of the L2."""
        for override in self.overrides:
            if override.temperature in (None, temperature) and override.speaks_of(case):
                return override.threshold
        return self.default
