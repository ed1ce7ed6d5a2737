"""Expert rows in tiles and block scales in atoms, as the spec lays them out. Imports no CuTeDSL."""

TILE_M = 128
"""The rows of an expert begin at a multiple of TILE_M."""
SF_VEC_SIZE = 16
ATOM_BYTES = 512
"""Bytes of an atom of block scales: 128 rows, 64 columns."""
MAX_EXPERTS = 512
"""The most experts that the routing kernels count in shared memory."""
