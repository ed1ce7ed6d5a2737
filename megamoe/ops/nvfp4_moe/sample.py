"""A few tokens of a real layer for the oracle. The y of a token depends on no other token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megamoe.codec.layout import swizzle_scales, unswizzle_scales
from megamoe.codec.nvfp4 import SF_VEC_SIZE
from megamoe.ops import Sample

if TYPE_CHECKING:
    from megamoe.contract import Case

OF_TOKENS = ("x_codes", "x_gs", "topk_ids", "topk_weights")


def sample_tokens(case: Case, inputs: Mapping[str, torch.Tensor], share: float) -> Sample | None:
    """`share` of the tokens of a layer, spread evenly from the first to the last; None if that is all of them.

    Inputs of tokens are cut to the chosen ones; weights are the same tensors. `x_sf` is swizzled anew with padding 0.
    """
    tokens = case.int("tokens")
    count = max(1, int(tokens * share))
    if count >= tokens:
        return None
    device = inputs["topk_ids"].device
    chosen = torch.linspace(0, tokens - 1, count, dtype=torch.float64).round().long().to(device)
    x_sf = unswizzle_scales(inputs["x_sf"], tokens, case.int("hidden") // SF_VEC_SIZE)
    cut = {name: inputs[name][chosen] for name in OF_TOKENS} | {"x_sf": swizzle_scales(x_sf[chosen])}
    axes = tuple((name, count if name == "tokens" else value) for name, value in case.axes)
    return Sample(
        replace(case, axes=axes), {**inputs, **cut}, {"y": chosen}, f"{count} of {tokens} tokens, evenly spread"
    )
