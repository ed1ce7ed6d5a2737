"""Fences of tensor maps that a kernel changes in global memory.

Copies read a map through a proxy of its own. A change is visible to them behind a release
(fence.proxy.tensormap::generic.release, or tensormap.cp_fenceproxy) and an acquire of the map's 128 bytes
(fence.proxy.tensormap::generic.acquire; PTX ISA 8.6, 9.7.13.4). Without the acquire an H200 copied through the old map
in every launch in which the CTA had used that map before; without the release it saw the change
(results/records/h200-tensormap-fences.json).

Any acquire in the cluster counts for those that come after it, and any release that a change comes before, so that no
finding is wrong. The start of a launch counts as an acquire of every map. In a dependent launch griddepcontrol.wait
counts instead, and GlobalRaces reports a use before it. map_reads.py is about the copies before a change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from backends.vm.faults import Fault, OtherAccess, report
from backends.vm.memory.clocks import Snapshot, parts_of, seen_of

if TYPE_CHECKING:
    from backends.vm.memory.global_memory import GlobalMemory
    from backends.vm.memory.global_races import Accessor, GlobalRaces

MAP_BYTES: Final = 128
MAP_HALF: Final = MAP_BYTES // 2
"""Bytes of the lower half of a map, which holds all fields. Kernels leave the upper half unwritten."""


def check_map_address(memory: GlobalMemory, address: int, lane: int) -> None:
    """Raise Fault unless a tensor map may lie at `address`, in whatever space."""
    if address % MAP_HALF:
        spot = memory.spot(address)
        raise Fault("misaligned", f"a tensor map must lie at a multiple of {MAP_HALF} bytes{spot}",
                    lane=lane, address=None if spot else address)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Acquire:
    """By `agent` in `epoch`: the marks of changes that were ordered before."""

    agent: int
    epoch: int
    marks: frozenset[int]


@dataclass(slots=True)
class MapFences:
    """The fences of one launch. `released`: what came before each release. `acquired`: by cluster and address."""

    races: GlobalRaces
    released: list[Snapshot] = field(default_factory=list[Snapshot])
    acquired: dict[tuple[int, int], list[_Acquire]] = field(default_factory=dict[tuple[int, int], list[_Acquire]])

    def release(self, warp: Accessor) -> None:
        """A releasing fence of `warp`."""
        self.released.append(warp.known())

    def acquire(self, memory: GlobalMemory, address: int, warp: Accessor) -> None:
        """An acquiring fence of `warp` for the map at `address`."""
        marks = frozenset(self.races.map_changes(memory, address, warp, used=False))
        if marks:
            acquires = self.acquired.setdefault((warp.agents.serial, address), [])
            acquires.append(_Acquire(warp.agent, int(warp.clock.seen[warp.agent]), marks))

    def use(self, memory: GlobalMemory, address: int, warp: Accessor, lane: int) -> None:
        """Report a use of the map at `address` by `lane` that a change in this launch is not fenced from."""
        changes = self.races.map_changes(memory, address, warp, used=True)
        if not changes:
            return
        seen, fenced = warp.clock.seen, set[int]()
        for one in self.acquired.get((warp.agents.serial, address), ()):
            if one.agent == warp.agent or seen[one.agent] >= one.epoch:
                fenced |= one.marks
        for mark, line in changes.items():
            who = self.races.name(mark, warp)
            told = f"the copy uses the tensor map{memory.spot(address)}, which {who} changed at PTX line {line}"
            if mark not in fenced:
                rule, lacking = "tensor-map-not-acquired", "no fence.proxy.tensormap::generic.acquire of the map since"
            elif not self._is_released(mark):
                rule, lacking = "tensor-map-not-released", "no fence.proxy.tensormap::generic.release after the change"
            else:
                continue
            report(Fault(rule, f"{told}, with {lacking}", lane=lane, other=OtherAccess(who, "changed", line)))
            return

    def _is_released(self, mark: int) -> bool:
        cluster, agent, epoch = parts_of(mark)
        return any(seen_of(known, cluster, agent) >= epoch for known in self.released)
