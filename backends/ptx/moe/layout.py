"""Expert rows in tiles and block scales in atoms, as the spec lays them out."""

from __future__ import annotations

TILE_M = 128
"""The rows of each expert begin at a multiple of it."""
SF_VEC_SIZE = 16
ATOM_ROWS = 128
ATOM_BLOCKS = 4
ATOM_BYTES = ATOM_ROWS * ATOM_BLOCKS
"""A scale factor atom: 128 rows by 4 block scales along K, in the order that tcgen05.cp takes (facts.md 2.4)."""


def tiles(extent: int, tile: int) -> int:
    """How many tiles cover an extent."""
    return -(-extent // tile)


def max_row_tiles(routes: int, num_experts: int) -> int:
    """The most tiles of TILE_M rows that `routes` can need: each expert's rows are padded to whole tiles."""
    occupied = min(routes, num_experts)
    return occupied + (routes - occupied) // TILE_M
