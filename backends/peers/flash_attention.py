"""Flash-attention 3 (the wheel fa3-fwd) and 4 (flash-attn-4), each through its own Python interface.

Both take q, k and v as [batch, rows, heads, hd]; ours go in as transposed views, with the last dimension contiguous.
Both align masks bottom-right, and their window counts the keys left of the query without its own. Neither public
function takes an output; `collect` copies o and lse.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final

from backends.peers.attention import AttentionLimits, mask_of, place_heads_second, scale_of
from backends.peers.own_results import OwnResults
from backends.peers.peer import Peer, Tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from megamoe.contract import Case, PreparedCall


def _prepare_fa3(case: Case, tensors: Tensors) -> PreparedCall:
    import torch

    fa3 = import_module("fa3_fwd_interface")
    batch, t, s_k, hd = (case.int(axis) for axis in ("batch", "t", "s_k", "hd"))
    q, k, v = (tensors[name].transpose(1, 2) for name in ("q", "k", "v"))
    lengths = torch.full((batch,), s_k, dtype=torch.int32, device=q.device)
    # num_splits=0 lets its heuristic split the cache, and the metadata balances the splits. Without both there is one
    # split, an unfair baseline.
    options = {"causal": mask_of(case).causal, "num_splits": 0, "pack_gqa": _packing(case)}
    plan = fa3.get_scheduler_metadata(
        batch, t, s_k, q.shape[2], k.shape[2], hd, lengths, qkv_dtype=q.dtype, headdim_v=hd, **options
    )

    def launch() -> Sequence[torch.Tensor]:
        return fa3.flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=lengths,
            softmax_scale=scale_of(case),
            scheduler_metadata=plan,
            return_softmax_lse=True,
            **options,
        )[:2]

    return OwnResults(launch, partial(place_heads_second, tensors))


def _packing(case: Case) -> bool | None:
    # Decode fills a tile of rows with the heads that share keys. MHA has nothing to pack: the library decides.
    return True if case["heads"] != case["kv_heads"] else None


def _prepare_fa4(case: Case, tensors: Tensors) -> PreparedCall:
    interface = import_module("flash_attn.cute")
    mask = mask_of(case)
    q, k, v = (tensors[name].transpose(1, 2) for name in ("q", "k", "v"))
    window = (None, None) if mask.window is None else (mask.window - 1, 0 if mask.causal else None)
    launch = partial(
        interface.flash_attn_func,
        q,
        k,
        v,
        softmax_scale=scale_of(case),
        causal=mask.causal,
        window_size=window,
        num_splits=1,
        pack_gqa=_packing(case),
        return_lse="lse" in tensors,
    )
    wanted = 2 if "lse" in tensors else 1
    return OwnResults(lambda: launch()[:wanted], partial(place_heads_second, tensors))


FA3: Final = Peer(
    "fa3",
    "fmha",
    ("sm_90a",),
    ("fa3-fwd", "torch"),
    AttentionLimits(
        hd=(64, 128, 256),
        other_hd="hd 512: flash-attention 3 ends at hd 256",
        window="a window: the wheel is built with FLASHATTENTION_DISABLE_LOCAL (its fa3_fwd_config)",
    ),
    _prepare_fa3,
    "flash_attn_with_kvcache with num_splits=0 and get_scheduler_metadata, pack_gqa for GQA",
)
FLASH_ATTN_4: Final = Peer(
    "flash-attn-4",
    "fmha",
    ("sm_90a", "sm_100a"),
    ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "torch"),
    AttentionLimits(
        hd=(64, 128, 256),
        other_hd="hd 512: flash-attention 4 has it for one shared K and V (MLA) on Blackwell alone",
    ),
    _prepare_fa4,
    "flash_attn_func with num_splits=1 (it does not split the cache on sm_90), pack_gqa for GQA; compiled once",
)
