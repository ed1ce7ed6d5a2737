"""Operands with block scales: random codes, their scales in the layout that tensor cores read, and their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from megamoe.contract import TensorArg

ATOM_ROWS, ATOM_BLOCKS = 128, 4
"""A scale-factor atom: 128 rows of 4 blocks in 512 bytes, row r at byte 16 (r mod 32) + 4 (r div 32)."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Dtypes (as TensorArg names them) of elements and scales, and how many elements share a scale."""

    element: str
    scale: str
    block: int


FORMATS: Mapping[str, BlockFormat] = {
    "nvfp4": BlockFormat("e2m1x2", "e4m3", 16),
    "mxfp4": BlockFormat("e2m1x2", "ue8m0", 32),
    "mxfp8": BlockFormat("e4m3", "ue8m0", 32),
}


@dataclass(frozen=True, slots=True)
class ScaledOperand:
    """`codes` in bytes [batch, rows, ...], `scales` in bytes [batch, row atoms, block atoms, 32, 4, 4], and `values`,
    float64 [batch, rows, k]."""

    format: BlockFormat
    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor

    def codes_argument(self, name: str) -> TensorArg:
        """The codes as the host function takes them."""
        return TensorArg(name, self.format.element, tuple(self.codes.shape))

    def scales_argument(self, name: str) -> TensorArg:
        """The scales as the host function takes them."""
        return TensorArg(name, self.format.scale, tuple(self.scales.shape))


def scaled_operand(form: BlockFormat, batch: int, rows: int, k: int, random: torch.Generator) -> ScaledOperand:
    """Random finite codes [batch, rows, k] and scales; `k` is a multiple of the block. What pads the atoms is zero."""
    blocks = k // form.block
    if form.scale == "e4m3":
        scale_codes = torch.randint(0x28, 0x48, (batch, rows, blocks), generator=random).numpy().astype(np.uint8)
        scales = scale_codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    else:
        scale_codes = torch.randint(124, 130, (batch, rows, blocks), generator=random).numpy().astype(np.uint8)
        scales = scale_codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    if form.element == "e4m3":
        codes = torch.randn(batch, rows, k, generator=random).to(torch.float8_e4m3fn)
        values, stored = codes.double().numpy(), codes.view(torch.uint8)
    else:
        nibbles = torch.randint(0, 16, (batch, rows, k), generator=random).numpy().astype(np.uint8)
        values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        stored = torch.from_numpy(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)
    return ScaledOperand(
        form, stored, torch.from_numpy(_atoms(scale_codes)), torch.from_numpy(values * np.repeat(scales, form.block, 2))
    )


def _atoms(codes: np.ndarray) -> np.ndarray:
    batch, rows, blocks = codes.shape
    row_atoms, block_atoms = -(-rows // ATOM_ROWS), -(-blocks // ATOM_BLOCKS)
    padded = np.zeros((batch, row_atoms * ATOM_ROWS, block_atoms * ATOM_BLOCKS), np.uint8)
    padded[:, :rows, :blocks] = codes
    split = padded.reshape(batch, row_atoms, 4, 32, block_atoms, 4)
    return np.ascontiguousarray(split.transpose(0, 1, 4, 3, 2, 5))
