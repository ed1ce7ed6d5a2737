"""Where requantisation leaves a kernel a choice, and how the oracle's y adapts to the choices that an output shows.

One requantised code at a rounding step moves a whole row of y by more than all other roundings together. Its direction
is known (a column of W2) and so is its size, so a row of hundreds of elements reveals which choices the kernel made.
Each choice that brings the oracle closer to the output is taken. The remaining error is judged by the usual bars.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from megamoe.codec.nvfp4 import (
    E2M1_MAX,
    SF_VEC_SIZE,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    unswizzle_scales,
)
from megamoe.codec.routing import Routing
from megamoe.ops.nvfp4_moe.stages import ULP, Activation, Inputs, Requantised, gs2, weight_columns, weights

if TYPE_CHECKING:
    from megamoe.contract import Case


# A scale is a maximum divided twice; a code is a quotient by a product. Each takes a few roundings, or an approximate
# reciprocal of 1 ulp (facts.md 7.4).
QUOTIENT_SLACK: Final = 4.0 * ULP


@dataclass(frozen=True, slots=True)
class Interval:
    """float64: the smallest and the largest number that a correct kernel may store."""

    lowest: torch.Tensor
    highest: torch.Tensor


def scale_interval(given: Activation, gs: torch.Tensor) -> Interval:
    """The interval of block scales, as numbers [routes, blocks], for h under gs [routes]."""
    lowest = (given.h.abs() - given.slack).clamp(min=0.0)
    ends = (_blocks(lowest).amax(dim=-1), _blocks(given.h.abs() + given.slack).amax(dim=-1))
    factors = (1.0 - QUOTIENT_SLACK, 1.0 + QUOTIENT_SLACK)
    codes = (encode_e4m3(end / E2M1_MAX / gs.double()[:, None] * f) for end, f in zip(ends, factors, strict=True))
    return Interval(*(decode_e4m3(code, torch.float64) for code in codes))


def code_interval(given: Activation, gs: torch.Tensor, sf: torch.Tensor) -> Interval:
    """The interval of codes, as numbers [routes, intermediate], for h under gs [routes] and block scales sf [routes,
    blocks]."""
    step = decode_e4m3(sf, torch.float64) * gs.double()[:, None]
    step = torch.where(step > 0, step, torch.inf).repeat_interleave(SF_VEC_SIZE, dim=1)
    margin = given.slack + given.h.abs() * QUOTIENT_SLACK
    ends = ((given.h - margin) / step, (given.h + margin) / step)
    return Interval(*(decode_e2m1(encode_e2m1(end), torch.float64) for end in ends))


@dataclass(frozen=True, slots=True)
class Choices:
    """Legal differences of a2 from the nominal a2, without the global scale.

    `number`, `route`, `column`: int64 [n]; `change`: float64 [n]; one entry per changed element. Choice `number`, 0 to
    `count` - 1, adds `change` at (route, column). All entries of a choice are in one route.
    """

    number: torch.Tensor
    route: torch.Tensor
    column: torch.Tensor
    change: torch.Tensor
    count: int


def choices(given: Activation, gs: torch.Tensor, nominal: Requantised) -> Choices:
    """What a correct kernel may do instead of `nominal`: take the other code at a step, or the other scale for a
    block."""
    values, scale = decode_e2m1(nominal.codes, torch.float64), decode_e4m3(nominal.sf, torch.float64)
    wide = scale.repeat_interleave(SF_VEC_SIZE, dim=1)
    parts: list[tuple[torch.Tensor, ...]] = []
    count = 0
    codes, scales = code_interval(given, gs, nominal.sf), scale_interval(given, gs)
    for end in (codes.lowest, codes.highest):
        at = (end != values).nonzero()
        route, column = at.unbind(dim=1)
        parts.append(
            (torch.arange(len(at), device=at.device) + count, route, column, ((end - values) * wide)[route, column])
        )
        count += len(at)
    for end in (scales.lowest, scales.highest):
        route, block = (end != scale).nonzero().unbind(dim=1)
        other = _requantised_blocks(_blocks(given.h)[route, block], end[route, block], gs[route].double())
        number = torch.arange(len(route), device=route.device) + count
        column = block[:, None] * SF_VEC_SIZE + torch.arange(SF_VEC_SIZE, device=block.device)
        change = other - _blocks(values * wide)[route, block]
        parts.append(
            tuple(part.reshape(-1) for part in torch.broadcast_tensors(number[:, None], route[:, None], column, change))
        )
        count += len(route)
    return Choices(*(torch.cat(part) for part in zip(*parts, strict=True)), count=count)


def _requantised_blocks(h: torch.Tensor, scale: torch.Tensor, gs: torch.Tensor) -> torch.Tensor:
    """Blocks h [n, 16], requantised under block scales [n] and global scales [n], as numbers without the global
    scale."""
    step = (scale * gs)[:, None]
    return decode_e2m1(encode_e2m1(h / torch.where(step > 0, step, torch.inf)), torch.float64) * scale[:, None]


def _blocks(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(*values.shape[:-1], values.shape[-1] // SF_VEC_SIZE, SF_VEC_SIZE)


# A row with an rms error below this many bf16 ulps is left alone: it passes anyway.
LEFT_ALONE: Final = 0.25
# A choice helps if the error contains at least half of it. Skip a choice of which the error contains less than this
# share: choices taken earlier may hide up to that much, and if they hide more, the next round finds it.
ASKED: Final = 0.25
# Rows of `hidden` doubles held at once (HELD) and computed at once (ENTRIES).
HELD: Final = 1 << 14
ENTRIES: Final = 1024


def settled(
    case: Case, inputs: Inputs, routes: Routing, legal: Choices, actual: torch.Tensor, oracle: torch.Tensor
) -> torch.Tensor:
    """float64 [tokens, hidden]: `oracle` plus each of the `legal` choices that brings it closer to `actual`."""
    y, seen = oracle.clone(), actual.double().to(oracle.device)
    scale = oracle.square().mean(dim=1).sqrt() * torch.finfo(torch.bfloat16).eps
    w2_sf = unswizzle_scales(inputs["w2_sf"], case.int("hidden"), case.int("intermediate") // SF_VEC_SIZE)
    token = routes.token[legal.route]
    left = torch.ones(legal.count, dtype=torch.bool, device=y.device)
    before = -1
    while before != (before := int(left.sum())):
        error = seen - y
        odd = (error.square().mean(dim=1).sqrt() > LEFT_ALONE * scale) & torch.isfinite(error).all(dim=1)
        asked = _asked(case, inputs, routes, legal, error, odd[token] & left[legal.number])
        counts = token[asked].bincount(minlength=len(y))
        tokens = counts.nonzero().flatten()
        step = max(1, HELD // max(1, int(counts.max())))
        for first in range(0, len(tokens), step):
            chosen = torch.zeros_like(odd)
            chosen[tokens[first : first + step]] = True
            names, direction, owner = _directions(case, inputs, w2_sf, routes, legal, asked & chosen[token])
            taken = _taken(direction, owner, error)
            y.index_add_(0, owner, direction * taken[:, None])
            left[names[taken > 0]] = False
    return y


def _asked(
    case: Case, inputs: Inputs, routes: Routing, legal: Choices, error: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """bool [entries]: the entries of `kept` whose token's error contains more than ASKED of their choice."""
    here = kept.nonzero().flatten()
    if not len(here):
        return kept
    fits = torch.zeros(len(routes.row), case.int("intermediate"), dtype=torch.float64, device=error.device)
    sizes = torch.zeros(case.int("num_experts"), fits.shape[1], dtype=torch.float64, device=error.device)
    wanted = set(routes.expert[legal.route[here]].unique().tolist())
    for expert, entries in routes.experts():
        if expert not in wanted:
            continue
        w2 = weights(inputs, "w2", expert, case.int("hidden"), case.int("intermediate")) * gs2(inputs, expert)
        torch.mm(error[routes.token[entries]], w2, out=fits[entries])
        sizes[expert] = w2.square().sum(dim=0)
    number, route, column = (part[here] for part in (legal.number, legal.route, legal.column))
    change = _weighted(case, inputs, routes, route, legal.change[here])
    fit, size = (torch.zeros(legal.count, dtype=torch.float64, device=error.device) for _ in range(2))
    fit.index_add_(0, number, change * fits[route, column])
    size.index_add_(0, number, change.square() * sizes[routes.expert[route], column])
    return kept & (fit > ASKED * size)[legal.number]


def _weighted(case: Case, inputs: Inputs, routes: Routing, route: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """`change` [n] of a2 in `route` [n], times the weight with which the route's row is summed into y."""
    if case["weight"] == "before":
        return change
    return change * inputs["topk_weights"][routes.token[route], routes.choice[route]].double()


def _directions(
    case: Case, inputs: Inputs, w2_sf: torch.Tensor, routes: Routing, legal: Choices, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, effects and tokens of the choices in the entries `kept`.

    Numbers and tokens are int64 [choices]. Effects are float64 [choices, hidden]: what each choice adds to y.
    """
    number, route, column, change = (part[kept] for part in (legal.number, legal.route, legal.column, legal.change))
    change = _weighted(case, inputs, routes, route, change)
    names, slot = number.unique(return_inverse=True)
    direction = torch.zeros(len(names), case.int("hidden"), dtype=torch.float64, device=change.device)
    for some in torch.arange(len(slot), device=slot.device).split(ENTRIES):
        w2 = weight_columns(inputs, w2_sf, routes.expert[route[some]], column[some])
        direction.index_add_(0, slot[some], w2 * change[some][:, None])
    token = torch.empty(len(names), dtype=torch.int64, device=change.device)
    token[slot] = routes.token[route]
    return names, direction, token


def _taken(direction: torch.Tensor, token: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """float64 [choices], 1 for each choice taken: greedily for each token, the one that explains most first."""
    order = token.argsort(stable=True)
    names, counts = token[order].unique_consecutive(return_counts=True)
    line = torch.arange(len(names), device=token.device).repeat_interleave(counts)
    place = torch.arange(len(order), device=token.device) - (counts.cumsum(0) - counts)[line]
    # One line per token, padded to the longest.
    padded = direction.new_zeros(len(names), int(counts.max()), direction.shape[1])
    padded[line, place] = direction[order]
    gram, fit = padded @ padded.mT, (padded @ error[names][:, :, None]).squeeze(2)
    own, each = gram.diagonal(dim1=1, dim2=2), torch.arange(len(names), device=token.device)
    taken = torch.zeros_like(fit)
    for _ in range(fit.shape[1]):
        # Padding gains 0.
        gain, best = torch.where(taken == 0, 2 * fit - own, -1.0).max(dim=1)
        helps = (gain > 0).double()
        if not bool(helps.any()):
            break
        taken[each, best] += helps
        fit = fit - gram[each, best] * helps[:, None]
    found = torch.empty_like(token, dtype=torch.float64)
    found[order] = taken[line, place]
    return found
