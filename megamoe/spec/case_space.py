"""Axes, their admissible values, and the space of an op's cases; writes and reads case ids.

Property tests draw from `Axis.drawn`, with their own Hypothesis strategies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from megamoe.contract import AxisValue, Case, spell
from megamoe.contract.known_names import nearest_of
from megamoe.spec.expression import Expression, ExpressionError
from megamoe.spec.marked_yaml import KeyPath

Kind = Literal["int", "float", "bool", "str"]
NAME = re.compile(r"[a-z][a-z0-9_]*")
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_INT = re.compile(r"-?[0-9]{1,18}")
_FLOAT = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,20})?(e[-+]?[0-9]{1,3})?")
_ARTICLE: dict[Kind, str] = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text"}


@dataclass(frozen=True, slots=True)
class Range:
    """Admissible values: `choices`, or the closed interval [min, max] if `choices` is None.

    `null`: whether None is admissible too. If there are choices, None is then one of them.
    """

    choices: tuple[AxisValue, ...] | None = None
    min: int | float | None = None
    max: int | float | None = None
    null: bool = False

    def admits(self, value: AxisValue) -> bool:
        """Whether `value`, which has the axis's kind, is admissible."""
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
        """Whether `outer` admits every value that this range admits."""
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

    `limits`: the values that a case may have. `drawn`: the subset of the limits that property tests draw from.
    `required`: it has no default. `optional`: it may be None.
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
        """Smallest value that property tests draw; None if they draw from `choices`."""
        return self.drawn.min

    @property
    def max(self) -> int | float | None:
        """Largest value that property tests draw; None if they draw from `choices`."""
        return self.drawn.max

    @property
    def choices(self) -> tuple[AxisValue, ...] | None:
        """The values that property tests draw from; None if they draw from min..max (and null if `optional`)."""
        return self.drawn.choices

    def coerce(self, value: object) -> AxisValue:
        """`value` in this axis's type: an integer becomes a float on a float axis. ValueError for another kind."""
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
        """The value that `text` spells in a case id; the inverse of `spell`. ValueError if it spells none."""
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
        """Why `value` is outside the limits, or outside the drawn range if `drawn`; None if it is inside."""
        admitted = self.drawn if drawn else self.limits
        if admitted.admits(value):
            return None
        of = "the range that tests draw from" if drawn else "its limits"
        return f"{self.name}={spell(value)} is outside of {of}; it must be {admitted}"

    @property
    def expected(self) -> str:
        """The kind in words, for messages."""
        return _ARTICLE[self.kind] + (" or null" if self.optional else "")


MAX_SEED = 2**63 - 1
_SEED = re.compile(r"[0-9]{1,19}")


class OutsideError(ValueError):
    """Says in a sentence why a point is not in the space.

    `rule`: the path in the spec file of the broken rule, () if the file does not state it. `culprit`: the axis,
    "inputs" or "seed" whose value is at fault, if only one is.
    """

    def __init__(self, sentence: str, rule: KeyPath = (), culprit: str | None = None) -> None:
        super().__init__(sentence)
        self.rule, self.culprit = rule, culprit


@dataclass(frozen=True, slots=True)
class CaseSpace:
    """All cases of one op. The first of `inputs` is the default; the default seed is 0."""

    op: str
    axes: Mapping[str, Axis]
    inputs: tuple[str, ...]
    constraints: tuple[Expression, ...] = ()

    def point(self, given: Mapping[str, object], inputs: AxisValue = None, seed: AxisValue = 0) -> Case:
        """The case with the axes `given` and the others at their defaults. OutsideError if it is not in the space."""
        values = self.completed(given)
        chosen = self.inputs[0] if inputs is None else inputs
        if not isinstance(chosen, str) or chosen not in self.inputs:
            sentence = f"there is no input distribution {chosen!r}{nearest_of(str(chosen), self.inputs)}"
            raise OutsideError(sentence, ("inputs",), "inputs")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
            raise OutsideError(f"seed must be an integer from 0 to {MAX_SEED}, not {seed!r}", (), "seed")
        return Case(self.op, tuple(values.items()), chosen, seed, self._id(values, chosen, seed))

    def completed(self, given: Mapping[str, object]) -> dict[str, AxisValue]:
        """All axes of the case with the axes `given`. OutsideError if it is not in the space."""
        values = self._complete(given)
        for name, value in values.items():
            if refusal := self.axes[name].refusal(value):
                raise OutsideError(refusal, ("axes", name), name)
        self._hold_constraints(values)
        return values

    def parse(self, case_id: str) -> Case:
        """The case named `case_id`. Axes may come in any order, with or without defaults. Raises OutsideError."""
        op, colon, rest = case_id.partition(":")
        if not colon or op != self.op:
            needed = ",".join(f"{name}=..." for name, axis in self.axes.items() if axis.required)
            raise OutsideError(
                f"{case_id!r} is no case id of {self.op}: write {self.op}:{needed}, as `megamoe list --op {self.op}` "
                "prints them"
            )
        texts: dict[str, str] = {}
        for part in rest.split(","):
            name, equals, text = part.partition("=")
            if not equals or not name:
                raise OutsideError(f"{part!r} in case id {case_id!r} is not of the form axis=value")
            if name in texts:
                raise OutsideError(f"{name} is given twice in case id {case_id!r}; keep one")
            texts[name] = text
        inputs, seed = texts.pop("inputs", None), texts.pop("seed", "0")
        if not _SEED.fullmatch(seed):
            raise OutsideError(f"seed must be an integer from 0 to {MAX_SEED}, not {seed!r}")
        given = {name: self._read(name, text) for name, text in texts.items()}
        return self.point(given, inputs, int(seed))

    def keeping_constraints(self, values: Mapping[str, AxisValue], name: str) -> Callable[[AxisValue], bool]:
        """A predicate: which values of the axis `name` make a case with `values`, one for every axis, each within its
        limits.

        Constraints that do not name the axis are evaluated only once.
        """
        if not _hold((one for one in self.constraints if name not in one.names), values):
            return lambda value: False
        asked = [one for one in self.constraints if name in one.names]
        return lambda value: _hold(asked, {**values, name: value})

    def undrawn(self, case: Case) -> OutsideError | None:
        """Why property tests never draw `case`; None if they may."""
        for name, value in case.axes:
            if refusal := self.axes[name].refusal(value, drawn=True):
                return OutsideError(refusal, ("ranges", name), name)
        return None

    def _axis(self, name: str) -> Axis:
        if name not in self.axes:
            raise OutsideError(f"{self.op} has no axis {name!r}{nearest_of(name, self.axes)}", ("axes",), name)
        return self.axes[name]

    def _read(self, name: str, text: str) -> AxisValue:
        try:
            return self._axis(name).read(text)
        except OutsideError:
            raise
        except ValueError as error:
            raise OutsideError(str(error), ("axes", name), name) from None

    def _complete(self, given: Mapping[str, object]) -> dict[str, AxisValue]:
        for name in given:
            self._axis(name)
        missing = [name for name, axis in self.axes.items() if axis.required and name not in given]
        if missing:
            raise OutsideError(f"{', '.join(missing)} must be given: no default", ("axes", missing[0]))
        values: dict[str, AxisValue] = {}
        for name, axis in self.axes.items():
            try:
                values[name] = axis.coerce(given[name]) if name in given else axis.default
            except ValueError as error:
                raise OutsideError(str(error), ("axes", name), name) from None
        return values

    def _hold_constraints(self, values: Mapping[str, AxisValue]) -> None:
        for i, constraint in enumerate(self.constraints):
            try:
                if constraint.value(values):
                    continue
                broken = ""
            except ExpressionError as error:
                broken = str(error)
            # Built only here, because drawing tries many points and needs few messages.
            seen = ", ".join(f"{name}={spell(values[name])}" for name in self.axes if name in constraint.names)
            sentence = f"{broken} ({seen})" if broken else f"{seen} breaks the constraint {constraint.text!r}"
            raise OutsideError(sentence, ("constraints", i))

    def _id(self, values: Mapping[str, AxisValue], inputs: str, seed: int) -> str:
        told = [(n, v) for n, v in values.items() if self.axes[n].required or v != self.axes[n].default]
        parts = [f"{name}={spell(value)}" for name, value in told]
        if inputs != self.inputs[0]:
            parts.append(f"inputs={inputs}")
        if seed:
            parts.append(f"seed={seed}")
        return f"{self.op}:{','.join(parts)}"


def _hold(constraints: Iterable[Expression], values: Mapping[str, AxisValue]) -> bool:
    try:
        return all(one.value(values) for one in constraints)
    except ExpressionError:
        return False
