"""The laws of NVFP4 MoE. A docstring states the law; its second paragraph says how exact it is and why."""

from __future__ import annotations

import hashlib

import torch

from conformance.kernels.laws.agreement import same_bits
from conformance.kernels.laws.law import (
    Axes,
    Bench,
    BrokenLawError,
    Tensors,
    inputs_of,
    law,
    spec_of,
)
from megamoe.codec.nvfp4 import SF_VEC_SIZE, deinterleave, interleave, swizzle_scales, unswizzle_scales
from megamoe.contract import Case
from megamoe.ops.nvfp4_moe.inputs import tokens_of

LAYER: Axes = {"stage": "layer"}
FEW_KERNELS: Axes = {**LAYER, "interleave": 8}
"""Laws about routes and scales use one layout of w1, which is compiled in: what they permute is the same in every
layout."""
OF_EXPERTS = ("w1_codes", "w1_sf", "w1_gs", "w2_codes", "w2_sf", "w2_gs", "a2_gs")
STAGES = ("l1", "l2", "combine")


@law("nvfp4_moe", "bitwise", fixed=FEW_KERNELS, least={"tokens": 2}, runs=lambda axes: [axes] * 2)
def token_permutation(bench: Bench, case: Case) -> None:
    """Permuting the tokens, with their routes, permutes y.

    Bitwise: a token's arithmetic does not depend on its tile or on its row within the tile.
    """
    inputs = inputs_of(case)
    order = torch.randperm(case.int("tokens"), generator=_generator(case))
    permuted = bench.run(case, _of_tokens(case, inputs, order))
    plain = {"y": bench.run(case, inputs)["y"][order]}
    same_bits(case, permuted, plain, ("with tokens permuted", "as they are"))


@law("nvfp4_moe", "bitwise", fixed=FEW_KERNELS, least={"num_experts": 2}, runs=lambda axes: [axes] * 2)
def expert_permutation(bench: Bench, case: Case) -> None:
    """Renumbering the experts, other than shared ones, changes nothing.

    Bitwise: an expert's arithmetic does not depend on its number, and a token's sum is in the order of its choices.
    """
    inputs, plain = inputs_of(case), bench.run(case, inputs_of(case))
    order, routed = torch.arange(case.int("num_experts")), case.int("num_experts") - case.int("shared")
    order[:routed] = torch.randperm(routed, generator=_generator(case))
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order))
    ids = inputs["topk_ids"].long()
    renumbered = {**inputs, **{name: inputs[name][order] for name in OF_EXPERTS if name in inputs}}
    renumbered["topk_ids"] = torch.where(ids >= 0, number[ids.clamp(min=0)], -1).int()
    same_bits(case, bench.run(case, renumbered), plain, ("with experts renumbered", "as they are"))


def _halves(axes: Axes) -> list[Axes]:
    tokens = axes["tokens"]
    assert isinstance(tokens, int)
    return [axes, {**axes, "tokens": tokens // 2}, {**axes, "tokens": tokens - tokens // 2}]


@law("nvfp4_moe", "bitwise", fixed=FEW_KERNELS, least={"tokens": 2}, runs=_halves)
def batch_split(bench: Bench, case: Case) -> None:
    """A batch has the outputs of its two halves.

    Bitwise: tokens share nothing, and serving relies on answers that do not change with their neighbours.
    """
    inputs, tokens = inputs_of(case), case.int("tokens")
    together = bench.run(case, inputs)["y"]
    for here in (slice(0, tokens // 2), slice(tokens // 2, tokens)):
        alone = spec_of(case.op).vary(case, tokens=here.stop - here.start)
        half = bench.run(alone, _of_tokens(case, inputs, torch.arange(here.start, here.stop)))
        same_bits(case, {"y": together[here]}, half, ("as part of the batch", f"alone, from token {here.start}"))


@law("nvfp4_moe", "bitwise", fixed={**FEW_KERNELS, "shared": 0}, runs=lambda axes: [axes] * 2)
def zero_weight_expert(bench: Bench, case: Case) -> None:
    """An expert's numbers do not matter where its weight is zero.

    Bitwise except for the sign of a zero: zero times a number, and a number plus zero, are exact. The codes of the most
    loaded expert are replaced by others.
    """
    inputs = {name: tensor.clone() for name, tensor in inputs_of(case).items()}
    ids = inputs["topk_ids"]
    expert = int(torch.bincount(ids[ids >= 0].long(), minlength=case.int("num_experts")).argmax())
    inputs["topk_weights"][ids == expert] = 0.0
    plain = bench.run(case, inputs)["y"]
    for name in ("w1_codes", "w2_codes"):
        inputs[name][expert] = inputs[name][expert].flip(0) ^ 0x5A
    changed = bench.run(case, inputs)["y"]
    sides = (f"with other codes for expert {expert} of weight 0", "as they are")
    # -0 + 0 is 0, so adding 0 drops the sign of a zero.
    same_bits(case, {"y": changed + 0.0}, {"y": plain + 0.0}, sides)


@law("nvfp4_moe", "bitwise", fixed=FEW_KERNELS, runs=lambda axes: [axes] * 3)
def global_scale_power_of_two(bench: Bench, case: Case) -> None:
    """A power of two may be moved from the global scale of w1 to x, and one in the global scale of w2 comes out in y.

    Bitwise: it changes exponents alone, and all numbers are far from the ends of fp32 and bf16.
    """
    inputs = inputs_of(case)
    plain = bench.run(case, inputs)
    x = "x" if case["activations"] == "bf16" else "x_gs"
    moved = {**inputs, x: inputs[x] * 4.0, "w1_gs": inputs["w1_gs"] / 4.0}
    same_bits(case, bench.run(case, moved), plain, (f"with {x} * 4 and w1_gs / 4", "as they are"))
    larger = bench.run(case, {**inputs, "w2_gs": inputs["w2_gs"] * 8.0})
    same_bits(case, larger, {"y": plain["y"] * 8.0}, ("with w2_gs * 8", "expected, 8 times y"))


@law(
    "nvfp4_moe",
    "bitwise",
    fixed={**FEW_KERNELS, "topk": 1, "shared": 0},
    least={"num_experts": 2},
    runs=lambda axes: [axes, {**axes, "num_experts": 1}],
)
def dense_equals_one_expert(bench: Bench, case: Case) -> None:
    """If all tokens choose one expert, the layer is a dense one with its weights.

    Bitwise: the arithmetic is the same; the other experts are neither read nor waited for.
    """
    inputs = inputs_of(case)
    expert = int(torch.randint(case.int("num_experts"), (), generator=_generator(case)))
    inputs["topk_ids"] = torch.full_like(inputs["topk_ids"], expert)
    dense = {**inputs, **{name: inputs[name][expert : expert + 1] for name in OF_EXPERTS if name in inputs}}
    dense["topk_ids"] = torch.zeros_like(inputs["topk_ids"])
    alone = bench.run(spec_of(case.op).vary(case, num_experts=1), dense)
    same_bits(case, bench.run(case, inputs), alone, (f"all on expert {expert}", "as the only expert"))


@law(
    "nvfp4_moe", "bitwise", fixed=FEW_KERNELS, runs=lambda axes: [axes] + [{**axes, "stage": stage} for stage in STAGES]
)
def fused_equals_unfused(bench: Bench, case: Case) -> None:
    """The layer writes the same outputs as its stages one after the other.

    Bitwise: the contract says what is rounded between stages, so a fused kernel has no other numbers.
    """
    inputs = inputs_of(case)
    held: dict[str, torch.Tensor] = dict(inputs)
    for stage in STAGES:
        alone = spec_of(case.op).vary(case, stage=stage)
        wanted = spec_of(case.op).tensors_of(alone)
        held |= bench.run(alone, {name: held[name] for name, tensor in wanted.items() if tensor.role == "input"})
    same_bits(case, bench.run(case, inputs), {"y": held["y"]}, ("as one layer", "stage by stage"))


@law("nvfp4_moe", "bitwise", fixed=LAYER, runs=lambda axes: [axes] * 2)
def gate_up_swap_is_noticed(bench: Bench, case: Case) -> None:
    """Exchanging gate and up changes y, unless y is zero.

    Any changed bit will do: silu(a) * b is not silu(b) * a. Activations must not saturate until only their signs are
    left, nor come from tokens so small that silu(a) is a / 2.
    """
    inputs, turn = inputs_of(case), case.int("interleave")
    if "x" in inputs:
        inputs["x"] = torch.ldexp(inputs["x"], 1 - inputs["x"].abs().amax(dim=1, keepdim=True).frexp().exponent)
    if "a2_gs" in inputs:
        inputs["a2_gs"] = inputs["a2_gs"].clamp(min=2.0**-10)
    rows, blocks = 2 * case.int("intermediate"), case.int("hidden") // SF_VEC_SIZE
    sf = unswizzle_scales(inputs["w1_sf"], rows, blocks)
    gate, up = deinterleave(inputs["w1_codes"], turn)
    gate_sf, up_sf = deinterleave(sf, turn)
    swapped = {
        "w1_codes": interleave(up, gate, turn),
        "w1_sf": swizzle_scales(interleave(up_sf, gate_sf, turn)),
    }
    plain, other = bench.run(case, inputs)["y"], bench.run(case, {**inputs, **swapped})["y"]
    if bool(plain.any()) and torch.equal(plain, other):
        raise BrokenLawError(f"{case.id}: y is the same, to the bit, with gate and up exchanged")


def _of_tokens(case: Case, inputs: Tensors, order: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the inputs of the tokens in `order`."""
    return {**inputs, **tokens_of(case, inputs, order)}


def _generator(case: Case) -> torch.Generator:
    digest = hashlib.sha256(f"law|{case.id}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
