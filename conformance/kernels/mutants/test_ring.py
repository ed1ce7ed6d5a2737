"""Attention with floats that are elements of a ring: kernels equal a reference bit for bit, and no term can hide.

The reference here uses Python's integers instead of the machine's ring: a shared mistake would hide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from conformance.kernels.laws.law import spec_of
from conformance.kernels.mutants.campaign import parsed_nowhere, program_of
from megamoe.contract import Case, Program, RunOptions, load_executor
from megamoe.judge.guarded import GuardedCase, GuardedRun
from megamoe.judge.judge import compared, expected_of
from megamoe.ops.fmha import softmax_scale, visible_keys

ORDER = 1 << 16
Elements = npt.NDArray[np.int64]
POWERS = np.array([pow(5, x, ORDER) for x in range(ORDER)], np.int64)


def elements(tensor: torch.Tensor) -> Elements:
    """The bits of bf16."""
    return tensor.contiguous().view(torch.uint16).numpy().astype(np.int64)


def quotient(numerators: Elements, divisor: int) -> Elements:
    """Divides by 2^j u: multiplies by 2^j, and divides by the odd u."""
    power = divisor & -divisor
    return numerators * power * pow(divisor // power, -1, ORDER) % ORDER if divisor else 0 * numerators


def answer(case: Case, inputs: Mapping[str, torch.Tensor]) -> Elements:
    """o [batch, heads, t, hd] of softmax in the ring: sums and products of integers; exp2 is a power of 5."""
    q, k, v = (elements(inputs[name]) for name in ("q", "k", "v"))
    scale = int(np.float32(softmax_scale(case) * np.log2(np.e)).view(np.uint32)) >> 16
    visible = visible_keys(case, torch.arange(case.int("t"))).numpy()
    shared = case.int("heads") // case.int("kv_heads")
    o = np.zeros(q.shape, np.int64)
    for batch, head, row in np.ndindex(q.shape[:3]):
        keys, values = (one[batch, head // shared] for one in (k, v))
        weights = np.where(visible[row], POWERS[keys @ q[batch, head, row] * scale % ORDER], 0)
        o[batch, head, row] = quotient(weights @ values % ORDER, int(weights.sum() % ORDER))
    return o


def ran(case: Case, program: Program, arithmetic: str) -> GuardedRun:
    found = GuardedCase(spec_of("fmha"), case, load_executor("vm")).run(program, RunOptions(accumulate=arithmetic))
    assert found.execution.violation is None, found.execution.violation
    return found


def differences(case: Case, run: GuardedRun) -> int:
    return int((elements(run.outputs["o"]) != answer(case, run.guarded.inputs)).sum())


@pytest.mark.parametrize(
    ("backend", "target", "row"),
    [
        ("ptx", "sm_90a", "hd=64,t=16,s_k=130,heads=4,kv_heads=2,causal=true,lse=false"),
        ("ptx", "sm_100a", "hd=64,t=32,s_k=300,window=64,lse=false"),
        ("cutedsl", "sm_90a", "hd=64,t=17,s_k=96,lse=false"),
        ("cutedsl", "sm_100a", "hd=64,t=17,s_k=96,lse=false"),
    ],
)
def test_kernels_equal_the_reference(backend: str, target: str, row: str) -> None:
    case = spec_of("fmha").parse_case(f"fmha:{row}")
    program = program_of(backend, target, case)
    if program is None:
        pytest.skip(f"unsupported: {backend} has no {case.id} for {target}")
    run = ran(case, program, "ring")  # pyright: ignore[reportArgumentType]
    wrong = differences(case, run)
    assert not wrong, f"{backend} {target} {case.id}: {wrong} elements of o differ from the reference in the ring"


HIDDEN = spec_of("fmha").parse_case("fmha:hd=64,t=1,s_k=64,inputs=large_logits,lse=false")
"""One row, where most keys have almost no weight."""


@pytest.mark.parametrize("times", [0, 2])
def test_a_term_that_a_tolerance_hides_is_seen(times: int) -> None:
    """A term of the row sum is dropped, or added twice. The row passes, but the ring shows it."""
    program = program_of("ptx", "sm_90a", HIDDEN)
    assert isinstance(program, Program), "the ptx backend builds PTX with launches"
    *_, term = re.finditer(r"add\.rn\.f32 (%row_sum), \1, %s_\d+;", program.ptx)
    broken = replace(program, ptx=f"{program.ptx[: term.start()]}{times * term[0]}{program.ptx[term.end() :]}")
    with parsed_nowhere():
        plain, ring = ran(HIDDEN, broken, "fast"), ran(HIDDEN, broken, "ring")
    judged = compared(spec_of("fmha"), expected_of(HIDDEN, plain.guarded.inputs), plain.outputs)
    assert judged.passed, f"the tolerance sees it too, so this proves nothing: {judged.sentence}"
    assert differences(HIDDEN, ring), f"{term[0]} stands there {times} times, and nothing differs in the ring"


def test_what_has_no_counterpart_is_refused_by_name() -> None:
    """lse needs a logarithm."""
    case = spec_of("fmha").parse_case("fmha:hd=64,t=1,s_k=1")
    program = program_of("ptx", "sm_90a", case)
    assert isinstance(program, Program)
    guarded = GuardedCase(spec_of("fmha"), case, load_executor("vm"))
    violation = guarded.run(program, RunOptions(accumulate="ring")).execution.violation or ""
    assert "the logarithm of PTX line" in violation, f"lse has no meaning in the ring, and the run says: {violation}"
