"""NVFP4 MoE: y = sum over a token's experts of weight * W2 requantise(swiglu(W1 x)), and each stage by itself.

The contract, stage by stage. megamoe.codec.routing defines the layout of expert rows.

* l1: gate and up are products of codes and block scales accumulated in fp32, times x_gs and w1_gs; h = silu(gate) * up
  in fp32, after min(gate, clamp) and max(-clamp, min(up, clamp)) if there is a clamp; times the top-k weight if
  `weight` is "before". The kernel requantises h at once.
* requantise: h in blocks of 16 to e2m1 codes and e4m3 scales under a2_gs of the expert: sf = e4m3(max|block| / 6 /
  a2_gs), code = e2m1(h / (sf * a2_gs)), to nearest even and saturating; codes are 0 where sf is 0.
* l2: codes and block scales accumulated in fp32, times a2_gs and w2_gs, rounded to bf16: one row per route.
* combine: a token's rows summed in fp32 in ascending k, each times its top-k weight if `weight` is "after"; bf16.
  A token without a route on this rank has y = 0.

With activations=bf16, x and a2 are bf16 and have no global scale, and requantising means rounding to bf16; the oracle
does not round.

Padding rows of a2_codes, a2_sf, a2, h and rows mean nothing: a kernel may leave them unwritten or write anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from megamoe.codec.nvfp4 import (
    SF_VEC_SIZE,
    decode_e2m1,
    decode_e4m3,
    dequantise,
    pack,
    swizzle_scales,
    unpack,
    unswizzle_scales,
)
from megamoe.codec.routing import Routing, expert_rows, routing
from megamoe.ops import Codes, Latitude, full_precision
from megamoe.ops.nvfp4_moe.inputs import EXACT, draw_topk_ids, input_names, output_names, sample_tokens
from megamoe.ops.nvfp4_moe.inputs import make_inputs as make_inputs
from megamoe.ops.nvfp4_moe.settle import choices, code_interval, scale_interval, settled
from megamoe.ops.nvfp4_moe.stages import Activation, Requantised, activation, combine, l2, requantise

if TYPE_CHECKING:
    from megamoe.contract import Case
    from megamoe.ops import Sample

ABSOLUTE_SCALE: Final[Mapping[str, float]] = {}
# tcgen05.mma.kind::mxf4nvf4 does four times the products of kind::f16 (K 64 instead of 16 for one instruction shape,
# PTX ISA, tcgen05.mma). sm_90a's wgmma has no such kind, and a block scale is exact in bf16 only.
MATRIX_RATES: Final[Mapping[str, float]] = {"sm_100a": 4.0}
Inputs = Mapping[str, torch.Tensor]


def oracle(case: Case, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The stage's outputs in float64, with the contract's requantisation; a2_codes and a2_sf are uint8."""
    return _outputs(case, inputs, torch.float64)


def simulated(case: Case, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The stage's outputs in their own dtypes: fp32 accumulation, bf16 rows, fp32 sums.

    The requantised activations are the oracle's, so a code that fp32 rounds to the other side of a step adds no noise;
    `latitude` handles such codes. Raises ValueError if torch uses reduced precision for fp32 products.
    """
    full_precision(case)
    return _outputs(case, inputs, torch.float32)


def _outputs(case: Case, inputs: Inputs, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    routes, stage = routing(case, inputs["topk_ids"]), case["stage"]
    rounded = torch.bfloat16 if dtype == torch.float32 else dtype
    if stage in ("l1", "requantise") and case["activations"] == "bf16":
        a2 = _given(case, inputs, routes).h.to(rounded)
        return {"a2": _scattered(routes, a2, torch.zeros(routes.capacity, a2.shape[1], dtype=rounded))}
    if stage in ("l1", "requantise"):
        return _a2_tensors(case, routes, _nominal(case, inputs, routes)[1])
    if stage == "combine":
        return {"y": combine(case, routes, inputs["rows"][routes.row].to(dtype), inputs["topk_weights"]).to(rounded)}
    rows = l2(case, inputs, routes, _a2_values(case, inputs, routes, dtype), dtype).to(rounded)
    if stage == "l2":
        return {"rows": _scattered(routes, rows, torch.zeros(routes.capacity, rows.shape[1], dtype=rounded))}
    return {"y": combine(case, routes, rows.to(dtype), inputs["topk_weights"]).to(rounded)}


def _given(case: Case, inputs: Inputs, routes: Routing) -> Activation:
    """What the stage requantises. Cached: the oracle, simulated reference and latitude of a case share it."""
    if case["stage"] == "requantise":
        h = inputs["h"][routes.row].double()
        return Activation(h, torch.zeros_like(h))
    seen = (case.id, {name: (WeakIdRef(tensor), tensor._version) for name, tensor in inputs.items()})
    kept = _ACTIVATIONS.get(inputs["topk_ids"])
    if kept is None or kept[0] != seen:
        kept = _ACTIVATIONS[inputs["topk_ids"]] = seen, activation(case, inputs, routes)
    return kept[1]


_Seen = tuple[str, dict[str, tuple[WeakIdRef, int]]]
_ACTIVATIONS: Final[MutableMapping[torch.Tensor, tuple[_Seen, Activation]]] = WeakIdKeyDictionary()
"""Activations by topk_ids tensor, with the case id and input versions they were computed from. Entries end with the
tensor."""


def _nominal(case: Case, inputs: Inputs, routes: Routing) -> tuple[Activation, Requantised]:
    """What the stage requantises, and the requantised result."""
    given = _given(case, inputs, routes)
    return given, requantise(given.h, inputs["a2_gs"][routes.expert])


def _a2_values(case: Case, inputs: Inputs, routes: Routing, dtype: torch.dtype) -> torch.Tensor:
    """[routes, intermediate]: codes times block scales, or bf16 values. Stage l2 has them as an input."""
    if case["activations"] == "bf16":
        if case["stage"] == "l2":
            return inputs["a2"][routes.row].to(dtype)
        h = _given(case, inputs, routes).h
        return h if dtype == torch.float64 else h.bfloat16().to(dtype)
    if case["stage"] == "l2":
        sf = unswizzle_scales(inputs["a2_sf"], routes.capacity, case.int("intermediate") // SF_VEC_SIZE)
        return dequantise(inputs["a2_codes"][routes.row], sf[routes.row], dtype=dtype)
    nominal = _nominal(case, inputs, routes)[1]
    return dequantise(pack(nominal.codes), nominal.sf, dtype=dtype)


def _a2_tensors(case: Case, routes: Routing, found: Requantised) -> dict[str, torch.Tensor]:
    codes = _scattered(
        routes, pack(found.codes), torch.zeros(routes.capacity, found.codes.shape[1] // 2, dtype=torch.uint8)
    )
    sf = _scattered(routes, found.sf, torch.zeros(routes.capacity, found.sf.shape[1], dtype=torch.uint8))
    return {"a2_codes": codes, "a2_sf": swizzle_scales(sf)}


def _scattered(routes: Routing, values: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    into = into.to(values.device)
    into[routes.row] = values
    return into


def free(case: Case, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Marks the padding rows of the expert-row tensors that the stage writes."""
    if case["stage"] in ("layer", "combine"):
        return {}
    padding = torch.ones(expert_rows(case), dtype=torch.bool, device=inputs["topk_ids"].device)
    padding[routing(case, inputs["topk_ids"]).row] = False
    if case["stage"] == "l2":
        return {"rows": padding[:, None].expand(-1, case.int("hidden"))}
    if case["activations"] == "bf16":
        return {"a2": padding[:, None].expand(-1, case.int("intermediate"))}
    blocks = case.int("intermediate") // SF_VEC_SIZE
    codes = padding[:, None].expand(-1, case.int("intermediate") // 2)
    return {"a2_codes": codes, "a2_sf": swizzle_scales(padding[:, None].expand(-1, blocks).byte(), padding=1).bool()}


def latitude(case: Case, inputs: Inputs, outputs: Inputs, expected: Inputs) -> Latitude:
    """Codes and scales that may lie on either side of a step, and the oracle's y for the side that the kernel took.

    In the combine stage the only choice is whether products and sums are fused: y is one bf16 or one of two. Under
    `exact_sums` without a clamp there is no choice in any stage: outputs are the oracle's numbers, either zero for 0.
    """
    routes, stage = routing(case, inputs["topk_ids"]), case["stage"]
    if stage == "combine":
        return Latitude(codes={"y": _combined(case, inputs, outputs["y"], routes)} if "y" in outputs else {})
    one_answer = case.inputs == EXACT and case["clamp"] is None
    coded = case["activations"] == "nvfp4" and stage in ("l1", "requantise")
    if one_answer and not coded:
        return Latitude(codes=_only(outputs, expected, routes))
    if stage == "l2" or case["activations"] == "bf16":
        return Latitude()
    given, nominal = _nominal(case, inputs, routes)
    if one_answer:
        given = replace(given, slack=torch.zeros_like(given.slack))
    gs = inputs["a2_gs"][routes.expert]
    if stage == "layer":
        y = settled(case, inputs, routes, choices(given, gs, nominal), outputs["y"], expected["y"])
        return Latitude(oracle={"y": y})
    blocks = case.int("intermediate") // SF_VEC_SIZE
    sf = unswizzle_scales(outputs["a2_sf"], routes.capacity, blocks)[routes.row]
    codes = unpack(outputs["a2_codes"])[routes.row]
    usable = torch.where(sf < 0x7F, sf, nominal.sf)
    scales, steps = scale_interval(given, gs), code_interval(given, gs, usable)
    axes = {"a2_codes": ("expert_row", "intermediate"), "a2_sf": ("expert_row", "block")}
    # ue4m3 has no sign: a scale with the sign bit set, or a NaN, lies in no interval.
    seen = torch.where(sf < 0x7F, decode_e4m3(sf, torch.float64), torch.nan)
    return Latitude(
        codes={
            "a2_codes": Codes(
                decode_e2m1(codes, torch.float64), steps.lowest, steps.highest, axes["a2_codes"], routes.row
            ),
            "a2_sf": Codes(seen, scales.lowest, scales.highest, axes["a2_sf"], routes.row),
        }
    )


def _only(outputs: Inputs, expected: Inputs, routes: Routing) -> dict[str, Codes]:
    """Each output but padding rows, with the oracle's numbers as the only right ones."""
    only: dict[str, Codes] = {}
    for name, output in outputs.items():
        right = expected[name].bfloat16().double()
        at = torch.arange(len(right), device=right.device) if name == "y" else routes.row
        axes = {"y": ("tokens", "hidden"), "rows": ("expert_row", "hidden"), "a2": ("expert_row", "intermediate")}
        only[name] = Codes(output.to(right.device)[at].double(), right[at], right[at], axes[name], at)
    return only


def _combined(case: Case, inputs: Inputs, y: torch.Tensor, routes: Routing) -> Codes:
    """The combine stage's y, between the fused result and the unfused one."""
    rows, weight = inputs["rows"][routes.row].float(), inputs["topk_weights"]
    ends = [combine(case, routes, rows, weight, fused=one).bfloat16().double() for one in (False, True)]
    tokens = torch.arange(len(y), device=y.device)
    return Codes(y.to(rows.device).double(), torch.minimum(*ends), torch.maximum(*ends), ("tokens", "hidden"), tokens)


def sample(case: Case, inputs: Inputs, most_flops: int) -> Sample | None:
    """Some tokens of a layer that is too large for its oracle. A single stage is small enough as it is."""
    return sample_tokens(case, inputs, most_flops / useful_flops(case)) if case["stage"] == "layer" else None


def useful_flops(case: Case) -> int:
    """Multiplications and additions of the routed tokens' products and of the combine, without padding."""
    routes = int((draw_topk_ids(case) >= 0).sum())
    hidden, intermediate = case.int("hidden"), case.int("intermediate")
    # SwiGLU and requantisation take a few operations per element, counted as 8.
    each = {
        "l1": 4 * hidden * intermediate + 8 * intermediate,
        "requantise": 8 * intermediate,
        "l2": 2 * hidden * intermediate,
        "combine": 2 * hidden,
    }
    stage = str(case["stage"])
    return routes * (each["l1"] + each["l2"] + each["combine"] if stage == "layer" else each[stage])


def minimum_bytes(case: Case) -> int:
    """Bytes of the tokens and experts that have a route, and of the outputs, each moved once."""
    routes = routing(case, ids := draw_topk_ids(case))
    hidden, intermediate = case.int("hidden"), case.int("intermediate")
    tokens, experts, rows = len(routes.token.unique()), len(routes.expert.unique()), len(routes.row)
    moved = {*input_names(case), *output_names(case)}
    quantised = {
        "x_codes": tokens * hidden,
        "w1_codes": 2 * experts * hidden * intermediate,
        "w2_codes": experts * hidden * intermediate,
        "a2_codes": rows * intermediate,
    }
    plain = {"h": 4 * rows * intermediate, "rows": 2 * rows * hidden, "y": 2 * case.int("tokens") * hidden}
    plain |= {"x": 2 * tokens * hidden, "a2": 2 * rows * intermediate}
    plain |= {"topk_ids": 4 * ids.numel(), "topk_weights": 4 * ids.numel()}
    numbers = sum(count for name, count in quantised.items() if name in moved)
    return math.ceil(numbers * (0.5 + 1 / SF_VEC_SIZE)) + sum(size for name, size in plain.items() if name in moved)
