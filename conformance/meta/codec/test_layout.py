"""Layouts of NVFP4: swizzled block scales against the formula, byte by byte, and gate/up interleaving."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from megamoe.codec.nvfp4 import deinterleave, interleave, swizzle_scales, swizzled_shape, unswizzle_scales

SHAPES = [(1, 1), (31, 3), (32, 4), (33, 5), (127, 4), (128, 4), (128, 8), (129, 9), (256, 16), (300, 24)]


def numbered(rows: int, blocks: int) -> torch.Tensor:
    """Scales that tell where they come from, as far as a byte can: 251 is prime."""
    return (torch.arange(rows * blocks).view(rows, blocks) * 7 % 251 + 1).to(torch.uint8)


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_every_scale_is_where_the_tensor_core_looks(rows: int, blocks: int) -> None:
    """facts.md 2.4: byte (row % 32) * 16 + (row // 32) * 4 + sf of an atom of 512, atoms along K first."""
    sf = numbered(rows, blocks)
    stored = swizzle_scales(sf, padding=0).flatten().tolist()
    k_atoms = -(-blocks // 4)
    for row, block in itertools.product(range(rows), range(blocks)):
        atom = row // 128 * k_atoms + block // 4
        at = atom * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        assert stored[at] == sf[row, block], f"scale {block} of row {row} is not at byte {at}"
        stored[at] = 0
    assert not any(stored), "the other bytes are padding"


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_swizzling_comes_undone(rows: int, blocks: int) -> None:
    sf = torch.stack([numbered(rows, blocks), numbered(rows, blocks).flip(0)])
    swizzled = swizzle_scales(sf, padding=0x7F)
    assert tuple(swizzled.shape) == (2, *swizzled_shape(rows, blocks))
    assert int((swizzled == 0x7F).sum()) == swizzled.numel() - sf.numel() + int((sf == 0x7F).sum()), "padding is poison"
    assert torch.equal(unswizzle_scales(swizzled, rows, blocks), sf), "and none of it comes back"


def test_swizzled_scales_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"129 rows of 4 blocks have \(2, 1, 512\)"):
        unswizzle_scales(torch.zeros(1, 1, 512, dtype=torch.uint8), 129, 4)


@pytest.mark.parametrize("granularity", [8, 16, 32, 64])
def test_gate_and_up_take_turns(granularity: int) -> None:
    gate, up = torch.arange(128).view(128, 1) * 2, torch.arange(128).view(128, 1) * 2 + 1
    both = interleave(gate.expand(3, -1, 2), up.expand(3, -1, 2), granularity)
    assert both.shape == (3, 256, 2)
    for row in range(256):
        pair, inside = divmod(row, 2 * granularity)
        of_up, offset = divmod(inside, granularity)
        assert both[0, row, 0] == 2 * (pair * granularity + offset) + of_up, f"row {row} at granularity {granularity}"
    again = deinterleave(both, granularity)
    assert torch.equal(again[0], gate.expand(3, -1, 2)), "gate comes back"
    assert torch.equal(again[1], up.expand(3, -1, 2)), "up comes back"


def test_rows_that_cannot_take_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="24 rows cannot be split into groups of 16"):
        interleave(torch.zeros(24, 1), torch.zeros(24, 1), 16)
    with pytest.raises(ValueError, match="24 rows cannot be split into groups of 32"):
        deinterleave(torch.zeros(24, 1), 16)
    with pytest.raises(ValueError, match="must be the same"):
        interleave(torch.zeros(16, 1), torch.zeros(16, 2), 8)


def test_swizzles_as_torchao_does() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = pytest.importorskip("torchao.prototype.mx_formats.utils", reason="torchao is not installed")
    for rows, blocks in SHAPES:
        sf = numbered(rows, blocks)
        assert torch.equal(swizzle_scales(sf).flatten(), other.to_blocked(sf)), f"{rows} rows of {blocks} scales"
