"""A sample of a large case is judged like the whole, and a fault in it names the sample."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megamoe.contract import Case
from megamoe.judge.arena import Arena
from megamoe.judge.judge import Expected, compared, complaints, expected_of
from megamoe.ops import reference
from megamoe.spec.load import load_specs

SPEC = load_specs()["nvfp4_moe"]
ROOM = reference("nvfp4_moe")
CASES = tuple(
    SPEC.parse_case(f"nvfp4_moe:hidden=128,intermediate=128,num_experts=4,tokens={rest}")
    for rest in ("140,topk=2,load=skewed", "24,topk=2,load=slice", "20,topk=2,inputs=poisoned_padding,weight=before")
)


def sampled(case: Case, share: float) -> tuple[dict[str, torch.Tensor], Expected]:
    inputs = ROOM.make_inputs(case)
    return inputs, expected_of(case, inputs, int(ROOM.useful_flops(case) * share))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_sample_has_the_results_of_the_whole(case: Case) -> None:
    inputs, part = sampled(case, 0.3)
    whole = expected_of(case, inputs)
    assert part.sample is not None
    rows = part.sample.rows["y"]
    assert 1 <= len(rows) < case.int("tokens")
    assert rows[0] == 0, "from the first token"
    torch.testing.assert_close(part.oracle["y"], whole.oracle["y"][rows], rtol=0, atol=0)
    torch.testing.assert_close(part.simulated["y"], whole.simulated["y"][rows], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_right_outputs_pass_and_a_fault_in_the_sample_does_not(case: Case) -> None:
    inputs, part = sampled(case, 0.3)
    assert part.sample is not None
    y = ROOM.simulated(case, inputs)["y"]
    assert compared(SPEC, part, {"y": y}).passed
    wrong = y.clone()
    token = next(int(row) for row in part.sample.rows["y"] if y[row].abs().sum() > 0)
    wrong[token] *= -1
    arena = Arena(SPEC, case, inputs)
    arena.tensors["y"].copy_(wrong)
    comparison = compared(SPEC, part, {"y": wrong})
    assert not comparison.passed
    assert "which alone were judged" in complaints(arena, part, comparison)


def test_a_cheap_case_is_judged_whole() -> None:
    case = CASES[0]
    assert ROOM.sample(case, ROOM.make_inputs(case), ROOM.useful_flops(case)) is None
    assert sampled(case, 1.0)[1].sample is None


@pytest.mark.parametrize("stage", ["l1", "requantise", "l2", "combine"])
def test_a_stage_is_of_one_piece(stage: str) -> None:
    case = SPEC.vary(CASES[0], stage=stage)
    assert ROOM.sample(case, ROOM.make_inputs(case), 1) is None


def test_the_sample_keeps_the_name_of_the_case() -> None:
    _, part = sampled(CASES[0], 0.3)
    assert part.case.id == CASES[0].id, "sentences and reruns name the case that was asked for"
    assert part.case != replace(CASES[0]), "its number of tokens is the sample's"
