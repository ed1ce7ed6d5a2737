"""Seals report changes block by block, on the host and on a device alike."""

from __future__ import annotations

import pytest
import torch

from megamoe.judge.arena import SEAL_BYTES, Digests, Seal, SealedCopy, seal

SEALS = (Digests, SealedCopy)
SIZES = (0, 1, 7, 8, SEAL_BYTES, 3 * SEAL_BYTES + 5)


def body(size: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("kind", SEALS)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_whole_is_whole(kind: type[Digests | SealedCopy], size: int) -> None:
    bytes_ = body(size)
    sealed: Seal = kind(bytes_)
    assert bool(sealed.whole(bytes_)), f"{size} bytes"
    assert sealed.broken(bytes_) == []


@pytest.mark.parametrize("kind", SEALS)
@pytest.mark.parametrize("size", [size for size in SIZES if size])
def test_one_flipped_bit_breaks_its_block_alone(kind: type[Digests | SealedCopy], size: int) -> None:
    bytes_ = body(size)
    sealed: Seal = kind(bytes_)
    for place in {0, size // 2, size - 1}:
        bytes_[place] ^= 0x80
        assert not bool(sealed.whole(bytes_)), f"bit flipped in byte {place} of {size}"
        assert sealed.broken(bytes_) == [place // SEAL_BYTES]
        bytes_[place] ^= 0x80
    assert bool(sealed.whole(bytes_))


@pytest.mark.parametrize("kind", SEALS)
def test_the_digest_is_that_of_what_was_sealed(kind: type[Digests | SealedCopy]) -> None:
    bytes_ = body(3 * SEAL_BYTES)
    before = Digests(bytes_).sha256()
    sealed: Seal = kind(bytes_)
    bytes_.zero_()
    assert sealed.sha256() == before, "whatever happens to the memory later"


def test_host_memory_is_sealed_by_digests() -> None:
    assert isinstance(seal(body(8)), Digests)
