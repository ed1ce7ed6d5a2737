"""Loads of NVFP4 MoE: how the tokens of a case choose their experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from megamoe.spec.draws import generator, uniform

if TYPE_CHECKING:
    from megamoe.contract import Case

# Ranks of the EP group of `load=slice`: 384 experts on 8 ranks are 48 a rank, 256 are 32.
EP_RANKS: Final = 8


def draw_topk_ids(case: Case) -> torch.Tensor:
    """int32 [tokens, topk]: distinct experts for each token, as the case's load says."""
    drawn = _LOADS[str(case["load"])](case)
    # Draw which expert is the loaded one, and the place of each choice.
    names = torch.randperm(case.int("num_experts"), generator=generator(case, "expert_names"))
    places = uniform(case, "places", tuple(drawn.shape)).argsort(dim=1)
    drawn = drawn.gather(1, places)
    return torch.where(drawn >= 0, names[drawn.clamp(min=0)], -1).int()


def _balanced(case: Case) -> torch.Tensor:
    """Loads differ by one at most: the routes go round the experts."""
    tokens, topk = case.int("tokens"), case.int("topk")
    return torch.arange(tokens * topk).view(tokens, topk) % case.int("num_experts")


def _drawn(case: Case, weight: torch.Tensor) -> torch.Tensor:
    """topk of the experts for each token without replacement, in proportion to `weight`."""
    level = uniform(case, "topk_ids", (case.int("tokens"), len(weight)))
    return (level.clamp(min=1e-300).log() / weight).topk(case.int("topk"), dim=1).indices


def _skewed(case: Case) -> torch.Tensor:
    """The n-th most popular expert has a share of 1 / n."""
    return _drawn(case, 1.0 / torch.arange(1, case.int("num_experts") + 1, dtype=torch.float64))


def _one_token(case: Case) -> torch.Tensor:
    """As many experts as possible have one token each. All other routes go to the same topk experts."""
    tokens, topk = case.int("tokens"), case.int("topk")
    ids = torch.arange(topk).repeat(tokens, 1)
    lonely = torch.arange(topk, case.int("num_experts"))[:tokens]
    ids[torch.arange(len(lonely)), torch.arange(len(lonely)) % topk] = lonely
    return ids


def _empty(case: Case) -> torch.Tensor:
    """Half of the experts, or all but topk of them if that is fewer, have no token."""
    experts = max(case.int("topk"), (case.int("num_experts") + 1) // 2)
    return _drawn(case, torch.ones(experts, dtype=torch.float64))


def _slice(case: Case) -> torch.Tensor:
    """Tokens choose among the experts of EP_RANKS ranks; an id is -1 where the expert is not of this rank."""
    ids = _drawn(case, torch.ones(EP_RANKS * case.int("num_experts"), dtype=torch.float64))
    return torch.where(ids < case.int("num_experts"), ids, -1)


_LOADS: Final = {
    "balanced": _balanced,
    "skewed": _skewed,
    "one_token": _one_token,
    "empty": _empty,
    "slice": _slice,
}
