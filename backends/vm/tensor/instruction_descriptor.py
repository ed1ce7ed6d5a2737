"""Instruction descriptors: 32 bits that tell tcgen05.mma its shapes and types (PTX ISA 9.7.16.4.2, Tables 42 to 44).

PTX ISA 9.7.16.2.1 (Table 39) and 9.7.16.10.1 list the valid shapes and types, Table 57 the valid scale vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault
from backends.vm.tensor.swizzle import Swizzle

CtaGroup = Literal[1, 2]
Operand = Literal["a", "b"]

_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_INPUT_TYPES: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _F8F6F4,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_D_TYPES: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}
_STORED_BITS = {"f16": 16, "tf32": 32, "f8f6f4": 8, "i8": 8, "mxf8f6f4": 8, "mxf4": 4, "mxf4nvf4": 4}
_BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
IGNORED_BITS: Mapping[str, int] = {"mxf4": 1 << 12, "mxf4nvf4": 1 << 12}
"""By kind: bits that the ISA reserves and sm_100a ignores."""

# (kind, spelling of .scale_vectorsize) -> (scale factors per row and instruction, scale types by bit 23).
_UE8M0_ONLY = {1: "ue8m0"}
_BOTH_SCALES = {0: "ue4m3", 1: "ue8m0"}
_SCALE_VECTORS: dict[tuple[str, str], tuple[int, dict[int, str]]] = {
    ("mxf8f6f4", ""): (1, _UE8M0_ONLY),
    ("mxf8f6f4", "scale_vec::1X"): (1, _UE8M0_ONLY),
    ("mxf8f6f4", "block32"): (1, _UE8M0_ONLY),
    ("mxf4", ""): (2, _UE8M0_ONLY),
    ("mxf4", "scale_vec::2X"): (2, _UE8M0_ONLY),
    ("mxf4", "block32"): (2, _UE8M0_ONLY),
    ("mxf4nvf4", "scale_vec::2X"): (2, _UE8M0_ONLY),
    ("mxf4nvf4", "block32"): (2, _UE8M0_ONLY),
    ("mxf4nvf4", "scale_vec::4X"): (4, _BOTH_SCALES),
    ("mxf4nvf4", "block16"): (4, _BOTH_SCALES),
}
_SF_IDS = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}


@dataclass(frozen=True, slots=True)
class InstructionDescriptor:
    """A decoded descriptor: D [m, n] += A [m, k] * B [n, k]^T, where m spans both CTAs of a cta_group::2.

    Rows of A and B have `sf_blocks` scale factors of `sf_type` (0 without block scaling), from byte `sfa_id` or
    `sfb_id` on.
    """

    kind: str
    m: int
    n: int
    k: int
    d_type: str
    a_type: str
    b_type: str
    transpose_a: bool
    transpose_b: bool
    negate_a: bool
    negate_b: bool
    saturate: bool
    sparse: bool
    sparsity_selector: int
    max_shift: int
    sf_blocks: int
    sf_type: str
    sfa_id: int
    sfb_id: int
    weight_stationary: bool = False

    @property
    def stored_k(self) -> int:
        """Stored elements per row of A: half of them if A is sparse."""
        return self.k // 2 if self.sparse else self.k

    @property
    def stored_bits(self) -> int:
        """Bits of an element of A or B in shared memory, including the padding of 4- and 6-bit f8f6f4 types."""
        return _STORED_BITS[self.kind]


@dataclass(frozen=True, slots=True)
class _Reader:
    raw: int
    kind: str

    def bits(self, low: int, width: int = 1) -> int:
        return self.raw >> low & (1 << width) - 1

    def refused(self, what: str, section: str = "9.7.16.4.2") -> Fault:
        text = f"the instruction descriptor {self.raw:#010x} of kind::{self.kind} {what} (PTX ISA {section})"
        return Fault("instruction-descriptor", text)

    def coded(self, low: int, width: int, what: str, codes: dict[int, str]) -> str:
        code = self.bits(low, width)
        if code not in codes:
            known = ", ".join(f"{key} {name}" for key, name in codes.items())
            place = f"bits {low + width - 1}..{low}" if width > 1 else f"bit {low}"
            raise self.refused(f"has {what} {code} in {place}; the codes are {known}")
        return codes[code]

    def reserved(self, *places: tuple[int, int]) -> None:
        for low, width in places:
            if self.bits(low, width):
                place = f"bits {low + width - 1}..{low}" if width > 1 else f"bit {low}"
                raise self.refused(f"has {self.bits(low, width):#x} in {place}, which must be 0")


@lru_cache(maxsize=1024)
def decode_instruction_descriptor(
    raw: int,
    kind: str,
    cta_group: CtaGroup,
    weight_stationary: bool = False,
    sparse: bool = False,
    scale_vectorsize: str = "",
) -> InstructionDescriptor:
    """The fields of `raw` for `tcgen05.mma` with this `.kind` ("f16" ..), `.cta_group`, `.ws` and `.sp`.

    `scale_vectorsize` as spelt: "scale_vec::4X", "block16", .. or "". Raises Fault `instruction-descriptor` for any
    value that the ISA forbids in this instruction.
    """
    reader = _Reader(raw, kind)
    if bool(reader.bits(2)) != sparse:
        spelling = "tcgen05.mma.sp" if sparse else "tcgen05.mma without .sp"
        raise reader.refused(f"has sparsity {reader.bits(2)} in bit 2, and the instruction is {spelling}")
    if kind in _BLOCK_SCALED:
        found = _block_scaled(reader, scale_vectorsize)
    elif kind in _D_TYPES:
        found = _plain(reader)
    else:
        raise reader.refused(f"cannot be read: the kinds are {', '.join(_STORED_BITS)}", "9.7.16.10.9.1")
    _check_shape(reader, found, cta_group, weight_stationary)
    if found.sparse and found.sparsity_selector and found.stored_bits == 8:
        raise reader.refused(
            f"has sparsity selector {found.sparsity_selector}; types of 8 bits have 0", "9.7.16.10.8.4"
        )
    return replace(found, weight_stationary=weight_stationary)


def _plain(reader: _Reader) -> InstructionDescriptor:
    kind, types = reader.kind, _INPUT_TYPES[reader.kind]
    reader.reserved((6, 1), (23, 1), (29, 1))
    if kind == "i8":
        reader.reserved((13, 2))
    else:
        reader.reserved((3, 1))
    found = InstructionDescriptor(
        kind=kind,
        m=reader.bits(24, 5) << 4,
        n=reader.bits(17, 6) << 3,
        k=256 // _STORED_BITS[kind] * (2 if reader.bits(2) else 1),
        d_type=reader.coded(4, 2, "D type", _D_TYPES[kind]),
        a_type=reader.coded(7, 3, "A type", types),
        b_type=reader.coded(10, 3, "B type", types),
        transpose_a=bool(reader.bits(15)),
        transpose_b=bool(reader.bits(16)),
        negate_a=bool(reader.bits(13)),
        negate_b=bool(reader.bits(14)),
        saturate=bool(reader.bits(3)),
        sparse=bool(reader.bits(2)),
        sparsity_selector=reader.bits(0, 2),
        max_shift=(0, 8, 16, 32)[reader.bits(30, 2)],
        sf_blocks=0,
        sf_type="",
        sfa_id=0,
        sfb_id=0,
    )
    if kind == "f16" and found.d_type == "f16" and "bf16" in (found.a_type, found.b_type):
        raise reader.refused("multiplies bf16 into an f16 accumulator; bf16 needs D type 1 (f32)", "9.7.16.2.1")
    return found


def _block_scaled(reader: _Reader, scale_vectorsize: str) -> InstructionDescriptor:
    kind = reader.kind
    if (kind, scale_vectorsize) not in _SCALE_VECTORS:
        known = ", ".join(f".{size}" for each, size in _SCALE_VECTORS if each == kind and size)
        asked = f".{scale_vectorsize}" if scale_vectorsize else "no scale vector size"
        raise reader.refused(f"is used with {asked}; this kind takes {known}", "9.7.16.10.7.1")
    blocks, scale_types = _SCALE_VECTORS[kind, scale_vectorsize]
    reader.reserved((0, 2), (3, 1), (6, 1), (24, 3))
    if kind == "mxf8f6f4":
        reader.reserved((31, 1))
    else:
        reader.reserved((15, 2))
        if reader.bits(31):
            raise reader.refused("has K = 96 (bit 31), which only sm_103a has")
    type_bits = 3 if kind == "mxf8f6f4" else 2
    return InstructionDescriptor(
        kind=kind,
        m=reader.bits(27, 2) << 7,
        n=reader.bits(17, 6) << 3,
        k=256 // _STORED_BITS[kind] * (2 if reader.bits(2) else 1),
        d_type="f32",
        a_type=reader.coded(7, 3, "A type", _INPUT_TYPES[kind]),
        b_type=reader.coded(10, type_bits, "B type", _INPUT_TYPES[kind]),
        transpose_a=bool(reader.bits(15)),
        transpose_b=bool(reader.bits(16)),
        negate_a=bool(reader.bits(13)),
        negate_b=bool(reader.bits(14)),
        saturate=False,
        sparse=bool(reader.bits(2)),
        sparsity_selector=0,
        max_shift=0,
        sf_blocks=blocks,
        sf_type=reader.coded(23, 1, "scale type", scale_types),
        sfa_id=_sf_id(reader, 29, "A", blocks),
        sfb_id=_sf_id(reader, 4, "B", blocks),
    )


def _sf_id(reader: _Reader, low: int, operand: str, blocks: int) -> int:
    value = reader.bits(low, 2)
    if value not in _SF_IDS[blocks]:
        allowed = " or ".join(map(str, _SF_IDS[blocks]))
        raise reader.refused(
            f"has {operand} scale factor id {value} in bits {low + 1}..{low}; with {blocks} scale factors a row it is "
            f"{allowed}",
            "9.7.16.10.7.2",
        )
    return value


def _check_shape(reader: _Reader, found: InstructionDescriptor, cta_group: CtaGroup, weight_stationary: bool) -> None:
    scaled = found.sf_blocks > 0
    if weight_stationary and (cta_group == 2 or scaled):
        raise reader.refused(f"is used with .ws and .cta_group::{cta_group}; no shape exists", "9.7.16.2.1")
    ms = _legal_m(found, cta_group, weight_stationary)
    if found.m not in ms:
        raise reader.refused(
            f"has M = {found.m}; with .cta_group::{cta_group}{'.ws' if weight_stationary else ''} it is "
            f"{' or '.join(map(str, ms))}",
            "9.7.16.2.1",
        )
    ns = _legal_n(found, cta_group, weight_stationary)
    if found.n not in ns:
        raise reader.refused(
            f"has N = {found.n}; with M = {found.m}, .cta_group::{cta_group}{'.ws' if weight_stationary else ''} "
            f"{'and B transposed ' if found.transpose_b else ''}it is {_listed(ns)}",
            "9.7.16.2.1" if not found.transpose_b else "9.7.16.10.1",
        )


def _legal_m(found: InstructionDescriptor, cta_group: CtaGroup, weight_stationary: bool) -> tuple[int, ...]:
    if weight_stationary:
        return (32, 64, 128)
    if found.sf_blocks:
        return (128,) if cta_group == 1 else (256,) if found.sparse else (128, 256)
    return (64, 128) if cta_group == 1 else (128, 256)


def _legal_n(found: InstructionDescriptor, cta_group: CtaGroup, weight_stationary: bool) -> tuple[int, ...]:
    if weight_stationary:
        return (64, 128) if found.sparse else (64, 128, 256)
    if found.kind == "i8":
        ns = (8, 16, 24, *range(32, 257, 16)) if cta_group == 1 else tuple(range(32, 257, 32))
    else:
        ns = tuple(range(8 * cta_group, 257, 8 * cta_group))
    if found.transpose_b and found.stored_bits == 8:
        return tuple(n for n in ns if n % (16 * cta_group) == 0)
    return ns


def _listed(values: tuple[int, ...]) -> str:
    step = values[1] - values[0]
    if values == tuple(range(values[0], values[-1] + 1, step)):
        return f"{values[0]} to {values[-1]} in steps of {step}"
    return " or ".join(map(str, values))


def check_operand_swizzle(found: InstructionDescriptor, operand: Operand, swizzle: Swizzle) -> None:
    """Raises Fault `instruction-descriptor` if the ISA forbids a transposed operand's swizzle.

    tf32 can be transposed only with the 128B swizzle of 32-byte atoms, other kinds never with it (PTX ISA 9.7.16.10.1).
    """
    if not (found.transpose_a if operand == "a" else found.transpose_b):
        return
    atom_32b = swizzle is Swizzle.B128_ATOM_32B
    if (found.kind == "tf32") != atom_32b:
        wanted = "needs the 128B swizzle with 32-byte atoms" if found.kind == "tf32" else "may have any other swizzle"
        raise Fault(
            "instruction-descriptor",
            f"operand {operand.upper()} of kind::{found.kind} is transposed and its matrix descriptor says swizzle "
            f"{swizzle.value}; a transposed operand of this kind {wanted} (PTX ISA 9.7.16.10.1)",
        )


# The zero-column mask of .ws: 64 bits that select columns of B to treat as zeros (PTX ISA 9.7.16.4.3, Table 45).


@dataclass(frozen=True, slots=True)
class ZeroColumns:
    """Columns of B to treat as zeros, bool [n], and how many columns of B precede the first used one."""

    zero: npt.NDArray[np.bool_]
    shift: int


@lru_cache(maxsize=256)
def decode_zero_columns(raw: int, m: int, n: int, max_shift: int) -> ZeroColumns:
    """The mask of an instruction of this shape. `max_shift` comes from its instruction descriptor.

    The table's text swaps the two spans relative to its four examples and its names; this follows the examples.
    Raises Fault `instruction-descriptor` for a shift beyond what the ISA or `max_shift` allows.
    """
    if raw >> 36 & 7 or raw >> 62:
        raise Fault(
            "instruction-descriptor", f"the zero-column mask {raw:#018x} has reserved bits set (PTX ISA 9.7.16.4.3)"
        )
    shift, most = raw >> 56 & 63, min(max_shift, 16 if m == 32 else 32)
    if shift > most:
        raise Fault("instruction-descriptor", f"the zero-column mask shifts by {shift} columns; at most {most} are "
                    "possible with this M and maximum shift (PTX ISA 9.7.16.4.3)")  # fmt: skip
    zero, parts = np.zeros(n, np.bool_), 128 // m
    if raw >> 39 & 1:
        skipped, used = (raw >> 40 & 255) + 1, (raw >> 48 & 255) + 1
        width = n // parts
        for part in range(parts):
            start, first = raw >> 8 * part & 255, raw >> 32 + part & 1
            at = start + np.arange(width) + (0 if first else skipped)
            zero[part * width : (part + 1) * width] = at % (skipped + used) < skipped
    return ZeroColumns(zero, shift)
