"""What a `cvt` spelling may say, and the function it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.unsignedinteger]
Function = Callable[..., Bits]

_INTEGER_WIDTH = {f"{sign}{bits}": bits for sign in "us" for bits in (8, 16, 32, 64)}
_FLOAT_WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "tf32": 32}
_PACKED_WIDTH = {
    "f16x2": 32,
    "bf16x2": 32,
    "e4m3x2": 16,
    "e5m2x2": 16,
    "e3m2x2": 16,
    "e2m3x2": 16,
    "e2m1x2": 8,
    "ue8m0x2": 16,
}
WIDTH = _INTEGER_WIDTH | _FLOAT_WIDTH | _PACKED_WIDTH
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


@dataclass(frozen=True, slots=True)
class Modifiers:
    """The words between `cvt` and the types: `rounding` without its dot, "" if absent."""

    rounding: str = ""
    ftz: bool = False
    sat: bool = False
    satfinite: bool = False
    relu: bool = False

    @property
    def flags(self) -> frozenset[str]:
        return frozenset(word for word in ("ftz", "sat", "satfinite", "relu") if getattr(self, word))


@dataclass(frozen=True, slots=True)
class Rule:
    """One (destination, source) pair: the modifiers it takes, the operands it reads, how to make its function."""

    roundings: frozenset[str]
    flags: frozenset[str]
    required: frozenset[str]
    operands: int
    build: Callable[[Modifiers], Function]


def take(operand: Bits, bits: int) -> Bits:
    """The low `bits` bits; a source register may be wider than the type (PTX ISA 9.7.9.21, Notes)."""
    return np.asarray(operand, dtype=UNSIGNED[bits])
