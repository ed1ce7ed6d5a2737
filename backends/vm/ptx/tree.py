"""The parse tree before names are resolved, and the error for text that cannot be parsed.

Operands without names (immediates) are already syntax-tree nodes. Operands with names are light tuples of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lark import Token

from backends.vm.ptx.literals import Constant

if TYPE_CHECKING:
    from backends.vm.ptx.ast import Module


class Placed(Protocol):
    """Anything with a position in the text, such as a Lark token."""

    line: int | None
    column: int | None


class PtxSyntaxError(ValueError):
    """PTX text that cannot be parsed. The message has file, line and column (from 1), what was seen and expected.

    `others`: what is wrong at later lines. `rest`: the module without the instructions that are wrong, None if it
    cannot be told. `outside_grammar`: not about a name or a constant.
    """

    others: tuple[PtxSyntaxError, ...] = ()
    rest: Module | None = None
    outside_grammar: bool = False

    def __init__(self, problem: str, name: str = "", line: int | None = None, column: int | None = None) -> None:
        place = name if line is None or line < 1 else f"{name}, line {line}, column {column}"
        super().__init__(f"{place}: {problem}" if place else problem)
        self.problem = problem
        self.name = name
        self.line = line
        self.column = column


class MisreadError(ValueError):
    """A syntax error before the file's name is known."""

    def __init__(self, problem: str, at: Placed | None = None) -> None:
        super().__init__(problem)
        self.line = at.line if at is not None else None
        self.column = at.column if at is not None else None
        self.others = tuple[MisreadError, ...]()
        self.rest: Module | None = None

    def with_others(self, others: Sequence[MisreadError], rest: Module | None) -> MisreadError:
        """This error with those at later lines; see PtxSyntaxError."""
        self.others, self.rest = tuple(others), rest
        return self

    def of_file(self, name: str) -> PtxSyntaxError:
        """The error for readers of the file `name`."""
        told = PtxSyntaxError(str(self), name, self.line, self.column)
        told.others, told.rest = tuple(one.of_file(name) for one in self.others), self.rest
        return told


class RawDisplaced(NamedTuple):
    """`name + constant`."""

    name: Token
    offset: Constant


class RawPair(NamedTuple):
    """`a|b`."""

    first: Token
    second: Token


class RawVector(NamedTuple):
    """`{a, b}`; `depth` is 1 when it holds no vector."""

    items: Sequence[RawOperand]
    depth: int


class RawAddress(NamedTuple):
    """`[base, {coordinates}, ...]`."""

    base: Token | RawDisplaced | Constant
    tuples: Sequence[RawVector]


class RawArguments(NamedTuple):
    """`(a, b)` of a call."""

    items: Sequence[RawOperand]


RawOperand = Token | Constant | RawDisplaced | RawPair | RawVector | RawAddress


class RawInstruction(NamedTuple):
    """An instruction. `start` and `end` are text offsets: its first character, and one past its semicolon."""

    guard: Token | None
    opcode: Token
    operands: Sequence[RawOperand]
    line: int
    start: int
    end: int


class RawCall(NamedTuple):
    """A call; `prototype` names a `.callprototype` or `.calltargets` list."""

    guard: Token | None
    opcode: Token
    returns: RawArguments | None
    target: Token
    arguments: RawArguments | None
    prototype: Token | None
    line: int
    start: int
    end: int


class RawInitialAddress(NamedTuple):
    """A symbol's address plus a byte offset in an initialiser, with or without `generic(...)`."""

    name: Token
    generic: bool
    offset: Constant


class RawInitialList(NamedTuple):
    """`{ ... }` in an initialiser; `depth` is 1 when it holds no list."""

    items: Sequence[RawInitial]
    depth: int


RawInitial = Constant | RawInitialAddress | RawInitialList


class RawDeclarator(NamedTuple):
    """A declared name; `dimensions` holds None for `[]`."""

    name: Token
    dimensions: Sequence[Constant | None]
    initial: RawInitial | None


class RawVariable(NamedTuple):
    """A variable declaration or a parameter. `pointer`: the parameter has .ptr, into generic or global space."""

    linkage: tuple[str, ...]
    space: str
    align: Constant | None
    vector: int
    type: str
    declarators: Sequence[RawDeclarator]
    pointer: bool = False


class RawRegisters(NamedTuple):
    """`.reg`: names, each with its count if it is a range."""

    vector: int
    type: str
    names: Sequence[tuple[Token, int | None]]


class RawTargets(NamedTuple):
    """A `.branchtargets` or `.calltargets` list and the label that names it."""

    label: Token
    names: Sequence[Token]


class RawPrototype(NamedTuple):
    """A `.callprototype` and the label that names it."""

    label: Token


class RawBlock(NamedTuple):
    """A `{ }` scope and its brace. A bare Token is a label."""

    begin: Token
    statements: Sequence[RawStatement]


RawStatement = RawInstruction | RawCall | RawRegisters | RawVariable | RawBlock | RawTargets | RawPrototype | Token


class RawDirective(NamedTuple):
    """`.reqntid 128, 1, 1`."""

    name: str
    values: Sequence[int]


class RawFunction(NamedTuple):
    """An `.entry` or `.func`; `body` is None for a declaration."""

    linkage: tuple[str, ...]
    is_entry: bool
    name: Token
    returns: Sequence[RawVariable]
    params: Sequence[RawVariable]
    directives: Sequence[RawDirective]
    body: RawBlock | None


class RawModule(NamedTuple):
    """A file."""

    version: Token
    target: Sequence[Token]
    address_size: Token | None
    items: Sequence[RawVariable | RawFunction]
