"""Humming's grouped W4A16 GEMM (the distribution humming-kernels): NVFP4 weights in memory, bf16 activations, wgmma.

Weights go in as the contract has them, but for block scales in plain rows; both global scales of an expert are its
second weight scale. Activations are codes times block scales, exact in bf16, sorted by expert with no padding. All of
that is prepared, and so is the compilation by nvcc, which takes seconds. The output goes to memory of our own, because
expert rows of a case have padding between them; `collect` copies it.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
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
    from collections.abc import Sequence

    import torch

    from megamoe.contract import Case, PreparedCall

_GEMM: Final = "grouped_contiguous"


def _prepare(case: Case, tensors: Tensors) -> PreparedCall:
    import torch

    # As it was measured: it compiles one kernel after the other.
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
    rows = expert_rows(case, tensors)
    a = activations(case, tensors, rows)
    layer = _layer(case, tensors)
    offsets = torch.nn.functional.pad(rows.ends, (1, 0))
    y = torch.empty(len(a), case.int("hidden"), dtype=torch.bfloat16, device=a.device)
    # A configuration by itself is for any number of rows. In a list each has a range, and the launcher looks up one
    # row first, whatever the call has; a list that holds both, and all between, is dozens of kernels to compile.
    tuning = import_module("humming.tune").get_heuristics_config(layer.humming_config, shape_m=len(a), gemm_type=_GEMM)

    def launch() -> Sequence[torch.Tensor]:
        layer(
            a,
            outputs=y,
            expert_layout=offsets,
            valid_shape_m=len(a),
            compute_config={"gemm_type": _GEMM},
            tuning_config=tuning,
        )
        return (y,)

    return OwnResults(launch, partial(place_rows, tensors, rows))


def _layer(case: Case, tensors: Tensors) -> torch.nn.Module:
    """The experts' second weights, in the order of bytes that the kernel wants."""
    import torch

    layer = (
        import_module("humming.layer")
        .HummingLayer(
            shape_n=case.int("hidden"),
            shape_k=case.int("intermediate"),
            num_experts=case.int("num_experts"),
            torch_dtype=torch.bfloat16,
            weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        )
        .to(tensors["w2_codes"].device)
    )
    layer.load_from_tensors(
        {
            "weight": tensors["w2_codes"],
            "weight_scale": weight_scales(case, tensors).view(torch.float8_e4m3fn),
            "weight_scale_2": output_scale(tensors),
        }
    )
    layer.transform()
    return layer


HUMMING: Final = Peer(
    "humming",
    "nvfp4_moe",
    ("sm_90a",),
    ("humming-kernels", "torch"),
    GemmLimits(),
    _prepare,
    "HummingLayer (modelopt, nvfp4) as grouped_contiguous, with its heuristic configuration",
)
