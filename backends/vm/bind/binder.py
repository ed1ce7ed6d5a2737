"""Binds the operands of one instruction to rows of the register file, and makes the step that computes on whole rows.

Every mismatch of width is reported as a sentence.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backends.vm.bind.flow import Carrying
from backends.vm.bind.forms import Step
from backends.vm.faults import UnknownInstructionError, counted
from backends.vm.machine.code import WIDTH_OF_VIEW, Key, RegisterRows
from backends.vm.machine.run_access import RunAccess
from backends.vm.machine.special import SPECIAL_REGISTERS
from backends.vm.machine.warp import Warp
from backends.vm.ptx.ast import (
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Vector,
)

AddressOf = Callable[["Warp"], npt.NDArray[np.int64]]
# `list[Key]` as a factory takes five times as long.
_no_keys: Callable[[], list[Key]] = list
_no_reads: Callable[[], list[tuple[str, int]]] = list


class OutsideRingError(UnknownInstructionError):
    """An instruction on floats that has no counterpart in the ring. Raised when a thread executes it."""


@dataclass(slots=True)
class Binder:
    """One instruction as its family sees it: the `words` that its form chose, its operands, and rows for them.

    `uses` and `defines` collect the registers that the family asks for; `reads`, `addresses`, `carrying`, `in_run` and
    `unread` are as in Bound. `places` has every row that it asks for, literals included, in order. Rows of literals are
    negative: literals follow the registers of their width, last one first, so a negative index finds them whatever the
    number of registers.
    """

    instruction: Instruction
    words: Mapping[str, str]
    rows: RegisterRows
    uses: list[Key] = field(default_factory=_no_keys)
    defines: list[Key] = field(default_factory=_no_keys)
    reads: list[tuple[str, int]] = field(default_factory=_no_reads)
    addresses: list[Key] = field(default_factory=_no_keys)
    carrying: Carrying | None = None
    in_run: RunAccess | None = None
    unread: Step | None = None
    places: list[Key] = field(default_factory=_no_keys)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands as parsed."""
        return self.instruction.operands

    def error(self, reason: str) -> UnknownInstructionError:
        """The error to raise: line, instruction and `reason`."""
        return UnknownInstructionError(f"PTX line {self.instruction.line}: `{self.instruction.text}`: {reason}")

    def _of_width(self, operand: Register, width: int, view: str) -> UnknownInstructionError:
        """The error for a register of another width. The type is as the opcode spells it: b64, though bound as u64."""
        needed = WIDTH_OF_VIEW[view]
        spelt = {part for part in self.instruction.parts if part[1:] == str(needed) and part[0] in "busf"}
        named = spelt.pop() if len(spelt) == 1 else view
        return self.error(f"`{operand.name}` holds {counted(width, 'bit')} where {named} needs {needed}")

    def outside_ring(self, what: str = "it", why: str = "") -> OutsideRingError:
        """The error to raise if floats are elements of a ring and this instruction, or `what` it computes, has no
        meaning for them."""
        reason = f"{what} has no counterpart in the ring (backends.vm.numerics.ring){why and f': {why}'}"
        return OutsideRingError(str(self.error(reason)))

    def expect(self, *counts: int) -> tuple[Operand, ...]:
        """The operands. Raises if their number is not one of `counts`."""
        if len(self.operands) not in counts:
            wanted = " or ".join(str(count) for count in counts)
            raise self.error(f"{counted(len(self.operands), 'operand')} where this form takes {wanted}")
        return self.operands

    def hinted(self, *counts: int) -> tuple[Operand, ...]:
        """As `expect`, without the cache policy that `.L2::cache_hint` appends (PTX ISA 9.7.9.2)."""
        policy = int(bool(self.words.get("hint") or self.words.get("L2::cache_hint")))
        operands = self.expect(*(count + policy for count in counts))
        if policy:
            self.source(operands[-1], "u64")
        return operands[: len(operands) - policy]

    def _register(self, operand: Register) -> Key:
        if operand.name in self.rows.rows:
            return self.rows.rows[operand.name]
        if operand.name in SPECIAL_REGISTERS:
            return self.rows.special(operand.name)
        raise self.error(f"`{operand.name}` is neither declared nor a special register that this machine has")

    def carry(self, around: Callable[[Warp, Step], object], *travels: Key) -> None:
        """Allow undefined bits in the registers `travels`: `around` does the step and carries them along."""
        self.carrying = Carrying(around, frozenset(travels))

    def source(self, operand: Operand, view: str, *, wider: bool = False) -> int:
        """Row of a source in `view` ("f32", "u64", ...). `wider` accepts a register wider than the type (ld/st/cvt)."""
        key = self._source(operand, view, wider=wider)
        self.reads.append((view if key[0] == WIDTH_OF_VIEW[view] else f"u{key[0]}", key[1]))
        self.places.append(key)
        return key[1]

    def _source(self, operand: Operand, view: str, *, wider: bool) -> Key:
        width = WIDTH_OF_VIEW[view]
        if isinstance(operand, Register):
            key = self._register(operand)
            if key[0] != width and not (wider and width < key[0] <= 64):
                raise self._of_width(operand, key[0], view)
            if operand.name in self.rows.rows:
                self.uses.append(key)
            return key
        if isinstance(operand, Immediate):
            return width, self.rows.literal(width, self._literal_bits(operand, view))
        if isinstance(operand, Symbol):
            return self.rows.address(operand.name, operand.offset, width)
        raise self.error(f"operand {operand} cannot be a {view} source")

    def predicate(self, operand: Operand) -> tuple[int, bool]:
        """Row of a predicate source, and whether it is negated (`!%p`)."""
        if isinstance(operand, Negated):
            return self.source(operand.operand, "pred"), True
        return self.source(operand, "pred"), False

    def width(self, operand: Operand) -> int:
        """Container width in bits of a register operand. 0 for anything else."""
        return self._register(operand)[0] if isinstance(operand, Register) else 0

    def destination(self, operand: Operand, view: str, *, wider: bool = False) -> int:
        """Row of a destination in `view`. The sink `_` gets a row that is never read."""
        width = WIDTH_OF_VIEW[view]
        if isinstance(operand, Sink):
            self.places.append(self.rows.address("_", 0, width))
            return self.places[-1][1]
        if not isinstance(operand, Register) or operand.name not in self.rows.rows:
            raise self.error(f"operand {operand} cannot be written")
        key = self._register(operand)
        if key[0] != width and not (wider and width < key[0] <= 64):
            raise self._of_width(operand, key[0], view)
        self.defines.append(key)
        self.places.append(key)
        return key[1]

    def vector(self, operand: Operand, *counts: int) -> tuple[Operand, ...]:
        """The items of `{a, b, ...}`, one of `counts` many. A lone operand counts as a vector of one."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        if counts and len(items) not in counts:
            raise self.error(f"a vector of {len(items)} where {' or '.join(map(str, counts))} are needed")
        return items

    def braced(self, operand: Operand, *counts: int) -> tuple[Operand, ...]:
        """As `vector`, for an operand whose braces ptxas demands, even around one register."""
        if not isinstance(operand, Vector):
            name = operand.name if isinstance(operand, Register) else "an operand"
            raise self.error(f"{name} stands where a vector in braces is needed, as {{{name}}}")
        return self.vector(operand, *counts)

    def pair(self, operand: Operand) -> tuple[Operand, Operand | None]:
        """Both destinations of `%d|%p`, or the only one and None."""
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)

    def immediate(self, operand: Operand) -> int:
        """The value of an operand that must be an integer literal."""
        if isinstance(operand, Immediate) and operand.kind == "int":
            return operand.value
        raise self.error(f"operand {operand} must be an integer constant here")

    def address(self, operand: Operand) -> AddressOf:
        """A function from a warp to the 32 lane addresses (int64) of `[base + offset]`, as wide as the base."""
        return self.addressed(operand)[0]

    def addressed(self, operand: Operand) -> tuple[AddressOf, Key, int]:
        """As `address`, followed by the register of the base and the offset."""
        if isinstance(operand, Address):
            base, offset = operand.base, operand.offset
        elif isinstance(operand, Register):
            base, offset = operand, 0
        else:
            raise self.error(f"operand {operand} is not an address")
        offset = (offset + 2**63) % 2**64 - 2**63
        if isinstance(base, Immediate):
            base, offset = Immediate(base.value + offset), 0
        if isinstance(base, Symbol):
            base, offset = Symbol(base.name, base.offset + offset), 0
        width = self.width(base) or 64
        if width == 64:
            row = self.source(base, "s64")
            self.addresses.append((64, row))
            return (lambda warp: warp.s64[row] + offset), (64, row), offset
        if width != 32:
            raise self.error(f"an address register holds 32 or 64 bits, this one {width}")
        row = self.source(base, "u32")
        self.addresses.append((32, row))
        # A 32-bit address wraps: nvcc splits the address of `s[i % 3]` into a register below 0 and an offset.
        wrapped = np.uint32(offset % 2**32)
        return (lambda warp: (warp.u32[row] + wrapped).astype(np.int64)), (32, row), offset

    def _literal_bits(self, operand: Immediate, view: str) -> int:
        width = WIDTH_OF_VIEW[view]
        if operand.kind == "int":
            if view in ("f32", "f64", "f16") and operand.value != 0:
                raise self.error(f"the integer literal {operand.value} stands where a {view} is needed")
            return operand.value & (2**width - 1) if width > 1 else int(operand.value != 0)
        if operand.kind == "f64" and width == 32:
            value = struct.unpack("<d", struct.pack("<Q", operand.value))[0]
            with np.errstate(over="ignore"):
                return int(np.float32(value).view(np.uint32))
        if width != {"f32": 32, "f64": 64}[operand.kind]:
            raise self.error(f"a {operand.kind} literal stands where {counted(width, 'bit')} are needed")
        return operand.value


# Lane-wise instructions: each lane's result depends only on that lane's operands, so one function handles whole rows.


Array = npt.NDArray[np.generic]
Compute = Callable[..., Array]

PACKED = frozenset({"u16x2", "f32x2", "u32x2", "u64x2"})


def write(warp: Warp, row: Array, values: Array) -> None:
    """Store the values in the active lanes; rows are [32], or [32, n] for packed views."""
    if warp.where is True:
        row[...] = values
    else:
        np.copyto(row, values, where=warp.mask if row.ndim == 1 else warp.mask[:, None])


def lanewise(b: Binder, view: str, compute: Compute, count: int) -> Step:
    """`op d, s1, ... s_count` with every operand in `view`."""
    return bind_lanewise(b, view, [view] * count, compute)


def bind_lanewise(b: Binder, destination: str, sources: Sequence[str], compute: Compute) -> Step:
    """`op d, s1, s2, ...` with a view for each operand. `compute` takes and returns rows."""
    d, *operands = b.expect(len(sources) + 1)
    rd = b.destination(d, destination)
    rows = [(view, b.source(operand, view)) for view, operand in zip(sources, operands, strict=True)]
    return apply(compute, (destination, rd), rows)


def apply(compute: Compute, destination: tuple[str, int], sources: Sequence[tuple[str, int]]) -> Step:
    """The step that computes row `destination` from rows `sources`. Each is a view and a row number."""
    out, rd = destination
    if len(sources) == 1 and destination[0] == sources[0][0] == "f32":
        ra = sources[0][1]
        return lambda warp: np.copyto(warp.f32[rd], compute(warp.f32[ra]), where=warp.where)

    def step(warp: Warp) -> None:
        values = compute(*[getattr(warp, view)[row] for view, row in sources])
        write(warp, getattr(warp, out)[rd], values)

    return step
