"""The operands of an instruction: registers, special registers, addresses, labels, immediates.

Hardware registers have no type, but these do: the declared type of a `Register` is checked against every instruction
that uses it (PTX ISA, "Operand Type Checking").
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

WIDTHS = {
    "pred": 1,
    "b8": 8,
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 16),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2"), 32),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 64),
}
"""Width in bits of every type of a register or operand; predicates count as 1."""

MIN_HEX = 1 << 20
"""Integers from here on are masks and descriptors; write them in hexadecimal."""

SPECIAL_REGISTERS = frozenset({
    "tid", "ntid", "laneid", "warpid", "nwarpid", "ctaid", "nctaid", "smid", "nsmid", "gridid", "lanemask_eq",
    "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt", "is_explicit_cluster", "clusterid", "nclusterid",
    "cluster_ctaid", "cluster_nctaid", "cluster_ctarank", "cluster_nctarank", "clock", "clock_hi", "clock64",
    "globaltimer", "globaltimer_lo", "globaltimer_hi", "total_smem_size", "dynamic_smem_size", "aggr_smem_size",
})  # fmt: skip
"""Names after `%` that PTX reserves (PTX ISA, "Special Registers")."""


class BuilderError(ValueError):
    """A kernel author's mistake, found while the PTX is being written."""


@dataclass(frozen=True, slots=True)
class Register:
    """`%name`, declared as `.type`."""

    name: str
    type: str

    def __str__(self) -> str:
        return f"%{self.name}"

    def __invert__(self) -> Negated:
        if self.type != "pred":
            raise BuilderError(f"only a predicate can be negated; {self} is .{self.type}")
        return Negated(self)


@dataclass(frozen=True, slots=True)
class Negated:
    """`!%p`."""

    register: Register

    def __str__(self) -> str:
        return f"!{self.register}"


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as `%tid.x`, or the address of a variable; `type` is the type it reads as."""

    name: str
    type: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, or `[base, {coordinates}]` for a tensor copy. `offset` is in the unit of the base."""

    base: Register
    offset: int = 0
    coordinates: tuple[Register | int, ...] = ()

    def __str__(self) -> str:
        inner = f"{self.base}" if self.offset == 0 else f"{self.base} + {self.offset}"
        if self.coordinates:
            inner += ", {" + ", ".join(str(item) for item in self.coordinates) + "}"
        return f"[{inner}]"

    def plus(self, offset: int) -> Address:
        """The address `offset` units further on."""
        return Address(self.base, self.offset + offset, self.coordinates)


@dataclass(frozen=True, slots=True)
class Label:
    """A position in the code; `Builder.place` sets it."""

    name: str

    def __str__(self) -> str:
        return f"${self.name}"


@dataclass(frozen=True, slots=True)
class Elected:
    """`_|%p`, the destination of elect.sync that discards the lane and keeps the predicate."""

    predicate: Register

    def __str__(self) -> str:
        return f"_|{self.predicate}"


class Sink:
    """`_`, a destination that discards the result."""

    def __str__(self) -> str:
        return "_"


SINK = Sink()

Vector = tuple[Register, ...]
Operand = Register | Negated | Special | Address | Label | Elected | Sink | Vector | int | float


def at(base: Register, offset: int = 0) -> Address:
    """`[base + offset]`."""
    return Address(base, offset)


def spelled(operand: Operand) -> str:
    """The operand as PTX writes it. A Python float becomes its exact f32 bit pattern, `0fXXXXXXXX`."""
    if isinstance(operand, float):
        return "0f" + struct.pack(">f", operand).hex().upper()
    if isinstance(operand, int) and operand >= MIN_HEX:
        return f"0x{operand:X}"
    if isinstance(operand, tuple):
        return "{" + ", ".join(str(item) for item in operand) + "}"
    return str(operand)
