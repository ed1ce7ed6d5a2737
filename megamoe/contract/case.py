"""Case: one frozen point of a matrix. Its id names it in tests, records, benchmarks and on the command line."""

from __future__ import annotations

import builtins
from dataclasses import dataclass

AxisValue = int | float | bool | str | None


def spell(value: AxisValue) -> str:
    """How `value` is written in a case id: as in YAML, and with nothing that a shell would interpret."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)


@dataclass(frozen=True, slots=True)
class Case:
    """One point: every axis of the spec in the order of the spec (defaults filled in), inputs and seed.

    Made by `Spec.case` and `Spec.parse_case` only, which check it and give it its id.
    """

    op: str
    axes: tuple[tuple[str, AxisValue], ...]
    inputs: str
    seed: builtins.int
    id: str

    def __getitem__(self, axis: str) -> AxisValue:
        """The value of `axis`; KeyError with a sentence if the op has no such axis."""
        for name, value in self.axes:
            if name == axis:
                return value
        known = ", ".join(name for name, _ in self.axes)
        raise KeyError(f"case {self.id} has no axis {axis!r}; it has: {known}")

    def int(self, axis: str) -> builtins.int:
        """The value of `axis`, which must be an integer; ValueError with a sentence if it is not."""
        value = self[axis]
        if isinstance(value, bool) or not isinstance(value, builtins.int):
            raise ValueError(f"axis {axis} of case {self.id} is {spell(value)}, not an integer")
        return value

    def __str__(self) -> str:
        return self.id
