"""Expressions over the axes of a spec: dimensions ("hidden // 2") and constraints ("heads % kv_heads == 0").

They consist of integers, axis names, null, true, false; + - * // %; comparisons; and, or, not; parentheses. Python's
parser reads them and this module turns its tree into functions: no text is executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megamoe.contract import AxisValue
from megamoe.contract.known_names import nearest_of

Term = int | bool | None
Compute = Callable[[Mapping[str, AxisValue]], Term]
Test = Callable[[Mapping[str, AxisValue]], bool]

MAX_LENGTH = 160
_ALLOWED = re.compile(r"[A-Za-z0-9_ ()+\-*/%<>=!]+")
_GLUED = re.compile(r"\b[0-9]+[A-Za-z_]")
_CONSTANTS: dict[str, Term] = {"null": None, "true": True, "false": False}
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class ExpressionError(ValueError):
    """Says in a sentence what cannot be read in an expression, or why it cannot be computed for these values."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression. `names`: its axes. `compute`: as `value`, but its errors do not quote the expression."""

    text: str
    names: frozenset[str]
    body: ast.expr
    compute: Compute = field(repr=False, compare=False)

    @property
    def counts(self) -> bool:
        """Whether it can be a number."""
        match self.body:
            case ast.Name(id=name):
                return name not in _CONSTANTS
            case ast.UnaryOp(op=op):
                return isinstance(op, ast.USub)
            case _:
                return isinstance(self.body, ast.Constant | ast.BinOp)

    def uncompared(self, flags: Collection[str]) -> str:
        """The first part of a condition that is a number where true or false is needed; "" if there is none.

        `flags`: the boolean axes.
        """
        return _uncompared(self.body, flags)

    def value(self, axes: Mapping[str, AxisValue]) -> Term:
        """Its value at `axes`. ExpressionError for null in arithmetic or for division by zero."""
        try:
            return self.compute(axes)
        except ZeroDivisionError:
            raise ExpressionError(f"{self.text!r} divides by zero") from None
        except ExpressionError as error:
            raise ExpressionError(f"{self.text!r} cannot be computed: {error}") from None


@dataclass(frozen=True, slots=True)
class HasValue:
    """The condition that a text axis has one of its values. Expressions cover only numbers and bools."""

    axis: str
    wanted: str

    @property
    def names(self) -> frozenset[str]:
        """The axis, as a set."""
        return frozenset({self.axis})

    def value(self, axes: Mapping[str, AxisValue]) -> bool:
        """Whether it holds at `axes`."""
        return axes[self.axis] == self.wanted


def parse_expression(text: str, known: Collection[str]) -> Expression:
    """Parses `text`, which may use the axes in `known`. Raises ExpressionError."""
    if len(text) > MAX_LENGTH or not _ALLOWED.fullmatch(text) or _GLUED.search(text):
        raise ExpressionError(f"{text[:MAX_LENGTH]!r} is not an expression over axes, such as 'heads % kv_heads == 0'")
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError):
        raise ExpressionError(f"{text!r} cannot be read; write it like 'heads % kv_heads == 0'") from None
    names = _names(body, text)
    for name in sorted(names):
        if name not in known:
            raise ExpressionError(f"{text!r} speaks of {name!r}, no axis it may use{nearest_of(name, known)}")
    return Expression(text, names, body, _computed(body))


def _names(node: ast.expr, text: str) -> frozenset[str]:
    match node:
        case ast.Name(id=name):
            return frozenset() if name in _CONSTANTS else frozenset({name})
        case ast.Constant(value=value) if type(value) is int:
            return frozenset()
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            return _names(operand, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _names(left, text) | _names(right, text)
        case ast.BoolOp(values=values):
            return frozenset[str]().union(*(_names(value, text) for value in values))
        case ast.Compare(left=left, comparators=right, ops=ops) if all(_comparable(op) for op in ops):
            return _names(left, text).union(*(_names(value, text) for value in right))
        case _:
            seen = ast.unparse(node)
            raise ExpressionError(f"{text!r} contains {seen!r}; only + - * // %, comparisons, and, or, not are known")


def _uncompared(node: ast.expr, flags: Collection[str]) -> str:
    match node:
        case ast.Compare():
            return ""
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _uncompared(operand, flags)
        case ast.BoolOp(values=values):
            return next(filter(None, (_uncompared(value, flags) for value in values)), "")
        case ast.Name(id=name) if name in flags or isinstance(_CONSTANTS.get(name), bool):
            return ""
        case _:
            return ast.unparse(node)


def _comparable(op: ast.cmpop) -> bool:
    return isinstance(op, ast.Eq | ast.NotEq) or type(op) in _ORDER


def _computed(node: ast.expr) -> Compute:
    """Returns the function that computes `node`. Walks the tree only once, as cases are drawn by the thousand."""
    match node:
        case ast.Constant(value=int(constant)):
            return lambda axes: constant
        case ast.Name(id=name) if name in _CONSTANTS:
            value = _CONSTANTS[name]
            return lambda axes: value
        case ast.Name(id=name):
            return lambda axes: _term(name, axes[name])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            truth = _computed(operand)
            return lambda axes: not truth(axes)
        case ast.UnaryOp(operand=operand):
            number = _number(operand)
            return lambda axes: -number(axes)
        case ast.BinOp(left=left, op=op, right=right):
            of, one, other = _ARITHMETIC[type(op)], _number(left), _number(right)
            return lambda axes: of(one(axes), other(axes))
        case ast.BoolOp(op=op, values=values):
            return _joined([_computed(value) for value in values], every=isinstance(op, ast.And))
        case ast.Compare():
            return _compared(node)
        case _:
            raise ExpressionError(f"{ast.unparse(node)!r} has no meaning here")


def _term(name: str, value: AxisValue) -> Term:
    if isinstance(value, float | str):
        raise ExpressionError(f"{name} is {value!r}, not an integer, bool or null")
    return value


def _joined(truths: Sequence[Compute], every: bool) -> Test:
    """Whether all of `truths` hold, or any of them. Evaluated in this order, and no further than needed."""
    if len(truths) == 1:
        (only,) = truths
        return lambda axes: bool(only(axes))
    first, rest = truths[0], _joined(truths[1:], every)
    if every:
        return lambda axes: bool(first(axes)) and rest(axes)
    return lambda axes: bool(first(axes)) or rest(axes)


def _number(node: ast.expr) -> Callable[[Mapping[str, AxisValue]], int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        constant = node.value
        return lambda axes: constant
    term = _computed(node)

    def number(axes: Mapping[str, AxisValue]) -> int:
        value = term(axes)
        if value is None:
            said = ast.unparse(node)
            raise ExpressionError(f"{said} is null; guard it with '{said} == null or ...'")
        return int(value)

    return number


def _compared(node: ast.Compare) -> Test:
    sides = [node.left, *node.comparators]
    return _joined([_link(op, *pair) for op, pair in zip(node.ops, pairwise(sides), strict=True)], every=True)


def _link(op: ast.cmpop, left: ast.expr, right: ast.expr) -> Test:
    if isinstance(op, ast.Eq | ast.NotEq):
        one, other, equal = _computed(left), _computed(right), isinstance(op, ast.Eq)
        return lambda axes: (one(axes) == other(axes)) is equal
    of, low, high = _ORDER[type(op)], _number(left), _number(right)
    return lambda axes: of(low(axes), high(axes))
