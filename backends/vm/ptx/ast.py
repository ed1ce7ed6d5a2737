"""What the parser yields: a PTX module with scopes resolved, before any meaning is given to an opcode.

Nested `{ }` scopes are flattened: registers, variables and labels that an inner scope declares are renamed so that
every name is unique within its function. An `Instruction` keeps its dotted spelling in parts, so that
`tcgen05.mma.cta_group::1.kind::f16` is ("tcgen05", "mma", "cta_group::1", "kind::f16"); which prefix is the opcode is
the instruction table's business.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Node(msgspec.Struct, frozen=True, gc=False, tag_field="node", tag=True, array_like=True):
    """A part of a module. msgspec writes and reads it as JSON: a list that begins with the name of the class."""


class Register(Node, frozen=True):
    """A declared register (unique name) or a special register such as `%tid.x` or `%laneid`."""

    name: str


class Immediate(Node, frozen=True):
    """A literal. `value` is the integer as written (sign kept); for 0f/0d literals it is the bit pattern."""

    value: int
    kind: str = "int"  # "int", "f32" (0fXXXXXXXX), "f64" (0dX16, or a decimal point)


class Symbol(Node, frozen=True):
    """The address of a variable, parameter, function or label, plus a constant byte offset."""

    name: str
    offset: int = 0


class Sink(Node, frozen=True):
    """The operand `_`: a destination that is thrown away."""


class Negated(Node, frozen=True):
    """`!%p`, a predicate source read inverted."""

    operand: Register


class Vector(Node, frozen=True):
    """`{a, b, ...}`."""

    items: tuple[Operand, ...]


class Pair(Node, frozen=True):
    """`%d|%p`: a value destination and a predicate destination."""

    first: Operand
    second: Operand


class Address(Node, frozen=True):
    """`[base + offset]`; for tensor copies `[base, {coordinates}]` or `[base, {..}, {..}]` fills `coordinates`.

    Absolute addresses `[imm]` have an Immediate as base.
    """

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand = Register | Immediate | Symbol | Sink | Negated | Vector | Pair | Address


class Guard(Node, frozen=True):
    """`@%p` or `@!%p`."""

    register: str
    negated: bool


class Instruction(Node, frozen=True):
    """One instruction. `line` counts from 1 in the PTX text; `text` is its source, whitespace collapsed."""

    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    text: str

    @property
    def opcode(self) -> str:
        """The dotted spelling as written."""
        return ".".join(self.parts)


class InitialAddress(Node, frozen=True):
    """The 8 bytes at `offset` of a variable hold the address of `symbol` plus `addend`.

    `generic`: the address is in the generic space, by `generic(symbol)`; otherwise it is in the symbol's own space.
    """

    offset: int
    symbol: str
    addend: int
    generic: bool


class Variable(Node, frozen=True):
    """A declared variable or parameter. `size` in bytes; 0 for `.extern .shared x[]`.

    `space`: "shared", "global", "const", "local" or "param". `initial` holds initialised bytes, or None; it has zeros
    where `addresses` go.
    """

    name: str
    space: str
    type: str
    align: int
    size: int
    initial: bytes | None = None
    extern: bool = False
    line: int = 0
    addresses: tuple[InitialAddress, ...] = ()


class Function(Node, frozen=True):
    """An `.entry` or `.func`, flattened. `labels` maps a label to the index of the instruction it precedes.

    `registers` maps every register name to its type ("b32", "f32", "pred", ...). `directives` maps e.g. "reqntid" to
    its integers and "maxnreg" likewise. `branch_targets` maps a label of a `.branchtargets` list to its labels.
    """

    name: str
    is_entry: bool
    params: tuple[Variable, ...]
    returns: tuple[Variable, ...]
    registers: Mapping[str, str]
    variables: tuple[Variable, ...]
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    directives: Mapping[str, tuple[int, ...]]
    branch_targets: Mapping[str, tuple[str, ...]]
    line: int


class Module(Node, frozen=True):
    """A parsed PTX file."""

    version: tuple[int, int]
    target: tuple[str, ...]
    address_size: int
    variables: Mapping[str, Variable]
    functions: Mapping[str, Function]
