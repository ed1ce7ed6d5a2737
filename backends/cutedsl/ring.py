# pyright: reportMissingImports=false
"""Rings of stages in shared memory: a full and an empty mbarrier per stage, and the position of an agent in its ring.

CuTeDSL's pipeline classes choose a ring when the code is traced. Here a warpgroup chooses one of two at run time, by
the number of its first stage, and one copy of the code serves both rings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, memory


class StageRing(NamedTuple):
    """One of several rings of `stages` stages each. Stages and their barriers are numbered across all rings.

    `full` and `empty` point to the barriers of stage 0; `first` is the first stage of this ring.
    """

    full: cute.Pointer
    empty: cute.Pointer
    first: Int32
    stages: int


class RingPlace(NamedTuple):
    """The position of an agent: a stage, and the parity of the phase that it waits for next."""

    stage: Int32
    parity: Int32


@dataclass(frozen=True)
class RingSlot:
    """The stage at a place of a ring, as TmaViews.load takes it."""

    ring: StageRing
    place: RingPlace

    @property
    def index(self) -> Int32:
        """The number of the stage."""
        return self.place.stage

    @property
    def barrier(self) -> cute.Pointer:
        """The barrier at which its bytes arrive."""
        return self.ring.full + self.place.stage


def allocate_rings(allocator: memory.SmemAllocator, stages: int, rings: int = 1) -> StageRing:
    """The first of `rings` rings, with room for the barriers of all of them."""
    full, empty = (allocator.allocate_array(Int64, stages * rings) for _ in range(2))
    return StageRing(full, empty, Int32(0), stages)


def init_rings(ring: StageRing, rings: int, consumers: int, producers: int = 1) -> None:
    """Initialise the barriers of all rings, by one thread.

    `producers` arrivals and the announced bytes make a stage full; an arrival of each of `consumers` warps makes it
    empty.
    """
    for stage in range(ring.stages * rings):
        cute.arch.mbarrier_init(ring.full + stage, producers)
        cute.arch.mbarrier_init(ring.empty + stage, consumers)


def ring_number(ring: StageRing, number: Int32) -> StageRing:
    """Ring `number` of the rings that were allocated with `ring`."""
    return ring._replace(first=number * ring.stages)


def ring_start(ring: StageRing, producer: bool) -> RingPlace:
    """The start of the ring. A producer finds every stage empty."""
    return RingPlace(ring.first + Int32(0), Int32(1 if producer else 0))


def advanced(ring: StageRing, place: RingPlace, count: Int32 | int = 1) -> RingPlace:
    """The place `count` stages further, at most a whole round."""
    following = place.stage + count
    if isinstance(count, int) and count == 1:
        wraps, wrapped = following == ring.first + ring.stages, ring.first + Int32(0)
    else:
        wraps, wrapped = following >= ring.first + ring.stages, following - ring.stages
    return RingPlace(cutlass.select_(wraps, wrapped, following), cutlass.select_(wraps, place.parity ^ 1, place.parity))


@cute.jit
def wait_empty(ring: StageRing, place: RingPlace):
    """Wait until all consumers have read the stage."""
    cute.arch.mbarrier_wait(ring.empty + place.stage, place.parity)


@cute.jit
def acquire(ring: StageRing, place: RingPlace, size: cutlass.Constexpr):
    """Wait until the stage is empty, and announce `size` bytes to it."""
    wait_empty(ring, place)
    announce(ring, place, size)


@cute.jit
def announce(ring: StageRing, place: RingPlace, size: cutlass.Constexpr):
    """Announce `size` bytes to the stage, which must be empty."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ring.full + place.stage, size)


@cute.jit
def make_full(ring: StageRing, place: RingPlace):
    """Make this warp's stores to the stage visible to MMAs and threads that wait for the stage."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.full + place.stage)


@cute.jit
def wait_full(ring: StageRing, place: RingPlace):
    """Wait until the bytes of the stage are there."""
    cute.arch.mbarrier_wait(ring.full + place.stage, place.parity)


@cute.jit
def release(ring: StageRing, stage: Int32):
    """Tell the producer that this warp has read the stage."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.empty + stage)
