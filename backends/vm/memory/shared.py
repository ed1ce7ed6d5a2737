"""Shared memory of one CTA: bytes, and for each byte or granule what silicon hides.

That is whether a byte was ever written; and for each 4-byte granule who wrote last, who read last (stamps of clocks.py)
and whether a bulk copy into it is in flight. Bits 31..24 of a 32-bit shared address hold the CTA's rank in its cluster.
The first 0x400 bytes are reserved (measured on an H200, facts.md 0.1).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault
from backends.vm.memory.clocks import (
    EPOCH_BITS,
    EPOCH_MASK,
    Agents,
    Clock,
    Stamps,
    agent_of,
    unordered,
)

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]
Granules = npt.NDArray[np.int64]

RESERVED = 0x400
BANKS = 32
MBARRIER = -1
"""The value of `in_flight` in the granules of a live mbarrier object."""
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
MAX_DYNAMIC = 232448
"""Bytes of dynamic shared memory that a block may have on sm_90 and sm_100 (facts.md 0.1)."""


class SharedMemory:
    """`size` bytes from offset 0, the reserved 0x400 included. Offsets below are addresses without rank bits.

    `contested` granules hold bytes of several generic writers that nothing orders. Order among those is not judged.
    `readers` holds readers besides the last: by agent, int32 epochs [granules]. `many_readers` has those granules.
    `unfenced_overwrites` counts bulk copies over what threads have read with no proxy fence in between.
    """

    def __init__(self, agents: Agents, static_size: int, dynamic_size: int, dynamic_align: int = 16) -> None:
        self.agents = agents
        self.dynamic_offset = -(-(RESERVED + static_size) // dynamic_align) * dynamic_align
        self.dynamic_size = dynamic_size
        self.size = self.dynamic_offset + dynamic_size
        padded = -(-self.size // 16) * 16
        self.data: Bytes = np.zeros(padded, np.uint8)
        self.written = np.zeros(padded, np.bool_)
        self.in_flight = np.zeros(padded // 4, np.int32)
        self.writer: Stamps = np.zeros(padded // 4, np.int32)
        self.reader: Stamps = np.zeros(padded // 4, np.int32)
        self.writer_line = np.zeros(padded // 4, np.int32)
        self.contested = np.zeros(padded // 4, np.bool_)
        self.many_readers = np.zeros(padded // 4, np.bool_)
        self.readers: dict[int, npt.NDArray[np.int32]] = {}
        self.unfenced_overwrites = 0

    def check(self, offsets: Addresses, size: int, access: str) -> None:
        """Fault unless every access of `size` bytes lies inside this CTA's shared memory and is aligned to it."""
        bad = (offsets < RESERVED) | (offsets + size > self.size) | (offsets & (size - 1) != 0)
        if np.count_nonzero(bad):
            lane = int(np.flatnonzero(bad)[0])
            at = int(offsets[lane])
            if at >= RESERVED and at + size <= self.size:
                raise Fault("misaligned", f"shared {access} of {size} bytes at an address that is not a multiple of "
                            f"{size}", lane=lane, address=at)  # fmt: skip
            raise Fault("out-of-bounds", f"shared {access} of {size} bytes; this CTA has {self.size - RESERVED} bytes "
                        f"from {RESERVED:#x} to {self.size:#x}", lane=lane, address=at)  # fmt: skip

    def check_region(self, offset: int, size: int, access: str) -> None:
        """Fault unless `size` bytes at `offset` are inside and aligned to their size."""
        self.check(np.array([offset], np.int64), size, access)

    def load(self, offsets: Addresses, size: int, clock: Clock, stamp: int, *, strong: bool = False) -> Bytes:
        """Generic-proxy read of uint8 [n, size]. Checks initialisation, bulk copies in flight and races.

        `strong` accesses (atomics, volatile, relaxed and up) race with nobody.
        """
        self.check(offsets, size, "load")
        index = offsets[:, None] + np.arange(size)
        granules = _granules(index)
        self._check_idle(granules, "read")
        if np.count_nonzero(self.written[index]) < index.size:
            lane, byte = np.argwhere(~self.written[index])[0]
            raise Fault("uninitialised-shared", f"byte {byte} of this {size}-byte load was never written",
                        lane=int(lane), address=int(offsets[lane] + byte))  # fmt: skip
        if not strong:
            self._check_writers(granules, clock, "read")
            self._note_readers(granules, clock, stamp)
        return self.data[index]

    def store(
        self, offsets: Addresses, values: Bytes, clock: Clock, stamp: int, line: int, *, strong: bool = False
    ) -> None:
        """Generic-proxy write of uint8 [n, size] at each offset. Where lanes collide the highest lane wins."""
        size = values.shape[1]
        self.check(offsets, size, "store")
        index = offsets[:, None] + np.arange(size)
        granules = _granules(index)
        self._check_idle(granules, "overwritten")
        if size < 4:
            self._check_neighbours(granules, clock)
        elif not strong:
            self._check_overwritten(granules, clock, self.data[index], values)
            self._check_readers(granules, clock)
        if size >= 4:
            self.contested[granules] = False
        self.data[index] = values
        self.written[index] = True
        self.writer[granules] = stamp
        self.writer_line[granules] = line

    def _check_neighbours(self, granules: Granules, clock: Clock) -> None:
        """Checks of a store of less than a granule, whose other bytes may rightly belong to another warp.

        Only copies and the tensor core count: they take whole granules. The granule becomes contested.
        """
        for stamps, action in ((self.writer, "overwritten"), (self.reader, "overwritten")):
            found = stamps[granules]
            late = unordered(found, clock.seen)
            if late is None:
                continue
            foreign = late & (agent_of(found) >= self.agents.first_engine)
            if np.count_nonzero(foreign):
                self._race(granules, foreign, stamps, action)
            self.contested[granules] |= late

    def _check_idle(self, granules: Granules, action: str) -> None:
        busy = self.in_flight[granules]
        if not np.count_nonzero(busy):
            return
        lane, at = _first(granules, busy != 0)
        if self.in_flight[at] == MBARRIER:
            raise Fault("mbarrier-misuse", "an mbarrier object lies here: only mbarrier operations may touch it "
                        "before mbarrier.inval", lane=lane, address=4 * at)  # fmt: skip
        raise Fault("copy-not-awaited", f"this granule is {action} while the copy of PTX line {self.in_flight[at]}"
                    " into it is in flight: nothing waits for its end", lane=lane, address=4 * at)  # fmt: skip

    def _check_writers(self, granules: Granules, clock: Clock, action: str) -> None:
        late = unordered(self.writer[granules], clock.seen)
        if late is not None:
            late &= ~self.contested[granules]
            if np.count_nonzero(late):
                self._race(granules, late, self.writer, action)

    def _check_overwritten(self, granules: Granules, clock: Clock, before: Bytes, after: Bytes) -> None:
        """As _check_writers, but for threads that write the value that another one wrote, in whole granules.

        Races between writes of one size are defined (PTX ISA 8.7.2), and such a one has one outcome: Triton's
        replicated layouts and nvcc's hoisted initialisations rely on it.
        """
        late = unordered(self.writer[granules], clock.seen)
        if late is None:
            return
        equal = (before == after).reshape(*granules.shape, 4).all(2)
        late &= ~self.contested[granules] & ~(equal & (agent_of(self.writer[granules]) < self.agents.first_engine))
        if np.count_nonzero(late):
            self._race(granules, late, self.writer, "overwritten")

    def _check_readers(self, granules: Granules, clock: Clock) -> None:
        late = unordered(self.reader[granules], clock.seen)
        if late is not None:
            self._race(granules, late, self.reader, "overwritten")
        if not self.readers or not np.count_nonzero(self.many_readers[granules]):
            return
        late = np.zeros(granules.shape, np.bool_)
        for agent, epochs in self.readers.items():
            late |= epochs[granules] > clock.seen[agent]
        if np.count_nonzero(late):
            _, at = _first(granules, late)
            agent = min(agent for agent, epochs in self.readers.items() if epochs[at] > clock.seen[agent])
            self.reader[at] = agent << EPOCH_BITS
            self._race(granules, late, self.reader, "overwritten")
        self.many_readers[granules] = False
        for epochs in self.readers.values():
            epochs[granules] = 0

    def _note_readers(self, granules: Granules, clock: Clock, stamp: int) -> None:
        """Keep the last reader in `reader`. An earlier one that nothing orders before it moves to `readers`."""
        found = self.reader[granules]
        late = unordered(found, clock.seen)
        if late is not None:
            at, kept = granules[late], found[late]
            by = agent_of(kept)
            for agent in set(by.tolist()):
                if agent not in self.readers:
                    self.readers[agent] = np.zeros(self.reader.size, np.int32)
                epochs, mine = self.readers[agent], by == agent
                epochs[at[mine]] = np.maximum(epochs[at[mine]], kept[mine] & EPOCH_MASK)
            self.many_readers[at] = True
        self.reader[granules] = stamp

    def _race(self, granules: Granules, late: npt.NDArray[np.bool_], stamps: Stamps, action: str) -> None:
        lane, at = _first(granules, late)
        agent = agent_of(int(stamps[at]))
        who = self.agents.name(agent)
        if stamps is self.writer and agent >= self.agents.first_copy:
            raise Fault("copy-not-awaited", f"this granule is {action}, but the copy of PTX line "
                        f"{self.writer_line[at]} into it has not been waited for",
                        lane=lane, address=4 * at)  # fmt: skip
        line = f" at PTX line {self.writer_line[at]}" if stamps is self.writer else ""
        did = "wrote" if stamps is self.writer else "read"
        raise Fault("race", f"this granule is {action}, but nothing orders that after {who} {did} it{line}: a barrier, "
                    "an mbarrier wait or a wait for a group is missing", lane=lane, address=4 * at)  # fmt: skip

    def _check_inside(self, granules: Granules, what: str) -> None:
        if granules.size and (int(granules.min()) < RESERVED // 4 or int(granules.max()) >= self.size // 4):
            at = int(granules.max() if int(granules.max()) >= self.size // 4 else granules.min())
            raise Fault("out-of-bounds", f"{what} outside of the CTA's shared memory ({RESERVED:#x}..{self.size:#x})",
                        address=4 * at)  # fmt: skip

    def _check_fenced(self, granules: Granules, clock: Clock, what: str) -> None:
        unfenced = unordered(self.writer[granules], clock.fenced)
        if unfenced is not None:
            _, at = _first(granules, unfenced)
            who = self.agents.name(agent_of(int(self.writer[at])))
            raise Fault("missing-proxy-fence", f"{what} what {who} wrote at PTX line {self.writer_line[at]} "
                        "through the generic proxy with no fence.proxy.async in between", address=4 * at)  # fmt: skip

    def async_read(self, granules: Granules, clock: Clock, stamp: int, what: str) -> None:
        """Checks before the asynchronous proxy (TMA store, MMA operand) reads whole 4-byte `granules`."""
        self._check_inside(granules, f"{what} reads")
        self._check_idle(granules, f"read by {what}")
        # Four bytes at once: every one of them is 1 where a granule is wholly written.
        whole = self.written.view(np.uint32)[granules] == 0x01010101
        if np.count_nonzero(whole) < whole.size:
            raise Fault("uninitialised-shared", f"{what} reads bytes that were never written",
                        address=4 * int(granules[~whole][0]))  # fmt: skip
        self._check_writers(granules, clock, f"read by {what}")
        self._check_fenced(granules, clock, f"{what} reads")
        self._note_readers(granules, clock, stamp)

    def async_write_begins(
        self, granules: Granules, clock: Clock, line: int, what: str, *, generic: bool = False
    ) -> None:
        """A copy into `granules` is issued. Earlier readers and writers must be ordered before it.

        `generic`: cp.async and st.async write through the generic proxy and so need no proxy fence.
        """
        self._check_inside(granules, f"{what} writes")
        self._check_idle(granules, "overwritten")
        self._check_writers(granules, clock, "overwritten")
        if not generic:
            self._check_fenced(granules, clock, f"{what} overwrites")
        self._check_readers(granules, clock)
        if not generic:
            self._count_unfenced_readers(granules, clock)
        self.in_flight[granules] = line

    def _count_unfenced_readers(self, granules: Granules, clock: Clock) -> None:
        """Count a bulk copy over what threads have read with no proxy fence in between.

        The ISA orders the two proxies by such a fence only. CUTLASS's and Triton's pipelines leave it out, so it is not
        a finding.
        """
        found = self.reader[granules]
        late = unordered(found, clock.fenced)
        if late is not None and np.count_nonzero(late & (agent_of(found) < self.agents.first_engine)):
            self.unfenced_overwrites += 1

    def async_write_ends(self, granules: Granules, stamp: int, line: int) -> None:
        """The bulk copy into `granules` has landed."""
        self.in_flight[granules] = 0
        self.contested[granules] = False
        self.written.reshape(-1, 4)[granules] = True
        self.writer[granules] = stamp
        self.writer_line[granules] = line


def _granules(index: Addresses) -> Granules:
    """4-byte granules [n, granules] of byte indices [n, size]."""
    return index[:, ::4] >> 2


def _first(granules: Granules, bad: npt.NDArray[np.bool_]) -> tuple[int | None, int]:
    """Lane (of [lanes, granules]; None for a flat list) and granule of the first bad one."""
    where = np.argwhere(bad)[0]
    return (int(where[0]) if granules.ndim == 2 else None), int(granules[tuple(where)])


def wavefronts(offsets: npt.NDArray[np.int64], size: int) -> tuple[int, int]:
    """Fewest possible and actual passes over the 32 banks for lanes that access `size` bytes at `offsets` (bytes).

    Lanes are served in groups of 128 bytes: all lanes, half warps or quarter warps. Within a group every bank gives one
    4-byte word a pass, and lanes that want the same word share it.
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
