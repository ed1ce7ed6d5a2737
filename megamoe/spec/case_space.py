"""The space of an op's cases: axes, input distributions, constraints. It writes and reads case ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megamoe.contract import AxisValue, Case, spell
from megamoe.spec.error import nearest
from megamoe.spec.expression import Expression, ExpressionError
from megamoe.spec.marked_yaml import KeyPath
from megamoe.spec.ranges import Axis

MAX_SEED = 2**63 - 1
_SEED = re.compile(r"[0-9]{1,19}")


class OutsideError(ValueError):
    """Why a point is not in the space, as a sentence.

    `rule`: the path in the spec's file of the rule that it breaks, () if the file states none. `culprit`: the axis,
    "inputs" or "seed" whose value is at fault, if one alone is.
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
        """The case with the axes `given` and the others at their defaults. OutsideError if there is none."""
        values = self._complete(given)
        for name, value in values.items():
            if refusal := self.axes[name].refusal(value):
                raise OutsideError(refusal, ("axes", name), name)
        self._hold_constraints(values)
        chosen = self.inputs[0] if inputs is None else inputs
        if not isinstance(chosen, str) or chosen not in self.inputs:
            sentence = f"there is no input distribution {chosen!r}; {nearest(str(chosen), self.inputs)}"
            raise OutsideError(sentence, ("inputs",), "inputs")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
            raise OutsideError(f"seed must be an integer from 0 to {MAX_SEED}, not {seed!r}", (), "seed")
        return Case(self.op, tuple(values.items()), chosen, seed, self._id(values, chosen, seed))

    def parse(self, case_id: str) -> Case:
        """The case named `case_id`, its axes in any order, defaults written out or not. Raises OutsideError."""
        op, colon, rest = case_id.partition(":")
        if not colon or op != self.op:
            raise OutsideError(f"case id {case_id!r} does not begin with '{self.op}:'")
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

    def undrawn(self, case: Case) -> OutsideError | None:
        """Why property tests never draw `case`; None if they may."""
        for name, value in case.axes:
            if refusal := self.axes[name].refusal(value, drawn=True):
                return OutsideError(refusal, ("ranges", name), name)
        return None

    def _axis(self, name: str) -> Axis:
        if name not in self.axes:
            raise OutsideError(f"{self.op} has no axis {name!r}; {nearest(name, self.axes)}", ("axes",), name)
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
            seen = ", ".join(f"{name}={spell(values[name])}" for name in self.axes if name in constraint.names)
            try:
                holds = bool(constraint.value(values))
            except ExpressionError as error:
                raise OutsideError(f"{error} ({seen})", ("constraints", i)) from None
            if not holds:
                raise OutsideError(f"{seen} breaks the constraint {constraint.text!r}", ("constraints", i))

    def _id(self, values: Mapping[str, AxisValue], inputs: str, seed: int) -> str:
        told = [(n, v) for n, v in values.items() if self.axes[n].required or v != self.axes[n].default]
        parts = [f"{name}={spell(value)}" for name, value in told]
        if inputs != self.inputs[0]:
            parts.append(f"inputs={inputs}")
        if seed:
            parts.append(f"seed={seed}")
        return f"{self.op}:{','.join(parts)}"
