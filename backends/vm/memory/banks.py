"""Shared-memory bank conflicts: 32 banks of 4 bytes; an access of 8 or 16 bytes a lane goes in 2 or 4 parts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BANKS = 32


def wavefronts(offsets: npt.NDArray[np.int64], size: int) -> tuple[int, int]:
    """Fewest possible and actual passes over the banks for lanes that access `size` bytes at `offsets` (bytes).

    Lanes are served in groups of 128 bytes (all lanes, half warps, quarter warps); within a group every bank gives
    one 4-byte word a pass, and lanes that want the same word share it.
    """
    words_per_lane = max(size // 4, 1)
    lanes = BANKS // words_per_lane
    taken = 0
    groups = 0
    words = (offsets[:, None] >> 2) + np.arange(words_per_lane)
    for start in range(0, offsets.size, lanes):
        distinct = np.unique(words[start : start + lanes])
        taken += int(np.bincount(distinct & (BANKS - 1), minlength=1).max())
        groups += 1
    return groups, taken
