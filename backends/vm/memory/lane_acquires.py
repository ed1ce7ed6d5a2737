"""What only some lanes of a warp have acquired, and the others do not know until they meet those lanes.

The clock of a warp takes over what any of its lanes acquires: from a flag, by a wait at an mbarrier, or by a wait for
bulk groups, which are the waiting thread's own. This module keeps lanes apart until they meet next; lanes.py says what
counts as a meeting.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backends.vm.memory.clocks import EPOCH_MASK, Epochs, Snapshot, Stamps, agent_of, parts_of, seen_of


@dataclass(slots=True)
class LaneAcquires:
    """Acquires by some lanes since a warp's meeting number `at`: what it knew `before` the first, and after each of
    them with the acquiring lanes as bits. For each lane only its last acquire counts."""

    at: int = 0
    before: Snapshot = field(default_factory=Snapshot)
    after: list[tuple[int, Snapshot]] = field(default_factory=list[tuple[int, Snapshot]])

    def note(self, lanes: int, meetings: int, before: Snapshot, after: Snapshot) -> None:
        """Record an acquire by `lanes` of a warp that has met `meetings` times. It knew `before`, and now knows
        `after`."""
        if self.at != meetings:
            self.at, self.before, self.after = meetings, before, []
        self.after = [*(one for one in self.after if one[0] & ~lanes), (lanes, after)]

    def tell(self, cluster: int, agent: int, epoch: int) -> None:
        """Let all lanes know the actions of an agent up to `epoch`."""
        for known in (self.before, *(after for _, after in self.after)):
            known[cluster] = seen = known[cluster].copy()
            seen[agent] = max(int(seen[agent]), epoch)

    def concern(self, lanes: int) -> bool:
        """Whether some of `lanes` may not know what their warp knows. The warp has not met since."""
        return bool(lanes & ~self.after[-1][0])

    def unknown(
        self, marks: npt.NDArray[np.int64], lanes: npt.NDArray[np.int64], now: Snapshot, warp: tuple[int, int]
    ) -> npt.NDArray[np.bool_]:
        """Which of marks [n, k] lanes [n] know only by other lanes' acquires, where the warp knows `now`.

        `warp`: its cluster and agent, whose own accesses are not judged here.
        """
        found = np.zeros(marks.shape, np.bool_)
        for at, lane in enumerate(lanes.tolist()):
            known = self._known_to(lane)
            if known is self.after[-1][1]:
                continue
            for column, mark in enumerate(marks[at].tolist()):
                cluster, agent, epoch = parts_of(mark)
                own, acquired, last = (seen_of(one, cluster, agent) for one in (known, self.after[-1][1], now))
                found[at, column] = (cluster, agent) != warp and own < epoch <= acquired == last
        return found

    def unknown_here(
        self, stamps: Stamps, lanes: npt.NDArray[np.int64], cluster: int, seen: Epochs, agent: int
    ) -> npt.NDArray[np.bool_]:
        """As `unknown`, for stamps [n, k] of shared memory, where warp `agent` of `cluster` has `seen`."""
        agents, epochs, acquired = agent_of(stamps), stamps & EPOCH_MASK, self.after[-1][1][cluster]
        found = (agents != agent) & (epochs <= acquired[agents]) & (acquired[agents] == seen[agents])
        for lane in dict.fromkeys(lanes.tolist()):
            rows = lanes == lane
            found[rows] &= epochs[rows] > self._known_to(lane)[cluster][agents[rows]]
        return found

    def _known_to(self, lane: int) -> Snapshot:
        return next((after for by, after in reversed(self.after) if by >> lane & 1), self.before)
