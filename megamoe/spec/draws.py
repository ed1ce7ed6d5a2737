"""Random tensors with the same bits everywhere, seeded by a case id and a stream name.

Most are drawn sequentially on the CPU. Tensors of gigabytes are drawn by counting: each number depends only on its
position, through integer arithmetic that is the same on every device, so the device can draw its own tensors.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from megamoe.contract import Case

QUANTILES: Final = 1 << 16
NUMBERS_A_WORD: Final = 4
"""How many numbers one 64-bit word gives."""
_PORTION: Final = 1 << 16
"""Numbers drawn at a time: their levels stay in the processor's cache until they are looked up."""


def generator(case: Case, stream: str) -> torch.Generator:
    """The generator for one stream of `case`, independent of its other streams."""
    return torch.Generator().manual_seed(_seed(case, stream) >> 1)


def _seed(case: Case, stream: str) -> int:
    # The id leaves defaults out, so a new axis with a default does not change the inputs of existing cases.
    return int.from_bytes(hashlib.sha256(f"{case.id}|{stream}".encode()).digest()[:8], "little")


def uniform(case: Case, stream: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Uniform in [0, 1), float64."""
    return torch.rand(shape, generator=generator(case, stream), dtype=torch.float64)


@lru_cache(maxsize=1)
def _quantiles() -> torch.Tensor:
    levels = (torch.arange(QUANTILES, dtype=torch.float64) + 0.5) / QUANTILES
    return torch.special.ndtri(levels).float()


def normal(case: Case, stream: str, shape: tuple[int, ...]) -> torch.Tensor:
    """N(0, 1), fp32: each value is one of QUANTILES equally likely values within 4.4 deviations.

    torch.randn picks its algorithm by CPU and by size. Integers and a table give the same numbers everywhere.
    """
    source = generator(case, stream)
    drawn = torch.empty(shape, dtype=torch.float32)
    for part in drawn.view(-1).split(_PORTION):
        level = torch.randint(QUANTILES, part.shape, generator=source, dtype=torch.int32)
        torch.index_select(_quantiles(), 0, level, out=part)
    return drawn


def counted_normal(case: Case, stream: str, first: int, count: int, device: str | torch.device) -> torch.Tensor:
    """float32 [count] on `device`: the N(0, 1) numbers `first` to `first + count - 1` of a stream.

    ValueError if `first` or `count` is not a multiple of NUMBERS_A_WORD.
    """
    if first % NUMBERS_A_WORD or count % NUMBERS_A_WORD:
        raise ValueError(f"numbers {first} to {first + count - 1}: both must be multiples of {NUMBERS_A_WORD}")
    place = torch.arange(first // NUMBERS_A_WORD, (first + count) // NUMBERS_A_WORD, device=device)
    level = scrambled(place.mul_(_signed(GOLDEN)).add_(_signed(_seed(case, stream)))).view(torch.int16)
    return torch.index_select(_quantiles().to(device), 0, level.int().bitwise_and_(QUANTILES - 1))


GOLDEN: Final = 0x9E3779B97F4A7C15


def scrambled(words: torch.Tensor) -> torch.Tensor:
    """Replaces each of `words` (int64) in place by a number that looks random, with the last steps of splitmix64
    (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # The shift must be a logical (unsigned) one.
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << 64 - shift) - 1)).mul_(_signed(factor))
    return words


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def signs(case: Case, stream: str, shape: tuple[int, ...]) -> torch.Tensor:
    """+1 and -1, equally likely, float32."""
    return torch.where(uniform(case, stream, shape) < 0.5, -1.0, 1.0)
