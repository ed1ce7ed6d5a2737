"""The oracle's y, moved to the legal choices at rounding steps that a kernel's output shows.

One requantised code at a rounding step moves a whole row of y by more than all other roundings together. The direction
is known (a column of W2) and so is the size, so a row of hundreds of elements tells which choices the kernel made. Each
choice that brings the oracle closer to the output is taken. What remains is held to the bars of any other error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from megamoe.codec.routing import Routing
from megamoe.ops.nvfp4_moe.stages import Inputs, weight_columns
from megamoe.ops.nvfp4_moe.steps import Choices

if TYPE_CHECKING:
    from megamoe.contract import Case

# A row whose rms error is below this many ulps of bf16 stays as it is: it passes anyway.
LEFT_ALONE: Final = 0.25
# Rows of `hidden` doubles held at once.
ENTRIES: Final = 1024


def settled(
    case: Case, inputs: Inputs, routes: Routing, legal: Choices, actual: torch.Tensor, oracle: torch.Tensor
) -> torch.Tensor:
    """float64 [tokens, hidden]: `oracle` with each of the `legal` choices that brings it closer to `actual`."""
    error = actual.double().to(oracle.device) - oracle
    scale = oracle.square().mean(dim=1).sqrt() * torch.finfo(torch.bfloat16).eps
    odd = error.square().mean(dim=1).sqrt() > LEFT_ALONE * scale
    odd &= torch.isfinite(error).all(dim=1)
    y = oracle.clone()
    direction, token = _directions(case, inputs, routes, legal, odd)
    for one in token.unique().tolist():
        mine = direction[token == one]
        y[one] += _taken(mine, error[one]) @ mine
    return y


def _directions(
    case: Case, inputs: Inputs, routes: Routing, legal: Choices, odd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each choice adds to y, float64 [choices, hidden], and its token, int64 [choices], for tokens in `odd`."""
    kept = odd[routes.token[legal.route]]
    number, route, column, change = (part[kept] for part in (legal.number, legal.route, legal.column, legal.change))
    if case["weight"] == "after":
        change = change * inputs["topk_weights"][routes.token[route], routes.choice[route]].double()
    names, slot = number.unique(return_inverse=True)
    direction = torch.zeros(len(names), case.int("hidden"), dtype=torch.float64, device=change.device)
    for expert in routes.expert[route].unique().tolist():
        here = (routes.expert[route] == expert).nonzero().flatten()
        columns, place = column[here].unique(return_inverse=True)
        w2 = weight_columns(case, inputs, expert, columns)
        for some in torch.arange(len(here), device=here.device).split(ENTRIES):
            direction.index_add_(0, slot[here[some]], w2[place[some]] * change[here[some]][:, None])
    token = torch.empty(len(names), dtype=torch.int64, device=change.device)
    token[slot] = routes.token[route]
    return direction, token


def _taken(direction: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """float64 [choices], 1 for each choice taken: greedily, the one that explains most first."""
    gram, fit = direction @ direction.mT, direction @ error
    taken = torch.zeros_like(fit)
    for _ in range(len(fit)):
        gain = torch.where(taken == 0, 2 * fit - gram.diagonal(), -1.0)
        best = int(gain.argmax())
        if float(gain[best]) <= 0:
            break
        taken[best] = 1.0
        fit = fit - gram[best]
    return taken
