"""Who acts on memory and who may see whose writes: the agents of a cluster, and vector clocks over them.

`seen` orders everything: agent a's actions up to epoch seen[a] happen before the owner's next action. `fenced` is the
part of it that is also visible to the asynchronous proxy in shared memory. `fence.proxy.async` sets fenced = seen.
Barriers and mbarriers carry both along, so either idiom is accepted: each writer fences before the barrier, or the
issuer fences after it. A path without a proxy fence is reported (PTX ISA, Memory Consistency Model, proxy-preserved
base causality order).

Memory keeps a stamp for each granule: the agent that wrote (or read) last and its epoch then, in one int32.

Clusters order each other through flags in global memory (PTX ISA 8.9: release and acquire patterns). A release there
carries all that its warp has seen; a relaxed access carries only what a fence of gpu scope has covered. What an acquire
finds is known at once; what a relaxed access finds is known only after such a fence. Barriers carry all three parts
along. Of the generic writes to global memory, the asynchronous proxy sees only those that a proxy fence has covered.
That part of what is known of cluster n is stored under -n, for the own cluster too, and travels the same ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from backends.vm.memory.lane_releases import LaneReads, LaneReleases
from backends.vm.numpy_calls import count_nonzero

ACCUMULATORS = 8
"""Accumulators of a CTA whose chains of MMAs are told apart; 512 columns hold four of 128."""
COPY_AGENTS = 48
CLUSTER_SHIFT = 32
STAMP_MASK = (1 << CLUSTER_SHIFT) - 1
"""The part of a global-memory mark that is a stamp; the serial number of a cluster lies above it."""


@dataclass(slots=True, eq=False)
class Agents:
    """The agents of cluster number `serial` (from 1) of a launch, with `size` CTAs.

    All warps come first, by CTA rank, then the tensor cores, then copies, and last clocks.WAITED. The tensor core of a
    CTA is several agents: one for tcgen05.cp, which every later mma follows in order, then one for each accumulator.
    Copies that are waited for together, at one mbarrier or in one thread's groups, are one agent. Beyond COPY_AGENTS
    such places, agents are shared, and a missing wait can hide behind another place's wait. `line`: the PTX line of the
    running instruction, `acting`: the warp that runs it. `tensor_fences`: by warp, the epochs of its
    tcgen05.fence::before_thread_sync. `releases`: releases of what lanes stored to shared memory; `reads`: of what
    they read there; `global_releases`: as `releases`, for global memory. `works`: by PTX line, the name of an
    asynchronous operation that counts as a copy here and is none.
    """

    serial: int
    size: int
    warps_per_cta: int
    copy_places: int = 0
    line: Callable[[], int] = int
    acting: Callable[[], int] = int
    tensor_fences: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    releases: LaneReleases = field(default_factory=LaneReleases)
    reads: LaneReads = field(default_factory=LaneReads)
    global_releases: LaneReleases = field(default_factory=LaneReleases)
    works: dict[int, str] = field(default_factory=dict[int, str])

    @property
    def first_engine(self) -> int:
        """The first index of a tensor core, after the warps."""
        return self.size * self.warps_per_cta

    @property
    def first_copy(self) -> int:
        """The first index of a copy, after the warps and tensor cores."""
        return self.size * (self.warps_per_cta + 1 + ACCUMULATORS)

    @property
    def count(self) -> int:
        """The length of a clock."""
        return self.first_copy + COPY_AGENTS + 1

    @property
    def mark(self) -> int:
        """`serial`, shifted to its position in marks of global memory."""
        return self.serial << CLUSTER_SHIFT

    def warp(self, rank: int, warp: int) -> int:
        """The index of warp number `warp` of the CTA of `rank`."""
        return rank * self.warps_per_cta + warp

    def warps_of(self, rank: int) -> slice:
        """The indices of the warps of the CTA of `rank`."""
        return slice(self.warp(rank, 0), self.warp(rank + 1, 0))

    def start_of(self, agent: int) -> Epochs:
        """Epochs that tell only that a warp has started."""
        told = np.zeros(self.count, np.int64)
        told[agent] = START
        return told

    def is_elsewhere(self, agent: int, warp: int) -> bool:
        """Whether `agent` is a warp of another CTA than `warp` is."""
        return agent < self.first_engine and agent // self.warps_per_cta != warp // self.warps_per_cta

    def tensor_core(self, rank: int) -> int:
        """The first index of a CTA's tensor core."""
        return self.first_engine + rank * (1 + ACCUMULATORS)

    def new_copy(self) -> int:
        """The index for one more place (an mbarrier, a thread) at which copies are waited for."""
        self.copy_places += 1
        return self.first_copy + (self.copy_places - 1) % COPY_AGENTS

    def copy_at(self, line: int) -> str:
        """The name of what counts as a copy at PTX `line`, with its article."""
        return self.works.get(line, "a copy")

    def the_copy_at(self, line: int) -> str:
        """The same with its place: the copy of PTX line 12."""
        return f"the {self.copy_at(line).partition(' ')[2]} of PTX line {line}"

    def name(self, agent: int, line: int = 0) -> str:
        """The name in reports of an agent that does something at PTX `line`; 0 if that is no asynchronous operation."""
        if agent >= self.first_copy:
            return self.copy_at(line)
        rank, index = divmod(agent, self.warps_per_cta)
        if agent >= self.first_engine:
            rank, index = (agent - self.first_engine) // (1 + ACCUMULATORS), -1
        of = f" of CTA rank {rank}" if self.size > 1 else ""
        return f"the tensor core{of}" if index < 0 else f"warp {index}{of}"


Epochs = npt.NDArray[np.int64]
Stamps = npt.NDArray[np.int32]
_IntOrArray = TypeVar("_IntOrArray", int, Stamps)

EPOCH_BITS = 21
"""Leaves 10 bits for agents: 16 CTAs of 32 warps, their tensor cores and the copies are 704."""
EPOCH_MASK = (1 << EPOCH_BITS) - 1
PENDING = EPOCH_MASK
"""The epoch of a write that nobody may rely on yet, not even the writer (tcgen05.st before its wait)."""

START = 1
"""The epoch of a warp before its first instruction. It accesses nothing then: to know of it is to know that the warp
has started."""

WAITED = -1
"""The last element of `seen` belongs to no agent: it is 1 after a griddepcontrol.wait."""


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
    # Fast path for the stamps of a single operation, which are all the same.
    head = stamps.item(0)
    if (head & EPOCH_MASK) <= seen[head >> EPOCH_BITS] and not count_nonzero(stamps != head):
        return None
    late = (stamps & EPOCH_MASK) > seen[stamps >> EPOCH_BITS]
    return late if count_nonzero(late) else None


Snapshot = dict[int, Epochs]
"""By serial number of a cluster: the epochs of its agents that are ordered before. By the negated number: those that
the asynchronous proxy sees too. The arrays are never modified."""


def seen_of(known: Snapshot, cluster: int, agent: int) -> int:
    """The last epoch of an agent that is ordered before, 0 if nothing is known of its cluster."""
    return int(known[cluster][agent]) if cluster in known else 0


def parts_of(mark: int) -> tuple[int, int, int]:
    """Cluster, agent and epoch of a mark of global memory."""
    return mark >> CLUSTER_SHIFT, agent_of(mark & STAMP_MASK), mark & EPOCH_MASK


def merge(into: Snapshot, other: Snapshot) -> None:
    """Add everything that `other` has seen to `into`."""
    for cluster, epochs in other.items():
        mine = into.get(cluster)
        if mine is not epochs:
            into[cluster] = epochs if mine is None else np.maximum(mine, epochs)


@dataclass(slots=True)
class GridClock:
    """What a clock knows of other clusters.

    `known` is ordered before; of the own cluster it holds only what the asynchronous proxy sees. `published` is what
    fences have covered, the own cluster included. `noticed` was found by relaxed accesses and becomes known at the next
    fence.
    """

    known: Snapshot = field(default_factory=dict[int, Epochs])
    published: Snapshot = field(default_factory=dict[int, Epochs])
    noticed: Snapshot = field(default_factory=dict[int, Epochs])

    def join(self, other: GridClock) -> None:
        """Add everything that `other` knows, has published and has noticed."""
        merge(self.known, other.known)
        merge(self.published, other.published)
        merge(self.noticed, other.noticed)

    def learn(self, cluster: int, seen: Epochs, found: Snapshot) -> None:
        """Add `found` to what is known. Its part about the own `cluster` goes to `seen`."""
        merge(self.known, {number: epochs for number, epochs in found.items() if number != cluster})
        if cluster in found:
            np.maximum(seen, found[cluster], out=seen)

    def fence_proxy(self, cluster: int, seen: Epochs) -> None:
        """`fence.proxy.async` of global memory by a warp of `cluster` whose own cluster's clock is `seen`."""
        visible = {-number: epochs for number, epochs in self.known.items() if number > 0}
        self.known.update(visible)
        self.known[-cluster] = seen.copy()

    def fence(self, cluster: int, seen: Epochs) -> None:
        """A fence of gpu scope by a warp of `cluster` whose own cluster's clock is `seen`."""
        self.learn(cluster, seen, self.noticed)
        self.noticed = {}
        self.published = {**self.known, cluster: seen.copy()}


@dataclass(slots=True)
class Clock:
    """The pair of vector clocks that an agent or a barrier carries; arrays of shape [agents].

    `grid` covers other clusters; it is None until a flag in global memory or a fence of gpu scope matters. `tensor` is
    `seen` as of the last tcgen05.fence::after_thread_sync, for a warp whose findings are collected. `earlier` is what
    comes before in time without being ordered before: what relaxed arrivals tell, and those whose scope leaves the
    waiter out. It travels the same ways. It is None until there is such an arrival or a relaxed wait.
    """

    seen: Epochs
    fenced: Epochs
    grid: GridClock | None = None
    tensor: Epochs | None = None
    earlier: Epochs | None = None

    @classmethod
    def zero(cls, agents: int) -> Clock:
        """A clock that has seen nothing: epoch 0 of every agent, in which no agent writes."""
        return cls(np.zeros(agents, np.int64), np.zeros(agents, np.int64))

    def of_copy(self) -> Clock:
        """A new clock for the end of a copy that the owner of this one issues before it begins an epoch.

        The end comes after the issue, and so after all that comes before the issue: a waiter for the copy is ordered
        behind that too (PTX ISA 8.9.4, causality is transitive).
        """
        return self.copy()

    def join(self, other: Clock) -> None:
        """Add everything that `other` has seen."""
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.fenced, other.fenced, out=self.fenced)
        if other.grid is not None:
            self.grid_part().join(other.grid)
        if other.earlier is not None:
            self.come_after(other.earlier)

    def come_after(self, epochs: Epochs) -> None:
        """Add `epochs` to what comes before in time."""
        if self.earlier is None:
            self.earlier = epochs.copy()
        else:
            np.maximum(self.earlier, epochs, out=self.earlier)

    def past(self) -> Epochs:
        """All that comes before in time."""
        return self.seen if self.earlier is None else np.maximum(self.seen, self.earlier)

    def comes_after(self, agent: int, epoch: int) -> bool:
        """Whether what `agent` did in its `epoch` comes before in time."""
        return bool(self.seen[agent] >= epoch or (self.earlier is not None and self.earlier[agent] >= epoch))

    def has_heard_of(self, agents: slice) -> bool:
        """Whether anything that one of `agents` did, if only its start, comes before in time."""
        return bool(self.seen[agents].any() or (self.earlier is not None and self.earlier[agents].any()))

    def relaxed(self, released: Clock, agent: int) -> Clock:
        """The clock of a relaxed arrival by `agent`, the owner: it orders what a fence has `released`.

        Such an arrival begins no epoch, so the past that it tells ends before the current one.
        """
        past = self.past().copy()
        past[agent] -= 1
        return replace(released, earlier=past)

    def copy(self) -> Clock:
        """A separate clock that has seen the same."""
        made = Clock(self.seen.copy(), self.fenced.copy(), tensor=self.tensor)
        if self.grid is not None:
            made.grid_part().join(self.grid)
        if self.earlier is not None:
            made.come_after(self.earlier)
        return made

    def grid_part(self) -> GridClock:
        """`grid`, made on first use."""
        if self.grid is None:
            self.grid = GridClock()
        return self.grid

    def clear(self) -> None:
        """Reset to a clock that has seen nothing."""
        self.seen[:] = 0
        self.fenced[:] = 0
        self.grid = self.earlier = None

    def fence_proxy(self) -> None:
        """`fence.proxy.async`: make what is ordered before now visible to the asynchronous proxy."""
        np.maximum(self.fenced, self.seen, out=self.fenced)


ANYONE = -1
"""Instead of a CTA's rank: the asynchronous proxy, whose completions reach every CTA of the cluster."""


@dataclass(slots=True)
class Carried:
    """The clocks that arrivals at a place have brought, by rank of their CTA and whether they release only to it
    (`.cta`).

    A release of scope .cta orders nothing for another CTA, and an acquire of that scope takes nothing from another CTA
    (PTX ISA 8.7.1, morally strong operations: each scope must include the other's thread). Where the text names no
    scope, CUTLASS and Triton mean the cluster, though the ISA's default is the CTA: it counts as the cluster here.
    """

    parts: dict[tuple[int, bool], Clock] = field(default_factory=dict[tuple[int, bool], Clock])

    def give(self, clock: Clock, rank: int = ANYONE, *, narrow: bool = False) -> None:
        """A release by a thread of CTA `rank`."""
        known = self.parts.get((rank, narrow))
        if known is None:
            self.parts[rank, narrow] = clock.copy()
        else:
            known.join(clock)

    def take(self, into: Clock, rank: int, *, narrow: bool = False) -> None:
        """An acquire by a thread of CTA `rank`."""
        for (giver, only), clock in self.parts.items():
            if giver in (rank, ANYONE) or not (only or narrow):
                into.join(clock)
            else:
                into.come_after(clock.past())

    def notice(self, into: Clock) -> None:
        """A relaxed wait: the arrivals come before it in time."""
        for clock in self.parts.values():
            into.come_after(clock.past())

    def over(self, met: Epochs) -> None:
        """Raise `met` to what is over once the arrivals have come, whatever the scope of the waiter.

        A release is performed after what its thread did before. A release of scope .cta guarantees that only within its
        CTA.
        """
        for (_, only), clock in self.parts.items():
            if not only:
                np.maximum(met, clock.seen, out=met)


@dataclass(slots=True)
class Flag(Carried):
    """What a read of a word in memory acquires. `releasers`: the agents whose releases have written it."""

    releasers: set[int] = field(default_factory=set[int])
