"""Shared-memory matrix descriptors: 64 bits that locate an MMA operand (PTX ISA 9.7.15.5.1.2.2, 9.7.16.4.1).

The unit is 16 bytes, because no layout splits them. A K-major operand of R rows is an array of units
[R, K bytes / 16]. An MN-major one is [K, R bytes / 16], where a unit holds neighbouring rows at one k. The address
formula was verified bit-exactly on an H200 with random starts, offsets, swizzles and base offsets (facts.md 3.1).
tcgen05 uses the same canonical layouts by specification.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from backends.vm.faults import Fault
from backends.vm.tensor.swizzle import PATTERN_BYTES, UNIT_BYTES, IntArray, Swizzle, swizzled

Major = Literal["k", "mn"]
Target = Literal["sm_90a", "sm_100a"]
Elements = NDArray[np.unsignedinteger]

_SM90_SWIZZLE = {0: Swizzle.NONE, 1: Swizzle.B128, 2: Swizzle.B64, 3: Swizzle.B32}
_SM100_SWIZZLE = {0: Swizzle.NONE, 1: Swizzle.B128_ATOM_32B, 2: Swizzle.B128, 4: Swizzle.B64, 6: Swizzle.B32}

# Bits that no field of the format covers, by target: (lowest bit, width).
_UNUSED = {
    "sm_90a": ((14, 2), (30, 2), (46, 3), (52, 10)),
    "sm_100a": ((14, 2), (30, 2), (53, 8)),
}

_ELEMENT_DTYPE = {8: np.uint8, 16: np.uint16, 32: np.uint32}


@dataclass(frozen=True, slots=True)
class MatrixDescriptor:
    """A decoded descriptor. `start`, `lbo` (leading-dimension) and `sbo` (stride-dimension) are bytes below 256 KiB."""

    start: int
    lbo: int
    sbo: int
    base_offset: int
    swizzle: Swizzle


def _bits(raw: int, low: int, width: int) -> int:
    return raw >> low & (1 << width) - 1


def _forbidden(raw: int, target: Target, what: str) -> Fault:
    section = "9.7.15.5.1.2.2" if target == "sm_90a" else "9.7.16.4.1"
    return Fault("matrix-descriptor", f"the {target} matrix descriptor {raw:#018x} {what} (PTX ISA {section})")


@lru_cache(maxsize=4096)
def decode_matrix_descriptor(raw: int, target: Target) -> MatrixDescriptor:
    """The fields of `raw`. Raises Fault `matrix-descriptor` for a value that the ISA forbids on `target`."""
    for low, width in _UNUSED[target]:
        if _bits(raw, low, width):
            place = f"bits {low + width - 1}..{low}"
            raise _forbidden(raw, target, f"has {place} = {_bits(raw, low, width):#x}; no field lies there, so 0")
    swizzle = _SM90_SWIZZLE[_bits(raw, 62, 2)] if target == "sm_90a" else _sm100_swizzle(raw)
    return MatrixDescriptor(
        start=_bits(raw, 0, 14) << 4,
        lbo=_bits(raw, 16, 14) << 4,
        sbo=_bits(raw, 32, 14) << 4,
        base_offset=_bits(raw, 49, 3),
        swizzle=swizzle,
    )


def _sm100_swizzle(raw: int) -> Swizzle:
    constant = _bits(raw, 46, 3)
    if constant != 0b001:
        raise _forbidden(raw, "sm_100a", f"has bits 48..46 = {constant:#05b}; the constant 0b001 belongs there")
    if _bits(raw, 52, 1):
        raise _forbidden(
            raw, "sm_100a", "has bit 52 = 1, an absolute leading-dimension address, which only sm_103a has"
        )
    code = _bits(raw, 61, 3)
    if code not in _SM100_SWIZZLE:
        known = ", ".join(f"{key} {mode.value}" for key, mode in _SM100_SWIZZLE.items())
        raise _forbidden(raw, "sm_100a", f"has swizzle code {code} in bits 63..61; the codes are {known}")
    return _SM100_SWIZZLE[code]


def unit_addresses(
    descriptor: MatrixDescriptor, rows: int, k: int, element_bits: int, major: Major, target: Target = "sm_100a"
) -> IntArray:
    """Shared byte address of every 16-byte unit of an operand of `rows` (its M or N) by `k` elements.

    Returns int64 [rows, k * element_bits / 128] for a K-major operand, [k, ceil(rows * element_bits / 128)] for an
    MN-major one. The last unit of an MN-major operand may extend beyond its rows. The caller checks bounds. Raises
    Fault `matrix-descriptor` for a combination of type, major-ness and swizzle that the ISA forbids.
    """
    start = descriptor.start
    relative = _pattern(
        descriptor.lbo,
        descriptor.sbo,
        descriptor.swizzle,
        descriptor.base_offset,
        start % PATTERN_BYTES,
        rows,
        k,
        element_bits,
        major,
        target,
    )
    return relative + (start - start % PATTERN_BYTES)


@lru_cache(maxsize=4096)
def _pattern(
    lbo: int,
    sbo: int,
    swizzle: Swizzle,
    base_offset: int,
    phase: int,
    rows: int,
    k: int,
    element_bits: int,
    major: Major,
    target: Target,
) -> IntArray:
    # Adding a multiple of 1024 commutes with every swizzle, so starts that differ by one share a pattern.
    if major == "k":
        linear = _k_major(lbo, sbo, swizzle, rows, k, element_bits)
    else:
        linear = _mn_major(lbo, sbo, swizzle, rows, k, element_bits, target)
    pattern = swizzled(swizzle, phase + linear, base_offset)
    pattern.setflags(write=False)
    return pattern


def _k_major(lbo: int, sbo: int, swizzle: Swizzle, rows: int, k: int, element_bits: int) -> IntArray:
    if swizzle is Swizzle.B128_ATOM_32B:
        raise Fault(
            "matrix-descriptor",
            "the 128B swizzle with 32-byte atoms is given with a K-major operand, for which the ISA describes no "
            "layout (PTX ISA 9.7.16.10.6, Table 55); it serves MN-major 32-bit operands",
        )
    row = np.arange(rows, dtype=np.int64)[:, None]
    unit = np.arange(k * element_bits // 128, dtype=np.int64)[None, :]
    if swizzle is Swizzle.NONE:
        return row % 8 * 16 + row // 8 * sbo + unit * lbo
    return row % 8 * swizzle.span + row // 8 * sbo + unit * 16


def _mn_major(lbo: int, sbo: int, swizzle: Swizzle, rows: int, k: int, element_bits: int, target: Target) -> IntArray:
    _check_mn_major(swizzle, element_bits, target)
    unit = np.arange(-(-rows * element_bits // 128), dtype=np.int64)[None, :]
    column = np.arange(k, dtype=np.int64)[:, None]
    if swizzle is Swizzle.NONE:
        return unit * sbo + column % 8 * 16 + column // 8 * lbo
    atom_columns = 4 if swizzle is Swizzle.B128_ATOM_32B else 8
    units_a_span = swizzle.span // UNIT_BYTES
    inside = unit % units_a_span * 16 + column % atom_columns * swizzle.span
    return inside + unit // units_a_span * lbo + column // atom_columns * sbo


def _check_mn_major(swizzle: Swizzle, element_bits: int, target: Target) -> None:
    if target == "sm_90a":
        if element_bits != 16:
            raise Fault(
                "matrix-descriptor",
                f"an MN-major (transposed) operand of {element_bits}-bit elements; wgmma transposes only 16-bit types "
                "(PTX ISA 9.7.15.5)",
            )
        return
    wanted = "only with the 128B swizzle with 32-byte atoms" if element_bits == 32 else "with any swizzle but that one"
    if element_bits < 8 or (element_bits == 32) != (swizzle is Swizzle.B128_ATOM_32B):
        raise Fault(
            "matrix-descriptor",
            f"an MN-major (transposed) operand of {element_bits}-bit elements with swizzle {swizzle.value}; "
            + ("4-bit operands are K-major" if element_bits < 8 else f"{element_bits}-bit types transpose {wanted}")
            + " (PTX ISA 9.7.16.10.3, Table 54)",
        )


def gather_units(smem: NDArray[np.uint8], addresses: IntArray) -> NDArray[np.uint8]:
    """The 16-byte units of `smem` (uint8, its byte 0 at shared address 0) at `addresses`: uint8 [*addresses.shape, 16].

    `smem` must be contiguous and a multiple of 16 bytes long. The caller checks bounds.
    """
    units = smem.view(np.complex128).take(addresses >> 4)
    return units.view(np.uint8).reshape(*addresses.shape, UNIT_BYTES)


def operand_elements(
    units: NDArray[np.uint8], rows: int, element_bits: int, major: Major
) -> NDArray[np.unsignedinteger]:
    """Raw elements [rows, k] of an operand from its units, uint8 [.., .., 16] as `gather_units` gives them.

    The dtype is uint8, uint16 or uint32 by `element_bits`. For 4-bit elements (K-major only) the result is
    uint8 [rows, k / 2] with the first element of each pair in the low nibble.
    """
    flat = units.reshape(units.shape[0], -1)
    elements = flat.view(_ELEMENT_DTYPE[max(element_bits, 8)])
    if major == "k":
        return elements
    return elements[:, :rows].T
