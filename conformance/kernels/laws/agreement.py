"""Whether two sets of outputs agree: in every bit, or as two roundings of the same numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from conformance.kernels.laws.law import BrokenLawError, Tensors, spec_of
from megamoe.contract import Case
from megamoe.judge.arena import coordinate
from megamoe.judge.tolerance import ULP_BARS
from megamoe.ops import reference

# The judge lets either side be this far from the truth, so the sides may be twice as far apart.
BOTH_SIDES = 2.0
BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.uint8: torch.uint8,
}


def same_bits(case: Case, seen: Tensors, wanted: Tensors, what: tuple[str, str]) -> None:
    """BrokenLawError unless all outputs are equal bit for bit. `what` names both sides, the one under trial first."""
    for name, right in _pairs(seen, wanted):
        left = seen[name]
        differs = left.contiguous().view(BITS[left.dtype]) != right.contiguous().view(BITS[right.dtype])
        if differs.any():
            sentence = f"{int(differs.sum())} elements differ in bits"
            _complain(case, name, differs.double(), (left, right), what, sentence)


def close(
    case: Case,
    seen: Tensors,
    wanted: Tensors,
    what: tuple[str, str],
    least_scale: Mapping[str, float] | None = None,
) -> None:
    """BrokenLawError unless all outputs agree as two correct kernels do.

    Errors are measured as in megamoe.judge.tolerance: relative to the rms of a row (last axis), or to the smallest
    normal number, the reference's ABSOLUTE_SCALE or `least_scale` if larger. The bars are BOTH_SIDES times its own.
    """
    absolute = {**reference(case.op).ABSOLUTE_SCALE, **(least_scale or {})}
    for name, right in _pairs(seen, wanted):
        left, floor, ulp = seen[name], ULP_BARS[seen[name].dtype], torch.finfo(seen[name].dtype).eps
        misplaced = _misplaced(left, right)
        if misplaced.any():
            _complain(case, name, misplaced.double(), (left, right), what, "NaN or infinity on one side only")
        finite = torch.isfinite(right)
        a, b = (torch.where(finite, x.double(), 0.0) for x in (left, right))
        least = max(absolute.get(name, 0.0), torch.finfo(left.dtype).tiny)
        scale = b.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=least)
        error = (a - b).abs()
        row = (error / scale).square().mean(dim=-1).sqrt()
        element = error / torch.maximum(b.abs(), scale)
        for metric, value, bar in (("row", row, floor.row), ("largest", element, floor.max)):
            if float(value.max()) > BOTH_SIDES * bar * ulp:
                sentence = f"{metric} difference {float(value.max()):.3g} is above {BOTH_SIDES * bar * ulp:.3g}"
                _complain(case, name, element, (left, right), what, sentence)


def within(case: Case, name: str, seen: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor, why: str) -> None:
    """BrokenLawError unless every |seen - wanted| is at most `bound` (float64, same shape)."""
    excess = (seen.double() - wanted.double()).abs() / bound
    excess = torch.where(torch.isnan(excess), math.inf, excess)
    if float(excess.max()) > 1.0:
        _complain(case, name, excess, (seen, wanted), ("seen", "expected"), why)


def _pairs(seen: Tensors, wanted: Tensors) -> list[tuple[str, torch.Tensor]]:
    if not seen or set(seen) != set(wanted):
        raise BrokenLawError(f"outputs {sorted(seen)} were written, {sorted(wanted)} expected")
    return list(wanted.items())


def _misplaced(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    infinite = torch.isinf(left) | torch.isinf(right)
    return (torch.isnan(left) != torch.isnan(right)) | (infinite & (left != right))


def _complain(
    case: Case,
    name: str,
    weight: torch.Tensor,
    sides: tuple[torch.Tensor, torch.Tensor],
    what: tuple[str, str],
    sentence: str,
) -> None:
    at = coordinate(int(weight.argmax()), tuple(weight.shape))
    axes = spec_of(case.op).tensors_of(case)[name].shape
    place = ", ".join(f"{axis}={index}" for axis, index in zip(axes, at, strict=True))
    values = ", ".join(f"{float(side[at]):.9g} {label}" for side, label in zip(sides, what, strict=True))
    raise BrokenLawError(f"{case.id}: {sentence}; {name} at {place}: {values}")
