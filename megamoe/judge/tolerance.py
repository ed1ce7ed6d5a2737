"""Judges the outputs of one case: verdict, metrics, a sentence, and the worst coordinate with both values.

Errors are against the float64 oracle and normalised, so that one bar fits every magnitude. A *row* is a slice along the
last axis. Its scale is the root mean square of the oracle's row, but at least the smallest normal number of the
output's dtype and at least the output's `absolute_scale`. Rows that may hold anything do not count. Four errors have a
bar each:

* `rms`: root mean square over the tensor of error / scale of the row. Shows a small systematic error.
* `row`: the largest rms of a single row. Shows a fault of one row, head, tile or mask.
* `max`: the largest error / max(scale of the row, |oracle|) of an element. Shows a single wrong element.
* `bias`: |mean of sign(oracle) * (output - oracle) / scale of the row|. Roundings to nearest cancel in it.
  Truncations, which the other three miss, add up.

A bar is noise_ratio times the same error of the simulated reference, but at least a floor in ulps of the dtype
(`UlpBars`): the rounding errors of two legal kernels differ, and on a small tensor either may be zero by luck.

A kernel may have choices beyond rounding. The op's reference states them for the given outputs (`Latitude`). Outputs of
codes must lie exactly in the interval of each element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch

from megamoe.contract.counted import counted
from megamoe.judge.arena import is_poison
from megamoe.ops import Codes, Latitude
from megamoe.records.lines import ERRORS

if TYPE_CHECKING:
    from megamoe.contract import Case


Tensors = Mapping[str, torch.Tensor]
_RELATIVE: Final = {
    "rms": "the rms of each row",
    "row": "the rms of its row",
    "max": "the larger of |expected| and the rms of its row",
    "bias": "the rms of each row",
}


class Bars(Protocol):
    """The part of a spec's tolerance that `compare` needs."""

    @property
    def cosine(self) -> float:
        """Minimum cosine similarity of a published cell."""
        ...

    @property
    def noise_ratio(self) -> float:
        """Maximum error of an output, as a multiple of the simulated reference's own error."""
        ...


@dataclass(frozen=True, slots=True)
class UlpBars:
    """Minimum bars of one dtype, in ulps (torch.finfo.eps) of the scale.

    `rms` is for a tensor of many rows. Rounding a few intermediates moves a whole row at once, so few rows average
    badly: the minimum for n rows is sqrt(rms^2 + row^2 * ROW_EXCESS / n), but at most `row`. `bias` is for a single
    row: the minimum for n rows is sqrt(bias^2 / n + systematic^2).
    """

    rms: float
    row: float
    max: float
    bias: float
    systematic: float


# A 16-bit output is a rounded sum of products, and one operand of each product was rounded to the same dtype. Either
# rounding is off by at most half an ulp, so a row may be off by one ulp, and an element that cancels by more. Over many
# rows the two roundings have an rms of 0.3 ulp. An fp32 output comes from accumulations in any order, truncated rather
# than rounded in tensor cores (facts.md 7.1), and from approximate functions of 2 ulps.
#
# Bias: rounding P moves a whole row of O by the weighted mean of P's roundings: by a quarter of an ulp at most for one
# key, by less for n keys. Rows move independently. Truncation instead of rounding moves all rows by a quarter of an ulp
# or more. Truncated fp32 accumulation of 8,192 keys, 16 at a time, also moves all rows, by 512 * 2^-24 at most: 0.004
# ulps of bf16. An fp32 output has no other error, so its bias has no bar of its own.
ULP_BARS: Final[Mapping[torch.dtype, UlpBars]] = {
    torch.bfloat16: UlpBars(rms=0.5, row=1.0, max=2.5, bias=0.5, systematic=0.05),
    torch.float16: UlpBars(rms=0.5, row=1.0, max=2.5, bias=0.5, systematic=0.05),
    torch.float32: UlpBars(rms=64.0, row=64.0, max=64.0, bias=0.0, systematic=64.0),
}
ROW_EXCESS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Worst:
    """The worst coordinate of a failure, with the stored value and the oracle's, both as float64."""

    tensor: str
    coordinate: tuple[tuple[str, int], ...]
    seen: float
    expected: float

    def __str__(self) -> str:
        place = ", ".join(f"{axis}={index}" for axis, index in self.coordinate)
        return f"{place}: seen {self.seen:.6g}, expected {self.expected:.6g}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on one case. `metrics`: TENSOR.rms, .row, .max and .bias, the `.bar` of each, and TENSOR.cosine.

    `sentence` is empty if and only if `passed`. `worst` is in the first tensor of the sentence that has one.
    """

    passed: bool
    metrics: dict[str, float]
    sentence: str
    worst: Worst | None


@dataclass(frozen=True, slots=True)
class _Output:
    """One output and its references, all of one shape. `settled`: the oracle after the kernel's choices.

    `held`: bool, over all axes of the output but the last. It marks the rows of the output that these tensors hold,
    packed one after another. None: they hold all rows, in the output's shape. `axes`: the output's axes.
    """

    name: str
    axes: tuple[str, ...]
    actual: torch.Tensor
    oracle: torch.Tensor
    simulated: torch.Tensor
    absolute_scale: float
    settled: torch.Tensor | None
    held: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    metrics: dict[str, float]
    complaint: str = ""
    worst: Worst | None = None


def compare(
    case: Case,
    actual: Tensors,
    oracle: Tensors,
    simulated: Tensors,
    tolerance: Bars,
    published: bool,
    *,
    axes: Mapping[str, Sequence[str]] | None = None,
    absolute_scale: Mapping[str, float] | None = None,
    free: Tensors | None = None,
    latitude: Latitude | None = None,
) -> Judgement:
    """Compares every output of `case` with the oracle (float64) and the simulated reference (the output's dtype).

    `published` adds the cosine bar. `axes`: axis names of each output (the spec's shape). `absolute_scale`: outputs
    whose error counts in absolute terms (`Reference.ABSOLUTE_SCALE`). `free` (bool) marks elements that may hold
    anything. Wrong, missing or empty outputs fail; they raise nothing.
    """
    metrics: dict[str, float] = {}
    failures: list[tuple[str, Worst | None]] = []
    given = latitude or Latitude()
    for name in sorted({*oracle, *actual}):
        missing = _missing(name, actual, oracle, simulated, name in given.codes)
        if missing:
            failures.append((f"tensor {name}: {missing}", None))
            continue
        named = _axis_names((axes or {}).get(name, ()), actual[name].dim())
        least_scale = (absolute_scale or {}).get(name, 0.0)
        anything = (free or {}).get(name)
        seen = _without_free(actual[name], simulated[name], anything)
        whole = _Output(name, named, seen, oracle[name], simulated[name], least_scale, given.oracle.get(name))
        codes = given.codes.get(name)
        verdict = _judge_codes(name, codes) if codes else _judge(_held_rows(whole, anything), tolerance, published)
        metrics.update({f"{name}.{metric}": value for metric, value in verdict.metrics.items()})
        if verdict.complaint:
            failures.append((f"tensor {name}: {verdict.complaint}", verdict.worst))
    if not oracle:
        failures.append(("the reference has no output, so nothing was compared", None))
    sentence = f"{case.id}: " + "; ".join(complaint for complaint, _ in failures) if failures else ""
    worst = next((found for _, found in failures if found), None)
    return Judgement(not failures, metrics, sentence, worst)


def _axis_names(given: Sequence[str], dims: int) -> tuple[str, ...]:
    return tuple(given) if len(given) == dims else tuple(f"axis{i}" for i in range(dims))


def _without_free(actual: torch.Tensor, simulated: torch.Tensor, free: torch.Tensor | None) -> torch.Tensor:
    return actual if free is None else torch.where(free.to(actual.device), simulated.to(actual.device), actual)


def _missing(name: str, actual: Tensors, oracle: Tensors, simulated: Tensors, codes: bool) -> str:
    if name not in actual:
        return "the kernel's outputs do not have it"
    if name not in oracle or name not in simulated:
        return "the reference does not have it, so it cannot be judged"
    seen, wanted = actual[name], simulated[name]
    if seen.shape != wanted.shape or oracle[name].shape != wanted.shape:
        return f"shape {tuple(seen.shape)}; the reference has {tuple(wanted.shape)}"
    if seen.dtype != wanted.dtype:
        return f"dtype {seen.dtype}; the reference has {wanted.dtype}"
    if seen.dtype not in ULP_BARS and not codes:
        return f"dtype {seen.dtype} has no floor; known are {', '.join(str(dtype) for dtype in ULP_BARS)}"
    return "" if seen.numel() else f"zero elements compared, shape {tuple(seen.shape)}"


def _judge_codes(name: str, codes: Codes) -> _Verdict:
    wrong = ~((codes.seen >= codes.lowest) & (codes.seen <= codes.highest))
    middle = (codes.lowest + codes.highest) / 2
    metrics = {
        "wrong": float(wrong.sum()),
        "undecided": float((codes.lowest != codes.highest).sum()),
        "share.wrong": float(wrong.double().mean()) if wrong.numel() else 0.0,
    }
    if not wrong.any():
        return _Verdict(metrics)
    weight = torch.where(torch.isnan(codes.seen), math.inf, (codes.seen - middle).abs()) * wrong
    weight = torch.where(torch.isnan(weight), 0.0, weight)
    row, *inside = (int(i) for i in np.unravel_index(int(weight.argmax()), weight.shape))
    at = (row, *inside)
    coordinate = tuple(zip(codes.axes, (int(codes.rows[row]), *inside), strict=True))
    worst = Worst(name, coordinate, float(codes.seen[at]), float(middle[at]))
    allowed = f"{float(codes.lowest[at]):g}" + (
        f" to {float(codes.highest[at]):g}" if codes.lowest[at] != codes.highest[at] else ""
    )
    place = ", ".join(f"{axis}={index}" for axis, index in coordinate)
    where = describe(wrong, wrong.double(), ("route", *codes.axes[1:]))
    return _Verdict(metrics, f"{where}; worst at {place}: seen {worst.seen:g}, correct is {allowed}", worst)


def _held_rows(whole: _Output, free: torch.Tensor | None) -> _Output:
    """Drops rows where nothing is expected, perhaps 127 of 128 expert rows. Without any error they would dilute the
    rms, and they would take most of the time."""
    held = None if free is None else ~free.to(whole.actual.device).all(dim=-1)
    if held is None or bool(held.all()):
        return whole
    actual, oracle, simulated = (part[held.to(part.device)] for part in (whole.actual, whole.oracle, whole.simulated))
    settled = None if whole.settled is None else whole.settled[held.to(whole.settled.device)]
    return replace(whole, actual=actual, oracle=oracle, simulated=simulated, settled=settled, held=held)


def _in_place(output: _Output, part: torch.Tensor) -> torch.Tensor:
    """`part`, which has only the held rows, expanded to the shape of the output with 0 elsewhere."""
    if output.held is None:
        return part
    whole = part.new_zeros((*output.held.shape, part.shape[-1]))
    whole[output.held] = part
    return whole


def _judge(output: _Output, tolerance: Bars, published: bool) -> _Verdict:
    actual, oracle = output.actual.double(), output.oracle.double().to(output.actual.device)
    own = (output.simulated.double().to(oracle.device) - oracle) * _outward(oracle)
    if output.settled is not None:
        oracle = output.settled.double().to(oracle.device)
    rounded = oracle.to(output.actual.dtype).double()
    misplaced = _misplaced(actual, rounded)
    if misplaced.any():
        worst = _worst(output, misplaced.double(), actual, oracle)
        return _Verdict({}, f"{_nonfinite(output, misplaced)}; first at {worst}", worst)
    counted = torch.isfinite(rounded)
    # Positive where the output is further from zero than the oracle.
    error = torch.where(counted, (actual - oracle) * _outward(oracle), 0.0)
    own = torch.where(counted & torch.isfinite(own), own, 0.0)
    scale = _row_scale(torch.where(counted, oracle, 0.0), output)
    element_scale = torch.maximum(torch.where(counted, oracle, 0.0).abs(), scale)
    seen, noise = (_errors(one, scale, element_scale) for one in (error, own))
    floors = _floors(output)
    bars = {name: max(tolerance.noise_ratio * noise[name], floors[name]) for name in ERRORS}
    cosine = _cosine(torch.where(counted, actual, 0.0), torch.where(counted, oracle, 0.0))
    metrics = {**seen, **{f"{name}.bar": bar for name, bar in bars.items()}, "cosine": cosine}
    over = [name for name in ERRORS if not seen[name] <= bars[name]]
    low = published and not cosine >= tolerance.cosine
    if not over and not low:
        return _Verdict(metrics)
    complaints = [_over(name, seen[name], bars[name], noise[name], tolerance, floors[name]) for name in over]
    if low:
        simulated = output.simulated.double().to(oracle.device)
        own_cosine = _cosine(torch.where(counted, simulated, 0.0), torch.where(counted, oracle, 0.0))
        attained = f"the simulated reference has {own_cosine:.9f}"
        complaints.append(f"cosine {cosine:.9f} is below the published {tolerance.cosine} ({attained})")
    weight = error.abs() / element_scale
    worst = _worst(output, weight, actual, oracle)
    weight = _in_place(output, weight)
    where = describe(weight > floors["max"] / 2, weight, output.axes)
    return _Verdict(metrics, f"{', '.join(complaints)}; worst at {worst}; {where}", worst)


def _outward(oracle: torch.Tensor) -> torch.Tensor:
    """-1 for a negative oracle, else 1. A zero counts as positive, so that its error is not lost."""
    return torch.where(oracle < 0, -1.0, 1.0).double()


def _misplaced(actual: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    # Infinities of one sign compare equal; NaN equals nothing.
    nan_differs = torch.isnan(actual) != torch.isnan(rounded)
    infinite = torch.isinf(actual) | torch.isinf(rounded)
    return nan_differs | (infinite & (actual != rounded) & ~torch.isnan(actual) & ~torch.isnan(rounded))


def _nonfinite(output: _Output, misplaced: torch.Tensor) -> str:
    unwritten = int(is_poison(output.actual).sum())
    misplaced = _in_place(output, misplaced)
    where = describe(misplaced, misplaced.double(), output.axes)
    never = f", {unwritten} were never written" if unwritten else ""
    return f"NaN or infinity where the oracle has none, or none where it has: {where}{never}"


def _row_scale(oracle: torch.Tensor, output: _Output) -> torch.Tensor:
    least = max(output.absolute_scale, torch.finfo(output.actual.dtype).tiny)
    square = oracle.square() if oracle.dim() == 0 else oracle.square().mean(dim=-1, keepdim=True)
    return square.sqrt().clamp(min=least)


def _errors(error: torch.Tensor, scale: torch.Tensor, element_scale: torch.Tensor) -> dict[str, float]:
    if not error.numel():
        return dict.fromkeys(ERRORS, 0.0)
    relative = (error / scale).square()
    row = relative if relative.dim() == 0 else relative.mean(dim=-1)
    return {
        "rms": math.sqrt(float(row.mean())),
        "row": math.sqrt(float(row.max())),
        "max": float((error / element_scale).abs().max()),
        "bias": abs(float((error / scale).mean())),
    }


def _floors(output: _Output) -> dict[str, float]:
    floor, ulp = ULP_BARS[output.actual.dtype], torch.finfo(output.actual.dtype).eps
    rows = max(1, output.actual.numel() // (output.actual.shape[-1] or 1 if output.actual.dim() else 1))
    rms = min(floor.row, math.hypot(floor.rms, floor.row * math.sqrt(ROW_EXCESS / rows)))
    bias = math.hypot(floor.bias / math.sqrt(rows), floor.systematic)
    return {"rms": rms * ulp, "row": floor.row * ulp, "max": floor.max * ulp, "bias": bias * ulp}


def _cosine(actual: torch.Tensor, oracle: torch.Tensor) -> float:
    if not actual.numel():
        return 1.0
    # Divide by the largest magnitude first, or squares of subnormal outputs would vanish.
    a, b = (x / x.abs().max().clamp(min=torch.finfo(torch.float64).tiny) for x in (actual, oracle))
    lengths = float(a.norm() * b.norm())
    if lengths == 0.0:
        return float(bool((actual == oracle).all()))
    return float((a * b).sum()) / lengths


def _over(name: str, seen: float, bar: float, noise: float, tolerance: Bars, floor: float) -> str:
    origin = "the floor of the dtype" if bar == floor else f"{tolerance.noise_ratio:g} x the simulated reference's"
    error = f"{name} error {seen:.3g}, relative to {_RELATIVE[name]},"
    return f"{error} is above {bar:.3g} ({origin}; simulated has {noise:.3g})"


def _worst(output: _Output, weight: torch.Tensor, actual: torch.Tensor, oracle: torch.Tensor) -> Worst:
    index = np.unravel_index(int(weight.argmax()), weight.shape) if weight.dim() else ()
    at = tuple(int(i) for i in index)
    place = at if output.held is None else (*output.held.nonzero()[at[0]].tolist(), *at[1:])
    coordinate = tuple(zip(output.axes, place, strict=True))
    return Worst(output.name, coordinate, float(actual[at]), float(oracle[at]))


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
    return (
        f"{count} of {counted(wrong.numel(), 'element')} {'is' if count == 1 else 'are'} "
        f"off{extent}{_concentration(weight, axes)}"
    )


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
    return f"{len(found)} of the {counted(size, 'value')} of {name}"


def _concentration(weight: torch.Tensor, axes: Sequence[str]) -> str:
    """The blocks of an axis with nine tenths of the squared error, if they are at most half of its blocks; else ""."""
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
