"""Tensor maps in global memory that copies may still read.

A copy begins by reading its map (PTX ISA 9.7.9.25), and whoever changes the map before the copy is complete gets
undefined behaviour (9.7.9.25.1). No fence helps. A thread may change the map once it knows that the copy has ended. The
mbarrier of a load tells its end; a wait for the bulk group of a store or a reduction tells theirs. A wait with .read is
enough, because it waits until the map has been read too (9.7.9.27.2.2).

Four things are more lenient than the ISA, so that no finding is wrong:
- cp.async.bulk.commit_group and .wait_group give back the maps of the thread's earlier loads too, though a bulk group
  holds none (9.7.9.27.2.1). CUTLASS's grouped GEMMs wait like this before they update the maps of A and B.
- A thread's write that leaves the bytes of a map as they are is no change. What a bulk copy will write is unknown when
  it is issued, so each is a change.
- What one lane of a warp knows, the other lanes know.
- Prefetches are not looked at: what they read decides no result.

Of the copies of one thread that end at one place (an mbarrier, its groups), the latest stands for all. Only the lower
half of a map is looked at, which holds all fields.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backends.vm.faults import Fault, OtherAccess, report
from backends.vm.memory.access_code import places_change
from backends.vm.memory.clocks import CLUSTER_SHIFT, Snapshot, seen_of, stamp
from backends.vm.memory.global_memory import Buffer, GlobalMemory
from backends.vm.memory.map_fences import MAP_HALF
from backends.vm.numpy_calls import count_nonzero

if TYPE_CHECKING:
    from backends.vm.memory.global_races import Accessor, GlobalAccesses, GlobalRaces

_Thread = tuple[int, int, int]
"""A cluster, the agent of a warp, and a lane of it."""
_Reader = tuple[_Thread, int]
"""A thread, and the agent of the copies that it issues."""


@dataclass(frozen=True, slots=True)
class _Read:
    """By copy number `serial` of the cluster, issued at PTX `line`."""

    serial: int
    line: int


@dataclass(slots=True)
class MapReads:
    """The reads of one launch, by buffer and by address of the map.

    `waits`: of each thread that has waited for bulk groups, the number up to which a wait covers its copies, and the
    epoch of its warp in which it did. Both grow.
    """

    races: GlobalRaces
    reads: dict[Buffer, dict[int, dict[_Reader, _Read]]] = field(
        default_factory=dict[Buffer, "dict[int, dict[_Reader, _Read]]"]
    )
    waits: dict[_Thread, list[tuple[int, int]]] = field(default_factory=dict[_Thread, "list[tuple[int, int]]"])

    def note(self, memory: GlobalMemory, address: int, warp: Accessor, lane: int, agent: int, serial: int) -> None:
        """`lane` issues copy number `serial`, of `agent`, through the map at `address`."""
        buffer = memory.holding(address)
        if buffer is None or not buffer.writable:
            return
        if buffer not in self.reads:
            places_change()  # From now on, no machine code stores there unseen: GlobalRaces.place gives none.
            self.reads[buffer] = {}
        readers = self.reads[buffer].setdefault(address, {})
        readers[_thread(warp, lane), agent] = _Read(serial, warp.agents.line())

    def wait(self, warp: Accessor, lane: int, serial: int) -> None:
        """`lane` has waited for bulk groups that it committed after it had issued copies up to number `serial`."""
        if not self.reads:
            return
        waits = self.waits.setdefault(_thread(warp, lane), [])
        if not waits or waits[-1][0] < serial:
            waits.append((serial, int(warp.clock.seen[warp.agent])))

    def check(self, accesses: GlobalAccesses, size: int) -> None:
        """Report writes of `size` bytes to a map that a copy may still read."""
        assert accesses.written is not None, "these are writes"
        buffer, warp, addresses = accesses.buffer, accesses.warp, accesses.written[0]
        low, high = int(addresses.min()), int(addresses.max()) + size
        near = [at for at in self.reads[buffer] if low < at + MAP_HALF and at < high]
        if not near:
            return
        same, known = accesses.written_before(), warp.known()
        for at in near:
            hit = (addresses < at + MAP_HALF) & (addresses + size > at)
            if same is not None:
                hit &= ~same[:, 0]
            unread = next((one for one in self.reads[buffer][at].items() if not self._is_over(*one, known)), None)
            if unread is None or not count_nonzero(hit):
                continue
            ((cluster, agent, _), _), read = unread
            access = int(hit.argmax())
            who = self.races.name(cluster << CLUSTER_SHIFT | stamp(agent, 0), warp)
            place = f"byte {max(int(addresses[access]), at) - buffer.base} of `{buffer.name}`"
            copy = f"{who} issued at PTX line {read.line}"
            told = (
                f"{place} {accesses.action}, but it is part of the tensor map at byte {at - buffer.base}, and nothing "
                f"orders that after the end of the copy that {copy} and that may still read the map"
            )
            report(Fault("tensor-map-in-use", told, lane=accesses.lane(access),
                         other=OtherAccess(who, "copied through", read.line)))  # fmt: skip
            return

    def latest(self) -> Iterator[tuple[Buffer, int, int, int]]:
        """For each map that was used: its buffer and address, the mark of a reader, and the PTX line of the copy."""
        for buffer, maps in self.reads.items():
            for address, readers in maps.items():
                ((cluster, _, _), agent), read = next(reversed(readers.items()))
                yield buffer, address, cluster << CLUSTER_SHIFT | stamp(agent, read.serial), read.line

    def _is_over(self, reader: _Reader, read: _Read, known: Snapshot) -> bool:
        """Whether what is `known` says that the copy has read its map."""
        thread, agent = reader
        cluster, issuer, _ = thread
        if read.serial <= seen_of(known, cluster, agent):
            return True
        waits = self.waits.get(thread, [])
        first = bisect_left(waits, (read.serial, 0))
        return first < len(waits) and waits[first][1] <= seen_of(known, cluster, issuer)


def _thread(warp: Accessor, lane: int) -> _Thread:
    return warp.agents.serial, warp.agent, lane
