"""The parser's result: a PTX module with scopes resolved, before any opcode has a meaning.

Nested `{ }` scopes are flattened: registers, variables and labels that an inner scope declares are renamed so that
every name is unique within its function. An `Instruction` keeps its dotted spelling in parts:
`tcgen05.mma.cta_group::1.kind::f16` is ("tcgen05", "mma", "cta_group::1", "kind::f16"). The instruction table decides
which prefix is the opcode.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Node(msgspec.Struct, frozen=True, gc=False, tag_field="node", tag=True, array_like=True):
    """A part of a module. msgspec encodes it as a JSON list that begins with the class name."""


class Register(Node, frozen=True):
    """A declared register (unique name) or a special register such as `%tid.x` or `%laneid`."""

    name: str


class Immediate(Node, frozen=True):
    """A literal. `value` is the integer as written, with its sign, or the bit pattern of a float."""

    value: int
    kind: str = "int"  # "int", "f32" (0fXXXXXXXX), "f64" (0dX16, or a decimal point)


class Symbol(Node, frozen=True):
    """The address of a variable, parameter, function or label, plus a constant byte offset."""

    name: str
    offset: int = 0


class Sink(Node, frozen=True):
    """The operand `_`: a discarded destination."""


class Negated(Node, frozen=True):
    """`!%p`: the inverse of a predicate source."""

    operand: Register


class Vector(Node, frozen=True):
    """`{a, b, ...}`."""

    items: tuple[Operand, ...]


class Pair(Node, frozen=True):
    """`%d|%p`: a value destination and a predicate destination."""

    first: Operand
    second: Operand


class Address(Node, frozen=True):
    """`[base + offset]`. Tensor copies write `[base, {coordinates}]` or `[base, {..}, {..}]`: see `coordinates`.

    The base of an absolute address `[imm]` is an Immediate.
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
    """One instruction. `line` counts from 1 in the PTX text; `text` is its source with whitespace collapsed."""

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

    `generic`: the initialiser is `generic(symbol)`, a generic address. Otherwise it is in the symbol's own space.
    """

    offset: int
    symbol: str
    addend: int
    generic: bool


class Variable(Node, frozen=True):
    """A declared variable or parameter. `size` is in bytes, 0 for `.extern .shared x[]`.

    `space`: "shared", "global", "const", "local" or "param". `initial` holds the initialised bytes, or None. It is zero
    where `addresses` are to be filled in. `pointer`: a parameter that the kernel is known to take for an address in
    global memory; see backends.vm.ptx.pointers.
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
    pointer: bool = False


class Function(Node, frozen=True):
    """An `.entry` or `.func`, flattened. `labels` maps a label to the index of the instruction it precedes.

    `registers` maps every register name to its type ("b32", "f32", "pred", ...). `directives` maps a directive such as
    "reqntid" or "maxnreg" to its integers. `branch_targets` maps the label of a `.branchtargets` list to its entries.
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
