"""The stages of NVFP4 MoE in float64, one expert at a time, with the contract's requantisation between them.

A kernel requantises `Activation.h`; its fp32 value may be off by `slack`. Requantisation is a step function: an h
within `slack` of a step has two correct codes, and a block whose largest h lies there has two correct scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from megamoe.codec.nvfp4 import (
    SF_VEC_SIZE,
    decode_e2m1,
    decode_scales,
    deinterleave,
    dequantise,
    quantise,
    unswizzle_scales,
)
from megamoe.codec.routing import Routing

if TYPE_CHECKING:
    from megamoe.contract import Case

Inputs = Mapping[str, torch.Tensor]

ULP: Final = 2.0**-23
# One tcgen05.mma takes K = 64 (facts.md 2.1). It may truncate its sum to fp32.
K_PER_MMA: Final = 64
# exp and reciprocal, products with global scales and weights: 8 ulps, plus exp2 of a rounded product of g.
SWIGLU_ULPS: Final = 8.0


@dataclass(frozen=True, slots=True)
class Activation:
    """float64 [routes, intermediate] each: the values to requantise, and the largest error of a kernel's fp32."""

    h: torch.Tensor
    slack: torch.Tensor


@dataclass(frozen=True, slots=True)
class Requantised:
    """uint8 codes [routes, intermediate] (not packed) and block scales [routes, intermediate / 16]."""

    codes: torch.Tensor
    sf: torch.Tensor


def activation(case: Case, inputs: Inputs, routes: Routing) -> Activation:
    """The SwiGLU output of each route, times its top-k weight if `weight` is "before"."""
    shape = (len(routes.row), case.int("intermediate"))
    h, slack = (torch.empty(shape, dtype=torch.float64, device=routes.row.device) for _ in range(2))
    numbers, x_gs = _x(case, inputs)
    for expert, here in routes.experts():
        token = routes.token[here]
        x = numbers[token].double()
        w1 = weights(inputs, "w1", expert, 2 * case.int("intermediate"), case.int("hidden"))
        scale = x_gs[token].double()[:, None] * inputs["w1_gs"][expert].double()
        gate, up = deinterleave((x @ w1.mT * scale).mT, case.int("interleave"))
        norm = x.norm(dim=1, keepdim=True) * w1.norm(dim=1) * scale
        gate_slack, up_slack = deinterleave(norm.mT, case.int("interleave"))
        error = ULP * (2.0 + case.int("hidden") / K_PER_MMA / 2.0)
        h[here], slack[here] = swiglu(case, gate.mT, up.mT, gate_slack.mT * error, up_slack.mT * error)
    if case["weight"] == "before":
        weight = inputs["topk_weights"][routes.token, routes.choice].double()[:, None]
        h, slack = h * weight, slack * weight.abs()
    return Activation(h, slack)


def _x(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [tokens, hidden], exact, and their global scales [tokens]."""
    if case["activations"] == "bf16":
        return inputs["x"], torch.ones(case.int("tokens"), device=inputs["x"].device)
    sf = unswizzle_scales(inputs["x_sf"], case.int("tokens"), case.int("hidden") // SF_VEC_SIZE)
    return dequantise(inputs["x_codes"], sf, dtype=torch.bfloat16), inputs["x_gs"]


def swiglu(
    case: Case, gate: torch.Tensor, up: torch.Tensor, gate_slack: torch.Tensor, up_slack: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up and its slack. With a clamp c, gate is at most c and up between -c and c."""
    clamp = case["clamp"]
    if clamp is not None:
        limit = float(clamp)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    silu = gate * gate.sigmoid()
    h = silu * up
    # The slope of silu is at most 1.1.
    slack = 1.1 * gate_slack * (up.abs() + up_slack) + silu.abs() * up_slack
    return h, slack + h.abs() * ULP * (SWIGLU_ULPS + gate.abs())


def requantise(h: torch.Tensor, gs: torch.Tensor) -> Requantised:
    """h [routes, intermediate] under gs [routes], quantised as in `megamoe.codec.nvfp4.quantise`."""
    packed, sf = quantise(h.float(), gs)
    return Requantised(torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2), sf)


def l2(case: Case, inputs: Inputs, routes: Routing, a2: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[routes, hidden] of `dtype`: activations a2 [routes, intermediate], times their global scale, through W2."""
    rows = torch.empty(len(a2), case.int("hidden"), dtype=dtype, device=a2.device)
    for expert, here in routes.experts():
        w2 = weights(inputs, "w2", expert, case.int("hidden"), case.int("intermediate"), dtype)
        rows[here] = a2[here].to(dtype) @ w2.mT * gs2(inputs, expert, dtype)
    return rows


def gs2(inputs: Inputs, expert: int | torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The factor of the l2 sums: the global scales of W2 and, if present, of its activations."""
    scale = inputs["w2_gs"][expert].to(dtype)
    return inputs["a2_gs"][expert].to(dtype) * scale if "a2_gs" in inputs else scale


def combine(
    case: Case, routes: Routing, rows: torch.Tensor, topk_weights: torch.Tensor, *, fused: bool = False
) -> torch.Tensor:
    """[tokens, hidden] in the dtype of `rows` [routes, hidden], summed in ascending k; weighted if weight=after.

    `fused`: in fp32, each product is added without a rounding of its own.
    """
    y = torch.zeros(case.int("tokens"), rows.shape[1], dtype=rows.dtype, device=rows.device)
    for k in range(case.int("topk")):
        entry = (routes.choice == k).nonzero().flatten()
        token = routes.token[entry]
        weight = topk_weights[token, k].to(rows.dtype)[:, None] if case["weight"] == "after" else 1.0
        if fused:
            y[token] = (y[token].double() + rows[entry].double() * weight).to(rows.dtype)
        else:
            y[token] += rows[entry] * weight
    return y


def weights(
    inputs: Inputs, name: str, expert: int, rows: int, k: int, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """[rows, k]: codes times block scales of one expert, without the global scale; exact in `dtype`."""
    sf = unswizzle_scales(inputs[f"{name}_sf"][expert], rows, k // SF_VEC_SIZE)
    return dequantise(inputs[f"{name}_codes"][expert], sf, dtype=dtype)


def weight_columns(inputs: Inputs, w2_sf: torch.Tensor, expert: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """float64 [n, hidden]: columns [n] of the W2 of experts [n], times the global scales of W2 and of its activations.

    `w2_sf`: uint8 [num_experts, hidden, intermediate / 16], not swizzled.
    """
    pair = inputs["w2_codes"][expert, :, column // 2]
    codes = torch.where((column % 2 == 0)[:, None], pair & 15, pair >> 4)
    scales = decode_scales(w2_sf[expert, :, column // SF_VEC_SIZE], torch.float64)
    return decode_e2m1(codes, torch.float64) * scales * gs2(inputs, expert)[:, None]
