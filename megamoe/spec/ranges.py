"""Axes and their admissible values. Property tests draw from `Axis.drawn`, with their own Hypothesis."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from megamoe.contract import AxisValue, spell

Kind = Literal["int", "float", "bool", "str"]
NAME = re.compile(r"[a-z][a-z0-9_]*")
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_INT = re.compile(r"-?[0-9]{1,18}")
_FLOAT = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,20})?(e[-+]?[0-9]{1,3})?")
_ARTICLE: dict[Kind, str] = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text"}


@dataclass(frozen=True, slots=True)
class Range:
    """Admissible values: those in `choices`, or the closed interval [min, max] if `choices` is None.

    `null`: whether None is admissible too. If choices are given, it is then one of them.
    """

    choices: tuple[AxisValue, ...] | None = None
    min: int | float | None = None
    max: int | float | None = None
    null: bool = False

    def admits(self, value: AxisValue) -> bool:
        """Whether `value`, of the kind of the axis, is admissible."""
        if self.choices is not None:
            return value in self.choices
        if value is None:
            return self.null
        return (
            not isinstance(value, str)
            and self.min is not None
            and self.max is not None
            and self.min <= value <= self.max
        )

    def within(self, outer: Range) -> bool:
        """Whether `outer` admits every value that this admits."""
        if self.choices is not None:
            return all(outer.admits(value) for value in self.choices)
        if outer.choices is not None:
            return False
        return outer.admits(self.min) and outer.admits(self.max) and (outer.null or not self.null)

    def __str__(self) -> str:
        if self.choices is not None:
            return "one of " + ", ".join(spell(value) for value in self.choices)
        return f"{spell(self.min)}..{spell(self.max)}" + (" or null" if self.null else "")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of an op.

    `limits`: what a case may have. `drawn`: what property tests draw, a part of the limits. `required`: it has no
    default. `optional`: it may be None.
    """

    name: str
    kind: Kind
    doc: str
    limits: Range
    drawn: Range
    default: AxisValue = None
    required: bool = True
    optional: bool = False

    @property
    def min(self) -> int | float | None:
        """Least value that property tests draw; None if they draw from `choices`."""
        return self.drawn.min

    @property
    def max(self) -> int | float | None:
        """Greatest value that property tests draw; None if they draw from `choices`."""
        return self.drawn.max

    @property
    def choices(self) -> tuple[AxisValue, ...] | None:
        """The values that property tests draw from; None if they draw from min..max (and null if `optional`)."""
        return self.drawn.choices

    def coerce(self, value: object) -> AxisValue:
        """`value` as this axis keeps it: an integer becomes a float on a float axis. ValueError for another kind."""
        if value is None and self.optional:
            return None
        if isinstance(value, bool):
            if self.kind == "bool":
                return value
        elif isinstance(value, int | float) and self.kind == "float":
            if abs(value) < 1e300 and not math.isnan(value):
                return float(value) + 0.0
        elif isinstance(value, int) and self.kind == "int":
            return int(value)
        elif isinstance(value, str) and self.kind == "str" and _WORD.fullmatch(value) and value != "null":
            return value
        raise ValueError(f"{self.name} must be {self.expected}, not {value!r:.60}")

    def read(self, text: str) -> AxisValue:
        """The value that `text` spells in a case id; the inverse of `spell`. ValueError if there is none."""
        value: AxisValue = text
        if text == "null":
            value = None
        elif self.kind == "int" and _INT.fullmatch(text):
            value = int(text)
        elif self.kind == "float" and _FLOAT.fullmatch(text):
            value = float(text)
        elif self.kind == "bool" and text in ("true", "false"):
            value = text == "true"
        return self.coerce(value)

    def refusal(self, value: AxisValue, *, drawn: bool = False) -> str | None:
        """Why `value` is outside of the limits, or of the drawn range if `drawn`; None if it is inside."""
        admitted = self.drawn if drawn else self.limits
        if admitted.admits(value):
            return None
        of = "the range that tests draw from" if drawn else "its limits"
        return f"{self.name}={spell(value)} is outside of {of}; it must be {admitted}"

    @property
    def expected(self) -> str:
        """The kind in words, for sentences."""
        return _ARTICLE[self.kind] + (" or null" if self.optional else "")
