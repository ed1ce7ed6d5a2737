"""Single-precision arithmetic and approximate functions, on scalars and pairs (PTX ISA 9.7.3)."""

from __future__ import annotations

from functools import partial
from typing import cast

import numpy as np

from backends.vm.bind.binder import Binder, Compute, bind_lanewise, lanewise
from backends.vm.bind.forms import Step, opcode
from backends.vm.machine.warp import Warp
from backends.vm.numerics import approx, f32
from backends.vm.numerics.formats import Rounding

_ROUNDINGS = "rn rz rm rp"
_NEAREST: dict[str, np.ufunc] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_NEAREST_PAIR = {"add": f32.add_rn, "sub": f32.sub_rn, "mul": f32.mul_rn}
_FULL = {"add": f32.add, "sub": f32.sub, "mul": f32.mul}


def _modifiers(b: Binder) -> dict[str, object]:
    """Keyword arguments for numerics.f32 from the words after the opcode."""
    chosen: dict[str, object] = {"rounding": cast(Rounding, b.words.get("rnd") or "rn")}
    chosen["ftz"] = bool(b.words.get("ftz"))
    if b.words.get("sat"):
        chosen["sat"] = True
    return chosen


def _plain(b: Binder) -> bool:
    return _modifiers(b) == {"rounding": "rn", "ftz": False}


def _nearest(b: Binder, operation: np.ufunc) -> Step:
    """The common case, straight into the destination. A sum of squares tells whether any result is NaN."""
    d, a, c = b.expect(3)
    rd, ra, rc = b.destination(d, "f32"), b.source(a, "f32"), b.source(c, "f32")

    def step(warp: Warp) -> None:
        rows = warp.f32
        out = rows[rd]
        if warp.where is not True:
            np.copyto(out, f32.canonical(operation(rows[ra], rows[rc])), where=warp.mask)
            return
        operation(rows[ra], rows[rc], out)
        squares = out.dot(out)
        if squares != squares:
            out[...] = f32.canonical(out)

    return step


@opcode("add{.<rnd>}{.ftz}{.sat}.f32", section="9.7.3.3", counter="float", rnd=_ROUNDINGS)
@opcode("sub{.<rnd>}{.ftz}{.sat}.f32", section="9.7.3.4", counter="float", rnd=_ROUNDINGS)
@opcode("mul{.<rnd>}{.ftz}{.sat}.f32", section="9.7.3.5", counter="float", rnd=_ROUNDINGS)
def arithmetic(b: Binder) -> Step:
    """Sum, difference or product, rounded to nearest by default."""
    name = b.instruction.parts[0]
    if _plain(b):
        return _nearest(b, _NEAREST[name])
    return lanewise(b, "f32", cast(Compute, partial(_FULL[name], **_modifiers(b))), 2)


@opcode("add{.<rnd>}{.ftz}.f32x2", section="9.7.3.3", counter="float", rnd=_ROUNDINGS)
@opcode("sub{.<rnd>}{.ftz}.f32x2", section="9.7.3.4", counter="float", rnd=_ROUNDINGS)
@opcode("mul{.<rnd>}{.ftz}.f32x2", section="9.7.3.5", counter="float", rnd=_ROUNDINGS)
def arithmetic_pair(b: Binder) -> Step:
    """As arithmetic, on both halves of 64-bit registers."""
    name = b.instruction.parts[0]
    compute = _NEAREST_PAIR[name] if _plain(b) else partial(_FULL[name], **_modifiers(b))
    return lanewise(b, "f32x2", cast(Compute, compute), 2)


@opcode("fma.<rnd>{.ftz}{.sat}.f32", "fma.<rnd>{.ftz}.f32x2", section="9.7.3.6", counter="float", rnd=_ROUNDINGS)
@opcode("mad.<rnd>{.ftz}{.sat}.f32", section="9.7.3.7", counter="float", rnd=_ROUNDINGS)
def fma(b: Binder) -> Step:
    """a * c + e rounded once. `mad.rnd.f32` is the same instruction."""
    compute = f32.fma_rn if _plain(b) else partial(f32.fma, **_modifiers(b))
    return lanewise(b, b.instruction.parts[-1], cast(Compute, compute), 3)


@opcode("div.<rnd>{.ftz}.f32", section="9.7.3.8", counter="float", rnd=_ROUNDINGS)
def div(b: Binder) -> Step:
    """Quotient, correctly rounded."""
    return lanewise(b, "f32", cast(Compute, partial(f32.div, **_modifiers(b))), 2)


@opcode("rcp.<rnd>{.ftz}.f32", section="9.7.3.13", counter="float", rnd=_ROUNDINGS)
@opcode("sqrt.<rnd>{.ftz}.f32", section="9.7.3.15", counter="float", rnd=_ROUNDINGS)
def rounded_function(b: Binder) -> Step:
    """Reciprocal or square root, correctly rounded."""
    function = f32.rcp if b.instruction.parts[0] == "rcp" else f32.sqrt
    return lanewise(b, "f32", cast(Compute, partial(function, **_modifiers(b))), 1)


@opcode("min{.ftz}{.NaN}.f32", "min{.ftz}{.NaN}.xorsign.abs.f32", "min{.ftz}{.NaN}.abs.f32", section="9.7.3.11",
        counter="float")  # fmt: skip
@opcode("max{.ftz}{.NaN}.f32", "max{.ftz}{.NaN}.xorsign.abs.f32", "max{.ftz}{.NaN}.abs.f32", section="9.7.3.12",
        counter="float")  # fmt: skip
def extremum(b: Binder) -> Step:
    """Minimum or maximum of two or three. NaN operands are ignored unless `.NaN`, and -0 is below +0."""
    smallest = b.instruction.parts[0] == "min"
    ftz, nan, xorsign = bool(b.words["ftz"]), bool(b.words["NaN"]), "xorsign" in b.words
    magnitudes = "abs" in b.words
    counts = (3,) if xorsign else (4,) if magnitudes else (3, 4)
    inputs = len(b.expect(*counts)) - 1
    if not (ftz or nan or magnitudes):
        choose = f32.min_num if smallest else f32.max_num
        if inputs == 2:
            return lanewise(b, "f32", cast(Compute, choose), 2)
        return lanewise(b, "f32", cast(Compute, lambda a, c, e: choose(choose(a, c), e)), 3)
    function = f32.minimum if smallest else f32.maximum
    return lanewise(
        b, "f32", cast(Compute, partial(function, nan=nan, ftz=ftz, abs=magnitudes, xorsign=xorsign)), inputs
    )


@opcode("abs{.ftz}.f32", section="9.7.3.9", counter="float")
@opcode("neg{.ftz}.f32", section="9.7.3.10", counter="float")
def sign_bit(b: Binder) -> Step:
    """Magnitude or negation. A NaN becomes 0x7FFFFFFF."""
    function = f32.absolute if b.instruction.parts[0] == "abs" else f32.negate
    return lanewise(b, "f32", cast(Compute, partial(function, ftz=bool(b.words["ftz"]))), 1)


@opcode("copysign.f32", section="9.7.3.2", counter="float")
def copysign(b: Binder) -> Step:
    """The magnitude of the second source with the sign of the first."""
    return lanewise(b, "f32", cast(Compute, f32.copysign), 2)


@opcode("testp.<property>.<type>", section="9.7.3.1", counter="float", type="f32 f64",
        property="finite infinite number notanumber normal subnormal")  # fmt: skip
def testp(b: Binder) -> Step:
    """Whether a float has a property."""
    prop = cast(f32.Property, b.words["property"])
    return bind_lanewise(b, "pred", [b.words["type"]], cast(Compute, partial(f32.testp, prop)))


# Approximate single-precision functions: ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh, div (PTX ISA 9.7.3).
# Results equal an H200's bit for bit; see backends.vm.numerics.approx.


_FUNCTIONS = {
    "ex2": approx.ex2,
    "lg2": approx.lg2,
    "rcp": approx.rcp,
    "rsqrt": approx.rsqrt,
    "sqrt": approx.sqrt,
    "sin": approx.sin,
    "cos": approx.cos,
}


@opcode("rcp.approx{.ftz}.f32", section="9.7.3.13", counter="special")
@opcode("sqrt.approx{.ftz}.f32", section="9.7.3.15", counter="special")
@opcode("rsqrt.approx{.ftz}.f32", section="9.7.3.16", counter="special")
@opcode("sin.approx{.ftz}.f32", section="9.7.3.18", counter="special")
@opcode("cos.approx{.ftz}.f32", section="9.7.3.19", counter="special")
@opcode("lg2.approx{.ftz}.f32", section="9.7.3.20", counter="special")
@opcode("ex2.approx{.ftz}.f32", section="9.7.3.21", counter="special")
def approximate(b: Binder) -> Step:
    """A function of one operand. `.ftz` flushes subnormal operands and results."""
    function = _FUNCTIONS[b.instruction.parts[0]]
    return lanewise(b, "f32", cast(Compute, partial(function, ftz=bool(b.words["ftz"]))), 1)


@opcode("tanh.approx.f32", section="9.7.3.22", counter="special")
def tanh(b: Binder) -> Step:
    """Hyperbolic tangent."""
    return lanewise(b, "f32", cast(Compute, approx.tanh), 1)


@opcode("div.approx{.ftz}.f32", "div.full{.ftz}.f32", section="9.7.3.8", counter="special")
def div_approximate(b: Binder) -> Step:
    """Quotient. `.approx` treats a divisor beyond 2^126 as infinite."""
    function = approx.div_full if b.instruction.parts[1] == "full" else approx.div_approx
    return lanewise(b, "f32", cast(Compute, partial(function, ftz=bool(b.words["ftz"]))), 2)
