"""Who last wrote and read shared memory: marks of granules of four bytes, and of single bytes where these differ.

A granule that nobody has accessed in part has one mark. The first write of one or two bytes to it divides its mark of
writers: each byte gets the mark that the granule had, and then the written bytes get their own. From then on the bytes
are judged one by one, until a write of the whole granule. Reads divide the mark of readers in the same way, for good:
a write does not end what is known of readers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backends.vm.memory.clocks import Stamps
from backends.vm.memory.lanes import LaneMarks
from backends.vm.numpy_calls import count_nonzero

Cells = npt.NDArray[np.int64]

GRANULE = 4
"""Bytes of a granule."""
WRITTEN, READ, COMPARED = 1, 2, 4
"""Bits of a divided granule: its marks of writers, and of readers, are those of its bytes. The third: a
compare-and-swap has failed on some of its bytes, and only NumPy knows of which to check later writes."""
LASTING = READ | COMPARED
"""The bits that stay when the whole granule is written."""
EVERY_BYTE = (1 << GRANULE) - 1
"""All bytes of a granule as bits."""


@dataclass(slots=True)
class Marks:
    """By cell of `unit` bytes, about its last write (or read): a stamp of clocks.py, the PTX line, and the lane."""

    unit: int
    stamp: Stamps
    line: npt.NDArray[np.int32]
    lanes: LaneMarks

    @classmethod
    def of(cls, cells: int, unit: int) -> Marks:
        """Marks of memory that nobody has accessed."""
        return cls(unit, np.zeros(cells, np.int32), np.zeros(cells, np.int32), LaneMarks(cells))

    @property
    def arrays(
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int8], npt.NDArray[np.int32]]:
        """Stamps, lines, lanes and meetings: the order of access_code.SHARED_FIELDS."""
        return self.stamp, self.line, self.lanes.lane, self.lanes.met

    @property
    def name(self) -> str:
        """What a report calls a cell."""
        return f"{GRANULE}-byte word" if self.unit == GRANULE else "byte"

    def note(self, cells: Cells, stamp: int, line: int) -> None:
        """Record an access to `cells`."""
        self.stamp[cells], self.line[cells] = stamp, line


@dataclass(slots=True)
class Divided:
    """The marks of `granules` of a memory, where some may be divided into bytes; `of_bytes` is made on first use.

    `bit`: WRITTEN or READ. `flags`: by granule, which of its marks are divided; shared by writers and readers.
    """

    bit: int
    flags: npt.NDArray[np.uint8]
    granules: Marks
    of_bytes: Marks = field(default_factory=lambda: Marks.of(0, 1))

    def finest(self, granules: Cells, bytes_: Cells | None = None) -> tuple[Marks, Cells]:
        """The marks of an access and its cells there: `granules` [..., k], or bytes if any of them is divided.

        `bytes_` [n, size]: the bytes, if they are not all bytes of the granules.
        """
        if not self.of_bytes.stamp.size:
            return self.granules, granules
        divided = (self.flags[granules] & self.bit) != 0
        if not count_nonzero(divided):
            return self.granules, granules
        # The marks of the bytes of undivided granules mean nothing, so they may hold what finest needs.
        self._spread(granules[~divided])
        return self.of_bytes, bytes_of(granules) if bytes_ is None else bytes_

    def divide(self, granules: Cells) -> Marks:
        """The marks of bytes, with `granules` divided."""
        self._spread(granules[(self.flags[granules] & self.bit) == 0])
        self.flags[granules] |= self.bit
        return self.of_bytes

    def _spread(self, granules: Cells) -> None:
        """Give the bytes of `granules` their marks."""
        at = bytes_of(granules.ravel())
        for mine, whole in zip(self.of_bytes.arrays, self.granules.arrays, strict=True):
            mine[at] = np.repeat(whole[granules.ravel()], GRANULE)


def bytes_of(granules: Cells) -> Cells:
    """The bytes of `granules` [..., k]: [..., 4 k]."""
    return (GRANULE * granules[..., None] + np.arange(GRANULE)).reshape(*granules.shape[:-1], -1)
