"""Schedules and cases for the laws; the cases are drawn from a spec's ranges within a budget of work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeVar

from hypothesis import strategies as st

from conformance.kernels.laws.law import Axes, Law, spec_of
from megamoe.contract import AxisValue, Case
from megamoe.spec.case_space import Axis

T = TypeVar("T")
MAX_SEED = 2**20
# Ranges up to this length are listed, so that no draw is discarded for a constraint between two axes.
LISTED = 64
# An element costs some 10 us of host time if a kernel handles it individually.
ANY_BUDGET = 1 << 16
# hd 512 has two key tiles under each of three schedules. Cases that need more are in `beyond`.
FMHA_BUDGET = 5_000
# Limit for the query heads of all sequences together.
ALIKE_HEADS = 128
# Floats are drawn in steps of a thousandth, to keep ids short.
FLOAT_STEPS = 1000


@dataclass(frozen=True)
class Drawing:
    """How the cases of an op are drawn. Axes that neither `first` nor `last` names keep their default or least value.

    `first`: drawn in a random order, so that each axis can get the whole budget. `last`: drawn in this order. `after`:
    an axis that another one bounds -> that one; it is drawn right after it, while there is budget. `edges`: values
    where kernels go wrong, drawn half of the time. `work`: in any unit, monotone in every axis; at most `budget` over
    all runs of a trial. `beyond`: by law, cases over the budget that are always tried, without the op. `percent`:
    trials of a law in a hundred examples of the profile, since one takes half a second and more.
    """

    work: Callable[[Axes], int]
    budget: int
    first: Sequence[str]
    last: Sequence[str]
    edges: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    beyond: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    percent: int = 6
    after: Mapping[str, str] = field(default_factory=dict[str, str])


def _fmha_work(axes: Axes) -> int:
    """Units of about 0.1 ms of host time on the PTX virtual machine, for the slowest kernel.

    Tiles have 64 rows by 64 keys. A row tile has a prologue and an epilogue for each part of its keys, which cost more
    than a tile of keys. If there are several parts, one CTA a row merges them. For one query, the CuTeDSL backend takes
    up to 130 units a query head on sm_90a; 12 are counted, so that three schedules of 64 heads are within the budget.
    More query heads than ALIKE_HEADS are over budget: the kernel for one query depends on their number, so a batch
    would be compared with sequences on another kernel.
    """
    hd, t, s_k, batch, heads, kv_heads = (int(axes[name] or 0) for name in _FMHA_SIZES)
    row_tiles = batch * kv_heads * -(-(heads // kv_heads) * t // 64)
    parts = -(-s_k // 512) if t <= 16 else -(-min(s_k, 512) // 128)
    merged = batch * heads * t * (5 + hd // 20) if parts > 1 else 0
    too_many = FMHA_BUDGET if batch * heads > ALIKE_HEADS else 0
    tiles = row_tiles * (parts * (100 + hd) + -(-s_k // 64) * (3 * hd // 5))
    return 300 + 12 * batch * heads + too_many + tiles + merged


def _moe_work(axes: Axes) -> int:
    """Same unit: routing by each expert, the repacking of its weights, then tiles of rows by columns by K."""
    hidden, intermediate, experts, tokens, topk = (int(axes[name] or 0) for name in _MOE_SIZES)
    row_tiles = min(experts, tokens * topk) + tokens * topk // 128
    l1 = -(-2 * intermediate // 256) * hidden
    l2 = -(-hidden // 256) * intermediate
    tiles, matrices = {"layer": (l1 + l2, 3), "l1": (l1, 2), "l2": (l2, 1)}.get(str(axes["stage"]), (0, 0))
    repacked = experts * matrices * hidden * intermediate // 200
    return 300 + 400 * experts + repacked + 4 * row_tiles * tiles + 60 * tokens * topk + 2 * tokens * hidden // 5


def _product(axes: Axes) -> int:
    return math.prod(max(1, size) for size in axes.values() if isinstance(size, int) and not isinstance(size, bool))


def drawing_of(op: str) -> Drawing:
    """Returns how the cases of `op` are drawn: as DRAWINGS says, or up to ANY_BUDGET elements, all axes alike."""
    spec = spec_of(op)
    return DRAWINGS.get(op) or Drawing(_product, ANY_BUDGET, first=tuple(spec.axes), last=())


_MOE_SIZES = ("hidden", "intermediate", "num_experts", "tokens", "topk")
_FMHA_SIZES = ("hd", "t", "s_k", "batch", "heads", "kv_heads")
DRAWINGS: dict[str, Drawing] = {
    "fmha": Drawing(
        work=_fmha_work,
        budget=FMHA_BUDGET,
        first=("hd", "t", "s_k", "batch", "heads"),
        last=("kv_heads", "causal", "window", "scale", "lse", "kv", "sinks"),
        # Two key parts for a combine kernel, and two sequences of two key tiles.
        beyond={
            "schedule_independent": ("hd=256,t=1,s_k=513", "hd=512,t=1,s_k=513"),
            "batch_invariant": ("hd=512,t=1,s_k=65,batch=2",),
        },
        edges={
            "t": (1, 2, 4, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 256, 300, 1024),
            "s_k": (1, 2, 30, 65, 127, 128, 129, 255, 256, 257, 384, 512, 1023, 1025),
            "batch": (1, 2, 3),
            "heads": (1, 2, 4, 6, 8, 64),
            "kv_heads": (2, 4),
            "window": (1, 2, 127, 128, 129, 255, 256, 257),
        },
    ),
    "nvfp4_moe": Drawing(
        work=_moe_work,
        budget=18_000,
        percent=3,
        first=("hidden", "intermediate", "num_experts", "tokens", "stage"),
        after={"topk": "num_experts"},
        last=("load", "weight", "clamp", "interleave", "shared", "activations"),
        edges={"num_experts": (1, 2, 8), "tokens": (1, 2, 3, 31, 32, 33, 40), "topk": (1, 2, 8)},
    ),
}


def schedules(count: int) -> st.SearchStrategy[tuple[str, ...]]:
    """Draws `count` different schedules; the simplest ones are eager and lazy."""
    named = st.sampled_from(("eager", "lazy"))
    drawn = st.integers(0, MAX_SEED).map("random:{}".format)
    return st.lists(named | drawn, min_size=count, max_size=count, unique=True).map(tuple)


@st.composite
def cases(draw: st.DrawFn, law: Law, share: int = 1) -> Case:
    """Draws cases that `law` covers, within the spec's ranges and a `share`-th of the op's budget."""
    spec, drawing = spec_of(law.op), drawing_of(law.op)
    axes: dict[str, AxisValue] = {name: _least(axis, law) for name, axis in spec.axes.items()} | dict(law.fixed)
    order = [*draw(_orders(tuple(drawing.first))), *drawing.last]
    for name, bound in drawing.after.items():
        order.insert(order.index(bound) + 1, name)
    least = sum(drawing.work(run) for run in law.runs(axes))
    budget = max(least, drawing.budget // share)
    for name in order:
        if name not in law.fixed:
            fits = partial(_fits, law, drawing.work, budget, axes, name)
            admits = partial(_admits, law, axes, name, spec.space.keeping_constraints(axes, name))
            low = law.least.get(name)
            axes[name] = _value(draw, spec.axes[name], low, drawing.edges.get(name, ()), fits, admits)
    return spec.case(inputs=_one_of(draw, spec.inputs), seed=draw(_between(0, MAX_SEED)), **axes)


def _least(axis: Axis, law: Law) -> AxisValue:
    if axis.name in law.least:
        return law.least[axis.name]
    return axis.default if not axis.required else min(axis.choices or (axis.min,), key=lambda value: value or 0)


def _fits(law: Law, work: Callable[[Axes], int], budget: int, axes: Axes, name: str, value: AxisValue) -> bool:
    return sum(work(run) for run in law.runs({**axes, name: value})) <= budget


def _admits(law: Law, axes: Axes, name: str, keeps: Callable[[AxisValue], bool], value: AxisValue) -> bool:
    return keeps(value) and law.speaks_of({**axes, name: value})


def _value(
    draw: st.DrawFn,
    axis: Axis,
    least: int | None,
    edges: Sequence[int],
    fits: Callable[[AxisValue], bool],
    admits: Callable[[AxisValue], bool],
) -> AxisValue:
    if axis.kind == "bool":
        return (bool(axis.default), not axis.default)[draw(_below(2))]
    if axis.choices is not None:
        return _one_of(draw, [value for value in axis.choices if admits(value) and fits(value)])
    if axis.kind == "float":
        if axis.optional and not draw(_below(2)):
            return None
        low, high = math.ceil((axis.min or 0) * FLOAT_STEPS), math.floor((axis.max or 0) * FLOAT_STEPS)
        return draw(_between(low, high)) / FLOAT_STEPS
    low, high = int(axis.min or 0) if least is None else least, int(axis.max or 0)
    # No value, an edge or any value, with equal odds.
    way = draw(_below(3 if axis.optional else 2)) - axis.optional
    if way < 0:
        return None
    if high - low < LISTED:
        listed = range(low, high + 1)
        near = [] if way else [value for value in listed if value in edges and admits(value) and fits(value)]
        return _one_of(draw, near or [value for value in listed if admits(value) and fits(value)])
    top = _greatest(low, high, fits)
    if way:
        return draw(_between(low, top))
    return _one_of(draw, [value for value in edges if low <= value <= top] or [low])


def _one_of(draw: st.DrawFn, values: Sequence[T]) -> T:
    """Draws one of `values`, and makes a choice even if there is only one.

    sampled_from makes no choice then. A smaller value of one axis, which leaves more for another, would add a choice
    and shift the choices of all later axes: a failure would not shrink.
    """
    return values[draw(_below(len(values)))]


@cache
def _between(low: int, high: int) -> st.SearchStrategy[int]:
    """Cached, because Hypothesis checks each new strategy, which takes longer than a draw from it."""
    return st.integers(low, high)


@cache
def _orders(names: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
    return st.permutations(names)


def _below(count: int) -> st.SearchStrategy[int]:
    return _between(0, count - 1)


def _greatest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The greatest value that fits. `low` must fit, and the fitting values must be an interval."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
