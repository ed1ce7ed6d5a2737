"""The values that every lane-wise spelling runs on (every.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final
from zlib import crc32

import numpy as np

from conformance.silicon.lanewise.programs import COUNT, FLOATS, PAIRS, WIDTH, Words, operand, specials

_MANY: Final = 4 * COUNT
_ALL_OF_16_BITS: Final = 1 << 16
_SHARED: Final = ("few", "few64")
"""Kinds whose values several lanes of a warp share: shuffling would undo that."""


def count_of(sources: Sequence[str]) -> int:
    """The number of values that a spelling with these operands runs on, a multiple of COUNT."""
    if len(sources) != 1:
        return _MANY
    (kind,) = sources
    if kind in PAIRS or WIDTH[kind] == 16:
        return _ALL_OF_16_BITS
    if kind in FLOATS:
        return 1 << FLOATS[kind][1] + 5
    return COUNT if WIDTH[kind] == 8 else _MANY


@cache
def values_of(sources: tuple[str, ...]) -> tuple[Words, ...]:
    """uint64 [count_of(sources)] for each operand, in shuffled order.

    One operand of up to 16 bits: all of its values. One pair: each half alike, or each exponent. One f32 or f64: each
    exponent with both signs and 16 mantissas. Else up to half are special values crossed; the rest is drawn as in
    programs.py.
    """
    count, draw = count_of(sources), np.random.default_rng([12, crc32(" ".join(sources).encode())])
    if len(sources) == 1 and (sources[0] in (*FLOATS, *PAIRS) or WIDTH[sources[0]] <= 16):
        return (draw.permutation(_single(sources[0], count, draw)),)
    columns = [
        np.concatenate([operand(kind, f"{at} {' '.join(sources)}", place) for at in range(count // COUNT)])
        for place, kind in enumerate(sources)
    ]
    if not columns or any(kind in _SHARED for kind in sources):
        return tuple(columns)
    every = [np.array(specials(kind) or column[:32], np.uint64) for kind, column in zip(sources, columns, strict=True)]
    sizes = [len(one) for one in every]
    total = int(np.prod(sizes))
    picked = np.arange(total) if total <= count // 2 else draw.choice(total, count // 2, replace=False)
    order = draw.permutation(count)
    for column, one, at in zip(columns, every, np.unravel_index(picked, sizes), strict=True):
        column[: len(picked)] = one[at]
        column[:] = column[order]
    return tuple(columns)


def _single(kind: str, count: int, draw: np.random.Generator) -> Words:
    number = np.arange(count, dtype=np.uint64)
    if kind in PAIRS:
        half, shift = PAIRS[kind]
        low, high = (draw.permutation(_single(half, count, draw)) for _ in range(2))
        return low | high << np.uint64(shift)
    if WIDTH[kind] <= 16:
        return number % np.uint64(1 << WIDTH[kind])
    bits, exponent_bits, mantissa_bits, _ = FLOATS[kind]
    sign, which = number & np.uint64(1), number >> np.uint64(1) & np.uint64(15)
    exponent = (number >> np.uint64(5)) % np.uint64(1 << exponent_bits)
    ends = np.array([0, 1, 1 << (mantissa_bits - 1), (1 << mantissa_bits) - 1], np.uint64)
    drawn = draw.integers(0, 1 << mantissa_bits, count, dtype=np.uint64)
    mantissa = np.where(which < 4, ends[which & np.uint64(3)], drawn)
    return sign << np.uint64(bits - 1) | exponent << np.uint64(mantissa_bits) | mantissa
