"""Builds one function: flattens scopes, makes names unique, resolves operands and orders instructions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

from lark import Token

from backends.vm.ptx.ast import (
    Address,
    Function,
    Guard,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Variable,
    Vector,
)
from backends.vm.ptx.comments import COMMENT
from backends.vm.ptx.pointers import with_pointers
from backends.vm.ptx.tree import (
    MisreadError,
    RawAddress,
    RawArguments,
    RawBlock,
    RawCall,
    RawDisplaced,
    RawFunction,
    RawInstruction,
    RawOperand,
    RawPair,
    RawPrototype,
    RawRegisters,
    RawStatement,
    RawTargets,
    RawVariable,
    RawVector,
)
from backends.vm.ptx.variables import declare

_DEPTH = 100
_LONGEST_NUMBER = 12
SEPARATOR = "#"
"""Precedes the number of an inner scope in unique names. PTX identifiers cannot contain it (PTX ISA 4.4)."""
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
_RESERVED = {"WARP_SZ": "the constant 32", "_": "the operand that is discarded"}
"""Names that ptxas accepts in no declaration, and what each of them is."""


def is_special(name: str) -> bool:
    """Whether `name`, with its component, is a special register."""
    return name[0] == "%" and _SPECIAL.fullmatch(name) is not None


def check_unreserved(token: Token, name: str) -> None:
    """MisreadError if no declaration may give this name to anything."""
    if name in _RESERVED:
        raise MisreadError(f"{name} is declared, but it is {_RESERVED[name]}; choose another name", token)


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
    """Declarations of one `{ }`. `lowest` maps a prefix p to the lowest n of a declared `pn`, and its declaration."""

    suffix: str
    names: dict[str, Operand] = field(default_factory=dict)
    ranges: dict[str, _Range] = field(default_factory=dict)
    lowest: dict[str, tuple[int, str]] = field(default_factory=dict)

    def note(self, name: str, declaration: str) -> None:
        """Enter `name` under each prefix that a range could have, so that a range need not check every name."""
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
    """Declares and looks up names, innermost scope first. `registers` holds registers used or declared by name.

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
        """A nested `{ }`. Its labels are declared first, because branches may precede them."""
        if len(self._scopes) > _DEPTH:
            raise MisreadError(f"scopes are nested more than {_DEPTH} deep", begin)
        self._opened += 1
        self._scopes.append(_Scope(f"{SEPARATOR}{self._opened}"))
        self.declare_labels(labels)
        yield
        self._scopes.pop()

    def declare_labels(self, labels: Iterable[Token]) -> None:
        """Makes the labels of the current scope known."""
        for label in labels:
            self.declare_symbol(label, label[:-1].rstrip())

    def declare_symbol(self, token: Token, name: str) -> str:
        """Declare a variable, parameter or label and return its unique name; MisreadError if the scope has it."""
        check_unreserved(token, name)
        scope = self._fresh(token, name)
        unique = self._unique(name)
        scope.names[name] = Symbol(unique)
        scope.note(name, name)
        return unique

    def declare_register(self, token: Token, type_: str, vector: int, count: int | None) -> None:
        """Declares a register or, with `count`, the range `token0` to `token{count-1}`."""
        name = str(token)
        check_unreserved(token, name)
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
        """A Register, the Vector of a vector register, or a Symbol; None for an undeclared name."""
        name = str(token)  # Token compares in Python, which is slow.
        found = self._declared(name)
        if found is not None:
            return found
        if "." in name:
            return self._component(name)
        if is_special(name):
            return Register(name)
        return _WARP_SZ if name == "WARP_SZ" else None

    def hides_special(self, name: str) -> bool:
        """Whether `name` is a component such as %tid.x, and a declaration here gives %tid another meaning."""
        return is_special(name) and "." in name and self._declared(name.partition(".")[0]) is not None

    def _declared(self, name: str) -> Operand | None:
        for scope in reversed(self._scopes):
            found = scope.names.get(name)
            if found is not None:
                return found
            of = scope.range_of(name) if scope.ranges else None
            if of is not None:
                found = self._register(self._unique(name, scope.suffix), of.type, of.vector)
                scope.names[name] = found
                return found
        return Symbol(name) if name in self._module_names else None

    def _component(self, name: str) -> Operand | None:
        base, _, component = name.partition(".")
        whole = self._declared(base)
        if whole is None:
            if is_special(name):
                return Register(name)
            whole = Register(base) if is_special(base) else None
        if isinstance(whole, Register) and _SELECTOR.fullmatch(component):
            return Register(f"{whole.name}.{component}")
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
        # A special register that is read before a declaration takes its name keeps its own.
        if not suffix and (name in self._module_names or is_special(name)):
            return f"{name}{SEPARATOR}0"
        return f"{name}{suffix}"

    def _register(self, unique: str, type_: str, vector: int) -> Operand:
        if vector == 1:
            self.registers[unique] = type_
            return Register(unique)
        names = [f"{unique}.{component}" for component in "xyzw"[:vector]]
        self.registers.update(dict.fromkeys(names, type_))
        return Vector(tuple(Register(name) for name in names))


_SINK = Sink()
_SELECTOR = re.compile(r"[bh][0-7]{1,4}")
"""Bytes or halves of a register, as video instructions spell them (PTX ISA 9.7.18)."""
_BRANCHES = frozenset(["bra", "brx"])


@lru_cache(maxsize=4096)
def _parts(opcode: str) -> tuple[str, ...]:
    return tuple("".join(opcode.split()).split("."))


def labels_of(block: RawBlock) -> list[Token]:
    """The labels of a scope itself, without those of nested scopes."""
    labels = [each for each in block.statements if isinstance(each, Token)]
    return labels + [each.label for each in block.statements if isinstance(each, RawTargets | RawPrototype)]


class FunctionBuilder:
    """Turns one RawFunction into a Function. An instance is used once. `wrong` receives the errors of instructions,
    which the Function is without."""

    def __init__(self, source: str, scopes: Scopes, wrong: list[MisreadError]) -> None:
        self._wrong = wrong
        self._source = source
        self._scopes = scopes
        self._variables: list[Variable] = []
        self._instructions: list[Instruction] = []
        self._labels: dict[str, int] = {}
        self._branch_targets: dict[str, tuple[str, ...]] = {}

    def build(self, raw: RawFunction) -> Function:
        """The Function. MisreadError for a name declared twice."""
        returns, params = self._parameters(raw.returns), self._parameters(raw.params)
        directives = {each.name: tuple(int(value) for value in each.values) for each in raw.directives}
        if raw.body is None:
            directives["extern"] = ()
        else:
            self._scopes.declare_labels(labels_of(raw.body))
            self._statements(raw.body)
        return Function(
            name=str(raw.name),
            is_entry=raw.is_entry,
            params=with_pointers(params, self._instructions) if raw.is_entry else params,
            returns=returns,
            registers=self._scopes.registers,
            variables=tuple(self._variables),
            instructions=tuple(self._instructions),
            labels=self._labels,
            directives=directives,
            branch_targets=self._branch_targets,
            line=raw.name.line or 0,
        )

    def _parameters(self, raws: Sequence[RawVariable]) -> tuple[Variable, ...]:
        variables = []
        for raw in raws:
            (declarator,) = raw.declarators
            name = declarator.name
            if raw.space == "reg":
                self._scopes.declare_register(name, raw.type, raw.vector, None)
                variables.append(declare(raw, declarator, str(name)))
            elif name == "_":
                variables.append(declare(raw, declarator, "_"))
            else:
                variables.append(declare(raw, declarator, self._scopes.declare_symbol(name, str(name))))
        return tuple(variables)

    # ---- statements

    def _statements(self, block: RawBlock) -> None:
        for statement in block.statements:
            try:
                if isinstance(statement, RawInstruction):
                    self._instruction(statement)
                else:
                    self._other(statement)
            except MisreadError as wrong:
                if not isinstance(statement, RawInstruction | RawCall):
                    raise
                self._wrong.append(wrong)

    def _other(self, statement: RawStatement) -> None:
        if isinstance(statement, Token):
            self._labels[self._symbol(statement, statement[:-1].rstrip()).name] = len(self._instructions)
        elif isinstance(statement, RawBlock):
            with self._scopes.inner(statement.begin, labels_of(statement)):
                self._statements(statement)
        elif isinstance(statement, RawRegisters):
            for name, count in statement.names:
                self._scopes.declare_register(name, statement.type, statement.vector, count)
        elif isinstance(statement, RawVariable):
            for declarator in statement.declarators:
                unique = self._scopes.declare_symbol(declarator.name, str(declarator.name))
                self._variables.append(declare(statement, declarator, unique))
        elif isinstance(statement, RawTargets):
            name = self._symbol(statement.label, statement.label[:-1].rstrip()).name
            self._branch_targets[name] = tuple(self._symbol(each, str(each)).name for each in statement.names)
        elif isinstance(statement, RawCall):
            self._call(statement)

    def _symbol(self, token: Token, name: str) -> Symbol:
        found = self._scopes.find(Token.new_borrow_pos(token.type, name, token))
        if not isinstance(found, Symbol):
            raise MisreadError(f"the label {name} does not exist in this scope or in one around it", token)
        return found

    def _instruction(self, raw: RawInstruction) -> None:
        opcode = raw.opcode
        parts = _parts(opcode)
        operands = tuple([self._operand(each, opcode) for each in raw.operands])
        self._append(raw, parts, operands)

    def _call(self, raw: RawCall) -> None:
        groups = [
            self._arguments(raw.returns, raw.opcode),
            self._name(raw.target, raw.opcode),
            self._arguments(raw.arguments, raw.opcode),
        ]
        if raw.prototype is not None:
            groups.append(self._symbol(raw.prototype, str(raw.prototype)))
        self._append(raw, _parts(raw.opcode), tuple(groups))

    def _arguments(self, raw: RawArguments | None, opcode: Token) -> Vector:
        if raw is None:
            return Vector(())
        return Vector(tuple(self._operand(each, opcode) for each in raw.items))

    def _append(self, raw: RawInstruction | RawCall, parts: tuple[str, ...], operands: tuple[Operand, ...]) -> None:
        text = self._source[raw.start : raw.end]
        if "/" in text:
            text = COMMENT.sub(" ", text)
        guard = self._guard(raw.guard) if raw.guard is not None else None
        self._instructions.append(Instruction(parts, operands, guard, raw.line, " ".join(text.split())))

    def _guard(self, token: Token) -> Guard:
        spelt = token[1:].lstrip()
        negated = spelt[0] == "!"
        name = spelt[1:].lstrip() if negated else spelt
        return Guard(self._predicate(token, name).name, negated)

    def _predicate(self, token: Token, name: str) -> Register:
        found = self._scopes.find(Token.new_borrow_pos(token.type, name, token))
        if not isinstance(found, Register) or self._scopes.registers.get(found.name) != "pred":
            raise MisreadError(f"{name} stands where a predicate should, but no .reg .pred declares it here", token)
        return found

    # ---- operands

    def _operand(self, raw: RawOperand, opcode: Token | None) -> Operand:
        if isinstance(raw, Token):
            if raw.type == "NEGATED":
                return Negated(self._predicate(raw, raw[1:].lstrip()))
            return self._name(raw, opcode)
        if isinstance(raw, int):
            return Immediate(int(raw))
        if isinstance(raw, Immediate):
            return raw
        if isinstance(raw, RawAddress):
            return self._address(raw, opcode)
        if isinstance(raw, RawVector):
            return Vector(tuple([self._operand(each, opcode) for each in raw.items]))
        if isinstance(raw, RawPair):
            return Pair(self._name(raw.first, opcode), self._name(raw.second, opcode))
        base, offset = self._displaced(raw)
        if not isinstance(base, Symbol):
            raise MisreadError(
                f"{raw.name} is no symbol; outside [ ] only a symbol's address takes an offset", raw.name
            )
        return Symbol(base.name, offset)

    def _name(self, token: Token, opcode: Token | None) -> Operand:
        if str(token) == "_":
            return _SINK
        found = self._scopes.find(token)
        if found is not None:
            return found
        if opcode is not None and _parts(opcode)[0] in _BRANCHES and not token.startswith("%"):
            raise MisreadError(f"the label {token} does not exist in this scope or in one around it", token)
        if self._scopes.hides_special(token):
            whole = token.partition(".")[0]
            raise MisreadError(
                f"{token} is no component of the {whole} declared here, which hides the special register {whole}; "
                "declare it under another name",
                token,
            )
        raise MisreadError(
            f"{token} is not declared: no register, variable, parameter, function or label of that name is seen here",
            token,
        )

    def _displaced(self, raw: RawDisplaced) -> tuple[Operand, int]:
        if isinstance(raw.offset, Immediate):
            raise MisreadError(
                f"the offset of {raw.name} is a floating-point constant; it must be an integer", raw.name
            )
        return self._name(raw.name, None), int(raw.offset)

    def _address(self, raw: RawAddress, opcode: Token | None) -> Address:
        coordinates = tuple([self._operand(item, None) for each in raw.tuples for item in each.items])
        if isinstance(raw.base, int):
            return Address(Immediate(int(raw.base)), 0, coordinates)
        if isinstance(raw.base, Immediate):
            raise MisreadError("an address is a floating-point constant; it must be an integer", opcode)
        if isinstance(raw.base, RawDisplaced):
            base, offset = self._displaced(raw.base)
            token = raw.base.name
        else:
            base, offset, token = self._name(raw.base, None), 0, raw.base
        if not isinstance(base, Register | Symbol):
            raise MisreadError(f"{token} stands in [ ] but is neither a scalar register nor a symbol", token)
        return Address(base, offset, coordinates)
