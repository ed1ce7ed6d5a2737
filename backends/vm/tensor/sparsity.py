"""Structured sparsity: which elements of a row of A are stored, and where their metadata is.

Half of each row is zero (PTX ISA 9.7.14.6.1, 9.7.15.6.1, 9.7.16.10.8). Four bits of metadata, the code, describe a
chunk of a row as two 2-bit indices: of the stored elements of four (2:4), or of the stored pairs of eight elements
(4:8, 4-bit types). 32-bit types have chunks of two elements (1:2); their code names the two halves of the stored one.

The ISA shows where codes are only in figures. In registers this follows CUTLASS's layouts of wgmma metadata (mma.sp has
the same figures); in tensor memory, CUTLASS's fragments of tcgen05 metadata (facts.md 2.6). Neither has been compared
with silicon.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from backends.vm.faults import Fault
from backends.vm.tensor.swizzle import IntArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
_Element = TypeVar("_Element", bound=np.generic)
CODE_BITS = 4
LANES = 32
_SAFE_CODE = 0b0100
_BY_HALVES = {0b0100: 0, 0b1110: 1}
"""Codes of 32-bit types: which of two elements is stored."""


@dataclass(frozen=True, slots=True)
class Granularity:
    """`chunk` elements of a row share one code. They are stored in `group`s of neighbours."""

    chunk: int
    group: int

    @classmethod
    def of(cls, bits: int) -> Granularity:
        """The granularity of elements of `bits` bits. 4 means types that are stored two to a byte."""
        return {32: cls(2, 1), 4: cls(8, 2)}.get(bits, cls(4, 1))


@lru_cache(maxsize=4)
def _positions(chunk: int, group: int, ordered: bool) -> IntArray:
    """Positions of the stored elements in a chunk, int64 [16 codes, chunk / 2]; -1 for an invalid code."""
    table = np.full((16, chunk // 2), -1, np.int64)
    for code in range(16):
        if chunk == 2:
            table[code] = _BY_HALVES.get(code, -1)
            continue
        first, second = code & 3, code >> 2
        if first < second if ordered else first != second:
            table[code] = [group * at + i for at in (first, second) for i in range(group)]
    table.setflags(write=False)
    return table


def dense(stored: NDArray[_Element], codes: Bytes, granularity: Granularity, *, ordered: bool) -> NDArray[_Element]:
    """A [rows, k] with its zeros, from the stored elements [rows, k / 2] and the codes uint8 [rows, chunks].

    `ordered`: the first index of a code must be the lower one. Fault `sparsity-metadata` for an invalid code.
    """
    rows, chunks = codes.shape
    places = _positions(granularity.chunk, granularity.group, ordered)[codes]
    if np.count_nonzero(places < 0):
        row, chunk = np.argwhere(places[..., 0] < 0)[0].tolist()
        raise Fault(
            "sparsity-metadata",
            f"the metadata of row {row}, chunk {chunk} of A is {int(codes[row, chunk]):#06b}, which does not name the "
            f"stored elements{' in ascending order' if ordered else ''}",
        )
    found = np.zeros((rows, chunks, granularity.chunk), stored.dtype)
    np.put_along_axis(found, places, stored.reshape(rows, chunks, -1), axis=2)
    return found.reshape(rows, -1)


def stored_places(codes: Bytes, granularity: Granularity, *, ordered: bool) -> NDArray[np.bool_]:
    """bool [rows, k]: the elements of A that are stored, for valid codes."""
    kept = codes.shape[1] * granularity.chunk // 2
    return dense(np.ones((codes.shape[0], kept), np.bool_), codes, granularity, ordered=ordered)


def known_codes(codes: Bytes, lost: NDArray[np.bool_]) -> Bytes:
    """The codes, with a valid placeholder in `lost` rows, bool [rows]: the caller tracks those as undefined."""
    return np.where(lost[:, None], np.uint8(_SAFE_CODE), codes)


def _cut(words: Words, shifts: IntArray) -> Bytes:
    return (words >> shifts.astype(np.uint32) & np.uint32(15)).astype(np.uint8)


# In the registers of a warp: 16 rows of A.


@lru_cache(maxsize=32)
def _in_registers(chunks: int, bits: int, selector: int) -> tuple[IntArray, IntArray]:
    """Lane and lowest bit of each code, int64 [16, chunks]: four lanes hold the codes of rows g and g + 8."""
    row, chunk = np.indices((16, chunks), dtype=np.int64)
    lanes, wide = 4 * (row % 8), bits <= 8
    if wide:
        # A lane holds eight chunks of one row: two lanes cover both rows, the next two continue along K.
        lane = lanes + row // 8 + 2 * (chunk // 8) + 2 * selector
        return lane, CODE_BITS * (chunk % 8)
    # A lane holds four chunks of both rows; the next lane continues along K.
    lane = lanes + chunk // 4 + (2 if chunks == 8 else 1) * selector
    return lane, CODE_BITS * (chunk % 4) + 16 * (row // 8)


def codes_in_registers(words: Words, k: int, bits: int, selector: int) -> Bytes:
    """The codes uint8 [16, chunks] of A [16, k] of mma.sp and of a warp of wgmma, from one register uint32 [32].

    `selector`: which lanes of each group of four hold them.
    """
    lanes, shifts = _in_registers(k // Granularity.of(bits).chunk, bits, selector)
    return _cut(words[lanes], shifts)


def selectors(k: int, bits: int) -> int:
    """Number of valid selectors: 4 if one lane of each four holds the codes, 2 for two lanes, 1 for all four."""
    return 16 // (k // Granularity.of(bits).chunk)


# In tensor memory: 128 rows, or copies of 64 or 32 rows that fill the lanes (.ws).


@lru_cache(maxsize=16)
def _in_tensor_memory(rows: int, bits: int) -> tuple[IntArray, IntArray, IntArray]:
    """Lane, column and lowest bit of each code, int64 [rows, chunks]."""
    chunks = 8 if bits > 8 else 16
    row, chunk = np.indices((rows, chunks), dtype=np.int64)
    if bits <= 8:
        return row, chunk // 8, CODE_BITS * (chunk % 8)
    lane = row % 8 + 8 * (chunk // 4) + 16 * (row // 16)
    return lane, np.zeros_like(lane), CODE_BITS * (chunk % 4) + 16 * (row // 8 % 2)


def codes_in_tensor_memory(tmem: Words, lane: int, column: int, rows: int, bits: int) -> Bytes:
    """The codes uint8 [rows, chunks] from `tmem` uint32 [128, 512], of K = 512 / bits elements."""
    lanes, columns, shifts = _in_tensor_memory(rows, bits)
    return _cut(tmem[lane + lanes, column + columns], shifts)


def hidden_in_tensor_memory(hidden: Words, lane: int, column: int, rows: int, bits: int) -> NDArray[np.bool_]:
    """bool [rows]: rows with a code that has an undefined bit in `hidden`."""
    return (codes_in_tensor_memory(hidden, lane, column, rows, bits) != 0).any(axis=1)


def metadata_columns(bits: int) -> int:
    """Tensor-memory columns that the codes of one instruction fill."""
    return 1 if bits > 8 else 2
