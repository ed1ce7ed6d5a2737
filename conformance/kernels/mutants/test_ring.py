"""Attention with floats that are elements of a ring: kernels equal a reference bit for bit, and no term can hide.

The reference here uses Python's integers instead of the machine's ring: a shared mistake would hide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch

from conformance.kernels.laws.law import spec_of
from conformance.kernels.mutants.campaign import built_program, parsed_nowhere
from megamoe.contract import Case, HostProgram, Program, RunOptions, load_executor
from megamoe.judge.guarded import GuardedCase, GuardedRun
from megamoe.judge.judge import compared, expected_of
from megamoe.ops.fmha import softmax_scale

PRIME = 37
SIZE = PRIME**3
Elements = npt.NDArray[np.int64]
POWERS = np.array([pow(PRIME + 1, x, SIZE) for x in range(PRIME**2)], np.int64)
LOG2_E = pow(0x3F31, -1, SIZE)
SPELLED = {0x8000: 0, 0x3F80: 1, 0xBF80: SIZE - 1, 0x3FB8: LOG2_E}
SPARE = {0xFFFF: 0x8000, 0xFFFE: 0x3F80, 0xFFFD: 0xBF80, 0xFFFC: 0x3FB8, 0xFFFB: 0x7F80}
BY_BITS = np.array([(SPELLED | SPARE).get(bits, bits % SIZE) for bits in range(1 << 16)], np.int64)
LOWEST, NATURAL = 0xFF800000, 2
"""-inf, and the lower half of a natural logarithm's word."""
Answer = Mapping[str, Elements]


def elements(tensor: torch.Tensor) -> Elements:
    """The elements of bf16, or of the upper halves of float32."""
    words = tensor.contiguous().view(torch.uint16).numpy()
    return BY_BITS[words[..., 1::2] if tensor.dtype == torch.float32 else words]


def logarithms(tensor: torch.Tensor) -> Elements:
    """What natural logarithms are of, and 0 for -inf; -1 for words of another kind."""
    words = tensor.contiguous().view(torch.int32).numpy().astype(np.int64) % (1 << 32)
    known = np.where(words & 0xFFFF == NATURAL, BY_BITS[words >> 16], -1)
    return np.where(words == LOWEST, 0, known)


def quotient(numerators: Elements, divisor: int) -> Elements:
    """Divides by 37^j u: multiplies by 37^j, and divides by the unit u."""
    power = math.gcd(divisor, SIZE)
    return numerators * power * pow(divisor // power, -1, SIZE) % SIZE if divisor else 0 * numerators


def by_sequence(case: Case, inputs: Mapping[str, torch.Tensor], rows: Elements) -> list[Elements]:
    """Views of q, o or lse: for each sequence [heads, t] or [heads, t, hd]."""
    if not case["ragged"]:
        return list(rows)
    starts = inputs["cu_seqlens_q"].tolist()
    return [rows[first:end].swapaxes(0, 1) for first, end in pairwise(starts)]


def cached(case: Case, inputs: Mapping[str, torch.Tensor], name: str) -> Iterator[Elements]:
    """The keys or values of each sequence: [kv_heads, s_k, hd]."""
    tensor = elements(inputs[name])
    for number in range(case.int("batch")):
        if not case["ragged"]:
            yield tensor[number]
        elif page := case.int("page_size"):
            key = np.arange(int(inputs["seqused_k"][number]))
            yield tensor[inputs["block_table"][number].numpy()[key // page] * page + key % page].swapaxes(0, 1)
        else:
            first, end = inputs["cu_seqlens_k"][number : number + 2].tolist()
            yield tensor[first:end].swapaxes(0, 1)


def visible(case: Case, row: int, t: int, s_k: int) -> slice:
    """The keys that a query row sees."""
    position = row + s_k - t
    first = 0 if case["window"] is None else max(0, position - case.int("window") + 1)
    return slice(first, max(0, position + 1) if case["causal"] else s_k)


def answer(case: Case, inputs: Mapping[str, torch.Tensor]) -> Answer:
    """o, and what lse is the logarithm of, in the ring: sums and products of integers; exp2 is a power of 38."""
    scale = int(BY_BITS[int(np.float32(softmax_scale(case) * np.log2(np.e)).view(np.uint32)) >> 16])
    shared = case.int("heads") // case.int("kv_heads")
    sinks = POWERS[elements(inputs["sink"]) * LOG2_E % PRIME**2] if case["sinks"] else [0] * case.int("heads")
    o = np.zeros(inputs["q"].shape, np.int64)
    totals = np.zeros(o.shape[:-1], np.int64)
    places = [by_sequence(case, inputs, rows) for rows in (elements(inputs["q"]), o, totals)]
    caches = [cached(case, inputs, name) for name in ("k", "k" if case["kv"] == "latent" else "v")]
    for queries, results, sums, keys, values in zip(*places, *caches, strict=True):
        for head, row in np.ndindex(queries.shape[:2]):
            seen = visible(case, row, queries.shape[1], keys.shape[1])
            scores = keys[head // shared, seen] @ queries[head, row] % SIZE * scale
            weights = POWERS[scores % PRIME**2]
            sums[head, row] = (weights.sum() + sinks[head]) % SIZE
            results[head, row] = quotient(weights @ values[head // shared, seen] % SIZE, int(sums[head, row]))
    return {"o": o, "lse": totals}


def ran(case: Case, program: Program | HostProgram, arithmetic: str) -> GuardedRun:
    options = RunOptions(accumulate=arithmetic)  # pyright: ignore[reportArgumentType]
    found = GuardedCase(spec_of("fmha"), case, load_executor("vm")).run(program, options)
    assert found.execution.violation is None, found.execution.violation
    return found


def differences(case: Case, run: GuardedRun) -> dict[str, int]:
    """How many elements of which outputs differ from the reference."""
    right = answer(case, run.guarded.inputs)
    found = {name: {"o": elements, "lse": logarithms}[name](output) for name, output in run.outputs.items()}
    counts = {name: int((right[name] != one).sum()) for name, one in found.items()}
    return {name: count for name, count in counts.items() if count}


def built(backend: str, target: str, row: str) -> tuple[Case, Program | HostProgram]:
    case = spec_of("fmha").parse_case(f"fmha:{row}")
    program = built_program(backend, target, case)
    assert program is not None, f"{backend} builds no PTX of {case.id} for {target}"
    return case, program


KERNELS = [(backend, target) for backend in ("ptx", "cutedsl") for target in ("sm_90a", "sm_100a")]
WHOLE = [
    "hd=64,t=16,s_k=130,heads=4,kv_heads=2,causal=true",
    "hd=64,t=17,s_k=96,lse=false",
    "hd=64,t=32,s_k=300,causal=true,window=30",
    "hd=64,t=1,s_k=201",
    "hd=128,t=100,s_k=30,causal=true",
    "hd=256,t=5,s_k=140,heads=2,inputs=large_logits",
    "hd=512,t=2,s_k=200,heads=16,kv=latent",
]
"""In hd=128 most rows see no key."""
SPLIT = [
    "hd=64,t=1,s_k=2048,window=700",
    "hd=128,t=3,s_k=540,heads=4,kv_heads=2,causal=true",
    "hd=256,t=1,s_k=600",
]
"""In none of them 37 divides the number of keys that a row sees in some part. Parts of the first see no key."""
ONLY_CUTEDSL = [
    "hd=64,t=1,s_k=130,heads=8,sinks=true",
    "hd=64,t=150,s_k=100,heads=2,causal=true,sinks=true",
    "hd=64,t=3,s_k=150,batch=2,heads=4,kv_heads=2,causal=true,ragged=true,total_q=5,total_k=190",
    "hd=128,t=1,s_k=300,batch=3,heads=8,kv_heads=2,ragged=true,total_q=3,total_k=768,page_size=16",
    "hd=128,t=3,s_k=700,batch=2,heads=4,kv_heads=2,causal=true,window=150,sinks=true",
]
"""Sinks, and sequences with lengths of their own; the last has parts."""
ROWS = [
    *[(*kernel, row) for row in WHOLE + SPLIT for kernel in KERNELS],
    *[("cutedsl", "sm_90a", row) for row in ONLY_CUTEDSL],
]


@pytest.mark.parametrize(("backend", "target", "row"), ROWS)
def test_kernels_equal_the_reference(backend: str, target: str, row: str) -> None:
    case, program = built(backend, target, row)
    wrong = differences(case, ran(case, program, "ring"))
    assert not wrong, f"{backend} {target} {case.id}: elements that differ from the reference in the ring: {wrong}"


@pytest.mark.parametrize(("backend", "target"), KERNELS)
@pytest.mark.parametrize("row", SPLIT)
def test_rows_that_should_be_split_are(backend: str, target: str, row: str) -> None:
    case, program = built(backend, target, row)
    statistics = program.scratch.get("partial_statistics", program.scratch.get("lse_part", 0))
    assert statistics >= 8 * case.int("heads") * case.int("t"), f"the scratch memory is for one part: {program.scratch}"


HIDDEN = "hd=64,t=1,s_k=64,inputs=large_logits"
"""One row, where most keys have almost no weight."""


@pytest.mark.parametrize("times", [0, 2])
def test_a_term_that_a_tolerance_hides_is_seen(times: int) -> None:
    """A term of the row sum is dropped, or added twice. The row passes, but the ring shows it."""
    case, program = built("ptx", "sm_90a", HIDDEN)
    assert isinstance(program, Program), "the ptx backend builds PTX with launches"
    *_, term = re.finditer(r"add\.rn\.f32 (%row_sum), \1, %s_\d+;", program.ptx)
    broken = replace(program, ptx=f"{program.ptx[: term.start()]}{times * term[0]}{program.ptx[term.end() :]}")
    with parsed_nowhere():
        plain, ring = ran(case, broken, "fast"), ran(case, broken, "ring")
    judged = compared(spec_of("fmha"), expected_of(case, plain.guarded.inputs), plain.outputs)
    assert judged.passed, f"the tolerance sees it too, so this proves nothing: {judged.sentence}"
    assert differences(case, ring), f"{term[0]} stands there {times} times, and nothing differs in the ring"


def changed(program: Program | HostProgram, before: str, after: str) -> Program:
    """The program with the first match of a pattern replaced."""
    assert isinstance(program, Program), "the ptx backend builds PTX with launches"
    ptx, count = re.subn(before, after, program.ptx, count=1)
    assert count, f"nothing in the PTX matches {before}"
    return replace(program, ptx=ptx)


ONE, PARTS = "hd=64,t=4,s_k=130", "hd=64,t=1,s_k=2048,window=700"
SUM, VALUE = (rf"@%there_3 fma\.rn\.f32 %{name}, .*;" for name in ("total", "value"))


@pytest.mark.parametrize(
    ("row", "before", "after", "outputs"),
    [
        (ONE, r"add\.rn\.f32 (%lse_value), %reference, (%log2_sum);", r"mov.f32 \1, \2;", {"lse"}),
        (ONE, r"mul\.rn\.f32 %lse_value, .*;", "", {"lse"}),
        (PARTS, r"sub\.rn\.f32 (%lse_value), (%log2_sum), %shift;", r"mov.f32 \1, \2;", {"lse"}),
        (PARTS, SUM, "", {"o", "lse"}),
        (PARTS, SUM, r"\g<0> \g<0>", {"o", "lse"}),
        (PARTS, VALUE, "", {"o"}),
        (PARTS, VALUE, r"\g<0> \g<0>", {"o"}),
    ],
    ids=[
        "no reference",
        "no ln 2",
        "no reference of parts",
        "no sum of a part",
        "a sum twice",
        "no part",
        "a part twice",
    ],
)
def test_a_planted_fault_is_seen(row: str, before: str, after: str, outputs: set[str]) -> None:
    case, program = built("ptx", "sm_90a", row)
    with parsed_nowhere():
        run = ran(case, changed(program, before, after), "ring")
    assert set(differences(case, run)) == outputs


@pytest.mark.parametrize(
    ("instead", "what"),
    [
        ("mul.rn.f32 %lse_value, %lse_value, %lse_value;", r"mul of a logarithm to the base 2 .* has"),
        (
            "mul.rn.f32 %lse_value, %lse_value, 0f40000000;",
            r"mul of a logarithm to the base 2 .* the element 16384 .* has",
        ),
        (
            "mul.rn.f32 %lse_value, %lse_value, 0f3F317218; add.f32 %lse_value, %lse_value, %log2_sum;",
            "add of a logarithm to the base e .* and a logarithm to the base 2 .* has",
        ),
        ("lg2.approx.f32 %lse_value, %lse_value;", "lg2 of a logarithm to the base 2 .* has"),
        ("rcp.rn.f32 %lse_value, %lse_value;", "rcp of a logarithm to the base 2 .* has"),
        ("sqrt.rn.f32 %lse_value, %row_sum;", "it has"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(instead: str, what: str) -> None:
    case, program = built("ptx", "sm_90a", ONE)
    broken = changed(program, r"mul\.rn\.f32 %lse_value, .*;", instead)
    *_, refused = re.findall(r"[^;]+;", instead)
    with parsed_nowhere():
        guarded = GuardedCase(spec_of("fmha"), case, load_executor("vm"))
        violation = guarded.run(broken, RunOptions(accumulate="ring")).execution.violation or ""
    expected = f"`{re.escape(refused.strip())}`: {what} no counterpart in the ring"
    assert re.search(expected, violation), f"the run says: {violation}"
