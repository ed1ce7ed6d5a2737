"""Which lanes of a warp released what, where the others had stored something since the lanes met last.

Clocks are by warp: an epoch of a warp that another agent has seen is ordered before with all lanes. This knows more of
an epoch, of those few warps of which some lanes arrive alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

EVERY, NOBODY = (1 << 32) - 1, 0
"""Lanes as bits."""


@dataclass(slots=True)
class LaneReleases:
    """What the warps of a cluster have released while lanes had stored what the others had not met behind.

    `by_agent`: epoch, meetings and releasing lanes, in order. `partial`: the warps of which some lanes released alone.
    """

    by_agent: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict[int, list[tuple[int, int, int]]])
    partial: set[int] = field(default_factory=set[int])

    def note(self, agent: int, epoch: int, meetings: int, lanes: int) -> None:
        """`lanes` of a warp that has met `meetings` times have released what is over in `epoch`."""
        self.by_agent.setdefault(agent, []).append((epoch, meetings, lanes))
        if lanes not in (EVERY, NOBODY):
            self.partial.add(agent)

    def leave_out(self, agent: int, lane: int, meetings: int, epoch: int, seen: int) -> bool:
        """Whether what `lane` wrote in `epoch` is in no release up to the epoch `seen`, whose own one is known."""
        since = list(self._since(agent, epoch, seen))
        if not since or since[0][:2] != (seen, meetings):
            return False
        return not any(lane >= 0 and lanes >> lane & 1 for _, _, lanes in since)

    def _since(self, agent: int, epoch: int, seen: int) -> Iterator[tuple[int, int, int]]:
        """Releases of the epochs `epoch` to `seen`, the last one first."""
        for one in reversed(self.by_agent[agent]):
            if one[0] < epoch:
                return
            if one[0] <= seen:
                yield one
