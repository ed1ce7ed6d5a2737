"""Which lanes of a warp released what, where the others had stored something since the lanes met last.

Clocks are by warp: an epoch of a warp that another agent has seen is ordered before with all lanes. This knows more of
an epoch, of those few warps of which some lanes arrive alone.
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
    """

    by_agent: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict[int, list[tuple[int, int, int]]])
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

    def leave_out(self, agent: int, lane: int, meetings: int, epoch: int, seen: int) -> bool:
        """Whether what `lane` wrote in `epoch` is in no release up to the epoch `seen`, whose own one is known.

        `lane` -1: it is not known which of the warp.
        """
        releases = self.by_agent.get(agent, [])
        at = bisect_right(releases, seen, key=lambda one: one[0])
        if at == 0 or releases[at - 1][:2] != (seen, meetings):
            return False
        while at and releases[at - 1][0] >= epoch:
            at -= 1
            lanes = releases[at][2]
            if lanes == EVERY or (lane >= 0 and lanes >> lane & 1):
                return False
        return at > 0 or len(releases) < KEPT
