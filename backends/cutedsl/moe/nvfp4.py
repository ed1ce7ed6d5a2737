# pyright: reportMissingImports=false
"""NVFP4 rows in global memory: codes, and block scales in atoms."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from backends.cutedsl.moe.layout import ATOM_BYTES, TILE_M

VECTOR = 16
"""Bytes of codes that a lane copies at once."""


class Nvfp4(NamedTuple):
    """A matrix, or one per expert: codes u8 (..., rows, K / 2), two per byte; sf u8 (..., row tiles, atoms, 512).

    Block scales are swizzled: an atom holds the scales of 128 rows and 64 columns.
    """

    codes: cute.Tensor
    sf: cute.Tensor


def scale_offset(row: Int32, atoms: Int32, atom: Int32) -> Int64:
    """The byte offset, in a swizzled tensor, of the four scales of `row` in its atom `atom` of `atoms`."""
    inside = row % 32 * 16 + row % TILE_M // 32 * 4
    return (Int64(row // TILE_M) * atoms + atom) * ATOM_BYTES + inside


def scale_word(mSF: cute.Tensor, row: Int32, atoms: Int32, atom: Int32) -> cute.Tensor:
    """The four scales of `row` in an atom, as one word."""
    pointer = mSF.iterator + cute.assume(scale_offset(row, atoms, atom), divby=4)
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), cute.make_layout(1))


def code_vector(mCodes: cute.Tensor, row: Int32, row_bytes: Int32, vector: Int32) -> cute.Tensor:
    """16 bytes of the codes of `row`."""
    pointer = mCodes.iterator + cute.assume(Int64(row) * row_bytes + vector * VECTOR, divby=VECTOR)
    return cute.make_tensor(pointer, cute.make_layout(VECTOR))
