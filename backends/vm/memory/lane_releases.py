"""Which lanes of a warp released what, where the others had stored something since the lanes met last.

Clocks are by warp: an epoch of a warp that another agent has seen is ordered before with all lanes. This knows more of
an epoch, of those few warps of which some lanes arrive alone.

A lane that ends takes part in nothing that comes later: a barrier waits for the threads that have not exited, and
orders what those that execute it have done (PTX ISA 9.7.13.1, 9.7.13.2). So what it stored after its last meeting is
ordered by its own releases alone, as what a whole warp stored that has ended.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

EVERY, NOBODY = (1 << 32) - 1, 0
"""Lanes as bits."""
KEPT = 1024
"""Releases of a warp that are known, at least. A write before them counts as ordered."""
MAX_AGENTS = 1 << 10
"""As many as a stamp of clocks.py tells apart."""


@dataclass(slots=True)
class LaneReleases:
    """What the warps of a cluster have released while lanes had stored what the others had not met behind.

    `by_agent`: epoch, meetings and releasing lanes, in order. `partial`: of which warps some lanes released alone, by
    agent, of this cluster or of another one that shares the array; `any_partial`: whether there is one in this cluster.
    `ended`: by agent, the epoch in which lanes ended ahead of others of their warp, its meetings by then, the lanes.
    """

    by_agent: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict[int, list[tuple[int, int, int]]])
    ended: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict[int, list[tuple[int, int, int]]])
    partial: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(MAX_AGENTS, np.bool_))
    any_partial: bool = False

    def note(self, agent: int, epoch: int, meetings: int, lanes: int) -> None:
        """`lanes` of a warp that has met `meetings` times have released what is over in `epoch`."""
        releases = self.by_agent.setdefault(agent, [])
        releases.append((epoch, meetings, lanes))
        if len(releases) > 2 * KEPT:
            del releases[:KEPT]
        if lanes not in (EVERY, NOBODY):
            self.partial[agent] = self.any_partial = True

    def end(self, agent: int, epoch: int, meetings: int, lanes: int) -> None:
        """`lanes` of a warp that has met `meetings` times end in `epoch`, and others go on."""
        self.ended.setdefault(agent, []).append((epoch, meetings, lanes))
        self.partial[agent] = self.any_partial = True

    def leave_out(self, agent: int, lane: int, meetings: int, epoch: int, seen: int) -> bool:
        """Whether what `lane` wrote in `epoch` is in no release up to the epoch `seen`, whose own one is known, or in
        none before the lane ended.

        `lane` -1: it is not known which of the warp.
        """
        releases, ends = self.by_agent.get(agent, []), self._ends(agent, lane, meetings)
        at = bisect_right(releases, seen, key=lambda one: one[0])
        if not ends and (at == 0 or releases[at - 1][:2] != (seen, meetings)):
            return False
        released = 0
        while at and releases[at - 1][0] >= epoch:
            at -= 1
            when, met, lanes = releases[at]
            # Lanes that have met release what each of them has done.
            lanes = EVERY if met > meetings and lanes else lanes
            for end, gone in ends:
                if end <= when:
                    lanes &= ~gone
            released |= lanes
            if released == EVERY or (lane >= 0 and released >> lane & 1):
                return False
        return at > 0 or len(releases) < KEPT

    def missing_meeting(self, agent: int, lane: int, meetings: int) -> str:
        """What to say of a write that is left out."""
        if self._ends(agent, lane, meetings):
            who = ("that lane has ended since and released nothing" if lane >= 0 else
                   "a lane of it has ended since, and not every lane has released it")  # fmt: skip
            return (f"{who}, and what orders others of its warp orders no lane that has ended: bar.warp.sync is "
                    "missing ahead of its end")  # fmt: skip
        return ("what orders that is a release by other lanes of that warp, which the lane has not met in between: "
                "bar.warp.sync is missing ahead of the release")  # fmt: skip

    def _ends(self, agent: int, lane: int, meetings: int) -> list[tuple[int, int]]:
        """The epochs in which `lane`, or any if it is not known, ended while its warp had met `meetings` times, and the
        lanes that did."""
        return [
            (epoch, lanes)
            for epoch, met, lanes in self.ended.get(agent, ())
            if met == meetings and (lane < 0 or lanes >> lane & 1)
        ]
