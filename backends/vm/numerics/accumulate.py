"""Matrix multiply-accumulate D = A B^T + C under a declared policy.

`fast` and `exact` sum the whole product at once. `hopper` models an H200 bit for bit, instruction by instruction
(facts.md 7.1). How Blackwell accumulates is undocumented, so there every policy is an approximation.
`ring` treats floats as elements of a ring (backends.vm.numerics.ring), in lane-wise instructions too.
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
"""Elements, and the exponents that the adder gives them."""


@dataclass(frozen=True, slots=True)
class Adder:
    """How a Hopper tensor core adds. With E the largest exponent among the products and C, it truncates each of them
    to a multiple of 2^(E - `fraction_bits`), and the sum to `significand_bits`. With D in f16, the sum is rounded to
    f16 without that truncation."""

    fraction_bits: int
    significand_bits: int


# Measured for every sm_90a type (conformance/silicon/whole). Types below 8 bits are assumed to share FP8's adder.
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
"""Exponent of the smallest normal number, which subnormals share. Unlisted types were never measured: their
subnormals count as normal numbers."""
_LEAST_OF_C = -126
_LEAST_OF_ALL = -133
"""Lower bound on the largest exponent of an instruction. Measured with bf16; other types reach it rarely (tf32) or
never."""


def policy_called(name: str) -> Policy:
    """The policy `name`. ValueError if there is none."""
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
    """float32 [M, N] from a [M, K], b [N, K] and c [M, N]. c is None when the accumulator is overwritten.

    `k_per_instruction` is the K of one instruction (16 for 16-bit inputs, 8 for tf32, 32 for 8-bit). `kind` is the
    input type, `b_kind` the type of B if it differs. Only `hopper` computes with these. tf32 inputs must already have
    lost their low 13 bits. `to_half`: `hopper` rounds its result to f16. `stored`, bool [M, K]: the elements that a
    sparse A stores. Elements that are not stored contribute nothing, even where B is infinite or NaN. ValueError for
    mismatched shapes, a K that is not a multiple of `k_per_instruction`, or an unknown kind. The ring has only bf16.
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
    """A [m, k] times B [n, k] plus C as an H200 computes it for one warp. `most`: the largest K of one instruction.

    An H200 has no FP8 product for one warp. ptxas 13.0 converts the lower half of each register to f16 and then the
    upper half, accumulates both products from zero, and adds C separately. With D in f16 each step rounds to f16.
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


def integer_mma(a: Float32, b: Float32, c: npt.NDArray[np.int32] | None, *, saturate: bool) -> npt.NDArray[np.uint32]:
    """Words of the integers A B^T + C. A sum beyond 32 bits wraps, or is clamped."""
    total = a.astype(np.float64) @ b.astype(np.float64).T
    if c is not None:
        total = total + c
    if saturate:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return total.astype(np.int64).astype(np.uint32)


def _in_ring(a: Float32, b: Float32, c: Float32 | None, kind: str) -> Float32:
    # Elements that a sparse A does not store are 0, and in the ring 0 times any word is 0, even infinities and NaN.
    if kind != "bf16":
        raise ValueError(f"operands of {kind} are no elements of the ring; those of bf16 are.")
    product = ring.words_of(ring.products(ring.elements_of(a), ring.elements_of(b)))
    return product if c is None else ring.add(product, c)


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
    """Floor of log2 |x|. As on an H200, subnormals have the exponent of the smallest normal number. A zero is far
    below any other number; infinities and NaN give 0."""
    return np.where(x == 0, _ZERO_EXPONENT, np.maximum(np.frexp(x)[1] - 1, least)).astype(np.int32)


def _sum(
    left: Factor, right: Factor, c: Float32 | None, adder: Adder, stored: Mask | None
) -> tuple[Float64, npt.NDArray[np.int64]]:
    """The sum of one instruction: all of K is one group, added exactly after truncation. Returns numbers [M, N] and
    the exponents of 2 that scale them, [M, N]."""
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
    """`total` rounded once to f16. As in f32, a negative sum that underflows is +0."""
    return total.astype(np.float16).astype(np.float32) + np.float32(0)


def _truncate(total: Float64, exponent: npt.NDArray[np.int64], bits: int) -> Float32:
    """total * 2^exponent truncated to `bits` significant bits, then towards zero into float32."""
    drop = np.maximum(np.frexp(total)[1] - bits, 0)
    kept = np.ldexp(np.trunc(np.ldexp(total, -drop)), drop + exponent)
    nearest = kept.astype(np.float32)
    # Only subnormal results are inexact here. Overflow gives infinity, as on an H200.
    up = (np.abs(nearest) > np.abs(kept)) & np.isfinite(nearest)
    # A negative sum that underflows is +0.
    return np.where(up, np.nextafter(nearest, np.float32(0)), nearest) + np.float32(0)
