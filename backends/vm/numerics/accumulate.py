"""Matrix multiply-accumulate D = A B^T + C under a declared policy.

`fast` and `exact` are single sums of the whole product; `hopper` is the bit-exact model of one H200 instruction after
another (facts.md 7.1). How Blackwell accumulates is undocumented, so there every policy is an approximation.
`ring` takes floats for elements of a ring (backends.vm.numerics.ring), in lane-wise instructions too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from backends.vm.numerics import ring
from backends.vm.numerics.f32 import Float32, canonical
from backends.vm.numerics.formats import Float64

Policy = Literal["fast", "exact", "hopper", "ring"]
Mask = npt.NDArray[np.bool_]
Factor = tuple[Float32, npt.NDArray[np.int32]]
"""Elements, and the exponents that they count with."""


@dataclass(frozen=True, slots=True)
class Adder:
    """How a tensor core of the Hopper generation adds: every product and C truncated to a multiple of
    2^(E - `fraction_bits`), E the largest exponent among them, the sum truncated to `significand_bits`. A sum of an
    instruction with D in f16 is rounded to f16 as it is."""

    fraction_bits: int
    significand_bits: int


# Measured for all of sm_90a (conformance/silicon/whole); the types below 8 bits are taken to share FP8's adder.
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
_LEAST_EXPONENTS = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14}
"""Of the smallest normal number. What is not listed was never seen on hardware, and counts as a normal number."""
_LEAST_OF_C = -126
_LEAST_OF_ALL = -133
"""What the largest exponent of an instruction counts as where it is smaller. Measured with bf16; other types reach it
rarely (tf32) or never."""


def policy_called(name: str) -> Policy:
    """The policy of that name. ValueError if there is none."""
    for policy in get_args(Policy):
        if policy == name:
            return policy
    raise ValueError(f"accumulation policy {name!r} is unknown; it is one of {', '.join(get_args(Policy))}.")


def mma(
    a: Float32,
    b: Float32,
    c: Float32 | None,
    *,
    k_per_instruction: int,
    kind: str,
    policy: Policy = "fast",
    to_half: bool = False,
    stored: Mask | None = None,
    b_kind: str = "",
) -> Float32:
    """float32 [M, N] from a [M, K], b [N, K] and c [M, N], or no c when the accumulator is overwritten.

    `k_per_instruction` is the K of one instruction (16 for 16-bit inputs, 8 for tf32, 32 for 8-bit), `kind` the input
    type (and `b_kind` that of B, if another); only `hopper` uses them. tf32 inputs must already have lost their low 13
    bits. `to_half`: the result of `hopper` is rounded to f16. `stored`, bool [M, K]: the elements that a sparse A has;
    what is not stored is multiplied with nothing, not even with an infinity or NaN of B. ValueError for shapes that do
    not fit, a K that is no multiple of `k_per_instruction`, or an unknown kind, of which the ring has bf16 alone.
    """
    _check(a, b, c, k_per_instruction, kind)
    if policy == "ring":
        return _in_ring(a, b, c, kind)
    if stored is not None and (np.isfinite(b).all() or stored.all()):
        stored = None
    if stored is not None and policy != "hopper":
        return canonical(_without_gaps(a.astype(np.float64), b.astype(np.float64), c, stored))
    if policy == "fast":
        product = a @ b.T
        return canonical(product if c is None else product + c)
    if policy == "exact":
        total = a.astype(np.float64) @ b.astype(np.float64).T
        return canonical((total if c is None else total + c).astype(np.float32))
    accumulator = c
    adder, last = ADDERS[kind], a.shape[1] - k_per_instruction
    for k in range(0, a.shape[1], k_per_instruction):
        group = slice(k, k + k_per_instruction)
        kept = None if stored is None else stored[:, group]
        left = _exponent(a[:, group], _LEAST_EXPONENTS.get(kind, _LEAST_OF_C))
        right = _exponent(b[:, group], _LEAST_EXPONENTS.get(b_kind or kind, _LEAST_OF_C))
        total, exponent = _sum((a[:, group], left), (b[:, group], right), accumulator, adder, kept)
        if to_half and k == last:
            return canonical(_to_half(np.ldexp(total, exponent)))
        accumulator = canonical(_truncate(total, exponent, adder.significand_bits))
    assert accumulator is not None
    return accumulator


def warp_product(
    a: Float32, b: Float32, c: Float32, kind: str, policy: Policy, *, to_half: bool, stored: Mask | None = None,
    most: int = 1024,
) -> Float32:  # fmt: skip
    """A [m, k] times B [n, k] and C as an H200 does it for one warp; `most`: elements of K of one instruction.

    It has no FP8 for one warp: ptxas 13.0 makes f16 of the lower half of each register and then of the upper one, adds
    both products from zero on, and C by an addition of its own, each rounded to f16 for a D in f16.
    """
    if policy != "hopper" or kind not in ("e4m3", "e5m2"):
        k = min(a.shape[1], most)
        return mma(a, b, c, k_per_instruction=k, kind=kind, policy=policy, to_half=to_half, stored=stored)
    run = 2 if stored is None else 4
    upper = np.arange(a.shape[1]) % (2 * run) >= run
    total: Float32 | None = None
    for half in (~upper, upper):
        kept = None if stored is None else stored[:, half]
        k = int(half.sum())
        total = mma(np.ascontiguousarray(a[:, half]), np.ascontiguousarray(b[:, half]), total, k_per_instruction=k,
                    kind="f16", policy=policy, to_half=to_half, stored=kept)  # fmt: skip
    assert total is not None
    return canonical(total + c)


def _in_ring(a: Float32, b: Float32, c: Float32 | None, kind: str) -> Float32:
    # What a sparse A does not store is 0, and in the ring 0 times any word is 0: those of infinities and NaN, too.
    if kind != "bf16":
        raise ValueError(f"operands of {kind} are no elements of the ring; those of bf16 are.")
    product = ring.products(ring.upper_halves(a), ring.upper_halves(b))
    return ring.words_of(product if c is None else product + ring.elements_of(c))


def _without_gaps(a: Float64, b: Float64, c: Float32 | None, stored: Mask) -> Float32:
    total = np.zeros((a.shape[0], b.shape[0])) if c is None else c.astype(np.float64)
    for k in range(a.shape[1]):
        total += np.where(stored[:, k, None], np.outer(a[:, k], b[:, k]), 0)
    return total.astype(np.float32)


def _check(a: Float32, b: Float32, c: Float32 | None, k_per_instruction: int, kind: str) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or a.shape[1] == 0:
        raise ValueError(f"A is {a.shape} and B {b.shape}; they must be [M, K] and [N, K] with the same K >= 1.")
    if c is not None and c.shape != (a.shape[0], b.shape[0]):
        raise ValueError(f"C is {c.shape}; with A {a.shape} and B {b.shape} it must be {(a.shape[0], b.shape[0])}.")
    if k_per_instruction < 1 or a.shape[1] % k_per_instruction:
        raise ValueError(f"K is {a.shape[1]}; it must be a multiple of one instruction's K, {k_per_instruction}.")
    if kind not in ADDERS:
        raise ValueError(f"input type {kind!r} is unknown; it is one of {', '.join(ADDERS)}.")


def _exponent(x: Float32, least: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Floor of the base-2 logarithm of |x|, of subnormal numbers that of the smallest normal one, as an H200 takes it;
    far below any other for zero, and 0 for infinities and NaN."""
    return np.where(x == 0, _ZERO_EXPONENT, np.maximum(np.frexp(x)[1] - 1, least)).astype(np.int32)


def _sum(
    left: Factor, right: Factor, c: Float32 | None, adder: Adder, stored: Mask | None
) -> tuple[Float64, npt.NDArray[np.int64]]:
    """One instruction's: all of K is one group, added exactly after the truncation. [M, N] numbers, and the [M, N]
    exponents of 2 that they count with."""
    (a, exponents_a), (b, exponents_b) = left, right
    largest = (
        np.full((a.shape[0], b.shape[0]), _ZERO_EXPONENT) if c is None else _exponent(c, _LEAST_OF_C).astype(np.int64)
    )
    for k in range(a.shape[1]):
        np.maximum(largest, np.add.outer(exponents_a[:, k], exponents_b[:, k]), out=largest)
    scale = adder.fraction_bits - np.maximum(largest, _LEAST_OF_ALL)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    total = np.zeros(scale.shape) if c is None else np.trunc(np.ldexp(c.astype(np.float64), scale))
    for k in range(a.shape[1]):
        products = np.outer(wide_a[:, k], wide_b[:, k])
        if stored is not None:
            products[~stored[:, k]] = 0
        total += np.trunc(np.ldexp(products, scale))
    return total, -scale


def _to_half(total: Float64) -> Float32:
    """Rounded to f16, once; as in f32, a negative sum that underflows is +0."""
    return total.astype(np.float16).astype(np.float32) + np.float32(0)


def _truncate(total: Float64, exponent: npt.NDArray[np.int64], bits: int) -> Float32:
    """total * 2^exponent truncated to `bits` significant bits, then towards zero into float32."""
    drop = np.maximum(np.frexp(total)[1] - bits, 0)
    kept = np.ldexp(np.trunc(np.ldexp(total, -drop)), drop + exponent)
    nearest = kept.astype(np.float32)
    # Only a result that is subnormal is not exact here. What overflows is infinite, as on an H200.
    up = (np.abs(nearest) > np.abs(kept)) & np.isfinite(nearest)
    # A negative sum that underflows is +0.
    return np.where(up, np.nextafter(nearest, np.float32(0)), nearest) + np.float32(0)
