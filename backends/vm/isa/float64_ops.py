"""Double-precision arithmetic (PTX ISA 9.7.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np

from backends.vm.bind.binder import Binder, Compute, lanewise
from backends.vm.bind.forms import Step, opcode
from backends.vm.numerics import approx, f64
from backends.vm.numerics.formats import Float64, Rounding

_ROUNDINGS = "rn rz rm rp"
_ROUNDED: dict[str, tuple[Callable[..., Float64], int]] = {
    "add": (f64.add, 2),
    "sub": (f64.sub, 2),
    "mul": (f64.mul, 2),
    "div": (f64.div, 2),
    "fma": (f64.fma, 3),
    "mad": (f64.fma, 3),
    "sqrt": (f64.sqrt, 1),
    "rcp": (lambda a, rounding: f64.div(np.ones_like(a), a, rounding=rounding), 1),
}


@opcode("add{.<rnd>}.f64", section="9.7.3.3", counter="float", rnd=_ROUNDINGS)
@opcode("sub{.<rnd>}.f64", section="9.7.3.4", counter="float", rnd=_ROUNDINGS)
@opcode("mul{.<rnd>}.f64", section="9.7.3.5", counter="float", rnd=_ROUNDINGS)
@opcode("fma.<rnd>.f64", section="9.7.3.6", counter="float", rnd=_ROUNDINGS)
@opcode("mad.<rnd>.f64", section="9.7.3.7", counter="float", rnd=_ROUNDINGS)
@opcode("div.<rnd>.f64", section="9.7.3.8", counter="float", rnd=_ROUNDINGS)
@opcode("rcp.<rnd>.f64", section="9.7.3.13", counter="float", rnd=_ROUNDINGS)
@opcode("sqrt.<rnd>.f64", section="9.7.3.15", counter="float", rnd=_ROUNDINGS)
def arithmetic(b: Binder) -> Step:
    """Correctly rounded arithmetic, to nearest by default."""
    function, count = _ROUNDED[b.instruction.parts[0]]
    return lanewise(b, "f64", cast(Compute, partial(function, rounding=cast(Rounding, b.words["rnd"] or "rn"))), count)


@opcode("abs.f64", section="9.7.3.9", counter="float")
@opcode("neg.f64", section="9.7.3.10", counter="float")
def sign_bit(b: Binder) -> Step:
    """Magnitude or negation."""
    return lanewise(b, "f64", cast(Compute, f64.absolute if b.instruction.parts[0] == "abs" else f64.negate), 1)


@opcode("min.f64", section="9.7.3.11", counter="float")
@opcode("max.f64", section="9.7.3.12", counter="float")
def extremum(b: Binder) -> Step:
    """Minimum or maximum. A NaN operand is ignored, and -0 is below +0."""
    return lanewise(b, "f64", cast(Compute, f64.minimum if b.instruction.parts[0] == "min" else f64.maximum), 2)


@opcode("copysign.f64", section="9.7.3.2", counter="float")
def copysign(b: Binder) -> Step:
    """The magnitude of the second source with the sign of the first."""
    return lanewise(b, "f64", lambda a, c: np.copysign(c, a), 2)


@opcode("rcp.approx.ftz.f64", section="9.7.3.14", counter="special")
@opcode("rsqrt.approx.ftz.f64", section="9.7.3.17", counter="special")
def gross(b: Binder) -> Step:
    """Reciprocal or reciprocal square root in the upper 32 bits: 20 bits of mantissa, subnormals flushed."""
    function = approx.rcp_f64 if b.instruction.parts[0] == "rcp" else approx.rsqrt_f64
    return lanewise(b, "f64", cast(Compute, function), 1)


@opcode("rsqrt.approx.f64", section="9.7.3.16", counter="special")
def rsqrt(b: Binder) -> Step:
    """1 / sqrt(a). A zero gives infinity of its sign."""
    return lanewise(b, "f64", cast(Compute, f64.rsqrt), 1)
