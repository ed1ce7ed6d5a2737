"""`exact_sums` of NVFP4 MoE: the inputs are what they claim, and the judge lets nothing pass that differs in a bit."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from conformance.fakes.nvfp4_moe import SMALL_FAULTS, STYLES
from conformance.kernels.laws.test_nvfp4_moe_judge import MOE, SPEC, drawn_case, judged, references
from megamoe.codec.nvfp4 import SF_VEC_SIZE, deinterleave, dequantise, unswizzle_scales
from megamoe.codec.routing import Routing, routing
from megamoe.contract import Case, RunOptions, Target, UnsupportedError, as_program, load_backend, load_executor
from megamoe.judge.guarded import GuardedCase
from megamoe.judge.tolerance import compare
from megamoe.ops.nvfp4_moe.exact import GATE
from megamoe.ops.nvfp4_moe.settle import code_interval, scale_interval
from megamoe.ops.nvfp4_moe.stages import Activation, activation, combine, l2, requantise, weights

EXACT = SPEC.cases("exact")
# fp32 holds every whole number up to this.
WHOLE = 2.0**24
# Requantisation is unique if no quotient is closer to a step than this.
FROM_A_STEP = 0.01
LAYER = "nvfp4_moe:hidden=256,intermediate=128,num_experts=4,tokens=20,topk=2,load=skewed"
W4A16 = "nvfp4_moe:hidden=384,intermediate=256,num_experts=3,tokens=20,topk=2,activations=bf16"
DEEP = "nvfp4_moe:hidden=128,intermediate=1408,num_experts=2,tokens=3,topk=2"
# Cases in which the judge passes a fault under `normal` and must catch it under `exact_sums`.
SHOWN_BY = {
    "sums_of_13_bits": (W4A16, DEEP),
    "product_dropped": (LAYER, W4A16, DEEP),
    "product_dropped_l2": (LAYER, W4A16, DEEP, f"{LAYER},stage=l2"),
    "scale_ulp": (LAYER, W4A16, DEEP),
    "weight_ulp": (LAYER, W4A16, DEEP),
}


def drawn_layers(inputs: str) -> Iterator[Case]:
    """Yields layers without a clamp that have a route."""
    for seed in range(24):
        axes = dict(SPEC.vary(drawn_case(random.Random(seed)), stage="layer", clamp=None).axes)
        case = SPEC.case(inputs=inputs, seed=seed, **axes)
        if bool((references(case)[0]["topk_ids"] >= 0).any()):
            yield case


def least_bits(numbers: torch.Tensor) -> torch.Tensor:
    """float64 [...]: the greatest power of two of which all `numbers` [..., n] are multiples; inf if all are 0."""
    mantissa, exponent = numbers.double().frexp()
    whole = (mantissa * 2.0**53).long()
    lowest = torch.ldexp((whole & -whole).double(), exponent - 53)
    return torch.where(lowest == 0, torch.inf, lowest).amin(dim=-1)


def fit(products: torch.Tensor) -> bool:
    """Whether fp32 holds the sum of any of the `products` [..., n] along n, in whatever order they are added."""
    return bool((products.abs().sum(dim=-1) <= WHOLE * least_bits(products)).all())


def tensors_between(case: Case) -> tuple[dict[str, torch.Tensor], Routing, Activation, torch.Tensor]:
    """The inputs of a layer, its routes, h, and a2 without its global scale."""
    inputs = references(case)[0]
    routes = routing(case, inputs["topk_ids"])
    given = activation(case, inputs, routes)
    if case["activations"] == "bf16":
        return inputs, routes, given, given.h
    found = requantise(given.h, inputs["a2_gs"][routes.expert])
    codes = found.codes[:, 0::2] | found.codes[:, 1::2] << 4
    return inputs, routes, given, dequantise(codes, found.sf, dtype=torch.float64)


def x_of(case: Case, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    if case["activations"] == "bf16":
        return inputs["x"].double()
    sf = unswizzle_scales(inputs["x_sf"], case.int("tokens"), case.int("hidden") // SF_VEC_SIZE)
    return dequantise(inputs["x_codes"], sf, dtype=torch.float64)


def sums_fit(case: Case) -> bool:
    """Whether all sums of both GEMMs and of the combine do."""
    inputs, routes, _, a2 = tensors_between(case)
    x, hidden, intermediate = x_of(case, inputs), case.int("hidden"), case.int("intermediate")
    for expert, here in routes.experts():
        w1 = weights(inputs, "w1", expert, 2 * intermediate, hidden)
        w2 = weights(inputs, "w2", expert, hidden, intermediate)
        pairs = ((x[routes.token[here]], w1), (a2[here], w2))
        if not all(fit(row * w) for rows, w in pairs for row in rows):
            return False
    rows = l2(case, inputs, routes, a2, torch.float64)
    weight = inputs["topk_weights"][routes.token, routes.choice].double() if case["weight"] == "after" else 1.0
    added = torch.zeros(case.int("tokens"), case.int("topk"), hidden, dtype=torch.float64)
    added[routes.token, routes.choice] = (rows.mT * weight).mT
    return bool((rows.bfloat16() == rows).all()) and fit(added.mT)


def steps_are_far(case: Case) -> bool:
    """Whether every code and block scale between the GEMMs is the same for an h that is FROM_A_STEP off."""
    inputs, routes, given, _ = tensors_between(case)
    gs = inputs["a2_gs"][routes.expert]
    off = Activation(given.h, FROM_A_STEP * given.h.abs())
    intervals = (scale_interval(off, gs), code_interval(off, gs, requantise(given.h, gs).sf))
    return all(torch.equal(one.lowest, one.highest) for one in intervals)


def test_sums_are_exact_in_every_order() -> None:
    for case in drawn_layers("exact_sums"):
        assert sums_fit(case), f"{case.id}: fp32 cannot hold some partial sum, or bf16 some row"
    assert not any(map(sums_fit, drawn_layers("normal"))), "normal inputs seem exact too, so that nothing was shown"


def test_requantisation_is_never_next_to_a_step() -> None:
    def quantised(inputs: str) -> list[Case]:
        return [SPEC.vary(case, activations="nvfp4") for case in drawn_layers(inputs)]

    for case in quantised("exact_sums"):
        assert steps_are_far(case), f"{case.id}: a code or a scale is within {FROM_A_STEP:.0%} of a step"
    assert not any(map(steps_are_far, quantised("normal"))), "normal inputs seem far from steps too"


def silu_is_the_positive_part(case: Case) -> bool:
    """Whether h is exactly max(gate, 0) * up, and exp(-|gate|) has no bit that could matter in fp32."""
    inputs, routes, given, _ = tensors_between(case)
    x, x_gs = x_of(case, inputs), inputs.get("x_gs", torch.ones(case.int("tokens"))).double()
    weight = inputs["topk_weights"][routes.token, routes.choice].double() if case["weight"] == "before" else None
    for expert, here in routes.experts():
        w1 = weights(inputs, "w1", expert, 2 * case.int("intermediate"), case.int("hidden"))
        sums = (x * x_gs[:, None])[routes.token[here]] @ w1.mT * inputs["w1_gs"][expert].double()
        gate, up = (part.mT for part in deinterleave(sums.mT, case.int("interleave")))
        h = gate.clamp(min=0.0) * up if weight is None else gate.clamp(min=0.0) * up * weight[here, None]
        if not torch.equal(given.h[here], h) or bool((gate.abs() < 2.0**GATE).logical_and(gate != 0).any()):
            return False
    return True


def test_silu_is_exact() -> None:
    for case in drawn_layers("exact_sums"):
        assert silu_is_the_positive_part(case), f"{case.id}: a gate is near 0, where silu is rounded"
        h = tensors_between(case)[2].h
        assert float((h == 0).double().mean()) < 0.75, f"{case.id}: most of h is 0 and hides mistakes"
    assert not any(map(silu_is_the_positive_part, drawn_layers("normal"))), "silu seems exact for normal inputs too"


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_outputs_are_equal_bit_for_bit_in_every_order(case: Case) -> None:
    """Legal kernels agree in every order. An output with one element off by one ulp does not."""
    inputs, oracle, simulated = references(case)
    for style in STYLES:
        verdict = judged(case, style)
        assert verdict.passed, f"{style}: {verdict.sentence}"
    row = int(routing(case, inputs["topk_ids"]).row[0])
    for name, tensor in simulated.items():
        seen = {**simulated, name: tensor.clone()}
        if name != "a2_sf":
            seen[name].view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.uint8)[row % len(tensor), 0] ^= 1
        else:
            seen[name][row // 128, 0, row % 32 * 16 + row // 32 % 4 * 4] ^= 1
        latitude, free = MOE.latitude(case, inputs, seen, oracle), MOE.free(case, inputs)
        verdict = compare(case, seen, oracle, simulated, SPEC.tolerance, False, free=free, latitude=latitude)
        assert not verdict.passed, f"{name}: one ulp off in one element passes"


@pytest.mark.parametrize("fault", SMALL_FAULTS)
def test_exact_sums_show_what_a_tolerance_hides(fault: str) -> None:
    for case_id in SHOWN_BY[fault]:
        hidden = judged(SPEC.parse_case(case_id), fault)
        assert hidden.passed, f"{case_id}: other inputs show it too: {hidden.sentence}"
        verdict = judged(SPEC.parse_case(f"{case_id},inputs=exact_sums"), fault)
        assert not verdict.passed, f"{case_id},inputs=exact_sums passes although {SMALL_FAULTS[fault]}"


def changed_tokens(case: Case, changed: dict[str, torch.Tensor]) -> float:
    """The share of tokens whose y changes with these inputs."""
    inputs, oracle, _ = references(case)
    seen = MOE.oracle(case, {**inputs, **changed})["y"].bfloat16() != oracle["y"].bfloat16()
    return float(seen.any(dim=1).double().mean())


@pytest.mark.parametrize("axis", ["hidden", "intermediate"])
@pytest.mark.parametrize("kind", ["dropped", "misplaced"])
def test_every_block_along_k_counts(axis: str, kind: str) -> None:
    """Without 64 of K in either GEMM, or with two of them exchanged in one operand, every token differs."""
    case = SPEC.parse_case(f"{LAYER},inputs=exact_sums")
    name = "x_codes" if axis == "hidden" else "w2_codes"
    codes = references(case)[0][name]
    step = 32
    for first in range(0, codes.shape[-1], step):
        other = codes.clone()
        here, there = slice(first, first + step), slice((first + step) % codes.shape[-1], None)
        other[..., here] = 0 if kind == "dropped" else codes[..., there][..., :step]
        share = changed_tokens(case, {name: other})
        assert share == 1.0, f"{name} {kind} at {2 * first}: y changes for {share:.0%} of the tokens only"


def test_every_route_counts() -> None:
    """Each route's weight halved, and its expert replaced by another, changes its token's y."""
    case = SPEC.parse_case(f"{LAYER},inputs=exact_sums")
    inputs, oracle, _ = references(case)
    routes = routing(case, inputs["topk_ids"])
    for choice in range(case.int("topk")):
        weight = inputs["topk_weights"].clone()
        weight[:, choice] /= 2
        assert changed_tokens(case, {"topk_weights": weight}) == 1.0, f"a weight of choice {choice} does not count"
        ids = inputs["topk_ids"].clone()
        taken = torch.nn.functional.one_hot(ids.long(), case.int("num_experts")).sum(dim=1)
        ids[:, choice] = taken.argmin(dim=1).int()
        assert changed_tokens(case, {"topk_ids": ids}) == 1.0, f"the expert of choice {choice} does not count"
    assert torch.equal(oracle["y"], combine(case, routes, *_rows_and_weights(case))), "y is not the sum of its rows"


def _rows_and_weights(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, routes, _, a2 = tensors_between(case)
    return l2(case, inputs, routes, a2, torch.float64), inputs["topk_weights"]


@pytest.mark.parametrize("clamp", [0.5, 64.0])
def test_with_a_clamp_the_usual_bars_apply(clamp: float) -> None:
    case = SPEC.parse_case(f"{LAYER},clamp={clamp},inputs=exact_sums")
    inputs, oracle, simulated = references(case)
    assert not MOE.latitude(case, inputs, simulated, oracle).codes, "a clamp leaves rounding, so no bits are compared"
    for style in STYLES:
        assert judged(case, style).passed, f"{style} is legal"


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("backend", ["ptx", "cutedsl"])
@pytest.mark.parametrize("accumulate", ["exact", "hopper"])
def test_kernels_give_the_same_bits_however_the_machine_adds(backend: str, target: Target, accumulate: str) -> None:
    case = SPEC.parse_case("nvfp4_moe:hidden=256,intermediate=128,num_experts=2,tokens=3,topk=2,inputs=exact_sums")
    guarded = GuardedCase(SPEC, case, load_executor("vm"))
    try:
        program = as_program(load_backend(backend).build(case, target), backend)
    except UnsupportedError as error:
        pytest.skip(f"unsupported: {error}")
    ran = guarded.run(program, RunOptions(accumulate=accumulate))
    assert not ran.fault(), ran.fault()
    right = MOE.oracle(case, guarded.inputs)["y"].bfloat16()
    assert torch.equal(ran.settled["y"], right), f"{int((ran.settled['y'] != right).sum())} elements of y differ"
