"""Attention through other people's interfaces: flash-attention 3 and 4, cudnn-frontend, the kernels inside torch.

Flash-attention 3 (the wheel fa3-fwd) and 4 (flash-attn-4) each have a Python interface of their own. Both take q, k and
v as [batch, rows, heads, hd]; ours go in as transposed views, with the last dimension contiguous. Both align masks
bottom-right. Their window counts the keys to the left of the query, without the query's own. Neither public function
takes an output; `collect` copies o and lse.

The CuTeDSL kernel of nvidia-cudnn-frontend for Hopper is the only packaged one with hd 512. It takes our q, k and v
directly, [batch, heads, rows, hd]. Its wrapper does not pack heads that share keys into a tile and would read the cache
once a head. So heads are folded into rows (a view) where no key is hidden. The wrapper allocates o and lse; `collect`
copies them. It compiles on first use, when the call is prepared.

The kernels inside torch are one peer each, through the operators beneath scaled_dot_product_attention. The public
function picks a kernel by its own rules and returns no lse; the operators do the same work and return it. q, k and v
are views of the case's tensors: [batch, heads, t, hd], or transposed if an operator wants heads after rows. Where no
key is hidden, query heads that share keys are folded into rows if the kernel would otherwise read the cache once a
head; flash-attention folds by itself only for t = 1. `collect` copies the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final

from backends.peers.peer import OwnResults, Peer, Tensors
from megamoe.contract import Target, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from megamoe.contract import Case, PreparedCall

ALL_HD = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Mask:
    """The parts of a case's mask that hide a key, bottom-right aligned: query i is at key i + s_k - t.

    A single query sees every key under `causal`, and a window as long as the cache hides nothing: neither counts here.
    `window`: the most keys that a query sees, its own included, or None. `blind`: whether some query sees no key.
    """

    causal: bool
    window: int | None
    blind: bool

    @property
    def hides(self) -> bool:
        """Whether any key is hidden from any query."""
        return self.causal or self.window is not None


def mask_of(case: Case) -> Mask:
    """The mask of an fmha case."""
    t, s_k, window = case.int("t"), case.int("s_k"), case["window"]
    causal = bool(case["causal"])
    return Mask(
        causal=causal and t > 1,
        window=int(window) if isinstance(window, int) and window < s_k else None,
        blind=causal and t > s_k,
    )


def scale_of(case: Case) -> float:
    """The factor of the logits."""
    scale = case["scale"]
    return 1.0 / math.sqrt(case.int("hd")) if scale is None else float(scale)


SINKS = "sinks: no recipe here passes them on"
LATENT = "one latent tensor for K and V: no recipe here passes k twice"
RAGGED = "sequences of their own lengths, or pages: no recipe here passes lengths and tables on"


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    """The part of fmha that a peer supports: the head dimensions `hd`, and a reason for each option that it lacks.

    None: it supports the option. `offset_causal`: causal with t != s_k, bottom-right aligned. `open_window`: a window
    without causal. `blind`: queries that see no key. `masked_gqa`: fewer KV heads than heads, under a mask.
    """

    hd: tuple[int, ...]
    other_hd: str | None = None
    lse: str | None = None
    offset_causal: str | None = None
    window: str | None = None
    open_window: str | None = None
    blind: str | None = None
    masked_gqa: str | None = None

    def refusal(self, case: Case) -> str | None:
        """Why the peer refuses `case`; None if it takes it."""
        mask = mask_of(case)
        asked = (
            (bool(case["sinks"]), SINKS),
            (case["kv"] == "latent", LATENT),
            (bool(case["ragged"]), RAGGED),
            (case.int("hd") not in self.hd, self.other_hd or f"hd must be one of {self.hd}"),
            (bool(case["lse"]), self.lse),
            (mask.causal and case.int("t") != case.int("s_k"), self.offset_causal),
            (mask.window is not None, self.window),
            (mask.window is not None and not mask.causal, self.open_window),
            (mask.blind, self.blind),
            (mask.hides and case["heads"] != case["kv_heads"], self.masked_gqa),
        )
        return next((reason for wanted, reason in asked if wanted and reason), None)

    def serves(self) -> str:
        """Head dimensions and options."""
        options = {"lse": self.lse, "causal": self.offset_causal, "window": self.window}
        done = [name for name, reason in options.items() if reason is None]
        return f"hd {', '.join(map(str, self.hd))}" + "".join(f"; {name}" for name in done)

    def refuses(self) -> Sequence[str]:
        """Every reason that `refusal` may give."""
        reasons = (self.lse, self.offset_causal, self.window, self.open_window, self.blind, self.masked_gqa)
        other_hd = self.other_hd if self.hd != ALL_HD else None
        return [reason for reason in (other_hd, *reasons, SINKS, LATENT, RAGGED) if reason]


def folded(case: Case, q: torch.Tensor) -> torch.Tensor:
    """q [batch, heads, t, hd] viewed as [batch, kv_heads, heads / kv_heads * t, hd]: the rows that share keys.

    Fold only where no key is hidden: a mask would mean something else for folded rows.
    """
    return q.view(case.int("batch"), case.int("kv_heads"), -1, case.int("hd"))


def place_heads_first(tensors: Tensors, results: Sequence[torch.Tensor]) -> None:
    """Copies o [b, h, rows, hd] and, if the case has it, lse [b, h, rows or more(, 1)] to the case's tensors.

    The heads may be folded: in memory both layouts are the same.
    """
    o = results[0]
    tensors["o"].view(o.shape).copy_(o)
    if "lse" in tensors:
        rows = results[1].flatten(2)[..., : o.shape[2]]
        tensors["lse"].view(o.shape[:-1]).copy_(rows)


def place_heads_second(tensors: Tensors, results: Sequence[torch.Tensor]) -> None:
    """As place_heads_first, for o [b, rows, h, hd]."""
    place_heads_first(tensors, (results[0].transpose(1, 2), *results[1:]))


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
        hd=(64, 128, 256), other_hd="hd 512: flash-attention 4 has it for one shared K and V (MLA) on Blackwell alone"
    ),
    _prepare_fa4,
    "flash_attn_func with num_splits=1 (it does not split the cache on sm_90), pack_gqa for GQA; compiled once",
)


def _prepare_cudnn_frontend(case: Case, tensors: Tensors) -> PreparedCall:
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
    _prepare_cudnn_frontend,
    "cudnn.sdpa.fwd.sdpa_fwd_wrapper_dsl_sm90; query heads folded into rows where nothing is masked",
)


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
