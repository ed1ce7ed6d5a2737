# pyright: reportMissingImports=false
"""Rings of stages in shared memory: a full and an empty mbarrier a stage, and where an agent stands in its ring.

CuTeDSL's pipeline classes choose a ring when the code is traced. Here a warpgroup chooses one of two at run time, by
the number of its first stage, and both rings are served by one copy of the code.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64


class Barriers(NamedTuple):
    """Pointers to the full and the empty mbarriers of all stages."""

    full: cute.Pointer
    empty: cute.Pointer


class Place(NamedTuple):
    """Where an agent stands: a stage, and the parity of the phase that it waits for next."""

    stage: Int32
    parity: Int32


def allocate_barriers(smem, stages: int) -> Barriers:
    """Room for the barriers of `stages` stages."""
    return Barriers(smem.allocate_array(Int64, stages), smem.allocate_array(Int64, stages))


def init_barriers(barriers: Barriers, stages: int, consumers: int) -> None:
    """By one thread. A stage is full by one arrival and its bytes, empty by an arrival of each consumer warp."""
    for stage in range(stages):
        cute.arch.mbarrier_init(barriers.full + stage, 1)
        cute.arch.mbarrier_init(barriers.empty + stage, consumers)


def ring_start(first: Int32, producer: bool) -> Place:
    """The start of the ring whose first stage is `first`. A producer finds every stage empty."""
    return Place(first + Int32(0), Int32(1 if producer else 0))


def advanced(place: Place, first: Int32, stages: int) -> Place:
    """The next place in the ring of `stages` stages from `first` on."""
    following = place.stage + 1
    wraps = following == first + stages
    return Place(
        cutlass.select_(wraps, first + Int32(0), following), cutlass.select_(wraps, place.parity ^ 1, place.parity)
    )


@cute.jit
def acquire(barriers: Barriers, place: Place, size: cutlass.Constexpr):
    """Wait until the stage is empty, and announce `size` bytes to it."""
    cute.arch.mbarrier_wait(barriers.empty + place.stage, place.parity)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barriers.full + place.stage, size)


@cute.jit
def wait_full(barriers: Barriers, place: Place):
    """Wait until the bytes of the stage are there."""
    cute.arch.mbarrier_wait(barriers.full + place.stage, place.parity)


@cute.jit
def release(barriers: Barriers, stage: Int32):
    """This warp has read the stage."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barriers.empty + stage)


def advanced_by(place: Place, first: Int32, stages: int, count: Int32 | int) -> Place:
    """The place `count` stages on, at most a whole round."""
    if isinstance(count, int) and count == 1:
        return advanced(place, first, stages)
    following = place.stage + count
    wraps = following >= first + stages
    return Place(
        cutlass.select_(wraps, following - stages, following), cutlass.select_(wraps, place.parity ^ 1, place.parity)
    )
