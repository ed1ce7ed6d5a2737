"""The CuTeDSL attention kernel of nvidia-cudnn-frontend for Hopper: the only packaged one with hd 512.

It takes q, k and v as they lie, [batch, heads, rows, hd]. Its wrapper does not pack heads that share keys into a tile
and would read the cache once a head, so heads are folded into rows, a view, where no key is hidden. The wrapper
allocates o and lse; `collect` copies them. It compiles on first use, when the call is prepared.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final

from backends.peers.attention import AttentionLimits, folded, mask_of, place_heads_first, scale_of
from backends.peers.own_results import OwnResults
from backends.peers.peer import Peer, Tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from megamoe.contract import Case, PreparedCall


def _prepare(case: Case, tensors: Tensors) -> PreparedCall:
    attend = import_module("cudnn.sdpa.fwd").sdpa_fwd_wrapper_dsl_sm90
    mask = mask_of(case)
    q = tensors["q"] if mask.hides else folded(case, tensors["q"])
    # Its window is the distance to the farthest visible key.
    options = {} if mask.window is None else {"window_size_left": mask.window - 1}

    def launch() -> Sequence[torch.Tensor]:
        results = attend(
            q,
            tensors["k"],
            tensors["v"],
            is_causal=mask.causal,
            causal_bottom_right=mask.causal,
            scale_softmax=scale_of(case),
            **options,
        )
        return results["o_tensor"], results["lse_tensor"]

    return OwnResults(launch, partial(place_heads_first, tensors))


CUDNN_FRONTEND: Final = Peer(
    "cudnn-frontend",
    "fmha",
    ("sm_90a",),
    ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "torch"),
    AttentionLimits(
        hd=(512,),
        other_hd="hd below 512: its Hopper kernel pays for tiles of 512 columns; torch-sdpa-cudnn has these",
        open_window="a window without causal: it is aligned bottom-right under causal alone",
        blind="queries that see no key (causal, t > s_k)",
    ),
    _prepare,
    "cudnn.sdpa.fwd.sdpa_fwd_wrapper_dsl_sm90; query heads folded into rows where nothing is masked",
)
