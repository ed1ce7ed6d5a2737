"""Which register of which thread gets which (M, N) of an accumulator: the loads of tensor memory, one by one.

A shape's fragment is the closed form of the figures in PTX ISA 9.7.16.2.3 (tcgen05 matrix fragments). Row M is the
lane of tensor memory, as it is for M = 128 in one CTA and for the half that a CTA of a pair keeps of M = 256; column N
counts from the accumulator's first column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megamoe.contract.trace import Bounds, CtaTrace
from megamoe.explain.roles import role_name
from megamoe.explain.tmem import Holding, overlap, tmem_map

WARP_SIZE = 32
_LOAD = re.compile(r"tcgen05\.ld\.sync\.aligned\.(?P<shape>\d+x\d+b)\.x(?P<num>\d+)\.b32")
# Shape -> registers a thread of its x1 form, and (thread, register) -> (lane, column).
_FRAGMENTS: Mapping[str, tuple[int, Callable[[int, int], tuple[int, int]]]] = {
    "32x32b": (1, lambda t, r: (t, r)),
    "16x64b": (1, lambda t, r: (t // 4 + 8 * (t % 2), 2 * r + t // 2 % 2)),
    "16x128b": (2, lambda t, r: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2))),
    "16x256b": (4, lambda t, r: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4))),
}


def fragment(shape: str, num: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(lane, column) from the load's address -> (thread of the warp, register), for `tcgen05.ld.SHAPE.xNUM`."""
    registers, place = _FRAGMENTS[shape]
    return {place(t, r): (t, r) for t in range(WARP_SIZE) for r in range(registers * num)}


@dataclass(frozen=True, slots=True)
class AccumulatorLoad:
    """One `tcgen05.ld` of a warp: PTX `line`, `.SHAPE.xNUM`, first row M and first column N of what it reads."""

    warp: int
    line: int
    shape: str
    num: int
    row: int
    column: int

    @property
    def cells(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(M, N) -> (thread of the warp, register)."""
        return {
            (self.row + lane, self.column + column): who
            for (lane, column), who in fragment(self.shape, self.num).items()
        }

    @property
    def extent(self) -> tuple[Bounds, Bounds]:
        """Rows and columns, bounds inclusive."""
        rows, columns = zip(*self.cells, strict=True)
        return (min(rows), max(rows)), (min(columns), max(columns))


@dataclass(frozen=True, slots=True)
class AccumulatorTile:
    """An accumulator of `columns` columns and who loads it. `turns`: columns of gate, then of up, in turns; or None."""

    columns: int
    first_column: int
    loads: tuple[AccumulatorLoad, ...]
    turns: int | None


def accumulator_tile(cta: CtaTrace, ptx: str, last_step: int, interleave: int | None) -> AccumulatorTile | None:
    """The first accumulator of a CTA that warps load into registers, or None.

    `interleave` is the case's, if it has one; it counts where the loading warps compute exponentials (a SwiGLU).
    """
    map_ = tmem_map(cta, last_step)
    for holding in map_.holdings if map_ else ():
        if holding.by != "tcgen05.mma":
            continue
        loads = _loads_of(cta, holding, ptx.splitlines())
        if loads:
            first, last = holding.columns
            activates = any(_activates(cta, load.warp) for load in loads)
            return AccumulatorTile(last - first + 1, first, loads, interleave if activates else None)
    return None


def _activates(cta: CtaTrace, warp: int) -> bool:
    return any("activation" in role_name(one.opcodes) for one in cta.warps if one.index == warp)


def _loads_of(cta: CtaTrace, holding: Holding, ptx: Sequence[str]) -> tuple[AccumulatorLoad, ...]:
    """The loads of a holding, each once, in the order of warps, then rows, then columns."""
    steps = {read.step for read in holding.reads if read.by == "tcgen05.ld"}
    found: set[tuple[int, int, int, int, str, int]] = set()
    for touch in cta.tmem:
        if touch.by != "tcgen05.ld" or touch.step not in steps or not overlap(touch.columns, holding.columns):
            continue
        named = _LOAD.search(ptx[touch.line - 1])
        if named:
            column = touch.columns[0] - holding.columns[0]
            found.add((touch.warp, touch.lanes[0], column, touch.line, named["shape"], int(named["num"])))
    return tuple(AccumulatorLoad(warp, line, shape, num, row, column)
                 for warp, row, column, line, shape, num in sorted(found))  # fmt: skip
