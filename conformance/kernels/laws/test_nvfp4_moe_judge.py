"""Which planted faults of NVFP4 MoE the judge catches, and on which cases; and that it passes legal kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch

from conformance.fakes.nvfp4_moe import FAULTS, STYLES, emulate
from conformance.kernels.laws.law import spec_of
from megamoe.codec.routing import routing
from megamoe.contract import AxisValue, Case
from megamoe.judge.arena import Arena
from megamoe.judge.tolerance import Judgement, compare
from megamoe.ops import Codes, reference
from megamoe.ops.nvfp4_moe.stages import combine

SPEC = spec_of("nvfp4_moe")
MOE = reference("nvfp4_moe")
CASES = [*SPEC.cases("small"), *SPEC.cases("stages")]

LAYER = "nvfp4_moe:hidden=256,intermediate=128,num_experts=8,tokens=30,topk=2,load=skewed"
BEFORE = "nvfp4_moe:hidden=256,intermediate=128,num_experts=4,tokens=10,topk=2,weight=before"
CLAMPED = "nvfp4_moe:hidden=256,intermediate=256,num_experts=2,tokens=9,topk=2,clamp=1.0"
POISONED = "nvfp4_moe:hidden=256,intermediate=256,num_experts=4,tokens=21,topk=2,inputs=poisoned_padding"
SLICE = "nvfp4_moe:hidden=128,intermediate=128,num_experts=4,tokens=24,topk=2,load=slice"
SATURATED = "nvfp4_moe:hidden=256,intermediate=128,num_experts=4,tokens=20,topk=2,inputs=saturating_scales"
WIDE = "nvfp4_moe:hidden=128,intermediate=256,num_experts=2,tokens=7,topk=2,interleave=32"
L1 = "nvfp4_moe:hidden=256,intermediate=128,num_experts=4,tokens=20,topk=2,stage=l1"
TILES = "nvfp4_moe:hidden=128,intermediate=128,num_experts=2,tokens=150,topk=1,stage=l1,seed=3"
REQUANTISE = "nvfp4_moe:hidden=128,intermediate=256,num_experts=4,tokens=20,topk=2,stage=requantise"
L2 = "nvfp4_moe:hidden=256,intermediate=128,num_experts=4,tokens=20,topk=2,stage=l2"
COMBINE = "nvfp4_moe:hidden=256,intermediate=128,num_experts=4,tokens=20,topk=2,stage=combine"
W4A16 = "nvfp4_moe:hidden=256,intermediate=128,num_experts=4,tokens=20,topk=2,activations=bf16"
FULL_RANGE = f"{W4A16},inputs=full_range"
SHARED = "nvfp4_moe:hidden=256,intermediate=128,num_experts=5,tokens=20,topk=3,shared=1"
SHARED_BEFORE = "nvfp4_moe:hidden=128,intermediate=128,num_experts=6,tokens=24,topk=4,load=slice,shared=2,weight=before"

# The cases on which each fault must be caught, by any output.
KILLS = {
    "gate_up_swapped": (LAYER, BEFORE, CLAMPED, SLICE, WIDE, L1),
    "neighbour_scale": (LAYER, CLAMPED, POISONED, SATURATED, L1),
    "wrong_expert": (LAYER, BEFORE, POISONED, L1),
    "weight_missing": (LAYER, BEFORE, SLICE, COMBINE),
    "weight_twice": (LAYER, BEFORE, f"{COMBINE},weight=before", L1),
    "weight_of_first_choice": (LAYER, BEFORE, COMBINE),
    "clamp_missing": (CLAMPED, f"{CLAMPED},stage=l1"),
    "clamp_gate_below": (CLAMPED, f"{CLAMPED},stage=l1"),
    "truncated_codes": (LAYER, BEFORE, SLICE, L1, REQUANTISE),
    "truncated_scales": (LAYER, BEFORE, SLICE, L1, REQUANTISE),
    "unsaturated_scales": (SATURATED, f"{REQUANTISE},inputs=saturating_scales"),
    "codes_without_scale": (f"{L1},inputs=zero_blocks",),
    "k_block_dropped": (LAYER, BEFORE, WIDE, L1),
    "k_block_dropped_l2": (LAYER, BEFORE, WIDE, L2),
    "swizzle_ignored": (LAYER, POISONED, L1),
    "scales_by_column": (LAYER, TILES, L1, REQUANTISE),
    "padding_leaks": (LAYER, POISONED, COMBINE),
    "nibbles_swapped": (LAYER, BEFORE, L2),
    "interleave_halved": (LAYER, WIDE, L1),
    "global_scale_of_first_expert": (LAYER, L2),
    "token_scale_of_first_token": (LAYER, L1),
    "slice_wraps": (SLICE, f"{SLICE},stage=combine"),
    "route_dropped": (LAYER, BEFORE, COMBINE),
    "one_wrong_element": (LAYER, BEFORE, L2, COMBINE),
    "silu_missing": (LAYER, CLAMPED, L1),
    "activations_quantised": (W4A16, FULL_RANGE, f"{W4A16},stage=l1", f"{W4A16},stage=l2"),
    "activations_in_f16": (FULL_RANGE, f"{W4A16},stage=l1,inputs=full_range", f"{W4A16},stage=l2,inputs=full_range"),
    "a2_truncated": (W4A16, f"{W4A16},stage=l1", f"{W4A16},stage=requantise"),
    "shared_dropped": (SHARED, SHARED_BEFORE, f"{SHARED},activations=bf16"),
    "shared_doubled": (SHARED, SHARED_BEFORE, f"{SHARED},activations=bf16"),
    "shared_weighted": (SHARED, SHARED_BEFORE),
}


# Larger than the number of cases of the matrix, which every style goes through.
@lru_cache(maxsize=256)
def references(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    inputs = MOE.make_inputs(case)
    return inputs, MOE.oracle(case, inputs), MOE.simulated(case, inputs)


def judged(case: Case, name: str) -> Judgement:
    """Judges the emulated kernel `name`."""
    inputs, oracle, simulated = references(case)
    arena = Arena(SPEC, case, inputs)
    emulate(case, arena.tensors, name)
    outputs = {output: arena.tensors[output] for output in oracle}
    free = MOE.free(case, inputs)
    assert not any(arena.unwritten(free).values()), f"{name} leaves outputs of {case.id} unwritten"
    latitude = MOE.latitude(case, inputs, outputs, oracle)
    return compare(case, outputs, oracle, simulated, SPEC.tolerance, False, free=free, latitude=latitude)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str) -> None:
    assert fault in KILLS, f"{fault} has no case that must catch it, which proves nothing"
    for case_id in KILLS[fault]:
        verdict = judged(SPEC.parse_case(case_id), fault)
        assert not verdict.passed, f"{case_id} passes although {FAULTS[fault]}: {verdict.metrics}"


LARGE_FAULTS = {
    "wrong_expert": (LAYER, L1),
    "k_block_dropped": (LAYER, L1),
    "k_block_dropped_l2": (LAYER, L2),
    "neighbour_scale": (LAYER, L1),
    "global_scale_of_first_expert": (LAYER, L2),
    "one_wrong_element": (LAYER, L2),
}


@pytest.mark.parametrize("fault", [*LARGE_FAULTS, "correct"])
def test_as_large_rows_are_drawn_and_digested_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large row differs in three ways: its draws are counted, its digests differ, its choices are settled in
    portions."""
    monkeypatch.setattr("megamoe.ops.nvfp4_moe.inputs.COUNTED", 4096)
    monkeypatch.setattr("megamoe.judge.arena.HASHED", 4096)
    monkeypatch.setattr("megamoe.ops.nvfp4_moe.settle.HELD", 16)
    references.cache_clear()
    try:
        for case_id in LARGE_FAULTS.get(fault, (LAYER, L1, L2)):
            verdict = judged(SPEC.parse_case(case_id), fault)
            assert verdict.passed == (fault == "correct"), f"{case_id}: {verdict.sentence or verdict.metrics}"
    finally:
        references.cache_clear()


@pytest.mark.parametrize("style", STYLES)
def test_legal_kernels_pass_on_the_matrix(style: str) -> None:
    """No false alarms: other steps along K and another order, truncated sums, approximate reciprocals and
    exponentials."""
    for case in CASES:
        verdict = judged(case, style)
        assert verdict.passed, f"{style} is legal: {verdict.sentence}"


def drawn_case(choice: random.Random) -> Case:
    experts = choice.randint(1, 8)
    axes: dict[str, AxisValue] = {
        "hidden": choice.choice([128, 128, 256, 384]),
        "intermediate": choice.choice([128, 128, 256]),
        "num_experts": experts,
        "tokens": choice.choice([1, 2, 3, 9, 33]),
        "topk": choice.randint(1, experts),
        "load": choice.choice(["balanced", "skewed", "one_token", "empty", "slice"]),
        "weight": choice.choice(["before", "after"]),
        "clamp": choice.choice([None, None, 0.3, 2.0]),
        "interleave": choice.choice([8, 16, 32, 64]),
        "shared": choice.randint(0, 1),
        "activations": choice.choice(["nvfp4", "bf16"]),
        "stage": choice.choice(["layer", "layer", "l1", "requantise", "l2", "combine"]),
    }
    return SPEC.case(inputs=choice.choice(SPEC.inputs), seed=choice.randrange(10**6), **axes)


@pytest.mark.parametrize("draw", range(6))
def test_legal_kernels_pass_on_drawn_shapes(draw: int) -> None:
    choice = random.Random(draw)
    for _ in range(20):
        case = drawn_case(choice)
        verdict = judged(case, choice.choice(list(STYLES)))
        assert verdict.passed, verdict.sentence


STEPS = SPEC.parse_case("nvfp4_moe:hidden=512,intermediate=256,num_experts=3,tokens=33,topk=3")


def flipped(places: torch.Tensor, codes: Codes, packed: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields copies of a2_codes, each with the code at one of `places` [n, 2] changed to a neighbour, a legal one if
    any."""
    for route, column in places.tolist():
        changed, shift = packed.clone(), 4 * (column % 2)
        row = changed[int(codes.rows[route])]
        code = int(row[column // 2]) >> shift & 15
        legal = [float(end[route, column]) for end in (codes.lowest, codes.highest)]
        up = abs(legal[1] + legal[0]) / 2 > abs(float(codes.seen[route, column])) or code & 7 == 0
        row[column // 2] = int(row[column // 2]) & (0xF0 >> shift) | (code + (1 if up else -1)) << shift
        yield changed


@pytest.fixture(scope="module")
def places() -> dict[bool, torch.Tensor]:
    """Places of codes of STEPS, by whether a neighbour is also right."""
    codes = codes_of_steps()[0]
    undecided = codes.lowest != codes.highest
    assert undecided.any(), f"{STEPS.id} has no code next to a step, so that nothing can be shown"
    return {True: undecided.nonzero()[:6], False: (~undecided).nonzero()[::9000]}


@lru_cache(maxsize=1)
def codes_of_steps() -> tuple[Codes, dict[str, torch.Tensor], Case]:
    """Returns the codes of STEPS's first stage on the layer's inputs; its outputs; its case."""
    l1, inputs = SPEC.vary(STEPS, stage="l1"), references(STEPS)[0]
    outputs = MOE.oracle(l1, inputs)
    return MOE.latitude(l1, inputs, outputs, outputs).codes["a2_codes"], outputs, l1


@pytest.mark.parametrize("case_id", [COMBINE, f"{COMBINE},weight=before", f"{COMBINE},shared=2"])
def test_rows_are_combined_to_the_bit(case_id: str) -> None:
    """Fused or not. With weights of 1, rows that are too large by a bit of fp32 show in sums between two bf16."""
    case = SPEC.parse_case(case_id)
    inputs, oracle, simulated = references(case)
    routes = routing(case, inputs["topk_ids"])
    rows, weights = inputs["rows"][routes.row].float(), inputs["topk_weights"]

    def passes(y: torch.Tensor) -> bool:
        seen = {"y": y}
        latitude = MOE.latitude(case, inputs, seen, oracle)
        return compare(case, seen, oracle, simulated, SPEC.tolerance, False, latitude=latitude).passed

    for fused in (False, True):
        y = combine(case, routes, rows, weights, fused=fused).bfloat16()
        assert passes(y), f"fused={fused} is legal"
        y.view(torch.int16)[0, 0] ^= 1
        assert not passes(y), f"fused={fused}: one ulp off in one element passes"
    column = combine(case, routes, rows, weights)
    column.view(torch.int32)[:, 7] &= -65536
    assert not passes(column.bfloat16()), "one truncated column passes"
    if case["shared"] or case["weight"] == "before":
        above = combine(case, routes, rows * (1 + 2.0**-23), weights).bfloat16()
        assert not passes(above), "sums between two bf16 that are rounded up pass"


@pytest.mark.parametrize("legal", [True, False])
def test_a_code_next_to_a_step_may_be_either_neighbour(legal: bool, places: dict[bool, torch.Tensor]) -> None:
    codes, outputs, l1 = codes_of_steps()
    inputs = references(STEPS)[0]
    for changed in flipped(places[legal], codes, outputs["a2_codes"]):
        seen = {**outputs, "a2_codes": changed}
        latitude = MOE.latitude(l1, inputs, seen, outputs)
        verdict = compare(l1, seen, outputs, outputs, SPEC.tolerance, False, latitude=latitude)
        assert verdict.passed == legal, f"one code is its neighbour: {verdict.sentence or 'passes'}"


@pytest.mark.parametrize("legal", [True, False])
def test_y_is_held_to_the_codes_that_the_kernel_chose(legal: bool, places: dict[bool, torch.Tensor]) -> None:
    """One code moves a row of y by more than its tolerance: right next to a rounding step, wrong elsewhere."""
    codes, outputs, _ = codes_of_steps()
    inputs, oracle, simulated = references(STEPS)
    moved = 0
    for changed in flipped(places[legal], codes, outputs["a2_codes"]):
        held = {**inputs, "a2_codes": changed, "a2_sf": outputs["a2_sf"]}
        held["rows"] = torch.zeros(SPEC.shape("rows", SPEC.vary(STEPS, stage="l2")), dtype=torch.bfloat16)
        held["y"] = torch.zeros_like(simulated["y"])
        for stage in ("l2", "combine"):
            emulate(SPEC.vary(STEPS, stage=stage), held, "correct")
        seen = {"y": held["y"]}
        strict = compare(STEPS, seen, oracle, simulated, SPEC.tolerance, False)
        moved += not strict.passed
        latitude = MOE.latitude(STEPS, inputs, seen, oracle)
        verdict = compare(STEPS, seen, oracle, simulated, SPEC.tolerance, False, latitude=latitude)
        assert verdict.passed if legal else verdict.passed == strict.passed, verdict.sentence or "a wrong code passes"
    assert moved, "no changed code moved y beyond its bars, so that nothing was shown"
