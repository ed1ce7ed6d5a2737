"""The judge catches planted faults, by case and tensor, and passes legal kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch

from conformance.fakes.fmha import FAULTS, Style, emulate, styles
from megamoe.contract import AxisValue, Case
from megamoe.judge.tolerance import Judgement, compare
from megamoe.ops import reference
from megamoe.spec.load import load_specs

SPEC = load_specs()["fmha"]
FMHA = reference("fmha")
Outputs = dict[str, torch.Tensor]

RAGGED = "fmha:hd=64,t=32,s_k=300,heads=4,kv_heads=2"
MASKED = "fmha:hd=64,t=32,s_k=300,heads=4,kv_heads=2,causal=true,window=100"
CAUSAL = "fmha:hd=128,t=16,s_k=200,causal=true"
DECODE = "fmha:hd=128,t=1,s_k=200,heads=8,kv_heads=2"
CELL = "fmha:hd=64,t=4,s_k=512"
SMALL = "fmha:hd=64,t=1,s_k=5"


@dataclass(frozen=True, slots=True)
class Kill:
    """Each tensor of `by` alone must catch `fault` on `case`."""

    fault: str
    case: str
    by: tuple[str, ...] = ("o",)

    def __str__(self) -> str:
        return f"{self.fault}-{self.case}"


KILLS = (
    *(Kill("scale_1_percent", case, ("o", "lse")) for case in (RAGGED, MASKED, CAUSAL, DECODE)),
    Kill("scale_1_percent", CELL, ("o", "lse")),
    Kill("scale_1_percent", SMALL, ("lse",)),
    *(Kill("key_dropped", case, ("o", "lse")) for case in (RAGGED, MASKED, CAUSAL, DECODE, CELL, SMALL)),
    Kill("key_past_s_k", SMALL, ("o", "lse")),
    *(Kill("key_past_s_k", case, ("lse",)) for case in (RAGGED, DECODE, CELL)),
    *(Kill("key_past_s_k", f"{case},inputs=large_logits", ("o", "lse")) for case in (RAGGED, DECODE, CELL)),
    *(Kill("last_tile_unmasked", case, ("o", "lse")) for case in (RAGGED, DECODE, SMALL)),
    *(Kill("mask_off_by_one", case, ("o", "lse")) for case in (MASKED, CAUSAL)),
    *(Kill("rows_swapped", case, ("o",)) for case in (RAGGED, MASKED, CAUSAL, CELL)),
    *(Kill("lse_base_2", case, ("lse",)) for case in (RAGGED, MASKED, CAUSAL, DECODE, CELL, SMALL)),
    *(Kill("lse_of_rounded_p", case, ("lse",)) for case in (RAGGED, MASKED, CAUSAL, DECODE, CELL, SMALL)),
    *(Kill("kv_head_modulo", case, ("o", "lse")) for case in (RAGGED, MASKED, DECODE)),
    Kill("bf16_accumulation", "fmha:hd=64,t=32,s_k=512"),
    Kill("bf16_accumulation", "fmha:hd=64,t=4,s_k=1024"),
    *(Kill("no_rescale", case, ("o", "lse")) for case in (RAGGED, MASKED, CELL)),
    Kill("no_row_maximum", f"{MASKED},inputs=large_logits", ("o", "lse")),
    Kill("no_row_maximum", f"{SMALL},inputs=large_logits", ("o", "lse")),
    *(Kill("v_blocks_swapped", case) for case in (RAGGED, DECODE, CELL)),
    Kill("v_blocks_swapped", f"{RAGGED},inputs=one_hot_rows"),
    *(Kill("fp8_p", case) for case in (RAGGED, MASKED, CAUSAL, DECODE, CELL, SMALL)),
    *(Kill("last_column_unwritten", case) for case in (RAGGED, DECODE, SMALL)),
    *(Kill("flush_to_zero", f"{case},inputs=denormal_scale") for case in (RAGGED, DECODE, CELL)),
    *(Kill("one_wrong_element", case) for case in (RAGGED, MASKED, CAUSAL, DECODE, CELL, SMALL)),
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread: in thousands of tiny products, threads on a busy machine mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@lru_cache(maxsize=32)
def references(case: Case) -> tuple[Outputs, Outputs, Outputs]:
    inputs = FMHA.make_inputs(case)
    return inputs, FMHA.oracle(case, inputs), FMHA.simulated(case, inputs)


def judged(case: Case, outputs: Outputs, by: str | None = None) -> Judgement:
    """The verdict on all outputs, or on `by` alone."""
    _, oracle, simulated = references(case)
    if by is not None:
        outputs, oracle, simulated = ({by: found[by]} for found in (outputs, oracle, simulated))
    axes = {name: tensor.shape for name, tensor in SPEC.tensors_of(case).items()}
    return compare(
        case, outputs, oracle, simulated, SPEC.tolerance, False, axes=axes, absolute_scale=FMHA.ABSOLUTE_SCALE
    )


@pytest.mark.parametrize("kill", KILLS, ids=str)
def test_planted_fault_is_caught(kill: Kill) -> None:
    case = SPEC.parse_case(kill.case)
    outputs = emulate(case, references(case)[0], Style(tile=64), kill.fault)
    for tensor in kill.by:
        verdict = judged(case, outputs, tensor)
        assert not verdict.passed, f"{kill.case}: {tensor} passes although {FAULTS[kill.fault]}: {verdict.metrics}"


def test_every_fault_is_caught_somewhere() -> None:
    assert {kill.fault for kill in KILLS} == set(FAULTS), (
        "a planted fault without a case that must catch it proves nothing"
    )


@pytest.mark.parametrize("case_id", sorted({kill.case for kill in KILLS}))
def test_the_same_kernels_pass_without_the_fault(case_id: str) -> None:
    case = SPEC.parse_case(case_id)
    for style in (Style(tile=64), *styles(seed=0)):
        verdict = judged(case, emulate(case, references(case)[0], style))
        assert verdict.passed, f"{style}: {verdict.sentence}"


def drawn_case(choice: random.Random) -> Case:
    kv_heads = choice.choice([1, 1, 2])
    axes: dict[str, AxisValue] = {
        "hd": choice.choice([64, 64, 64, 128, 512]),
        "t": choice.choice([1, 1, 2, 3, 17, 40]),
        "s_k": choice.choice([1, 2, 3, 4, 7, 16, 33, 100, 129, 300]),
        "batch": choice.choice([1, 1, 2]),
        "heads": kv_heads * choice.choice([1, 2]),
        "kv_heads": kv_heads,
        "causal": choice.random() < 0.4,
        "window": choice.choice([None, None, 1, 2, 5, 60]),
        "scale": choice.choice([None, None, 1.0, 0.05, 0.3]),
    }
    return SPEC.case(inputs=choice.choice(SPEC.inputs), seed=choice.randrange(10**6), **axes)


@pytest.mark.parametrize("draw", range(8))
def test_legal_kernels_pass_on_drawn_shapes(draw: int) -> None:
    """No false alarm: other tile sizes and orders, a stale maximum, exp2 2 ulps off, truncating accumulation."""
    choice = random.Random(draw)
    for _ in range(12):
        case = drawn_case(choice)
        for style in styles(choice.randrange(10**6)):
            verdict = judged(case, emulate(case, references(case)[0], style))
            assert verdict.passed, f"{style} is legal: {verdict.sentence}"


@pytest.mark.parametrize("hd", [64, 128, 256, 512])
def test_the_cosine_bar_can_be_met_on_published_cells(hd: int) -> None:
    """The simulated reference clears the published bar; t = 1 is closest to it."""
    for t, s_k in ((1, 128), (1, 256), (1, 384), (1, 512), (1, 1024), (4, 128), (32, 512)):
        case = SPEC.case(hd=hd, t=t, s_k=s_k)
        assert SPEC.published(case), f"{case.id} must be a published cell"
        _, oracle, simulated = references(case)
        verdict = compare(case, simulated, oracle, simulated, SPEC.tolerance, True)
        assert verdict.passed, verdict.sentence
