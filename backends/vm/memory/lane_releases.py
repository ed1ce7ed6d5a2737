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
        releases, end = self.by_agent.get(agent, []), self._end_of(agent, lane, meetings)
        at = bisect_right(releases, seen if end is None else min(seen, end - 1), key=lambda one: one[0])
        if end is None and (at == 0 or releases[at - 1][:2] != (seen, meetings)):
            return False
        while at and releases[at - 1][0] >= epoch:
            at -= 1
            lanes = releases[at][2]
            if lanes == EVERY or (lane >= 0 and lanes >> lane & 1):
                return False
        return at > 0 or len(releases) < KEPT

    def missing_meeting(self, agent: int, lane: int, meetings: int) -> str:
        """What to say of a write that is left out."""
        if self._end_of(agent, lane, meetings) is not None:
            return ("that lane has ended since and released nothing, and what orders others of its warp orders no lane "
                    "that has ended: bar.warp.sync is missing ahead of its end")  # fmt: skip
        return ("what orders that is a release by other lanes of that warp, which the lane has not met in between: "
                "bar.warp.sync is missing ahead of the release")  # fmt: skip

    def _end_of(self, agent: int, lane: int, meetings: int) -> int | None:
        """The epoch in which `lane` ended, if its warp had not met more than `meetings` times by then."""
        for epoch, met, lanes in self.ended.get(agent, ()):
            if met == meetings and (lane < 0 or lanes >> lane & 1):
                return epoch
        return None
