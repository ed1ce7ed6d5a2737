"""Who may see whose writes: vector clocks over the agents of a cluster, one pair a warp.

`seen` orders everything: agent a's actions up to epoch seen[a] happen before the owner's next action. `fenced` is the
part of it that is also visible to the asynchronous proxy in shared memory; grid_clocks holds that of global memory.
`fence.proxy.async` sets fenced = seen; barriers and mbarriers carry both along, so either idiom (each writer fences
before the barrier, or the issuer fences after it) is accepted, and a path without a proxy fence is found out (PTX ISA,
Memory Consistency Model, proxy-preserved base causality order).

Memory keeps a stamp for each granule: the agent that wrote (or read) last and its epoch then, in one int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from backends.vm.memory.grid_clocks import GridClock

Epochs = npt.NDArray[np.int64]
Stamps = npt.NDArray[np.int32]
_IntOrArray = TypeVar("_IntOrArray", int, Stamps)

EPOCH_BITS = 21
"""Leaves 10 bits for agents: 16 CTAs of 32 warps, their tensor cores and the copies are 704."""
EPOCH_MASK = (1 << EPOCH_BITS) - 1
PENDING = EPOCH_MASK
"""The epoch of a write that is not complete for anybody, the writer included (tcgen05.st before its wait)."""

WAITED = -1
"""The last element of `seen` belongs to no agent: it is 1 for whoever is ordered after a griddepcontrol.wait."""


def stamp(agent: int, epoch: int) -> int:
    """Agent and epoch in one int32; epochs stop short of PENDING."""
    return agent << EPOCH_BITS | min(epoch, PENDING - 1)


def pending_stamp(agent: int) -> int:
    """The stamp of an incomplete write of `agent`."""
    return agent << EPOCH_BITS | PENDING


def agent_of(stamps: _IntOrArray) -> _IntOrArray:
    """The agent in a stamp."""
    return stamps >> EPOCH_BITS


def unordered(stamps: Stamps, seen: Epochs) -> npt.NDArray[np.bool_] | None:
    """Which stamps lie outside of `seen` (shape of `stamps`): actions that no chain of synchronisation orders.

    None if all lie inside.
    """
    if not stamps.size:
        return None
    # The quick answer for what one operation did: all stamps are the same one.
    head = stamps.item(0)
    if (head & EPOCH_MASK) <= seen[head >> EPOCH_BITS] and not np.count_nonzero(stamps != head):
        return None
    late = (stamps & EPOCH_MASK) > seen[stamps >> EPOCH_BITS]
    return late if np.count_nonzero(late) else None


@dataclass(slots=True)
class Clock:
    """The pair of vector clocks that an agent or a barrier carries; arrays of shape [agents].

    `grid` is what it knows of other clusters, None until a flag in global memory or a fence of gpu scope matters.
    """

    seen: Epochs
    fenced: Epochs
    grid: GridClock | None = None

    @classmethod
    def zero(cls, agents: int) -> Clock:
        """A clock that has seen nothing (epoch 0 of everybody, which nobody writes in)."""
        return cls(np.zeros(agents, np.int64), np.zeros(agents, np.int64))

    def of_copy(self) -> Clock:
        """A new clock for what the end of a copy brings, of a copy that the owner of this one issues: it comes after a
        griddepcontrol.wait before the issue, and of other things only after the copy."""
        made = Clock.zero(self.seen.size)
        made.seen[WAITED] = self.seen[WAITED]
        return made

    def join(self, other: Clock) -> None:
        """See everything that `other` has seen."""
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.fenced, other.fenced, out=self.fenced)
        if other.grid is not None:
            self.grid_part().join(other.grid)

    def copy(self) -> Clock:
        """A clock of its own that has seen the same."""
        made = Clock(self.seen.copy(), self.fenced.copy())
        if self.grid is not None:
            made.grid_part().join(self.grid)
        return made

    def grid_part(self) -> GridClock:
        """`grid`, made on first use."""
        if self.grid is None:
            self.grid = GridClock()
        return self.grid

    def clear(self) -> None:
        """Forget everything."""
        self.seen[:] = 0
        self.fenced[:] = 0
        self.grid = None

    def fence_proxy(self) -> None:
        """`fence.proxy.async`: what is ordered before now becomes visible to the asynchronous proxy."""
        np.maximum(self.fenced, self.seen, out=self.fenced)
