"""FMHA as other people's interfaces take it: which keys a case hides, folding query heads, placing results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backends.peers.peer import Tensors

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Case

ALL_HD = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Mask:
    """The parts of a case's mask that hide a key, bottom-right aligned: query i stands at key i + s_k - t.

    A single query sees every key under `causal`, and a window as long as the cache hides nothing: neither counts here.
    `window`: keys that a query sees at most, its own included, or None. `blind`: whether some query sees no key.
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


@dataclass(frozen=True, slots=True)
class AttentionLimits:
    """The part of fmha that a peer has: the head dimensions `hd`, and a reason for each option that it lacks.

    None: it has the option. `offset_causal`: causal with t != s_k, bottom-right aligned. `open_window`: a window
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
        return [reason for reason in (other_hd, *reasons) if reason]


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
