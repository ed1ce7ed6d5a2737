"""SwiGLU in the registers of one thread: silu(gate) * up.

Rounding contract: gate and up are accumulators times a factor; silu(g) = g * 1/(1 + 2^(-g log2 e)) with ex2.approx.ftz
and rcp.approx.ftz, every other operation rounded to nearest even in fp32; then times up.
"""

from __future__ import annotations

import math

from backends.ptx.builder import Builder
from backends.ptx.operands import Register

LOG2_E = math.log2(math.e)


class Swiglu:
    """`limit` is the parameter that limits gates from above and ups from both sides; None if nothing is limited."""

    def __init__(self, x: Builder, limit: Register | None) -> None:
        self._x, self._limit = x, limit
        self._lower_limit = x.reg("negated_clamp", "f32")

    def begin(self) -> None:
        """Emits what must come once, before the first activation."""
        if self._limit is not None:
            self._x.emit("neg.f32", self._lower_limit, self._limit)

    def activation(self, gate: Register, up: Register, factor: Register) -> Register:
        """Computes the activation in the register of its gate. `up` is overwritten."""
        x = self._x
        x.emit("mul.rn.f32", gate, gate, factor)
        x.emit("mul.rn.f32", up, up, factor)
        if self._limit is not None:
            x.emit("min.f32", gate, gate, self._limit)
            x.emit("min.f32", up, up, self._limit)
            x.emit("max.f32", up, up, self._lower_limit)
        sigmoid = x.let("sigmoid", "mul.rn.f32", gate, -LOG2_E)
        x.emit("ex2.approx.ftz.f32", sigmoid, sigmoid)
        x.emit("add.rn.f32", sigmoid, sigmoid, 1.0)
        x.emit("rcp.approx.ftz.f32", sigmoid, sigmoid)
        x.emit("mul.rn.f32", gate, gate, sigmoid)
        x.emit("mul.rn.f32", gate, gate, up)
        return gate
