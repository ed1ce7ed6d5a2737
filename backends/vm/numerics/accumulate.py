"""Matrix multiply-accumulate D = A B^T + C under a declared policy.

`fast` and `exact` are single sums of the whole product; `hopper` is the bit-exact model of one H200 instruction after
another (facts.md 7.1). How Blackwell accumulates is undocumented, so there every policy is an approximation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from backends.vm.numerics.f32 import Float32, canonical
from backends.vm.numerics.formats import Float64

Policy = Literal["fast", "exact", "hopper"]


@dataclass(frozen=True, slots=True)
class Adder:
    """How a tensor core of the Hopper generation adds: every product and C truncated to a multiple of
    2^(E - `fraction_bits`), E the largest exponent among them, the sum truncated to `significand_bits`."""

    fraction_bits: int
    significand_bits: int


# Measured for f16, bf16, tf32 and e4m3; the other 8-bit and narrower types are taken to share e4m3's adder.
_WIDE, _NARROW = Adder(25, 24), Adder(13, 14)
ADDERS: dict[str, Adder] = {
    "f16": _WIDE,
    "bf16": _WIDE,
    "tf32": _WIDE,
    "e4m3": _NARROW,
    "e5m2": _NARROW,
    "e3m2": _NARROW,
    "e2m3": _NARROW,
    "e2m1": _NARROW,
}
_ZERO_EXPONENT = -100_000


def mma(
    a: Float32, b: Float32, c: Float32 | None, *, k_per_instruction: int, kind: str, policy: Policy = "fast"
) -> Float32:
    """float32 [M, N] from a [M, K], b [N, K] and c [M, N], or no c when the accumulator is overwritten.

    `k_per_instruction` is the K of one instruction (16 for 16-bit inputs, 8 for tf32, 32 for 8-bit), `kind` the input
    type; only `hopper` uses them. tf32 inputs must already have lost their low 13 bits. ValueError for shapes that do
    not fit, a K that is no multiple of `k_per_instruction`, or an unknown kind or policy.
    """
    _check(a, b, c, k_per_instruction, kind)
    if policy == "fast":
        product = a @ b.T
        return canonical(product if c is None else product + c)
    if policy == "exact":
        total = a.astype(np.float64) @ b.astype(np.float64).T
        return canonical((total if c is None else total + c).astype(np.float32))
    if policy != "hopper":
        raise ValueError(f"accumulation policy {policy!r} is unknown; it is one of fast, exact, hopper.")
    accumulator = c
    for k in range(0, a.shape[1], k_per_instruction):
        group = slice(k, k + k_per_instruction)
        accumulator = _instruction(a[:, group], b[:, group], accumulator, ADDERS[kind])
    assert accumulator is not None
    return accumulator


def _check(a: Float32, b: Float32, c: Float32 | None, k_per_instruction: int, kind: str) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or a.shape[1] == 0:
        raise ValueError(f"A is {a.shape} and B {b.shape}; they must be [M, K] and [N, K] with the same K >= 1.")
    if c is not None and c.shape != (a.shape[0], b.shape[0]):
        raise ValueError(f"C is {c.shape}; with A {a.shape} and B {b.shape} it must be {(a.shape[0], b.shape[0])}.")
    if k_per_instruction < 1 or a.shape[1] % k_per_instruction:
        raise ValueError(f"K is {a.shape[1]}; it must be a multiple of one instruction's K, {k_per_instruction}.")
    if kind not in ADDERS:
        raise ValueError(f"input type {kind!r} is unknown; it is one of {', '.join(ADDERS)}.")


def _exponent(x: Float32) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Floor of the base-2 logarithm of |x|; far below any other for zero, and 0 for infinities and NaN."""
    return np.where(x == 0, _ZERO_EXPONENT, np.frexp(x)[1] - 1).astype(np.int32)


def _instruction(a: Float32, b: Float32, c: Float32 | None, adder: Adder) -> Float32:
    """One instruction: all of K is one group, added exactly after the truncation."""
    exponents_a, exponents_b = _exponent(a), _exponent(b)
    largest = np.full((a.shape[0], b.shape[0]), _ZERO_EXPONENT) if c is None else _exponent(c).astype(np.int64)
    for k in range(a.shape[1]):
        np.maximum(largest, np.add.outer(exponents_a[:, k], exponents_b[:, k]), out=largest)
    scale = adder.fraction_bits - np.where(largest > _ZERO_EXPONENT, largest, 0)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    total = np.zeros(scale.shape) if c is None else np.trunc(np.ldexp(c.astype(np.float64), scale))
    for k in range(a.shape[1]):
        total += np.trunc(np.ldexp(np.outer(wide_a[:, k], wide_b[:, k]), scale))
    return canonical(_truncate(total, -scale, adder.significand_bits))


def _truncate(total: Float64, exponent: np.ndarray[tuple[int, ...], np.dtype[np.int64]], bits: int) -> Float32:
    """total * 2^exponent truncated to `bits` significant bits, then towards zero into float32."""
    drop = np.maximum(np.frexp(total)[1] - bits, 0)
    kept = np.ldexp(np.trunc(np.ldexp(total, -drop)), drop + exponent)
    nearest = kept.astype(np.float32)
    # Only a result that is subnormal or overflows is not exact here; neither was measured.
    return np.where(np.abs(nearest) > np.abs(kept), np.nextafter(nearest, np.float32(0)), nearest)
