"""Say in words where the wrong elements of a tensor are: for each axis, the indices that confine them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

BLOCK = 32


def describe(wrong: torch.Tensor, weight: torch.Tensor, axes: Sequence[str]) -> str:
    """A clause such as "64 of 8192 elements are off, all in heads=3, t 32..63 of 128".

    `wrong` (bool) and `weight` (the normalised error) have one shape; `axes` names its axes.
    """
    count = int(wrong.sum())
    if not count:
        return "the error is spread over many elements, none of which is off by itself"
    confined = [_confined(_by_index(wrong, axis).any(dim=1), name) for axis, name in enumerate(axes)]
    places = [place for place in confined if place]
    extent = f", all in {', '.join(places)}" if places else ", spread over every axis"
    return f"{count} of {wrong.numel()} elements are off{extent}{_concentration(weight, axes)}"


def _by_index(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    return tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)


def _confined(hit: torch.Tensor, name: str) -> str:
    size = hit.numel()
    found = [int(i) for i in hit.nonzero().flatten()]
    if size == 1 or len(found) == size:
        return ""
    if len(found) == 1:
        return f"{name}={found[0]}"
    step = found[1] - found[0]
    if all(b - a == step for a, b in pairwise(found)):
        stride = f" in steps of {step}" if step > 1 else ""
        return f"{name} {found[0]}..{found[-1]}{stride} of {size}"
    if found[-1] - found[0] + 1 < size:
        return f"{name} {found[0]}..{found[-1]} of {size} ({len(found)} of them)"
    return f"{len(found)} of the {size} values of {name}"


def _concentration(weight: torch.Tensor, axes: Sequence[str]) -> str:
    """The blocks of an axis with nine tenths of the squared error, if they are at most half of its blocks."""
    for axis, name in enumerate(axes):
        size = weight.shape[axis]
        if size < 2 * BLOCK:
            continue
        energy = _by_index(weight, axis).square().sum(dim=1)
        blocks = torch.stack([part.sum() for part in energy.split(BLOCK)])
        share = blocks / blocks.sum().clamp(min=torch.finfo(torch.float64).tiny)
        heavy = [int(i) for i in (share > 0.9 / len(share)).nonzero().flatten()]
        if 2 * len(heavy) <= len(share) and float(share[heavy].sum()) > 0.9:
            spans = ", ".join(f"{i * BLOCK}..{min(size, (i + 1) * BLOCK) - 1}" for i in heavy[:4])
            return f"; nine tenths of the squared error in {name} {spans}"
    return ""
