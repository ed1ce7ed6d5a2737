"""Random tensors with the same bits everywhere: drawn on the CPU from a case id and the name of a stream."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from megamoe.contract import Case

QUANTILES: Final = 1 << 16


def generator(case: Case, stream: str) -> torch.Generator:
    """The generator of one stream of `case`, independent of the case's other streams."""
    # The id leaves defaults out, so a new axis with a default does not change the inputs of earlier cases.
    digest = hashlib.sha256(f"{case.id}|{stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def uniform(case: Case, stream: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Uniform in [0, 1), float64."""
    return torch.rand(shape, generator=generator(case, stream), dtype=torch.float64)


@lru_cache(maxsize=1)
def _quantiles() -> torch.Tensor:
    levels = (torch.arange(QUANTILES, dtype=torch.float64) + 0.5) / QUANTILES
    return torch.special.ndtri(levels).float()


def normal(case: Case, stream: str, shape: tuple[int, ...]) -> torch.Tensor:
    """N(0, 1), fp32, of at least one axis: each one of QUANTILES equally likely values within 4.4 deviations.

    torch.randn picks its algorithm by CPU and by size. Integers and a table give the same numbers everywhere.
    """
    source = generator(case, stream)
    drawn = torch.empty(shape, dtype=torch.float32)
    for batch in drawn:
        level = torch.randint(QUANTILES, batch.shape, generator=source, dtype=torch.int32)
        torch.index_select(_quantiles(), 0, level.flatten(), out=batch.view(-1))
    return drawn


def signs(case: Case, stream: str, shape: tuple[int, ...]) -> torch.Tensor:
    """+1 and -1, equally likely, float32."""
    return torch.where(uniform(case, stream, shape) < 0.5, -1.0, 1.0)
