"""Tensor maps of codes, in boxes of one stage along K, and of scale factor atoms.

Beyond K and beyond the rows of one expert, zeros are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.sm100_moe.geometry import (
    ATOM_BYTES,
    B_ATOMS,
    MMA_K,
    STAGE_ROW_BYTES,
    STAGE_STEPS,
    STAGED_COLUMNS,
    TILE_M,
    TILE_N,
)
from megamoe.contract import TensorMapArg

ATOM_WORDS = ATOM_BYTES // 4


@dataclass(frozen=True, slots=True)
class Weights:
    """One of the weight tensors: `name` is w1 or w2; `rows` by `k` an expert."""

    name: str
    num_experts: int
    rows: int
    k: int

    def codes(self) -> TensorMapArg:
        """[num_experts][rows][k / 2]."""
        return TensorMapArg(
            tensor=f"{self.name}_codes",
            dtype="u8",
            dims=(self.k // 2, self.rows, self.num_experts),
            strides=(self.k // 2, self.rows * self.k // 2),
            box=(STAGE_ROW_BYTES, TILE_N, 1),
            swizzle="128B",
        )

    def scales(self) -> TensorMapArg:
        """[num_experts][rows / 128][k / 64] atoms."""
        row_atoms, k_atoms = self.rows // TILE_M, self.k // MMA_K
        return TensorMapArg(
            tensor=f"{self.name}_sf",
            dtype="u32",
            dims=(ATOM_WORDS, k_atoms, row_atoms, self.num_experts),
            strides=(ATOM_BYTES, k_atoms * ATOM_BYTES, row_atoms * k_atoms * ATOM_BYTES),
            box=(ATOM_WORDS, STAGE_STEPS, B_ATOMS, 1),
        )


def row_scales(tensor: str, row_tiles: int, k: int) -> TensorMapArg:
    """[row tiles][k / 64] atoms."""
    k_atoms = k // MMA_K
    return TensorMapArg(
        tensor=tensor,
        dtype="u32",
        dims=(ATOM_WORDS, k_atoms, row_tiles),
        strides=(ATOM_BYTES, k_atoms * ATOM_BYTES),
        box=(ATOM_WORDS, STAGE_STEPS, 1),
    )


def token_codes(tokens: int, hidden: int) -> TensorMapArg:
    """x_codes [tokens][hidden / 2], to be gathered row by row."""
    return _matrix("x_codes", tokens, hidden, 1)


def row_codes(rows: int, intermediate: int) -> TensorMapArg:
    """a2_codes [rows][intermediate / 2]."""
    return _matrix("a2_codes", rows, intermediate, TILE_M)


def expert_rows(rows: int, hidden: int) -> TensorMapArg:
    """rows [rows][hidden] bf16, in the boxes that a warp writes."""
    return TensorMapArg(
        tensor="rows",
        dtype="bf16",
        dims=(hidden, rows),
        strides=(hidden * 2,),
        box=(STAGED_COLUMNS, 32),
        swizzle="64B",
    )


def _matrix(tensor: str, rows: int, k: int, box_rows: int) -> TensorMapArg:
    return TensorMapArg(
        tensor=tensor,
        dtype="u8",
        dims=(k // 2, rows),
        strides=(k // 2,),
        box=(STAGE_ROW_BYTES, box_rows),
        swizzle="128B",
    )
