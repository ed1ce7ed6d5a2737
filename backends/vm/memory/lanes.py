"""Which lane of its warp wrote or read a granule of memory, to check what only the warp's own convergence orders.

The lanes of a warp are independent threads since sm_70. The machine lets them go on together from the first common
instruction, sooner than silicon must, so schedules never expose a missing bar.warp.sync. Clocks are per warp. This
module tells lanes apart instead: lanes that have not met since a write (no bar.warp.sync, no other instruction that
gathers lanes except elect.sync, mma.sync, ldmatrix and their kin, no wait) are not ordered by it. Whatever may order
them counts as a meeting, so that no finding is wrong. An arrival of one lane publishes what that lane did, and what
others did before they met it (PTX ISA 8.8). So another warp that waits only for that arrival is not ordered behind the
others' later writes and reads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.vm.memory.clocks import EPOCH_MASK, Epochs, Stamps, agent_of
from backends.vm.memory.lane_releases import LaneReleases

Addresses = npt.NDArray[np.int64]


class LaneMarks:
    """By granule or byte, about its last generic write (or read): `lane`, and `met`, how often its warp had met before.

    `lane` is -1 where all lanes wrote it together (stmatrix); a row of ldmatrix counts for the lane that gives its
    address. `met` is 0 where it does not matter: no access, or a strong one.
    """

    def __init__(self, granules: int) -> None:
        self.lane = np.zeros(granules, np.int8)
        self.met = np.zeros(granules, np.int32)

    def note(self, granules: Addresses, lanes: Addresses | None, meetings: int) -> None:
        """Record an access by lanes [n] (None: unknown) to granules [n, k]; their warp has met `meetings` times."""
        self.lane[granules] = -1 if lanes is None else lanes[:, None]
        self.met[granules] = meetings

    def split(self, times: int) -> None:
        """Split each granule into `times` granules."""
        self.lane, self.met = np.repeat(self.lane, times), np.repeat(self.met, times)

    def foreign(self, granules: Addresses, lanes: Addresses, meetings: int) -> npt.NDArray[np.bool_]:
        """Which of granules [n, k] another lane than lanes [n] wrote since the warp's meeting number `meetings`."""
        return (self.met[granules] == meetings) & (self.lane[granules] != lanes[:, None])

    def loose(self, granules: Addresses, stamps: Stamps, seen: Epochs, releases: LaneReleases) -> npt.NDArray[np.bool_]:
        """Which of `granules`, last accessed with `stamps`, only other lanes released to the owner of `seen`."""
        agents, epochs = agent_of(stamps), stamps & EPOCH_MASK
        asked = releases.partial[agents] & (self.met[granules] > 0) & (epochs <= seen[agents])
        for at in zip(*np.nonzero(asked), strict=True):
            lane, met, agent = int(self.lane[granules[at]]), int(self.met[granules[at]]), int(agents[at])
            asked[at] = releases.leave_out(agent, lane, met, int(epochs[at]), int(seen[agent]))
        return asked
