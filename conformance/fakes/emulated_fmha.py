"""A flash-attention kernel in torch, rounding by rounding: legal in many ways (`Style`), wrong in named ones (FAULTS).

It shares no code with the references, so that the judge is tried on something that it did not make itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from megamoe.contract import Case

# Planted faults, in words. Each is a mistake that people make in kernels.
FAULTS: Final[Mapping[str, str]] = {
    "scale_1_percent": "the softmax scale is 1 % too large",
    "key_dropped": "the last key is never attended to",
    "key_past_s_k": "one zero-filled key past s_k takes part",
    "last_tile_unmasked": "the zero-filled keys of the ragged last tile take part",
    "mask_off_by_one": "the causal or window mask is one key too wide",
    "rows_swapped": "two query rows are swapped in the output",
    "lse_base_2": "lse is a logarithm to base 2",
    "lse_of_rounded_p": "lse is that of the bf16 P, not of the fp32 P",
    "kv_head_modulo": "query head h reads kv head h % kv_heads",
    "bf16_accumulation": "o is rounded to bf16 after every MMA of 16 keys",
    "no_rescale": "o and the row sum are not rescaled when the row maximum grows",
    "no_row_maximum": "exp2 of the logits without subtracting the row maximum",
    "v_blocks_swapped": "two blocks of 8 keys of v are swapped within a tile",
    "fp8_p": "P is rounded to e4m3 instead of bf16",
    "last_column_unwritten": "the last column of o is never written",
    "flush_to_zero": "subnormal results are flushed to zero",
    "one_wrong_element": "one element of o is off by a tenth of its row's magnitude",
}


@dataclass(frozen=True, slots=True)
class Style:
    """Choices that a correct kernel is free to make.

    `stale_bits`: how far the subtracted maximum may lag, in log2. `sum_rounded_p`: o is divided by the sum of the bf16
    P, so that its rounding cancels in part; lse is that of the fp32 P all the same.
    """

    tile: int = 128
    shuffle_tiles: bool = False
    stale_bits: float = 0.0
    exp2_ulps: float = 0.0
    truncate: bool = False
    sum_rounded_p: bool = False
    seed: int = 0


def emulate(
    case: Case, inputs: Mapping[str, torch.Tensor], style: Style, fault: str | None = None
) -> dict[str, torch.Tensor]:
    """bf16 o and f32 lse of `case` as a kernel of that style computes them, with one fault of FAULTS if named."""
    generator = torch.Generator().manual_seed(style.seed)
    q, k, v = (inputs[name].float() for name in ("q", "k", "v"))
    o, lse = torch.empty(q.shape), torch.empty(q.shape[:-1])
    heads, kv_heads = case.int("heads"), case.int("kv_heads")
    for batch in range(case.int("batch")):
        for head in range(heads):
            kv = (batch, head % kv_heads if fault == "kv_head_modulo" else head * kv_heads // heads)
            o[batch, head], lse[batch, head] = _head(case, q[batch, head], k[kv], v[kv], style, fault, generator)
    return _store(o, lse, bool(case["lse"]), fault)


def _store(o: torch.Tensor, lse: torch.Tensor, with_lse: bool, fault: str | None) -> dict[str, torch.Tensor]:
    if fault == "rows_swapped":
        o[..., [0, -1], :] = o[..., [-1, 0], :]
    if fault == "last_column_unwritten":
        o[..., -1] = math.nan
    if fault == "one_wrong_element":
        o[0, 0, -1, 3] += 0.1 * o[0, 0, -1].square().mean().sqrt()
    if fault == "flush_to_zero":
        o = torch.where(o.abs() < torch.finfo(torch.float32).tiny, 0.0, o)
    if fault == "lse_base_2":
        lse = lse * math.log2(math.e)
    return {"o": o.bfloat16(), "lse": lse} if with_lse else {"o": o.bfloat16()}


def _mask(case: Case, keys: int, tile: int, fault: str | None) -> torch.Tensor:
    """bool [t, keys] on keys padded to a whole tile."""
    t, s_k, window = case.int("t"), case.int("s_k"), case["window"]
    wider = 1 if fault == "mask_off_by_one" else 0
    key, position = torch.arange(keys)[None, :], torch.arange(t)[:, None] + s_k - t
    bound = {"key_dropped": s_k - 1, "key_past_s_k": s_k + 1, "last_tile_unmasked": keys}.get(fault or "", s_k)
    seen = (key < bound).expand(t, keys)
    if case["causal"]:
        seen = seen & (key <= position + wider)
    if window is not None:
        seen = seen & (key > position - int(window) - wider)
    return seen


def _head(
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    style: Style,
    fault: str | None,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    s_k, hd, tile = case.int("s_k"), case.int("hd"), style.tile
    keys = -(-(s_k + (fault == "key_past_s_k")) // tile) * tile
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, keys - s_k)) for x in (k, v))
    if fault == "v_blocks_swapped":
        v = v.clone()
        v[:16] = v[:16].roll(8, dims=0)
    own_scale = case["scale"]
    scale = (1 / math.sqrt(hd) if own_scale is None else float(own_scale)) * math.log2(math.e)
    s = _matmul(q, k.mT, style, bf16=False) * torch.tensor(scale * (1.01 if fault == "scale_1_percent" else 1.0))
    s = s.masked_fill(~_mask(case, keys, tile, fault), -math.inf)
    starts = list(range(0, keys, tile))
    if style.shuffle_tiles:
        starts = [starts[i] for i in torch.randperm(len(starts), generator=generator).tolist()]
    return _online_softmax([(s[:, i : i + tile], v[i : i + tile]) for i in starts], style, fault, generator)


def _online_softmax(
    tiles: list[tuple[torch.Tensor, torch.Tensor]], style: Style, fault: str | None, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, hd = tiles[0][0].shape[0], tiles[0][1].shape[1]
    acc, row_max = torch.zeros(rows, hd), torch.full((rows,), -math.inf)
    row_sum, rounded_sum = torch.zeros(rows), torch.zeros(rows)
    for s, v in tiles:
        new_max = torch.maximum(row_max, s.amax(dim=1))
        new_max = torch.where(new_max - row_max > style.stale_bits, new_max, row_max)
        shift = torch.where(new_max == -math.inf, 0.0, new_max)
        if fault == "no_row_maximum":
            shift = torch.zeros_like(shift)
        factor = torch.exp2(torch.where(row_max == -math.inf, shift, row_max) - shift)
        if fault in ("no_rescale", "no_row_maximum"):
            factor = torch.ones_like(factor)
        row_max = new_max if fault != "no_row_maximum" else torch.zeros_like(new_max)
        p = torch.exp2(s - shift[:, None])
        p = p * (1 + style.exp2_ulps * 2.0**-23 * (2 * torch.rand(p.shape, generator=generator) - 1))
        p_rounded = p.to(torch.float8_e4m3fn).float() if fault == "fp8_p" else p.bfloat16().float()
        row_sum = row_sum * factor + p.sum(dim=1)
        rounded_sum = rounded_sum * factor + p_rounded.sum(dim=1)
        acc = _matmul(p_rounded, v, style, bf16=fault == "bf16_accumulation", start=acc * factor[:, None])
    divisor = rounded_sum if style.sum_rounded_p else row_sum
    o = acc * torch.where(divisor > 0, 1 / divisor, 0.0)[:, None]
    lse_sum = rounded_sum if fault == "lse_of_rounded_p" else row_sum
    return o, (row_max + torch.log2(lse_sum)) * math.log(2)


def _matmul(
    a: torch.Tensor, b: torch.Tensor, style: Style, *, bf16: bool, start: torch.Tensor | None = None
) -> torch.Tensor:
    """fp32 product, in steps of K = 16 with each step truncated to fp32 if the style says so."""
    acc = torch.zeros(a.shape[0], b.shape[1]) if start is None else start
    if not (style.truncate or bf16):
        return acc + a @ b
    for k in range(0, a.shape[1], 16):
        exact = acc.double() + a[:, k : k + 16].double() @ b[k : k + 16].double()
        acc = exact.bfloat16().float() if bf16 else _truncate(exact)
    return acc


def _truncate(exact: torch.Tensor) -> torch.Tensor:
    nearest = exact.float()
    return torch.where(nearest.double().abs() > exact.abs(), nearest.nextafter(torch.zeros(())), nearest)


def styles(seed: int) -> tuple[Style, ...]:
    """Legal kernels, from the plainest to one that takes every liberty at once."""
    plain = Style(seed=seed)
    return (
        plain,
        replace(plain, tile=64, shuffle_tiles=True),
        replace(plain, tile=32, stale_bits=8.0),
        replace(plain, truncate=True, exp2_ulps=2.0),
        replace(plain, sum_rounded_p=True),
        Style(tile=16, shuffle_tiles=True, stale_bits=8.0, exp2_ulps=2.0, truncate=True, seed=seed),
    )
