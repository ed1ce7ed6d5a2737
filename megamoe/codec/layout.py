"""Where NVFP4 block scales and weight rows lie in memory, as the tensor core and a fused SwiGLU want them.

Swizzled block scales: atoms of 512 bytes for 128 rows by 4 blocks along K; scale `j` of row `r` of an atom is at byte
(r % 32) * 16 + (r // 32) * 4 + j, atoms along K next to each other (facts.md 2.4). tcgen05.mma reads an atom as
tcgen05.cp.32x128b.warpx4 copies it. Rows and blocks that fill up the last atoms are padding and mean nothing.
"""

from __future__ import annotations

from typing import Final

import torch

ATOM_ROWS: Final = 128
ATOM_BLOCKS: Final = 4
ATOM_BYTES: Final = ATOM_ROWS * ATOM_BLOCKS


def swizzled_shape(rows: int, blocks: int) -> tuple[int, int, int]:
    """(atoms along the rows, atoms along K, 512) for `rows` rows of `blocks` block scales each."""
    return -(-rows // ATOM_ROWS), -(-blocks // ATOM_BLOCKS), ATOM_BYTES


def swizzle_scales(sf: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """uint8 [..., rows, blocks] to uint8 [..., *swizzled_shape(rows, blocks)]. `padding`: the byte that fills up."""
    rows, blocks = sf.shape[-2:]
    row_atoms, k_atoms, _ = swizzled_shape(rows, blocks)
    fill = (0, k_atoms * ATOM_BLOCKS - blocks, 0, row_atoms * ATOM_ROWS - rows)
    whole = torch.nn.functional.pad(sf, fill, value=padding)
    # [row atom, row // 32, row % 32, K atom, block] becomes [row atom, K atom, row % 32, row // 32, block].
    split = whole.reshape(*sf.shape[:-2], row_atoms, 4, 32, k_atoms, ATOM_BLOCKS)
    return split.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1)).flatten(-3)


def unswizzle_scales(swizzled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """uint8 [..., row atoms, K atoms, 512] to uint8 [..., rows, blocks], no padding. ValueError for other shapes."""
    if tuple(swizzled.shape[-3:]) != swizzled_shape(rows, blocks):
        raise ValueError(
            f"swizzled scales of shape {tuple(swizzled.shape)}; {rows} rows of {blocks} blocks have "
            f"{swizzled_shape(rows, blocks)} at the end"
        )
    row_atoms, k_atoms = swizzled.shape[-3:-1]
    split = swizzled.reshape(*swizzled.shape[:-1], 32, 4, ATOM_BLOCKS)
    whole = split.movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1))
    return whole.reshape(*swizzled.shape[:-3], row_atoms * ATOM_ROWS, k_atoms * ATOM_BLOCKS)[..., :rows, :blocks]


def interleave(gate: torch.Tensor, up: torch.Tensor, granularity: int) -> torch.Tensor:
    """[..., n, x] twice to [..., 2 n, x]: `granularity` rows of gate, as many of up, and so on.

    It is for codes and for block scales that are not swizzled. ValueError if n is no multiple of `granularity`.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}; they must be the same")
    rows = _groups(gate.shape[-2], granularity)
    shape = (*gate.shape[:-2], rows, granularity, gate.shape[-1])
    return torch.stack((gate.reshape(shape), up.reshape(shape)), dim=-3).flatten(-4, -2)


def deinterleave(both: torch.Tensor, granularity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) of [..., 2 n, x]. Inverse of `interleave`."""
    groups = _groups(both.shape[-2], 2 * granularity)
    split = both.reshape(*both.shape[:-2], groups, 2, granularity, both.shape[-1])
    gate, up = split.unbind(dim=-3)
    return gate.flatten(-3, -2), up.flatten(-3, -2)


def _groups(rows: int, size: int) -> int:
    if size < 1 or rows % size:
        raise ValueError(f"{rows} rows cannot be split into groups of {size}")
    return rows // size
