"""Lane-wise float instructions when floats are elements of a ring (backends.vm.numerics.ring).

Copies, loads, stores and selections move words as usual. Executing any other float computation that is not defined here
is an error: nothing is guessed.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from backends.vm.bind.binder import Binder, Compute, lanewise
from backends.vm.bind.forms import Step, in_ring
from backends.vm.faults import UnknownInstructionError
from backends.vm.isa import compare, convert_ops, float32
from backends.vm.machine.undefined import BecameUndefined, all_bits
from backends.vm.machine.warp import Warp
from backends.vm.memory.definedness import Origin
from backends.vm.numerics import ring


def check_multiplied(policy: str, kind: str, *, plain: bool) -> None:
    """UnknownInstructionError under the policy "ring" for an unsupported matrix product: one whose operands are not
    bf16, or one that is not `plain` because it negates an operand or scales D."""
    if policy == "ring" and not (kind == "bf16" and plain):
        which = "" if plain else ", with negation or scale,"
        raise UnknownInstructionError(
            f"a matrix product of {kind}{which} has no counterpart in the ring (backends.vm.numerics.ring)"
        )


_LANEWISE = {"add": (ring.add, 2), "sub": (ring.sub, 2), "mul": (ring.mul, 2), "fma": (ring.fma, 3)}


@in_ring(float32.arithmetic, float32.arithmetic_pair, float32.fma)
def arithmetic(b: Binder) -> Step:
    """Sums and products. Rounding modes and `.ftz` change nothing."""
    kind = b.instruction.parts[-1]
    if kind not in ("f32", "f32x2") or b.words.get("sat"):
        raise b.outside_ring()
    name = b.instruction.parts[0]
    compute, count = _LANEWISE["fma" if name == "mad" else name]
    return lanewise(b, kind, cast(Compute, compute), count)


@in_ring(float32.extremum)
def extremum(b: Binder) -> Step:
    """Choose one operand by its bits."""
    if "abs" in b.words or "xorsign" in b.words:
        raise b.outside_ring()
    choose = ring.smaller if b.instruction.parts[0] == "min" else ring.larger
    if len(b.expect(3, 4)) == 3:
        return lanewise(b, "f32", cast(Compute, choose), 2)
    return lanewise(b, "f32", cast(Compute, lambda a, c, e: choose(choose(a, c), e)), 3)


@in_ring(float32.sign_bit, float32.rounded_function, float32.approximate)
def function(b: Binder) -> Step:
    """neg, ex2 and rcp. lg2 has too few defined bits in the ring: its result is undefined, and a fault where used."""
    functions = {"neg": ring.negate, "ex2": ring.ex2, "rcp": ring.rcp}
    name = b.instruction.parts[0]
    if name == "lg2":
        return _undefined(b)
    if name not in functions:
        raise b.outside_ring()
    return lanewise(b, "f32", cast(Compute, functions[name]), 1)


def _undefined(b: Binder) -> Step:
    d, a = b.expect(2)
    rd, line = b.destination(d, "u32"), b.instruction.line
    b.source(a, "f32")
    origin = Origin("uninitialised-register", f"the logarithm of PTX line {line}, which an element of the ring has not")

    def step(warp: Warp) -> None:
        warp.undefined.put((32, rd), all_bits(32, warp.mask), warp.mask, origin)
        raise BecameUndefined

    return step


@in_ring(compare.setp_float)
def setp(b: Binder) -> Step:
    """eq and ne compare elements. The others use max's order."""
    ordered = compare.INTEGER_COMPARISONS.get(b.words["cmp"].removesuffix("u"))
    if b.instruction.parts[-1] != "f32" or ordered is None:
        raise b.outside_ring()
    return compare.bind_setp(b, "f32", lambda a, c: ordered(ring.order(a), ring.order(c)))


@in_ring(convert_ops.cvt)
def cvt(b: Binder) -> Step:
    """Convert float32 to pairs of bf16."""
    *between, dst, src = b.instruction.parts[1:]
    if src != "f32" or dst != "bf16x2" or {"relu", "satfinite"} & set(between):
        raise b.outside_ring()
    d, high, low = b.expect(3)
    rd, ra, rc = b.destination(d, "u32"), b.source(high, "f32"), b.source(low, "f32")

    def step(warp: Warp) -> None:
        packed = ring.elements_of(warp.f32[ra]).astype(np.uint32) << np.uint32(16)
        np.copyto(warp.u32[rd], packed | ring.elements_of(warp.f32[rc]), where=warp.where)

    return step
