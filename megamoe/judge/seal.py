"""Seals on the inputs of a kernel: whether a kernel has changed them, and in which blocks."""

from __future__ import annotations

import hashlib
from typing import Final, Protocol

import torch

SEAL_BYTES: Final = 4096
# Bytes compared at once on a device. A comparison needs as much memory again for its result.
_CHUNK: Final = 1 << 30


class Seal(Protocol):
    """A seal on the memory of a tensor (a vector of uint8), made when it was filled."""

    def whole(self, body: torch.Tensor) -> torch.Tensor:
        """bool scalar on the device of `body`: True if nothing has changed."""
        ...

    def broken(self, body: torch.Tensor) -> list[int]:
        """Indices of the changed blocks of SEAL_BYTES bytes of `body`, ascending."""
        ...

    def sha256(self) -> str:
        """Hexadecimal SHA-256 over the SHA-256 of each block as sealed."""
        ...


def seal(body: torch.Tensor) -> Seal:
    """Seals `body`: by digests in host memory; on a device by a copy there, so that checking needs no transfer."""
    return Digests(body) if body.device.type == "cpu" else SealedCopy(body)


class Digests:
    """SHA-256 of every block."""

    def __init__(self, body: torch.Tensor) -> None:
        self._digests = _digests(body)

    def whole(self, body: torch.Tensor) -> torch.Tensor:
        """See Seal."""
        return torch.tensor(_digests(body) == self._digests)

    def broken(self, body: torch.Tensor) -> list[int]:
        """See Seal."""
        return [i for i, (now, then) in enumerate(zip(_digests(body), self._digests, strict=True)) if now != then]

    def sha256(self) -> str:
        """See Seal."""
        return hashlib.sha256(b"".join(self._digests)).hexdigest()


class SealedCopy:
    """A copy of the bytes on the same device."""

    def __init__(self, body: torch.Tensor) -> None:
        self._bytes = body.clone()

    def whole(self, body: torch.Tensor) -> torch.Tensor:
        """See Seal."""
        words = body.numel() // 8 * 8
        parts = zip(
            (*body[:words].view(torch.int64).split(_CHUNK // 8), body[words:]),
            (*self._bytes[:words].view(torch.int64).split(_CHUNK // 8), self._bytes[words:]),
            strict=True,
        )
        return torch.stack([(now == then).all() for now, then in parts]).all()

    def broken(self, body: torch.Tensor) -> list[int]:
        """See Seal."""
        blocks = range(0, body.numel(), _CHUNK)
        found = [(body[i : i + _CHUNK] != self._bytes[i : i + _CHUNK]).nonzero().flatten() + i for i in blocks]
        return torch.cat(found).div(SEAL_BYTES, rounding_mode="floor").unique().tolist() if found else []

    def sha256(self) -> str:
        """See Seal."""
        return hashlib.sha256(b"".join(_digests(self._bytes))).hexdigest()


def _digests(body: torch.Tensor) -> list[bytes]:
    stored = body.cpu().numpy().data
    return [hashlib.sha256(stored[i : i + SEAL_BYTES]).digest() for i in range(0, len(stored), SEAL_BYTES)]
