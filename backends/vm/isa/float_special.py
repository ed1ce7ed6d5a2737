"""Approximate single-precision functions: ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh, div (PTX ISA 9.7.3).

Results are those of an H200, bit for bit; see backends.vm.numerics.approx.
"""

from __future__ import annotations

from functools import partial
from typing import cast

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.bind.lanewise import Compute, lanewise
from backends.vm.numerics import approx

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
    """A function of one operand; `.ftz` flushes subnormal operands and results."""
    function = _FUNCTIONS[b.instruction.parts[0]]
    return lanewise(b, "f32", cast(Compute, partial(function, ftz=bool(b.words["ftz"]))), 1)


@opcode("tanh.approx.f32", section="9.7.3.22", counter="special")
def tanh(b: Binder) -> Step:
    """Hyperbolic tangent."""
    return lanewise(b, "f32", cast(Compute, approx.tanh), 1)


@opcode("div.approx{.ftz}.f32", "div.full{.ftz}.f32", section="9.7.3.8", counter="special")
def div(b: Binder) -> Step:
    """Quotient; `.approx` treats a divisor beyond 2^126 as infinite."""
    function = approx.div_full if b.instruction.parts[1] == "full" else approx.div_approx
    return lanewise(b, "f32", cast(Compute, partial(function, ftz=bool(b.words["ftz"]))), 2)
