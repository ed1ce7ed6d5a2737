"""References of NVFP4 MoE: shapes, routing, loads, and the oracle compared with sums written out element by element."""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections import Counter
from collections.abc import Mapping

import pytest
import torch

from conformance import ROOT
from conformance.kernels.laws.law import specs
from megamoe.codec.nvfp4 import SF_VEC_SIZE, decode_e2m1, decode_e4m3, dequantise, unswizzle_scales
from megamoe.codec.routing import Routing, routing
from megamoe.contract import Case
from megamoe.judge.arena import DTYPES
from megamoe.ops import reference
from megamoe.ops.nvfp4_moe.inputs import draw_topk_ids, input_names, output_names
from megamoe.ops.nvfp4_moe.stages import Activation, activation
from megamoe.spec.draws import counted_normal

SPEC = specs()["nvfp4_moe"]
MOE = reference("nvfp4_moe")
CASES = [*SPEC.cases("small"), *SPEC.cases("stages")]
ROUTED = "hidden=128,intermediate=128,num_experts=8,tokens=40"


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_spec_and_reference_name_the_same_tensors(activations: str) -> None:
    for stage in ("layer", "l1", "requantise", "l2", "combine"):
        case = SPEC.parse_case("nvfp4_moe:hidden=128,intermediate=128,num_experts=2,tokens=1")
        case = SPEC.vary(case, stage=stage, activations=activations)
        for role, names in (("input", input_names(case)), ("output", output_names(case))):
            wanted = {name for name, tensor in SPEC.tensors_of(case).items() if tensor.role == role}
            assert set(names) == wanted, f"{role}s of stage {stage}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensors_are_those_of_the_spec(case: Case) -> None:
    inputs = MOE.make_inputs(case)
    outputs, oracle = MOE.simulated(case, inputs), MOE.oracle(case, inputs)
    for name, tensor in SPEC.tensors_of(case).items():
        found = inputs[name] if tensor.role == "input" else outputs[name]
        assert tuple(found.shape) == SPEC.shape(name, case), f"shape of {name}"
        assert found.dtype == DTYPES[tensor.dtype], f"dtype of {name}"
        if tensor.role == "output":
            assert oracle[name].shape == found.shape, f"the oracle's {name}"
            assert torch.isfinite(oracle[name].double()).all(), f"{name} must be finite, padding poisoned or not"
    for name, free in MOE.free(case, inputs).items():
        assert free.shape == outputs[name].shape, f"free elements of {name}"
    assert MOE.minimum_bytes(case) > 0, "something must move"


def test_the_same_case_has_the_same_bits() -> None:
    case = SPEC.case(hidden=128, intermediate=128, num_experts=3, tokens=5, topk=2)
    first, second = MOE.make_inputs(case), MOE.make_inputs(case)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = MOE.make_inputs(SPEC.vary(case, seed=1))
    assert not torch.equal(first["w1_codes"], other["w1_codes"]), "another seed, other bits"
    assert not torch.equal(first["w1_codes"][0], first["w1_codes"][1]), "experts differ"


def counts(case: Case) -> list[int]:
    ids = draw_topk_ids(case)
    for row in ids.tolist():
        here = [expert for expert in row if expert >= 0]
        assert len(set(here)) == len(here), f"a token has an expert twice: {row}"
    found = Counter(ids.flatten().tolist())
    return sorted(found.get(expert, 0) for expert in range(case.int("num_experts")))


@pytest.mark.parametrize("seed", range(5))
def test_loads_are_what_they_are_called(seed: int) -> None:
    def load(name: str, topk: int = 2) -> list[int]:
        return counts(SPEC.parse_case(f"nvfp4_moe:{ROUTED},topk={topk},load={name},seed={seed}"))

    assert max(load("balanced", 3)) - min(load("balanced", 3)) <= 1, "as many each"
    assert load("one_token")[:6] == [1] * 6, "one each but for topk of them"
    assert load("empty")[:4] == [0] * 4, "none in half of them"
    assert min(load("empty", 8)) == 40, "all experts are needed when topk is all of them"
    assert max(load("skewed")) > 1.5 * sum(load("skewed")) / 8, "the most popular expert has far more than its share"
    assert 0 < sum(load("slice")) < 80, "some routes go to other ranks"


@pytest.mark.parametrize("load", ["balanced", "skewed", "one_token", "empty", "slice"])
def test_every_token_visits_the_shared_experts(load: str) -> None:
    case = SPEC.parse_case(f"nvfp4_moe:{ROUTED},topk=4,load={load},shared=2")
    ids, weights = draw_topk_ids(case), MOE.make_inputs(case)["topk_weights"]
    assert ids[:, 2:].eq(torch.tensor([6, 7])).all(), "the last experts are the last choices"
    assert weights[:, 2:].eq(1).all(), "their weight is 1"
    assert int(ids[:, :2].max()) < 6, "a shared expert is chosen besides"
    assert weights[:, :2].sum(dim=1).allclose(torch.ones(40)), "the others share their weight among them"
    assert counts(case)[-2:] == [40, 40], f"loads under {load}"
    only = SPEC.case(hidden=128, intermediate=128, num_experts=1, tokens=3, shared=1, load=load)
    assert draw_topk_ids(only).tolist() == [[0]] * 3


@pytest.mark.parametrize("stage", ["layer", "l1"])
def test_plain_activations_agree_with_quantised_ones_of_the_same_numbers(stage: str) -> None:
    """NVFP4 numbers under a power-of-two global scale are bf16 numbers: l1 is the same, and y differs only by a2."""
    quantised = SPEC.case(hidden=128, intermediate=128, num_experts=3, tokens=5, topk=2, stage=stage)
    plain = SPEC.vary(quantised, activations="bf16")
    inputs = MOE.make_inputs(quantised)
    inputs["x_gs"] = torch.full((5,), 2.0**-10)
    x = torch.tensor([[number(inputs["x_codes"], inputs["x_sf"], t, k) for k in range(128)] for t in range(5)])
    held = {**MOE.make_inputs(plain), "x": (x * inputs["x_gs"][:, None]).bfloat16()}
    shared = {name: inputs[name] for name in input_names(plain) if name != "x"}
    expected, seen = MOE.oracle(quantised, inputs), MOE.oracle(plain, {**held, **shared})
    if stage == "layer":
        left, right = seen["y"], expected["y"]
    else:
        row = routing(plain, inputs["topk_ids"]).row
        sf = unswizzle_scales(expected["a2_sf"], len(expected["a2_codes"]), 8)[row]
        gs = inputs["a2_gs"][inputs["topk_ids"].flatten().sort(stable=True).values]
        left, right = seen["a2"][row], dequantise(expected["a2_codes"][row], sf, gs)
    error = (left - right).norm() / right.norm()
    assert 0.01 < error < 0.2, f"requantisation moves the output by {error:.3f} of it"


def test_expert_rows_are_sorted_and_padded() -> None:
    case = SPEC.case(hidden=128, intermediate=128, num_experts=4, tokens=3, topk=2)
    ids = torch.tensor([[3, 0], [-1, 3], [3, 1]], dtype=torch.int32)
    found = routing(case, ids)
    routes = list(zip(*(part.tolist() for part in (found.expert, found.token, found.choice, found.row)), strict=True))
    assert routes == [(0, 0, 1, 0), (1, 2, 1, 128), (3, 0, 0, 256), (3, 1, 1, 257), (3, 2, 0, 258)]
    assert found.capacity == SPEC.shape("rows", SPEC.vary(case, stage="l2"))[0]
    assert [(expert, here.start, here.stop) for expert, here in found.experts()] == [(0, 0, 1), (1, 1, 2), (3, 2, 5)]


@pytest.mark.parametrize("seed", range(4))
def test_any_routing_fits(seed: int) -> None:
    for load in ("balanced", "skewed", "one_token", "empty", "slice"):
        case = SPEC.parse_case(f"nvfp4_moe:{ROUTED},topk=8,load={load},seed={seed}")
        found = routing(case, draw_topk_ids(case))
        assert int(found.row.max()) < found.capacity, f"{load} needs more rows than the tensors have"


def number(codes: torch.Tensor, sf: torch.Tensor, row: int, k: int) -> float:
    """codes [rows, K / 2] and atoms [row atoms, K atoms, 512]: element k of a row, without global scale."""
    byte = int(codes[row, k // 2])
    code, block = byte >> 4 if k % 2 else byte & 15, k // 16
    scale = sf[row // 128, block // 4, row % 32 * 16 + row % 128 // 32 * 4 + block % 4]
    return float(decode_e2m1(torch.tensor([code]))) * float(decode_e4m3(scale[None]))


@pytest.mark.parametrize("weight", ["before", "after"])
@pytest.mark.parametrize("clamp", [None, 0.3])
def test_the_oracle_is_the_sum_written_out(weight: str, clamp: float | None) -> None:
    """Computes one block of one route's activations from the bytes."""
    shape = SPEC.case(hidden=128, intermediate=128, num_experts=2, tokens=3, topk=2, interleave=16)
    case = SPEC.vary(shape, weight=weight, clamp=clamp, stage="l1")
    inputs, token, choice, first = MOE.make_inputs(case), 1, 1, 32
    expert = int(inputs["topk_ids"][token, choice])
    w1, w1_sf = inputs["w1_codes"][expert], inputs["w1_sf"][expert]
    gs = float(inputs["x_gs"][token]) * float(inputs["w1_gs"][expert])
    x = [number(inputs["x_codes"], inputs["x_sf"], token, k) for k in range(128)]
    h: list[float] = []
    for i in range(first, first + 16):
        row = i // 16 * 32 + i % 16
        gate, up = (gs * sum(x[k] * number(w1, w1_sf, r, k) for k in range(128)) for r in (row, row + 16))
        if clamp is not None:
            gate, up = min(gate, clamp), max(-clamp, min(up, clamp))
        factor = float(inputs["topk_weights"][token, choice]) if weight == "before" else 1.0
        h.append(gate / (1 + math.exp(-gate)) * up * factor)
    outputs, routes = MOE.oracle(case, inputs), routing(case, inputs["topk_ids"])
    row = int(routes.row[(routes.token == token) & (routes.choice == choice)])
    a2_gs, largest = float(inputs["a2_gs"][expert]), max(map(abs, h))
    at = (row // 128, first // 64, row % 32 * 16 + row % 128 // 32 * 4 + first // 16 % 4)
    scale = float(decode_e4m3(outputs["a2_sf"][at][None]))
    assert scale * a2_gs == pytest.approx(largest / 6, rel=2**-4), "the scale lets the largest be 6"
    seen = [number(outputs["a2_codes"], outputs["a2_sf"], row, i) * a2_gs for i in range(first, first + 16)]
    assert all(abs(a - b) <= 1.01 * scale * a2_gs for a, b in zip(seen, h, strict=True)), f"{seen} against {h}"
    assert any(abs(a) > 3 * scale * a2_gs for a in seen), "codes of a block reach its largest"


COUNTED = "megamoe.ops.nvfp4_moe.inputs.COUNTED"


def test_weights_drawn_by_counting_are_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real layers use such weights. All experts differ, and their numbers have a normal distribution."""
    monkeypatch.setattr(COUNTED, 2 * 256 * 128)
    case = SPEC.case(hidden=128, intermediate=128, num_experts=7, tokens=1)
    inputs = MOE.make_inputs(case)
    for name, rows in (("w1", 256), ("w2", 128)):
        experts = {inputs[f"{name}_codes"][expert].numpy().tobytes() for expert in range(7)}
        assert len(experts) == 7, f"two experts have the same {name}"
        assert len(inputs[f"{name}_gs"].unique()) == 7, f"two experts have the same global scale of {name}"
        sf = unswizzle_scales(inputs[f"{name}_sf"], rows, 128 // SF_VEC_SIZE)
        values = dequantise(inputs[f"{name}_codes"], sf, inputs[f"{name}_gs"]) * 128**0.5
        assert values.mean().abs() < 0.02, f"{name} has the mean {values.mean()}; N(0, 1) is asked for"
        assert values.std(dim=(1, 2)).sub(1).abs().max() < 0.3, f"{name} has the deviations {values.std(dim=(1, 2))}"
    assert tuple(inputs["w1_sf"].shape) == SPEC.shape("w1_sf", case)


def test_what_is_drawn_by_counting_does_not_depend_on_where_or_in_what_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An H200 and this CPU draw the same bits; the device's digests come from a record."""
    held = json.loads((ROOT / "results" / "records" / "h200-moe-draws.json").read_text())
    for drawn in held["drawn"]:
        monkeypatch.setattr(COUNTED, drawn["counted_from"])
        made = MOE.make_inputs(SPEC.parse_case(drawn["case"]))
        found = {name: hashlib.sha256(bytes_of(made[name])).hexdigest() for name in drawn["sha256"]}
        assert found == drawn["sha256"], f"{drawn['case']}, counted from {drawn['counted_from']} numbers on"
    case = SPEC.case(hidden=256, intermediate=128, num_experts=5, tokens=1)
    whole = counted_normal(case, "w1", 0, 4096, "cpu")
    parts = torch.cat([counted_normal(case, "w1", first, 512, "cpu") for first in range(0, 4096, 512)])
    assert torch.equal(whole, parts), "a number depends on its place alone"
    assert not torch.equal(whole, counted_normal(case, "w2", 0, 4096, "cpu")), "another stream has other numbers"
    with pytest.raises(ValueError, match="must be multiples of 4"):
        counted_normal(case, "w1", 2, 512, "cpu")


def test_rows_of_one_real_layer_share_its_weights_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COUNTED, 128 * 128)
    case = SPEC.case(hidden=128, intermediate=128, num_experts=4, tokens=5, topk=2)
    first, others = MOE.make_inputs(case), {"tokens": 6, "load": "skewed", "stage": "l2"}
    for axis, value in others.items():
        made = MOE.make_inputs(SPEC.vary(case, **{axis: value}))
        assert made["w2_codes"] is first["w2_codes"], f"with another {axis} the same weights were drawn again"
        assert not torch.equal(made["topk_ids"], first["topk_ids"]), f"routes do not change with {axis}"
    for what, other in {
        "seed": SPEC.vary(case, seed=1),
        "hidden": SPEC.vary(case, hidden=256),
        "num_experts": SPEC.vary(case, num_experts=5),
        "inputs": SPEC.vary(case, inputs="poisoned_padding"),
    }.items():
        made = MOE.make_inputs(other)
        assert not torch.equal(made["w2_codes"][:4, :128].flatten(), first["w2_codes"].flatten()), f"another {what}"
    copies, alive = {name: tensor.clone() for name, tensor in first.items()}, weakref.ref(first["w1_codes"])
    del first
    assert alive() is None, "weights are kept that nobody has"
    again = MOE.make_inputs(case)
    assert all(torch.equal(again[name], copies[name]) for name in copies), "the bits depend on what was drawn before"
    again["w1_codes"].zero_()
    assert torch.equal(MOE.make_inputs(case)["w1_codes"], copies["w1_codes"]), "what somebody has changed is handed on"


@pytest.mark.parametrize("stage", ["layer", "l1"])
def test_references_of_one_case_share_its_activations(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share it with no other case: neither for other inputs, nor for the same tensors with other numbers."""
    asked: list[str] = []

    def noted(case: Case, inputs: Mapping[str, torch.Tensor], routes: Routing) -> Activation:
        asked.append(case.id)
        return activation(case, inputs, routes)

    monkeypatch.setattr("megamoe.ops.nvfp4_moe.reference.activation", noted)
    case = SPEC.case(hidden=128, intermediate=128, num_experts=2, tokens=5, topk=2, stage=stage)
    inputs = MOE.make_inputs(case)
    oracle = MOE.oracle(case, inputs)
    MOE.latitude(case, inputs, MOE.simulated(case, inputs), oracle)
    assert asked == [case.id], "the activations of one case are computed once"
    changed = {**inputs, "w1_gs": inputs["w1_gs"] * 2}
    name = "y" if stage == "layer" else "a2_sf"
    assert not torch.equal(MOE.oracle(case, changed)[name], oracle[name]), "another tensor went unnoticed"
    inputs["w1_gs"].mul_(2)
    assert torch.equal(MOE.oracle(case, inputs)[name], MOE.oracle(case, changed)[name]), "a change went unnoticed"
    clamped = SPEC.vary(case, clamp=0.01)
    assert not torch.equal(MOE.oracle(clamped, inputs)[name], MOE.oracle(case, inputs)[name]), "another case did"


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_poisoned_padding_is_poison() -> None:
    case = SPEC.case(hidden=128, intermediate=128, num_experts=2, tokens=5, inputs="poisoned_padding")
    clean = SPEC.vary(case, inputs="normal")
    assert int((MOE.make_inputs(case)["x_sf"] == 0x7F).sum()) == (128 - 5) * 8, "all padding of x_sf is NaN"
    assert not int((MOE.make_inputs(clean)["x_sf"] == 0x7F).sum()), "and only then"
    for stage, name in (("requantise", "h"), ("combine", "rows")):
        held = MOE.make_inputs(SPEC.vary(case, stage=stage))[name]
        assert int(held.isnan().all(dim=1).sum()) == len(held) - 5, f"padding rows of {name} are NaN"
