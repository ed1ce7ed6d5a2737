"""Instructions that compute each lane's result from that lane's operands alone: one function on whole rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step
from backends.vm.machine.warp import Warp

Array = npt.NDArray[np.generic]
Compute = Callable[..., Array]

PACKED = frozenset({"u16x2", "f32x2", "u32x2", "u64x2"})


def write(warp: Warp, row: Array, values: Array) -> None:
    """Store the values of the active lanes; rows are [32], or [32, n] for packed views."""
    if warp.where is True:
        row[...] = values
    else:
        np.copyto(row, values, where=warp.mask if row.ndim == 1 else warp.mask[:, None])


def lanewise(b: Binder, view: str, compute: Compute, count: int) -> Step:
    """`op d, s1, ... s_count` with every operand in `view`."""
    return bind_lanewise(b, view, [view] * count, compute)


def bind_lanewise(b: Binder, destination: str, sources: Sequence[str], compute: Compute) -> Step:
    """`op d, s1, s2, ...` with a view for each operand. `compute` takes and gives rows."""
    d, *operands = b.expect(len(sources) + 1)
    rd = b.destination(d, destination)
    rows = [(view, b.source(operand, view)) for view, operand in zip(sources, operands, strict=True)]
    return apply(compute, (destination, rd), rows)


def apply(compute: Compute, destination: tuple[str, int], sources: Sequence[tuple[str, int]]) -> Step:
    """The step that computes row `destination` from rows `sources`. Each is a view and a row number."""
    out, rd = destination
    if len(sources) == 1 and destination[0] == sources[0][0] == "f32":
        ra = sources[0][1]
        return lambda warp: np.copyto(warp.f32[rd], compute(warp.f32[ra]), where=warp.where)

    def step(warp: Warp) -> None:
        values = compute(*[getattr(warp, view)[row] for view, row in sources])
        write(warp, getattr(warp, out)[rd], values)

    return step
