"""The attention kernels inside torch, one peer each, through the operators beneath scaled_dot_product_attention.

The public function picks a kernel by its own rules and returns no lse; the operators do the same work and return it.
q, k and v are views of the case's tensors: [batch, heads, t, hd], or transposed if an operator wants heads after rows.
Where no key is hidden, query heads that share keys are folded into rows if the kernel would otherwise read the cache
once a head; flash-attention folds by itself only for t = 1. `collect` copies the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from backends.peers.attention import (
    ALL_HD,
    AttentionLimits,
    folded,
    mask_of,
    place_heads_first,
    place_heads_second,
    scale_of,
)
from backends.peers.peer import OwnResults, Peer, Tensors
from megamoe.contract import Target, UnsupportedError

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Case, PreparedCall

# CausalFromBottomRight of the memory-efficient kernel's mask types.
_EFFICIENT_BOTTOM_RIGHT: Final = 2
_BOTH: Final[tuple[Target, ...]] = ("sm_90a", "sm_100a")


def _prepare_cudnn(case: Case, tensors: Tensors, *, fold: bool = False) -> PreparedCall:
    import torch

    q = folded(case, tensors["q"]) if fold else tensors["q"]
    launch = partial(
        torch.ops.aten._scaled_dot_product_cudnn_attention,
        q,
        tensors["k"],
        tensors["v"],
        None,
        "lse" in tensors,
        0.0,
        mask_of(case).causal,
        scale=scale_of(case),
    )
    try:
        return OwnResults(lambda: _wanted(tensors, launch()), partial(place_heads_first, tensors))
    except RuntimeError as error:
        # cuDNN decides by heuristics that differ between versions.
        if "xecution plan" in str(error):
            raise UnsupportedError(f"{case.id}: this cuDNN has no plan for it: {_first_line(error)}") from error
        raise


def _prepare_flash(case: Case, tensors: Tensors) -> PreparedCall:
    import torch

    mask = mask_of(case)
    q = tensors["q"] if mask.hides else folded(case, tensors["q"])
    window = {} if mask.window is None else {"window_size_left": mask.window - 1}
    if mask.window is not None:
        window["window_size_right"] = 0 if mask.causal else -1
    launch = partial(
        torch.ops.aten._flash_attention_forward,
        *(tensor.transpose(1, 2) for tensor in (q, tensors["k"], tensors["v"])),
        None,
        None,
        q.shape[2],
        case.int("s_k"),
        0.0,
        mask.causal,
        False,
        scale=scale_of(case),
        **window,
    )
    return OwnResults(lambda: _wanted(tensors, launch()), partial(place_heads_second, tensors))


def _prepare_efficient(case: Case, tensors: Tensors) -> PreparedCall:
    import torch

    causal = mask_of(case).causal
    q = tensors["q"] if causal else folded(case, tensors["q"])
    launch = partial(
        torch.ops.aten._efficient_attention_forward,
        *(tensor.transpose(1, 2) for tensor in (q, tensors["k"], tensors["v"])),
        None,
        None,
        None,
        None,
        None,
        0.0,
        _EFFICIENT_BOTTOM_RIGHT if causal else 0,
        "lse" in tensors,
        scale=scale_of(case),
    )
    return OwnResults(lambda: _wanted(tensors, launch()), partial(place_heads_second, tensors))


def _prepare_math(case: Case, tensors: Tensors) -> PreparedCall:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    visible = _visible(case, tensors["q"].device) if mask_of(case).hides else None
    grouped = case["heads"] != case["kv_heads"]

    def launch() -> Sequence[torch.Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            o = scaled_dot_product_attention(
                tensors["q"], tensors["k"], tensors["v"], attn_mask=visible, scale=scale_of(case), enable_gqa=grouped
            )
        return (o,)

    return OwnResults(launch, partial(place_heads_first, tensors))


def _visible(case: Case, device: torch.device) -> torch.Tensor:
    """bool [t, s_k]: the mask as a tensor."""
    import torch

    mask, t, s_k = mask_of(case), case.int("t"), case.int("s_k")
    behind = torch.arange(t, device=device)[:, None] + (s_k - t) - torch.arange(s_k, device=device)
    visible = behind >= 0 if mask.causal else torch.ones_like(behind, dtype=torch.bool)
    return visible if mask.window is None else visible & (behind < mask.window)


def _wanted(tensors: Tensors, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return results[: 2 if "lse" in tensors else 1]


def _cudnn_version() -> dict[str, str]:
    import torch

    return {"cudnn": str(torch.backends.cudnn.version())}


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


_NO_PLUS_INFINITY: Final = "queries that see no key (causal, t > s_k): its lse for them is not -inf"


def _peer(name: str, limits: AttentionLimits, prepare: Callable[[Case, Tensors], PreparedCall], recipe: str) -> Peer:
    return Peer(name, "fmha", _BOTH, ("torch",), limits, prepare, recipe)


def _cudnn_peer(name: str, fold: bool, masked_gqa: str | None, recipe: str) -> Peer:
    limits = AttentionLimits(
        hd=(64, 128, 256),
        other_hd="hd 512: the attention of cuDNN in torch ends at hd 256",
        offset_causal="causal with t != s_k: torch asks cuDNN for a mask that is aligned top-left",
        window="a window: torch does not pass one to cuDNN",
        masked_gqa=masked_gqa,
    )
    prepare = partial(_prepare_cudnn, fold=fold)
    return Peer(name, "fmha", _BOTH, ("torch",), limits, prepare, recipe, libraries=_cudnn_version)


CUDNN: Final = _cudnn_peer(
    "torch-sdpa-cudnn", False, None, "aten::_scaled_dot_product_cudnn_attention; GQA by cuDNN itself"
)
CUDNN_FOLDED: Final = _cudnn_peer(
    "torch-sdpa-cudnn-folded",
    True,
    "GQA under a mask: heads that are folded into rows would share one mask",
    "aten::_scaled_dot_product_cudnn_attention; query heads that share keys folded into rows",
)
FLASH: Final = _peer(
    "torch-sdpa-flash",
    AttentionLimits(hd=(64, 128, 256), other_hd="hd 512: flash-attention 2 ends at hd 256", blind=_NO_PLUS_INFINITY),
    _prepare_flash,
    "aten::_flash_attention_forward; query heads folded into rows where nothing is masked",
)
EFFICIENT: Final = _peer(
    "torch-sdpa-efficient",
    AttentionLimits(
        hd=ALL_HD,
        window="a window: the operator has no local mask that counts from the last key",
        blind=_NO_PLUS_INFINITY,
        masked_gqa="GQA under a mask: the kernel has no GQA, and heads folded into rows would share one mask",
    ),
    _prepare_efficient,
    "aten::_efficient_attention_forward; query heads folded into rows where nothing is masked",
)
MATH: Final = _peer(
    "torch-sdpa-math",
    AttentionLimits(
        hd=ALL_HD,
        lse="lse: the composite of matrix products and softmax returns none",
        blind="queries that see no key (causal, t > s_k): their softmax is NaN",
    ),
    _prepare_math,
    "scaled_dot_product_attention under SDPBackend.MATH; the mask as a bool tensor",
)
