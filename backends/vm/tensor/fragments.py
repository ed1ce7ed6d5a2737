"""Maps registers of threads to matrix elements for wgmma and the warp-level matrix instructions.

Registers are uint32 [registers, threads]: 128 threads (a warpgroup) for wgmma, 32 lanes otherwise. A `Fragment` gives
the row and column of every element of every register, from the low bits up. All maps were verified on an H200
(facts.md 4 and 5; PTX ISA 9.7.15.5.1 and 9.7.14.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from backends.vm.tensor.swizzle import IntArray

Words = NDArray[np.uint32]
Elements = NDArray[np.unsignedinteger]
Operand = Literal["a", "b", "c"]

WARP = 32
WARPGROUP = 128
MATRIX_ROW_BYTES = 16
_DTYPE: dict[int, type[np.unsignedinteger]] = {8: np.uint8, 16: np.uint16, 32: np.uint32}


@dataclass(frozen=True, eq=False)
class Fragment:
    """How registers hold each element of a matrix of `shape` once. `rows` and `columns` are int64 [registers, threads,
    32 / element_bits]."""

    shape: tuple[int, int]
    element_bits: int
    rows: IntArray
    columns: IntArray

    @property
    def registers(self) -> int:
        """32-bit registers per thread."""
        return self.rows.shape[0]

    @cached_property
    def places(self) -> IntArray:
        """For each register element, its row-major index in the matrix."""
        return self.rows * self.shape[1] + self.columns

    @cached_property
    def sources(self) -> IntArray:
        """For each matrix element, its flat index in the registers: an array of `shape`."""
        return np.argsort(self.places, axis=None).reshape(self.shape)


def to_matrix(registers: Words, fragment: Fragment) -> Elements:
    """The matrix, raw elements of `fragment.shape`, from registers uint32 [registers, threads]."""
    return np.ascontiguousarray(registers).view(_DTYPE[fragment.element_bits]).take(fragment.sources)


def to_registers(matrix: Elements, fragment: Fragment) -> Words:
    """Registers uint32 [registers, threads] from the matrix, raw elements of `fragment.shape`."""
    return matrix.take(fragment.places).view(np.uint32)[..., 0]


def _fragment(shape: tuple[int, int], element_bits: int, rows: IntArray, columns: IntArray) -> Fragment:
    rows.setflags(write=False)
    columns.setflags(write=False)
    return Fragment(shape, element_bits, rows, columns)


def _indices(registers: int, threads: int, element_bits: int) -> tuple[IntArray, IntArray, IntArray]:
    register, thread, element = np.indices((registers, threads, 32 // element_bits), dtype=np.int64)
    return register, thread, element


@lru_cache(maxsize=128)
def wgmma_accumulator(n: int, element_bits: int = 32) -> Fragment:
    """D of wgmma m64nNkK, [64, n] of 32-bit (f32, s32) or 16-bit (f16, two to a register) elements."""
    per_register = 32 // element_bits
    register, thread, element = _indices(n // 2 // per_register, WARPGROUP, element_bits)
    index = register * per_register + element
    rows = 16 * (thread // WARP) + thread % WARP // 4 + 8 * (index // 2 % 2)
    columns = 8 * (index // 4) + 2 * (thread % 4) + index % 2
    return _fragment((64, n), element_bits, rows, columns)


@lru_cache(maxsize=4)
def wgmma_operand_a(element_bits: int) -> Fragment:
    """A of wgmma in 4 registers, [64, 256 / element_bits] of 8-, 16- or 32-bit elements."""
    register, thread, element = _indices(4, WARPGROUP, element_bits)
    rows = 16 * (thread // WARP) + thread % WARP // 4 + 8 * (register % 2)
    per_register = 32 // element_bits
    columns = thread % 4 * per_register + element + 4 * per_register * (register // 2)
    return _fragment((64, 256 // element_bits), element_bits, rows, columns)


@lru_cache(maxsize=16)
def mma_fragment(operand: Operand, element_bits: int) -> Fragment:
    """A [16, k], B [k, 8] or C and D [16, 8] of mma.sync m16n8kK with 32-byte rows: k is 16 for 16 bits, 32 for 8 bits.

    C and D have 32-bit elements, two neighbouring columns in registers 2i and 2i + 1.
    """
    per_register = 32 // element_bits
    k = 8 * per_register
    if operand == "c":
        register, lane, _ = _indices(4, WARP, 32)
        return _fragment((16, 8), 32, lane // 4 + 8 * (register // 2), 2 * (lane % 4) + register % 2)
    register, lane, element = _indices(4 if operand == "a" else 2, WARP, element_bits)
    inner = lane % 4 * per_register + element
    if operand == "a":
        rows = lane // 4 + 8 * (register % 2)
        return _fragment((16, k), element_bits, rows, inner + 4 * per_register * (register // 2))
    return _fragment((k, 8), element_bits, inner + 4 * per_register * register, lane // 4)


@lru_cache(maxsize=8)
def matrix_fragment(count: int, transposed: bool) -> Fragment:
    """`count` (1, 2, 4) stacked 8x8 matrices of 16-bit elements, [8 * count, 8]. Register j holds matrix j.

    Lane l holds two neighbouring elements of row l / 4, or, transposed, of column l / 4 (PTX ISA 9.7.14.5.15).
    """
    register, lane, element = _indices(count, WARP, 16)
    outer, inner = lane // 4, 2 * (lane % 4) + element
    row, column = (inner, outer) if transposed else (outer, inner)
    return _fragment((8 * count, 8), 16, 8 * register + row, column)


def load_matrices(rows: NDArray[np.uint8], *, transposed: bool = False) -> Words:
    """ldmatrix m8n8 b16: registers uint32 [count, 32] from the bytes of 8 * count rows, uint8 [8 * count, 16].

    Row i comes from the address in lane i (lanes 0..7 for .x1, 0..15 for .x2, all for .x4).
    """
    matrix = np.ascontiguousarray(rows).view(np.uint16)
    return to_registers(matrix, matrix_fragment(len(rows) // 8, transposed))


def store_matrices(registers: Words, *, transposed: bool = False) -> NDArray[np.uint8]:
    """stmatrix m8n8 b16: the bytes of 8 * count rows, uint8 [8 * count, 16], from registers uint32 [count, 32]."""
    return to_matrix(registers, matrix_fragment(len(registers), transposed)).view(np.uint8)


def transposed_matrix(register: Words) -> Words:
    """movmatrix.trans b16: the fragment of the transposed 8x8 matrix. `register` is its fragment, uint32 [32]."""
    matrix = to_matrix(register[None, :], matrix_fragment(1, False))
    return to_registers(matrix, matrix_fragment(1, True))[0]
