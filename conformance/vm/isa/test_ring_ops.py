"""Float instructions on elements of a ring. A refusal says what was computed of which operands, and why it has none."""

from __future__ import annotations

import numpy as np
import pytest

from backends.vm.faults import UnknownInstructionError
from backends.vm.machine.machine import Machine
from conformance.vm.kernel import run_ptx

LOG, LN = "lg2.approx.f32 %l, %a;", "mul.f32 %n, %l, 0f3F317218;"
TWO_BASES = "logarithms of two bases have no sum"
PRODUCTS = "a logarithm has a product with 1, -1, ln 2 if its base is 2, and log2 e if its base is e"
RECIPROCALS = "a logarithm has no reciprocal"
BINARY, NATURAL = r"a logarithm to the base 2 \(of 16512\)", r"a logarithm to the base e \(of 16512\)"
THREE, TWO = r"the element 16448 \(0x40400000\)", r"the element 16384 \(0x40000000\)"
REFUSED = {
    f"{LOG} mul.f32 %d, %l, 0f40000000;": (f"mul of {BINARY} and {TWO}", PRODUCTS),
    f"{LOG} mul.f32 %d, %l, %l;": (f"mul of {BINARY} and {BINARY}", PRODUCTS),
    f"{LOG} {LN} mul.f32 %d, %n, 0f3F317218;": (f"mul of {NATURAL} and the element 16177", PRODUCTS),
    f"{LOG} fma.rn.f32 %d, %l, 0f40000000, %a;": (f"fma of {BINARY} and {TWO} and", PRODUCTS),
    f"{LOG} {LN} fma.rn.f32 %d, %n, 0f3F800000, %l;": (f"fma of {NATURAL} and the element 1 .* {BINARY}", TWO_BASES),
    f"{LOG} {LN} add.f32 %d, %l, %n;": (f"add of {BINARY} and {NATURAL}", TWO_BASES),
    f"{LOG} {LN} sub.f32 %d, %l, %n;": (f"sub of {BINARY} and {NATURAL}", TWO_BASES),
    f"{LOG} div.rn.f32 %d, 0f40400000, %l;": (f"div of {THREE} and {BINARY}", RECIPROCALS),
    f"{LOG} div.rn.f32 %d, %l, 0f40400000;": (f"div of {BINARY} and {THREE}", PRODUCTS),
    f"{LOG} rcp.rn.f32 %d, %l;": (f"rcp of {BINARY}", RECIPROCALS),
    f"{LOG} lg2.approx.f32 %d, %l;": (f"lg2 of {BINARY}", "logarithms and infinities have no logarithm"),
    "lg2.approx.f32 %d, 0fFF800000;": ("lg2 of -inf", "logarithms and infinities have no logarithm"),
    f"{LOG} {LN} ex2.approx.f32 %d, %n;": (f"ex2 of {NATURAL}", "ex2 takes a logarithm to the base 2 only"),
    f"{LOG} cvt.rn.bf16x2.f32 %d, %a, %l;": (f"cvt of {BINARY}", "bf16 has neither logarithms nor infinities"),
    "cvt.rn.bf16x2.f32 %d, 0f7F800000, %a;": (r"cvt of \+inf", "bf16 has neither logarithms nor infinities"),
    "neg.f32 %d, 0f7FFFFFFF;": (r"neg of the word 0x7fffffff \(which stands for nothing\)", "nothing can be computed"),
}
"""Instructions on %a, the element 16512, by what the refusal says of the last one."""


def run(body: str, lanes: int = 32) -> None:
    declare = ".reg .f32 %l, %n; .reg .pred %some; .reg .b32 %tx; mov.u32 %tx, %tid.x;"
    declare += f" setp.ge.u32 %some, %tx, {32 - lanes};"
    values = {"a": np.full(32, 0x40800000, np.uint32).view(np.float32), "d": np.zeros(32, np.float32)}
    run_ptx(body, values, {"d": np.dtype(np.float32)}, declare=declare, machine=Machine(accumulate="ring"))


@pytest.mark.parametrize("body", REFUSED)
def test_a_result_without_a_counterpart_is_said_with_its_operands(body: str) -> None:
    what, why = REFUSED[body]
    instruction = body.split(";")[-2].strip()
    pattern = f"PTX line \\d+: `{instruction};`: {what}.* in lane 0 has no counterpart in the ring .*: {why}"
    with pytest.raises(UnknownInstructionError, match=pattern):
        run(body)


def test_the_lane_is_the_first_that_computes_it() -> None:
    with pytest.raises(UnknownInstructionError, match=r"in lane 22 has no counterpart"):
        run("lg2.approx.f32 %l, %a; @%some mul.f32 %d, %l, %l;", lanes=10)


@pytest.mark.parametrize(
    "body",
    [
        f"{LOG} mul.f32 %d, %l, 0fBF800000;",
        f"{LOG} {LN} mul.f32 %d, %n, 0f3FB8AA3B;",
        f"{LOG} fma.rn.f32 %d, %l, 0f3F317218, %a;",
        f"{LOG} add.f32 %d, %l, %l;",
        f"{LOG} div.rn.f32 %d, %l, 0f3F800000;",
        f"{LOG} ex2.approx.f32 %d, %l;",
        "cvt.rn.bf16x2.f32 %d, %a, %a;",
    ],
)
def test_what_has_a_counterpart_is_not_refused(body: str) -> None:
    run(body)


def test_an_operation_without_a_counterpart_is_refused_for_any_operand() -> None:
    with pytest.raises(UnknownInstructionError, match=r"`sqrt\.rn\.f32 %d, %a;`: it has no counterpart in the ring"):
        run("sqrt.rn.f32 %d, %a;")
