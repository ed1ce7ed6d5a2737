"""Random histories of accesses to a few granules of shared memory, and two ways to run them: by NumPy alone, or with
machine code first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault, collecting
from backends.vm.memory import compiled_access
from backends.vm.memory.access_code import NO, NO_ROOM
from backends.vm.memory.clocks import Agents, Clock, stamp
from backends.vm.memory.compiled_access import Kind
from backends.vm.memory.marks import GRANULE
from backends.vm.memory.shared import RESERVED, SharedMemory
from backends.vm.memory.strong_writes import Strong
from backends.vm.numpy_calls import address_of

WARPS: Final = 4
GRANULES: Final = 6
EVERY: Final = (1 << 32) - 1
Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Access:
    """A load or store by lanes of a warp: `size` bytes at each offset from the first byte of the memory."""

    warp: int
    stores: bool
    size: int
    offsets: Addresses
    lanes: Addresses
    values: npt.NDArray[np.uint8]
    strong: bool


@dataclass(frozen=True)
class Bulk:
    """A copy out of (`reads`) or into granules, issued by a warp, over at once, but waited for only by a Wait."""

    warp: int
    reads: bool
    granules: Addresses


@dataclass(frozen=True)
class Step:
    """What orders: `giver` releases to `taker`, its lanes meet, or it waits for all copies and what was before them.

    `lanes`: those that release, as bits.
    """

    does: Literal["release", "meet", "wait"]
    giver: int
    taker: int = 0
    lanes: int = EVERY


Event = Access | Bulk | Step


def history(seed: int, events: int, *, partial: bool = False) -> list[Event]:
    """Events, mostly in order; `partial`: some lanes release without the others."""
    draw = np.random.default_rng(seed)
    made = list[Event]()
    ordered, narrow = draw.choice([0.2, 0.5, 0.8]), draw.choice([0.4, 0.8])
    while len(made) < events:
        warp = int(draw.integers(WARPS))
        if draw.random() < ordered:
            for other in draw.permutation(WARPS)[: draw.choice([1, 2, WARPS])].tolist():
                lanes = int(draw.choice([1, EVERY])) if partial else EVERY
                made.append(Step("release", other, warp, lanes))
        if draw.random() < 0.5:
            made.append(Step(str(draw.choice(["meet", "meet", "wait"])), warp))  # type: ignore[arg-type]
        chosen = draw.random()
        if chosen < 0.12:
            first = int(draw.integers(GRANULES))
            granules = np.arange(first, int(draw.integers(first, GRANULES)) + 1, dtype=np.int64)
            made.append(Bulk(warp, bool(chosen < 0.08), granules))
            continue
        size = int(draw.choice([1, 2])) if draw.random() < narrow else int(draw.choice([4, 8]))
        places = GRANULE * GRANULES // size
        count = int(draw.choice([1, 1, 2, 5, places]))
        offsets = size * (draw.integers(0, places, count) if draw.random() < 0.7 else np.arange(count) % places)
        lanes = np.sort(draw.permutation(32)[:count] if draw.random() < 0.3 else np.arange(count)).astype(np.int64)
        values = draw.integers(0, 2, (count, size)).astype(np.uint8)
        stores, strong = draw.random() < 0.45, draw.random() < 0.1
        made.append(Access(warp, bool(stores), size, offsets.astype(np.int64), lanes, values, bool(strong)))
    return made


@dataclass
class Run:
    """A history on a SharedMemory. `told` holds the findings of each event, `loaded` the bytes of each load.

    `compares`: strong loads are compare-and-swaps that fail.
    """

    quick: bool
    compares: bool = False
    memory: SharedMemory = field(init=False)
    agents: Agents = field(init=False)
    line: int = 0
    told: list[list[Fault]] = field(default_factory=list[list[Fault]])
    loaded: list[bytes] = field(default_factory=list[bytes])
    answers: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.agents = Agents(1, 1, WARPS, line=lambda: self.line)
        self.memory = SharedMemory(self.agents, 0, GRANULE * GRANULES)
        self.clocks = [Clock.zero(self.agents.count) for _ in range(WARPS)]
        for warp, clock in enumerate(self.clocks):
            clock.seen[warp] = 1
        self.meetings, self.serial, self.landed = [1] * WARPS, 0, Clock.zero(self.agents.count)

    def play(self, events: list[Event], stop: Callable[[list[Fault]], bool] = lambda _: False) -> None:
        """Run `events` until `stop` holds for the findings of one."""
        for self.line, event in enumerate(events, 1):
            found = list[Fault]()
            with collecting(found.append):
                self._do(event)
            self.told.append(found)
            if stop(found):
                return

    def state(self) -> list[object]:
        """All that later accesses depend on. A mark that does not count is 0."""
        memory = self.memory
        found: list[object] = [memory.data.tobytes(), memory.defined.tobytes(), memory.divided.tolist()]
        for one in (memory.writes, memory.reads):
            apart = (memory.divided & one.bit) != 0
            found += [np.where(apart, 0, each).tolist() for each in one.granules.arrays]
            if one.of_bytes.stamp.size:
                found += [np.where(np.repeat(apart, GRANULE), each, 0).tolist() for each in one.of_bytes.arrays]
        kept = {agent: each.tolist() for agent, each in memory.readers.items() if each.any()}
        return [*found, memory.many_readers.tolist(), kept, self.agents.reads.last.tolist()]

    def _do(self, event: Event) -> None:
        if isinstance(event, Access):
            self._access(event)
        elif isinstance(event, Bulk):
            self._bulk(event)
        elif event.does == "meet":
            self.meetings[event.giver] += 1
        elif event.does == "wait":
            self.clocks[event.giver].join(self.landed)
            self.meetings[event.giver] += 1
        else:
            self._release(event)

    def _release(self, event: Step) -> None:
        giver, taker = self.clocks[event.giver], self.clocks[event.taker]
        epoch, met = int(giver.seen[event.giver]), self.meetings[event.giver]
        self.agents.releases.note(event.giver, epoch, met, event.lanes)
        self.agents.reads.release(event.giver, epoch, met, event.lanes)
        if event.giver != event.taker:
            taker.join(giver)
            self.meetings[event.taker] += 1
        giver.seen[event.giver] += 1

    def _bulk(self, event: Bulk) -> None:
        clock, granules = self.clocks[event.warp], event.granules + RESERVED // GRANULE
        clock.fence_proxy()
        self.serial += 1
        self.landed.join(clock)
        self.landed.seen[[self.agents.first_engine, self.agents.first_copy]] = self.serial
        if event.reads:
            self.memory.async_read(granules, clock, stamp(self.agents.first_engine, self.serial), "the tensor core")
            return
        self.memory.async_write_begins(granules, clock, self.line, "a copy")
        self.memory.async_write_ends(granules, stamp(self.agents.first_copy, self.serial), self.line)

    def _access(self, event: Access) -> None:
        warp, clock, offsets = event.warp, self.clocks[event.warp], event.offsets + RESERVED
        mark, met = stamp(warp, int(clock.seen[warp])), self.meetings[warp]
        if self.quick and not event.strong:
            self.answers.append(self._by_machine_code(event, mark, met))
            if self.answers[-1] != NO:
                return
        memory, size, strong, lanes = self.memory, event.size, event.strong, event.lanes
        if event.stores:
            memory.store(offsets, event.values, clock, mark, self.line, strong=Strong() if strong else None)
            memory.note_lanes(offsets, size, lanes, 0 if strong else met)
            return
        if not strong:
            memory.check_lanes(offsets, size, lanes, (warp, met), "read by")
            self.agents.reads.read(warp, met, int((1 << lanes).sum()))
        values, _ = memory.load(
            offsets, size, clock, mark, strong=Strong(kind="load") if strong else None, lanes=lanes, meetings=met
        )
        self.loaded.append(values.tobytes())
        if strong and self.compares:
            memory.note_comparison(offsets, size, clock, mark, Strong(kind="comparison"))

    def _by_machine_code(self, event: Access, mark: int, met: int) -> int:
        size, held = event.size, max(event.size, 2)
        kind = Kind("shared", event.stores, 4, size, False, (held,))
        addresses, mask = np.zeros(32, np.uint32), np.zeros(32, np.bool_)
        addresses[event.lanes], mask[event.lanes] = event.offsets + RESERVED, True
        register = np.zeros((32, held), np.uint8)
        register[event.lanes, :size] = event.values
        bounds = np.array([address_of(addresses), address_of(register)], np.int64)
        words = compiled_access.program((0, 0), 0, self.line, [(1, 0)])
        place, seen = self.memory.place, self.clocks[event.warp].seen
        assert place is not None, "nobody observes this memory"
        arguments = (address_of(words), address_of(bounds), address_of(mask), place.address, address_of(seen), 0, mark,
                     met, event.warp)  # fmt: skip
        perform = compiled_access.performer(kind)
        while (answer := perform(*arguments)) <= NO_ROOM:
            self.memory.keep_readings_of(NO_ROOM - answer)
        if answer != NO and not event.stores:
            self.loaded.append(register[event.lanes, :size].tobytes())
        return answer
