"""Maps lanes to matrix elements for mma.sync of every type and for wmma: elements of 1 to 64 bits.

mma.sync follows one rule (PTX ISA 9.7.14.5.2 to 9.7.14.5.13). Lane l holds part of row l / 4 (of B: column): a register
of neighbours along K, at position l % 4. With 16 rows, every second register holds rows 8 to 15. Further registers
continue along K. The fragments of wmma are opaque (9.7.14.4.1), so this machine uses a map of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from backends.vm.tensor.swizzle import IntArray

LANES = 32
Raw = NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True)
class WarpFragment:
    """Row and column of each element, int64 [registers, 32, elements per register], and the size of the matrix.

    Registers have 32 bits, or 64 for 64-bit elements.
    """

    shape: tuple[int, int]
    bits: int
    rows: IntArray
    columns: IntArray

    @property
    def registers(self) -> int:
        """Registers per lane."""
        return self.rows.shape[0]

    @property
    def view(self) -> str:
        """The register view that holds them."""
        return "u64" if self.bits == 64 else "u32"

    def matrix(self, registers: Raw) -> Raw:
        """Raw elements of `shape` from registers [registers, 32]."""
        per_register = self.rows.shape[2]
        shifts = (self.bits * np.arange(per_register)).astype(registers.dtype)
        mask = registers.dtype.type(2**self.bits - 1)
        found = np.zeros(self.shape, registers.dtype)
        found[self.rows, self.columns] = registers[..., None] >> shifts & mask
        return found

    def packed(self, matrix: Raw) -> Raw:
        """Registers [registers, 32] from a matrix of raw elements."""
        dtype = np.uint64 if self.bits == 64 else np.uint32
        shifts = (self.bits * np.arange(self.rows.shape[2])).astype(dtype)
        return np.bitwise_or.reduce(matrix[self.rows, self.columns].astype(dtype) << shifts, axis=2)


def _indices(registers: int, bits: int) -> tuple[IntArray, IntArray, IntArray]:
    register, lane, element = np.indices((registers, LANES, max(32 // bits, 1)), dtype=np.int64)
    return register, lane, element


@cache
def operand_fragment(operand: str, outer: int, k: int, bits: int) -> WarpFragment:
    """A [m, k] (`operand` "a") or B [k, n] ("b") of mma.sync. `outer` is m (8 or 16) or n (8)."""
    width = max(32 // bits, 1)
    tall = outer // 8
    register, lane, element = _indices(tall * k // (4 * width), bits)
    along = lane % 4 * width + element + 4 * width * (register // tall)
    across = lane // 4 + 8 * (register % tall)
    if operand == "a":
        return WarpFragment((outer, k), bits, across, along)
    return WarpFragment((k, outer), bits, along, across)


@cache
def accumulator_fragment(m: int, bits: int) -> WarpFragment:
    """C and D [m, 8], m 8 or 16. A lane holds two neighbouring columns of a row, then those eight rows below."""
    width = max(32 // bits, 1)
    register, lane, element = _indices(m * 8 // (LANES * width), bits)
    index = register * width + element
    return WarpFragment((m, 8), bits, lane // 4 + 8 * (index // 2), 2 * (lane % 4) + index % 2)


@cache
def quarter_fragment(operand: str, quarter: int, *, by_rows: bool, bits: int = 16) -> tuple[WarpFragment, IntArray]:
    """One of the four products of an f16 m8n8k4 (9.7.14.5.1), and the eight lanes that hold it.

    The maps cover those eight lanes. Lanes follow the rows of a row-major A, K of a column-major one, and so on.
    """
    lanes = np.array([4 * quarter + i for i in range(4)] + [16 + 4 * quarter + i for i in range(4)])
    count = {"a": 4, "b": 4, "c": 8}[operand]
    width = 32 // bits
    register, lane, element = np.indices((count // width, 8, width), dtype=np.int64)
    index, high, inner = register * width + element, 4 * (lane // 4), lane % 4
    if operand == "c" and bits == 32:
        rows = (inner & 1) + (index & 2) + high
        return WarpFragment((8, 8), 32, rows, (index & 4) + (inner & 2) + (index & 1)), lanes
    if operand == "c":
        return WarpFragment((8, 8), 16, inner + high, index), lanes
    if operand == "a":
        rows, columns = (inner + high, index) if by_rows else (index + high, inner)
        return WarpFragment((8, 4), 16, rows, columns), lanes
    rows, columns = (inner, index + high) if by_rows else (index, inner + high)
    return WarpFragment((4, 8), 16, rows, columns), lanes


@cache
def wmma_fragment(shape: tuple[int, int], registers: int, bits: int) -> WarpFragment:
    """A matrix of `shape` spread row by row over `registers` of each lane. Small matrices repeat."""
    register, lane, element = _indices(registers, bits)
    width = element.shape[2]
    index = (lane * registers * width + register * width + element) % (shape[0] * shape[1])
    return WarpFragment(shape, bits, index // shape[1], index % shape[1])
