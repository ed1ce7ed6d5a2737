"""What the parser yields: a PTX module with scopes resolved, before any meaning is given to an opcode.

Nested `{ }` scopes are flattened: registers, variables and labels that an inner scope declares are renamed so that
every name is unique within its function. An `Instruction` keeps its dotted spelling in parts, so that
`tcgen05.mma.cta_group::1.kind::f16` is ("tcgen05", "mma", "cta_group::1", "kind::f16"); which prefix is the opcode is
the instruction table's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Register:
    """A declared register (unique name) or a special register such as `%tid.x` or `%laneid`."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal. `value` is the integer as written (sign kept); for 0f/0d literals it is the bit pattern."""

    value: int
    kind: str = "int"  # "int", "f32" (0fXXXXXXXX), "f64" (0dX16, or a decimal point)


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, parameter, function or label, plus a constant byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Sink:
    """The operand `_`: a destination that is thrown away."""


@dataclass(frozen=True, slots=True)
class Negated:
    """`!%p`, a predicate source read inverted."""

    operand: Register


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, ...}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`%d|%p`: a value destination and a predicate destination."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`; for tensor copies `[base, {coordinates}]` or `[base, {..}, {..}]` fills `coordinates`.

    Absolute addresses `[imm]` have an Immediate as base.
    """

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand = Register | Immediate | Symbol | Sink | Negated | Vector | Pair | Address


@dataclass(frozen=True, slots=True)
class Guard:
    """`@%p` or `@!%p`."""

    register: str
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
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


@dataclass(frozen=True, slots=True)
class Variable:
    """A declared variable or parameter. `size` in bytes; 0 for `.extern .shared x[]`.

    `space`: "shared", "global", "const", "local" or "param". `initial` holds initialised bytes, or None.
    """

    name: str
    space: str
    type: str
    align: int
    size: int
    initial: bytes | None = None
    extern: bool = False
    line: int = 0


@dataclass(frozen=True, slots=True)
class Function:
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


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed PTX file."""

    version: tuple[int, int]
    target: tuple[str, ...]
    address_size: int
    variables: Mapping[str, Variable]
    functions: Mapping[str, Function]
