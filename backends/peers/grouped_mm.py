"""torch's grouped matrix product on weights that were dequantised to bf16: what a model without FP4 kernels runs.

Weights are codes times block scales, exact in bf16. Both global scales are in the activations, rounded to bf16, so that
the product is the contract's row with nothing left to do to it. All of that is prepared; the product allocates its
result, which `collect` copies to the expert rows.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from backends.peers.expert_rows import (
    GemmLimits,
    activations,
    expert_rows,
    output_scale,
    place_rows,
    weight_scales,
)
from backends.peers.own_results import OwnResults
from backends.peers.peer import Peer, Tensors

if TYPE_CHECKING:
    from megamoe.contract import Case, PreparedCall


def _prepare(case: Case, tensors: Tensors) -> PreparedCall:
    import torch

    from megamoe.codec.nvfp4 import dequantise

    rows = expert_rows(case, tensors)
    scale = output_scale(tensors)[rows.expert][:, None]
    a = (activations(case, tensors, rows).float() * scale).bfloat16()
    w = dequantise(tensors["w2_codes"], weight_scales(case, tensors), dtype=torch.bfloat16).transpose(-2, -1)
    ends = rows.ends.int()
    return OwnResults(lambda: (torch.ops.aten._grouped_mm(a, w, ends),), partial(place_rows, tensors, rows))


TORCH_GROUPED_MM: Final = Peer(
    "torch-grouped-mm",
    "nvfp4_moe",
    ("sm_90a", "sm_100a"),
    ("torch",),
    GemmLimits(),
    _prepare,
    "torch._grouped_mm on bf16 weights",
)
