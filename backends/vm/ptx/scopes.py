"""Names of one function: nested scopes, register ranges, unique names for what inner scopes declare."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

from lark import Token

from backends.vm.ptx.ast import Immediate, Operand, Register, Symbol, Vector
from backends.vm.ptx.syntax_error import MisreadError

_DEPTH = 100
_LONGEST_NUMBER = 12
_SEPARATOR = "#"
"""Stands before the number of an inner scope in unique names. No PTX identifier has one (PTX ISA 4.4)."""
_DECIMAL = frozenset("0123456789")
_COMPONENTS = {"x": 0, "y": 1, "z": 2, "w": 3, "r": 0, "g": 1, "b": 2, "a": 3}
_SPECIAL = re.compile(
    r"%(?:(?:n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)(?:\.[xyzw])?|laneid|n?warpid|n?smid|gridid|clock|clock_hi|clock64"
    r"|is_explicit_cluster|cluster_n?ctarank|lanemask_(?:eq|le|lt|ge|gt)|globaltimer(?:_lo|_hi)?|pm[0-7](?:_64)?"
    r"|envreg(?:[12]?[0-9]|3[01])|(?:total|aggr|dynamic)_smem_size|reserved_smem_offset_(?:begin|end|cap|[01])"
    r"|current_graph_exec)"
)
"""PTX ISA 10: special registers, which need no declaration."""
_WARP_SZ = Immediate(32)


@dataclass(frozen=True, slots=True)
class _Range:
    """`%r<100>`: `%r0` to `%r99`."""

    prefix: str
    count: int
    type: str
    vector: int

    def holds_number(self, digits: str) -> bool:
        if not (digits.isascii() and digits.isdecimal()) or len(digits) > _LONGEST_NUMBER:
            return False
        return (digits == "0" or digits[0] != "0") and int(digits) < self.count


@dataclass(slots=True)
class _Scope:
    """What one `{ }` declares. `lowest`: by prefix p the lowest n of a declared name `pn`, and its declaration."""

    suffix: str
    names: dict[str, Operand] = field(default_factory=dict)
    ranges: dict[str, _Range] = field(default_factory=dict)
    lowest: dict[str, tuple[int, str]] = field(default_factory=dict)

    def note(self, name: str, declaration: str) -> None:
        """Enter `name` under each prefix that a range could have, so that a range need not look at every name."""
        for end in range(len(name) - 1, max(len(name) - _LONGEST_NUMBER, 1) - 1, -1):
            if name[end] not in _DECIMAL:
                return
            if name[end] == "0" and end + 1 < len(name):
                continue
            found = int(name[end:]), declaration
            self.lowest[name[:end]] = min(found, self.lowest.get(name[:end], found))

    def range_of(self, name: str) -> _Range | None:
        for end in range(len(name) - 1, max(len(name) - _LONGEST_NUMBER, 0) - 1, -1):
            found = self.ranges.get(name[:end])
            if found is not None and found.holds_number(name[end:]):
                return found
            if not name[end].isdecimal():
                return None
        return None


class Scopes:
    """Declares and looks up names, innermost scope first; `registers` collects the registers that are used or named.

    A register of a range `%r<n>` enters `registers` when it is first used. A vector register `v` becomes the scalar
    registers `v.x`, `v.y`, ...
    """

    def __init__(self, module_names: Set[str]) -> None:
        self.registers: dict[str, str] = {}
        self._module_names = module_names
        self._scopes = [_Scope("")]
        self._opened = 0

    @contextmanager
    def inner(self, begin: Token, labels: Iterable[Token]) -> Iterator[None]:
        """A nested `{ }` with its labels, which may be named before they stand."""
        if len(self._scopes) > _DEPTH:
            raise MisreadError(f"scopes are nested more than {_DEPTH} deep", begin)
        self._opened += 1
        self._scopes.append(_Scope(f"{_SEPARATOR}{self._opened}"))
        self.declare_labels(labels)
        yield
        self._scopes.pop()

    def declare_labels(self, labels: Iterable[Token]) -> None:
        """Makes the labels of the current scope known."""
        for label in labels:
            self.declare_symbol(label, label[:-1].rstrip())

    def declare_symbol(self, token: Token, name: str) -> str:
        """The unique name of a variable, parameter or label, declared in the current scope; MisreadError if it was."""
        scope = self._fresh(token, name)
        unique = self._unique(name)
        scope.names[name] = Symbol(unique)
        scope.note(name, name)
        return unique

    def declare_register(self, token: Token, type_: str, vector: int, count: int | None) -> None:
        """Declares a register, or with `count` the range `token0` to `token{count-1}`."""
        name = str(token)
        if count is None:
            scope = self._fresh(token, name)
            scope.names[name] = self._register(self._unique(name), type_, vector)
            scope.note(name, name)
            return
        scope, met = self._scopes[-1], self._scopes[-1].range_of(f"{name}0")
        number, taken = scope.lowest.get(name, (count, "")) if met is None else (-1, f"{met.prefix}<{met.count}>")
        if number < count:
            raise MisreadError(f"{name}<{count}> declares again what {taken} has declared in this scope", token)
        scope.ranges[name] = _Range(name, count, type_, vector)
        scope.note(f"{name}0", f"{name}<{count}>")

    def find(self, token: Token) -> Operand | None:
        """A Register, the Vector of a vector register, or a Symbol; None for a name that nothing declares."""
        for scope in reversed(self._scopes):
            found = scope.names.get(token)
            if found is not None:
                return found
            of = scope.range_of(token) if scope.ranges else None
            if of is not None:
                found = self._register(self._unique(token, scope.suffix), of.type, of.vector)
                scope.names[str(token)] = found
                return found
        if token in self._module_names:
            return Symbol(str(token))
        if token[0] == "%" and _SPECIAL.fullmatch(token):
            return Register(str(token))
        if token == "WARP_SZ":
            return _WARP_SZ
        return self._component(token) if "." in token else None

    def _component(self, token: Token) -> Operand | None:
        base, _, component = token.partition(".")
        whole = self.find(Token.new_borrow_pos(token.type, base, token))
        index = _COMPONENTS.get(component)
        if not isinstance(whole, Vector) or index is None or index >= len(whole.items):
            return None
        return whole.items[index]

    def _fresh(self, token: Token, name: str) -> _Scope:
        scope = self._scopes[-1]
        if name in scope.names or scope.range_of(name) is not None:
            raise MisreadError(f"{name} is declared twice in one scope; a name may be declared once", token)
        return scope

    def _unique(self, name: str, suffix: str | None = None) -> str:
        suffix = self._scopes[-1].suffix if suffix is None else suffix
        if not suffix and name in self._module_names:
            return f"{name}{_SEPARATOR}0"
        return f"{name}{suffix}"

    def _register(self, unique: str, type_: str, vector: int) -> Operand:
        if vector == 1:
            self.registers[unique] = type_
            return Register(unique)
        names = [f"{unique}.{component}" for component in "xyzw"[:vector]]
        self.registers.update(dict.fromkeys(names, type_))
        return Vector(tuple(Register(name) for name in names))
