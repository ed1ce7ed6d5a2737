"""Races of accesses of any width are exact by byte, held to a plain model; machine code does as NumPy does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from llvmlite import ir

from backends.vm.faults import Fault
from backends.vm.memory import compiled_access, compiled_granules, marks, shared
from backends.vm.memory.access_code import NO, NO_ROOM, MemoryCode
from conformance.vm.memory.byte_histories import GRANULES, WARPS, Access, Bulk, Event, Run, Step, history

_HISTORIES = range(500)
_TWINS = range(120)
ENGINE, COPY = WARPS, WARPS + 1
BYTES = 4 * GRANULES


@dataclass
class Byte:
    """Who wrote a byte last, when, and in which lane after how many meetings; and all its reads, with those since."""

    writer: int = 0
    written: int = 0
    lane: int = 0
    met: int = 0
    value: int = 0
    reads: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    since: int = 0


class Model:
    """Who must be ordered behind whom, by byte, with nothing forgotten about reads.

    Each access answers with bytes: `must` race, `may` race, and are read by a lane that has not met the writing one.
    A race with a read is only one that must be found if nobody has stored the byte since, and if the reading warp has
    not read the granule again in a later epoch.
    """

    def __init__(self) -> None:
        self.bytes = [Byte() for _ in range(BYTES)]
        self.seen = [[int(i == j) for j in range(WARPS + 2)] for i in range(WARPS)]
        self.meetings, self.serial, self.time, self.landed = [1] * WARPS, 0, 0, [0] * (WARPS + 2)

    def do(self, event: Event) -> tuple[set[int], set[int], set[int]]:
        """Judge and perform one event."""
        self.time += 1
        if isinstance(event, Step):
            self._order(event)
            return set(), set(), set()
        if isinstance(event, Bulk):
            self.serial += 1
            self.landed = _joined(self.landed, self.seen[event.warp])
            self.landed[ENGINE:] = [self.serial, self.serial]
            at = [4 * int(one) + i for one in event.granules for i in range(4)]
            return self._bulk(event, at)
        return self._store(event) if event.stores else self._load(event)

    def _order(self, step: Step) -> None:
        giver, taker = step.giver, step.taker
        if step.does == "wait":
            self.seen[giver] = _joined(self.seen[giver], self.landed)
            self.meetings[giver] += 1
        elif step.does == "meet":
            self.meetings[giver] += 1
        else:
            if giver != taker:
                self.seen[taker] = _joined(self.seen[taker], self.seen[giver])
                self.meetings[taker] += 1
            self.seen[giver][giver] += 1

    def _unordered(self, warp: int, by: int, epoch: int) -> bool:
        return epoch > self.seen[warp][by]

    def _read_before(self, warp: int, at: int) -> tuple[bool, bool]:
        """Whether a read of a byte may, and must, be found to be unordered with a store."""
        byte, must, may = self.bytes[at], False, False
        for by, epoch, time in byte.reads:
            if self._unordered(warp, by, epoch):
                may = True
                granule = range(at // 4 * 4, at // 4 * 4 + 4)
                again = any(b == by and e > epoch for i in granule for b, e, _ in self.bytes[i].reads)
                must |= time > byte.since and not again
        return may, must

    def _bulk(self, event: Bulk, at: list[int]) -> tuple[set[int], set[int], set[int]]:
        must, may = set[int](), set[int]()
        for i in at:
            byte = self.bytes[i]
            if self._unordered(event.warp, byte.writer, byte.written):
                must.add(i)
            if not event.reads:
                found, sure = self._read_before(event.warp, i)
                may |= {i} if found else set()
                must |= {i} if sure else set()
        for i in at:
            if event.reads:
                self.bytes[i].reads.append((ENGINE, self.serial, self.time))
            else:
                one = self.bytes[i]
                one.writer, one.written, one.met, one.since = COPY, self.serial, 0, self.time
        return must, may | must, set()

    def _load(self, event: Access) -> tuple[set[int], set[int], set[int]]:
        must, apart, met = set[int](), set[int](), self.meetings[event.warp]
        if event.strong:
            return must, must, apart
        each = [(o + i, lane) for o, lane in zip(event.offsets, event.lanes, strict=True) for i in range(event.size)]
        for at, lane in each:
            byte = self.bytes[at]
            if self._unordered(event.warp, byte.writer, byte.written):
                must.add(int(at))
            if byte.writer == event.warp and byte.met == met and byte.lane != lane:
                apart.add(int(at))
        for at, _ in each:
            self.bytes[at].reads.append((event.warp, self.seen[event.warp][event.warp], self.time))
        return must, must, apart

    def _store(self, event: Access) -> tuple[set[int], set[int], set[int]]:
        must, may = set[int](), set[int]()
        each = [
            (int(o) + i, lane, int(event.values[row, i]))
            for row, (o, lane) in enumerate(zip(event.offsets, event.lanes, strict=True))
            for i in range(event.size)
        ]
        for at, _, value in each:
            byte = self.bytes[at]
            late = self._unordered(event.warp, byte.writer, byte.written)
            if late and not event.strong and not (value == byte.value and byte.writer < WARPS):
                must.add(at)
            found, sure = self._read_before(event.warp, at)
            may |= {at} if found else set()
            must |= {at} if sure else set()
        own = self.seen[event.warp][event.warp]
        for at, lane, value in each:
            one = self.bytes[at]
            one.writer, one.written, one.lane, one.value, one.since = event.warp, own, int(lane), value, self.time
            one.met = 0 if event.strong else self.meetings[event.warp]
        return must, may | must, set()


def _joined(one: list[int], other: list[int]) -> list[int]:
    return [max(pair) for pair in zip(one, other, strict=True)]


def _raced(found: list[Fault]) -> list[Fault]:
    return [one for one in found if one.rule != "lanes-unordered"]


def _held_to_the_model(seed: int, *, quick: bool = False) -> Counter[str]:
    """Plays a history until its first race. Returns what it has met."""
    events, run, model, met = history(seed, 60), Run(quick=quick), Model(), Counter[str]()
    run.play(events, lambda found: bool(_raced(found)))
    for number, (event, told) in enumerate(zip(events, run.told, strict=False)):
        must, may, apart = model.do(event)
        where = f"history {seed}, event {number}, {event}"
        raced, lanes = _raced(told), [one for one in told if one.rule == "lanes-unordered"]
        assert raced or not must, f"{where}: nothing is found; bytes {sorted(must)} race"
        for one in raced:
            at = (one.address or 0) - shared.RESERVED
            own = {at} if "this byte" in str(one) else set(range(at, at + 4))
            assert own & may, f"{where}: {one} is found; only bytes {sorted(may)} race"
        assert bool(lanes) == bool(apart), f"{where}: {lanes} are found; lanes have not met at bytes {sorted(apart)}"
        if isinstance(event, Access):
            width = "narrow" if event.size < 4 else "whole"
            met[f"{width} {'store' if event.stores else 'load'}{' raced' if raced else ''}"] += 1
            met["lanes"] += bool(lanes)
        elif isinstance(event, Bulk):
            met[f"copy{' raced' if raced else ''}"] += 1
    return met


_MET = [f"{width} {what} raced" for width in ("narrow", "whole") for what in ("load", "store")]


@pytest.mark.parametrize("quick", [False, True], ids=["NumPy", "machine code"])
def test_races_are_those_of_the_bytes(quick: bool) -> None:
    met = sum((_held_to_the_model(seed, quick=quick) for seed in _HISTORIES), Counter[str]())
    assert all(met[name] > 10 for name in (*_MET, "copy raced", "lanes")), f"the histories have met {met} only"


def _ignored(*arguments: object, **others: object) -> None:
    pass


def _granules_only(self: marks.Divided, granules: marks.Cells, bytes_: object = None) -> object:
    return self.granules, granules


def _undivided(self: marks.Divided, granules: marks.Cells) -> marks.Marks:
    return self.of_bytes


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (marks.Divided, "finest", _granules_only),
        (marks.Divided, "divide", _undivided),
        (marks.Divided, "_spread", _ignored),
        (shared.SharedMemory, "_keep", _ignored),
        (shared.SharedMemory, "_check_overwritten", _ignored),
        (shared.SharedMemory, "_check_writers", _ignored),
        (shared.SharedMemory, "_check_readers", _ignored),
    ],
)
def test_a_memory_that_forgets_bytes_is_found_out(
    monkeypatch: pytest.MonkeyPatch, where: type[object], name: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(AssertionError, match=r"(is|are) found"):
        list(map(_held_to_the_model, _HISTORIES))


def _twins(seed: int) -> list[int]:
    """Plays a history both ways, beyond races, and compares. Returns the answers of the machine code."""
    events = history(seed, 80, partial=seed % 2 == 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_granules, "wanted", lambda deed: None)
        plain = Run(quick=False, compares=True)
        plain.play(events)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_granules, "wanted", compiled_granules.performer)
        quick = Run(quick=True, compares=True)
        quick.play(events)
    for number, (mine, other) in enumerate(zip(plain.told, quick.told, strict=True)):
        told = [[f"{one} {one.lane} {one.address}" for one in each] for each in (mine, other)]
        assert told[0] == told[1], f"history {seed}, event {number}, {events[number]}: with machine code {told[1]}"
    assert plain.loaded == quick.loaded, f"history {seed}: other bytes are loaded with machine code"
    for number, (mine, other) in enumerate(zip(plain.state(), quick.state(), strict=True)):
        assert mine == other, f"history {seed}, observation {number}, with machine code: {other}\nwithout: {mine}"
    for one in (plain, quick):
        one.memory.give_readings_back()
    return quick.answers


def test_machine_code_does_as_numpy_does() -> None:
    """The histories reach both what the machine code does and what it refuses."""
    answers = [answer for seed in _TWINS for answer in _twins(seed)]
    done = sum(answer != NO for answer in answers)
    assert len(answers) // 4 < done < len(answers), f"{done} of {len(answers)} accesses by machine code"
    assert min(answers) > NO_ROOM


def _never(*arguments: object) -> ir.Constant:
    return ir.Constant(ir.IntType(1), 0)


_ALL_KNOWN = compiled_granules._GranuleAccess._all_known  # pyright: ignore[reportPrivateUsage]


def _of_granules(self: compiled_granules._GranuleAccess, name: str, first: object, unit: str = "") -> object:  # pyright: ignore[reportPrivateUsage]
    return ir.Constant(ir.IntType(1), 1) if unit else _ALL_KNOWN(self, name, first)


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (MemoryCode, "_divide", _ignored),
        (MemoryCode, "_marks_at", lambda self, granule, byte, divided: self._marks_of(granule)),
        (MemoryCode, "_check_kept", _ignored),
        (MemoryCode, "_note_bytes_read", _ignored),
        (MemoryCode, "_keep_reader", _ignored),
        (MemoryCode, "_given_back_alone", _never),
        (MemoryCode, "_compared", _never),
        (compiled_access._Access, "_mark_divided", _ignored),  # pyright: ignore[reportPrivateUsage]
        (compiled_access._Access, "_loose", _never),  # pyright: ignore[reportPrivateUsage]
        (compiled_granules._GranuleAccess, "_all_known", _of_granules),  # pyright: ignore[reportPrivateUsage]
    ],
)
def test_machine_code_that_forgets_bytes_is_found_out(
    monkeypatch: pytest.MonkeyPatch, where: type[object], name: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(where, name, broken)
    performers = compiled_access.performer, compiled_granules.performer
    for one in performers:
        one.cache_clear()
    try:
        with pytest.raises(AssertionError, match="with machine code"):
            list(map(_twins, _TWINS))
    finally:
        for one in performers:
            one.cache_clear()


def test_an_untouched_memory_has_no_marks_of_bytes() -> None:
    """They are made by the first access to less than a granule."""
    run = Run(quick=True)
    whole = Access(0, True, 4, np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones((1, 4), np.uint8), False)
    run.play([whole])
    assert not run.memory.writes.of_bytes.stamp.size, "a store of a granule has made marks of bytes"
    run.play([Access(0, False, 1, whole.offsets, whole.lanes, whole.values[:, :1], False)])
    assert run.memory.reads.of_bytes.stamp.size, "a load of a byte has made no marks of bytes"
    refused = [answer == NO for answer in run.answers]
    assert refused == [False, True], f"the answers are {run.answers}; only the first access to a byte is refused"
