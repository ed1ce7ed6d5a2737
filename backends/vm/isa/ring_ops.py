"""Lane-wise float instructions when floats are elements of a ring (backends.vm.numerics.ring).

Copies, loads, stores and selections move words as usual. Executing any other float computation that is not defined here
is an error, and so is a result without a meaning in an active lane: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from backends.vm.bind.binder import Binder, Compute, bind_lanewise, lanewise, write
from backends.vm.bind.forms import Step, in_ring
from backends.vm.faults import UnknownInstructionError
from backends.vm.isa import compare, convert_ops, float32
from backends.vm.machine.warp import Warp
from backends.vm.numerics import ring
from backends.vm.numerics.f32 import Float32


def check_multiplied(policy: str, kind: str, *, plain: bool) -> None:
    """UnknownInstructionError under the policy "ring" for an unsupported matrix product: one whose operands are not
    bf16, or one that is not `plain` because it negates an operand or scales D."""
    if policy == "ring" and not (kind == "bf16" and plain):
        which = "" if plain else ", with negation or scale,"
        raise UnknownInstructionError(
            f"a matrix product of {kind}{which} has no counterpart in the ring (backends.vm.numerics.ring)"
        )


_LANEWISE: Mapping[str, tuple[Compute, int]] = {
    name: (cast(Compute, compute), count)
    for name, compute, count in (
        ("add", ring.add, 2), ("sub", ring.sub, 2), ("mul", ring.mul, 2), ("div", ring.div, 2), ("fma", ring.fma, 3),
        ("mad", ring.fma, 3), ("neg", ring.negate, 1), ("ex2", ring.ex2, 1), ("lg2", ring.lg2, 1), ("rcp", ring.rcp, 1),
    )
}  # fmt: skip


def _check_meant(b: Binder, warp: Warp, words: Float32, *operands: Float32) -> None:
    """OutsideRingError if the result `words` of `operands` has no meaning in an active lane."""
    nothing = ring.meaningless(words)
    if nothing[warp.mask].any():
        lane, *half = next(index for index in np.argwhere(nothing).tolist() if warp.mask[index[0]])
        name, values = b.instruction.parts[0], [one[(lane, *half)].reshape(1) for one in operands]
        listed = " and ".join(ring.described(value.view(np.uint32)[0]) for value in values)
        raise b.outside_ring(f"{name} of {listed} in lane {lane}", ring.reason(name, values))


@in_ring(float32.arithmetic, float32.arithmetic_pair, float32.fma, float32.div, float32.div_approximate,
         float32.sign_bit, float32.rounded_function, float32.approximate)  # fmt: skip
def arithmetic(b: Binder) -> Step:
    """Sums, products, quotients, neg, ex2, lg2 and rcp. Rounding modes and `.ftz` change nothing."""
    name, kind = b.instruction.parts[0], b.instruction.parts[-1]
    if kind not in ("f32", "f32x2") or b.words.get("sat") or name not in _LANEWISE:
        raise b.outside_ring()
    compute, count = _LANEWISE[name]
    d, *operands = b.expect(count + 1)
    rd = b.destination(d, kind)
    sources = [b.source(operand, kind) for operand in operands]

    def step(warp: Warp) -> None:
        rows = getattr(warp, kind)
        values = [cast(Float32, rows[row]) for row in sources]
        words = cast(Float32, compute(*values))
        _check_meant(b, warp, words, *values)
        write(warp, rows[rd], words)

    return step


@in_ring(float32.extremum)
def extremum(b: Binder) -> Step:
    """Choose one operand by its bits."""
    if "abs" in b.words or "xorsign" in b.words:
        raise b.outside_ring()
    choose = ring.smaller if b.instruction.parts[0] == "min" else ring.larger
    if len(b.expect(3, 4)) == 3:
        return lanewise(b, "f32", cast(Compute, choose), 2)
    return lanewise(b, "f32", cast(Compute, lambda a, c, e: choose(choose(a, c), e)), 3)


@in_ring(compare.setp_float)
def setp(b: Binder) -> Step:
    """eq and ne compare elements and bases. The others use max's order."""
    ordered = compare.INTEGER_COMPARISONS.get(b.words["cmp"].removesuffix("u"))
    if b.instruction.parts[-1] != "f32" or ordered is None:
        raise b.outside_ring()
    return compare.bind_setp(b, "f32", lambda a, c: ordered(ring.order(a), ring.order(c)))


_TO_FLOAT: Mapping[str, tuple[str, Compute]] = {
    "bf16": ("u16", ring.widened), "s32": ("s32", ring.words_of), "u32": ("u32", ring.words_of),
}  # fmt: skip
"""Types that cvt converts to float32: their views, and how."""


@in_ring(convert_ops.cvt)
def cvt(b: Binder) -> Step:
    """Convert float32 to bf16 or a pair of bf16, and bf16 and integers to float32."""
    *between, dst, src = b.instruction.parts[1:]
    if {"relu", "sat", "satfinite"} & set(between):
        raise b.outside_ring()
    if src == "f32" and dst in ("bf16", "bf16x2"):
        return _shortened(b)
    if dst != "f32" or src not in _TO_FLOAT:
        raise b.outside_ring()
    view, compute = _TO_FLOAT[src]
    return bind_lanewise(b, "f32", [view], compute)


def _shortened(b: Binder) -> Step:
    pair = b.instruction.parts[-2] == "bf16x2"
    d, *operands = b.expect(3 if pair else 2)
    view = "u32" if pair else "u16"
    rd = b.destination(d, view)
    sources = [b.source(operand, "f32") for operand in operands]

    def step(warp: Warp) -> None:
        values = [warp.f32[source] for source in sources]
        halves = [ring.rounded(value) for value in values]
        for half, value in zip(halves, values, strict=True):
            _check_meant(b, warp, half, value)
        low = halves[-1].view(np.uint32) >> np.uint32(16)
        write(warp, getattr(warp, view)[rd], halves[0].view(np.uint32) | low if pair else low)

    return step
