"""Operands for lane-wise instructions: random bits, numbers near one, special values, denormals, small integers.

Each operand is uint64 [COUNT], its bits in the low end. The same program and place give the same operands everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

COUNT: Final = 512
"""Values of each operand; a block has 128 threads."""
WIDTH: Final[Mapping[str, int]] = {
    **dict.fromkeys(("s8", "u8", "b8", "e2m1x2"), 8),
    **dict.fromkeys(("s16", "u16", "b16", "f16", "bf16", "e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "ue8m0x2"), 16),
    **dict.fromkeys(("s32", "u32", "b32", "f32", "f16x2", "bf16x2", "tf32", "u16x2", "s16x2"), 32),
    **dict.fromkeys(("amount", "lane", "few", "bit", "nth"), 32),
    **dict.fromkeys(("s64", "u64", "b64", "f64", "f32x2", "few64"), 64),
}
"""Bits of a type, and of the kinds of operands that have ranges of their own."""
# Bits, exponent bits, mantissa bits, bias.
_FLOATS: Final = {"f16": (16, 5, 10, 15), "bf16": (16, 8, 7, 127), "f32": (32, 8, 23, 127), "f64": (64, 11, 52, 1023)}
_PAIRS: Final = {"f16x2": ("f16", 16), "bf16x2": ("bf16", 16), "f32x2": ("f32", 32)}


def operand(kind: str, opcode: str, place: int) -> Words:
    """The operand of `kind` at `place` of the program `opcode`."""
    draw = np.random.default_rng([11, crc32(opcode.encode()), place])
    if kind in _PAIRS:
        half, shift = _PAIRS[kind]
        return _floats(half, draw) | _floats(half, draw) << np.uint64(shift)
    if kind in _FLOATS:
        return _floats(kind, draw)
    return _RANGES[kind](draw) if kind in _RANGES else _integers(WIDTH[kind], draw)


def _bits(draw: np.random.Generator) -> Words:
    return draw.integers(0, 1 << 64, COUNT, dtype=np.uint64)


def _floats(kind: str, draw: np.random.Generator) -> Words:
    bits, exponent_bits, mantissa_bits, bias = _FLOATS[kind]
    one, top, all_ones = 1 << mantissa_bits, 1 << (bits - 1), (1 << exponent_bits) - 1
    random = _bits(draw) & np.uint64((1 << bits) - 1)
    mantissa = random & np.uint64(one - 1 | top)
    near_one = mantissa | (draw.integers(bias - 6, bias + 7, COUNT).astype(np.uint64) << np.uint64(mantissa_bits))
    infinity, largest = all_ones * one, (all_ones - 1) * one | (one - 1)
    magnitudes = (0, 1, one - 1, one, bias * one, (bias + 1) * one, (bias - 1) * one, (bias + 14) * one, largest)
    nans = (infinity | 1, infinity | one >> 1, infinity | (one - 1))
    special = draw.choice(np.array([m | s for m in (*magnitudes, infinity, *nans) for s in (0, top)], np.uint64), COUNT)
    halves = np.round(draw.normal(0, 300, COUNT) * 2) / 2
    small = {
        "f16": lambda: halves.astype(np.float16).view(np.uint16),
        "bf16": lambda: halves.astype(np.float32).view(np.uint32) >> np.uint32(16),
        "f32": lambda: halves.astype(np.float32).view(np.uint32),
        "f64": lambda: halves.view(np.uint64),
    }[kind]().astype(np.uint64)
    pick = draw.integers(0, 10, COUNT)
    return np.select([pick < 3, pick < 6, pick < 8, pick < 9], [random, near_one, special, small], mantissa)


def _integers(bits: int, draw: np.random.Generator) -> Words:
    mask = np.uint64((1 << bits) - 1)
    random = _bits(draw) & mask
    small = random >> draw.integers(0, bits, COUNT).astype(np.uint64)
    top = 1 << (bits - 1)
    edges = draw.choice(np.array([0, 1, 2, top - 1, top, top + 1, 2 * top - 1], np.uint64), COUNT)
    pick = draw.integers(0, 8, COUNT)
    return np.select([pick < 3, pick < 5, pick < 7], [random, small, ~small & mask], edges)


def _amounts(draw: np.random.Generator) -> Words:
    """Shift amounts, positions and lengths: 0 to 255, where PTX defines them for every instruction."""
    return np.where(draw.integers(0, 4, COUNT) < 3, draw.integers(0, 70, COUNT), draw.integers(0, 256, COUNT)).astype(
        np.uint64
    )


def _few(draw: np.random.Generator) -> Words:
    """Values that several lanes of a warp share; in half of the warps, all of a half-warp."""
    shared = np.repeat(draw.integers(0, 3, COUNT // 16), 16)
    mixed = np.repeat(draw.integers(0, 2, COUNT // 32), 32)
    return (shared + draw.integers(0, 2, COUNT) * mixed).astype(np.uint64)


_RANGES: Final[Mapping[str, Callable[[np.random.Generator], Words]]] = {
    "amount": _amounts,
    "lane": lambda draw: draw.integers(0, 40, COUNT).astype(np.uint64),
    "bit": lambda draw: draw.integers(0, 32, COUNT).astype(np.uint64),
    "nth": lambda draw: draw.integers(-6, 7, COUNT).astype(np.int32).view(np.uint32).astype(np.uint64),
    "few": _few,
    "few64": lambda draw: _few(draw) * np.uint64(0x1_0000_0001),
}
