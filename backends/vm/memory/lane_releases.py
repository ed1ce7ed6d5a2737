"""Which lanes of a warp released what, where other lanes had stored or read something since the lanes last met.

Clocks are per warp: an epoch of a warp that another agent has seen is ordered before, for all lanes. This module is
finer, for the few warps where some lanes arrive alone.

A lane that ends takes part in nothing later: a barrier waits for the threads that have not exited, and orders what the
threads that execute it have done (PTX ISA 9.7.13.1, 9.7.13.2). So what it stored after its last meeting is ordered only
by its own releases, like the stores of a whole warp that has ended.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

LANE_BITS = 32
EVERY, NOBODY = (1 << LANE_BITS) - 1, 0
"""Sets of lanes as bits."""
KEPT = 1024
"""Releases of a warp that are kept, at least. A write before them counts as ordered."""
MAX_AGENTS = 1 << 10
"""The number of agents that a stamp of clocks.py tells apart."""


@dataclass(slots=True)
class LaneReleases:
    """What the warps of a cluster have released while some lanes had stored since the last meeting of all lanes.

    `by_agent`: epoch, meetings and releasing lanes, in order. `partial`: by agent, whether only some lanes of the warp
    released; shared with other clusters. `any_partial`: whether that happened in this cluster. `ended`: by agent, the
    epoch in which lanes ended ahead of others of their warp, its meetings by then, and the lanes.
    """

    by_agent: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict[int, list[tuple[int, int, int]]])
    ended: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict[int, list[tuple[int, int, int]]])
    partial: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(MAX_AGENTS, np.bool_))
    any_partial: bool = False

    def note(self, agent: int, epoch: int, meetings: int, lanes: int, concerned: int = EVERY) -> None:
        """Record that `lanes` of a warp that has met `meetings` times have released what is over in `epoch`.

        `concerned`: the lanes that have accessed anything since that meeting.
        """
        releases = self.by_agent.setdefault(agent, [])
        releases.append((epoch, meetings, lanes))
        if len(releases) > 2 * KEPT:
            del releases[:KEPT]
        if lanes != NOBODY and concerned & ~lanes:
            self.partial[agent] = self.any_partial = True

    def end(self, agent: int, epoch: int, meetings: int, lanes: int) -> None:
        """Record that `lanes` of a warp that has met `meetings` times end in `epoch` while others go on."""
        self.ended.setdefault(agent, []).append((epoch, meetings, lanes))
        self.partial[agent] = self.any_partial = True

    def leave_out(self, agent: int, lane: int, meetings: int, epoch: int, seen: int) -> bool:
        """Whether no release up to epoch `seen`, or none before the lane ended, covers what `lane` wrote in `epoch`.

        The release of `seen` itself must be known. `lane` -1: the lane is unknown.
        """
        releases, ends = self.by_agent.get(agent, []), self._ends(agent, lane, meetings)
        at = bisect_right(releases, seen, key=lambda one: one[0])
        if not ends and (at == 0 or releases[at - 1][:2] != (seen, meetings)):
            return False
        released = 0
        while at and releases[at - 1][0] >= epoch:
            at -= 1
            when, met, lanes = releases[at]
            # Once lanes have met, a release by any of them covers all of them.
            lanes = EVERY if met > meetings and lanes else lanes
            for end, gone in ends:
                if end <= when:
                    lanes &= ~gone
            released |= lanes
            if released == EVERY or (lane >= 0 and released >> lane & 1):
                return False
        return at > 0 or len(releases) < KEPT

    def missing_meeting(self, agent: int, lane: int, meetings: int) -> str:
        """The clause that says why a left-out write is not ordered."""
        if self._ends(agent, lane, meetings):
            who = ("that lane has ended since and released nothing" if lane >= 0 else
                   "a lane of it has ended since, and not every lane has released it")  # fmt: skip
            return (f"{who}, and what orders others of its warp orders no lane that has ended: bar.warp.sync is "
                    "missing ahead of its end")  # fmt: skip
        return ("what orders that is a release by other lanes of that warp, which the lane has not met in between: "
                "bar.warp.sync is missing ahead of the release")  # fmt: skip

    def _ends(self, agent: int, lane: int, meetings: int) -> list[tuple[int, int]]:
        """The epochs in which `lane` (any lane if unknown) ended while its warp had met `meetings` times, and the ended
        lanes."""
        return [
            (epoch, lanes)
            for epoch, met, lanes in self.ended.get(agent, ())
            if met == meetings and (lane < 0 or lanes >> lane & 1)
        ]


@dataclass(slots=True)
class LaneReads(LaneReleases):
    """The same for reads of shared memory. What a lane has read before it ended counts as ordered.

    `last`: by agent, the meetings of its warp at its last read, above the lanes that have read since that meeting.
    """

    last: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(MAX_AGENTS, np.int64))

    def read(self, agent: int, meetings: int, lanes: int) -> None:
        """Record that `lanes` of a warp that has met `meetings` times read. Machine code does the same."""
        last = self.last.item(agent)
        self.last[agent] = (last if last >> LANE_BITS == meetings else meetings << LANE_BITS) | lanes

    def release(self, agent: int, epoch: int, meetings: int, lanes: int) -> None:
        """As `note`, if the warp has read anything since that meeting."""
        last = self.last.item(agent)
        if last >> LANE_BITS == meetings:
            self.note(agent, epoch, meetings, lanes, last & EVERY)
