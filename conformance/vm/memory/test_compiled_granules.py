"""Machine code for asynchronous-proxy accesses does what NumPy does: every array and every finding, at random."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from llvmlite import ir

from backends.vm.faults import Fault, collecting
from backends.vm.memory import compiled_granules, shared
from backends.vm.memory.access_code import NO, NO_ROOM
from backends.vm.memory.clocks import Agents, Clock, stamp
from backends.vm.memory.compiled_granules import Perform
from backends.vm.memory.marks import GRANULE
from backends.vm.memory.shared import RESERVED, SharedMemory
from backends.vm.memory.strong_writes import Strong

_DEEDS = 60
_PROGRAMS = range(60)
_BYTES = 256
_LINES = 5


def _granules(draw: np.random.Generator) -> shared.Granules:
    """Adjacent units in any order, some of them ragged, apart or, rarely, out of bounds."""
    units = draw.permutation(_BYTES // 16)[: draw.integers(1, 6)] * 4
    if draw.random() < 0.2:
        units = units + draw.integers(0, 4)
    found = (RESERVED // 4 + units[:, None] + np.arange(draw.choice([4, 4, 4, 1, 3]))).ravel()
    if draw.random() < 0.1:
        found = draw.permutation(found)
    if draw.random() < 0.02:
        found = found - RESERVED // 4 + int(draw.choice([0, 310]))
    return np.ascontiguousarray(found, np.int64)


def _deed(draw: np.random.Generator, memory: SharedMemory, clocks: list[Clock]) -> Callable[[], object]:
    """One random access to `memory`, mostly by an agent that has seen all or one other agent's earlier ones."""
    agents, agent = memory.agents, int(draw.integers(len(clocks)))
    clock, line = clocks[agent], int(draw.integers(1, _LINES))
    own = agent if draw.random() < 0.7 else agents.first_copy + agent
    clock.seen[own] = epoch = int(clock.seen[own]) + 1
    chosen = draw.random()
    known = clocks if chosen < 0.4 else [clock, clocks[draw.integers(len(clocks))]] if chosen < 0.95 else [clock]
    clock.seen[:] = np.maximum.reduce([one.seen for one in known])
    if draw.random() < 0.8:
        clock.fence_proxy()
    granules, mark = _granules(draw), stamp(own, epoch)
    chosen = draw.random()
    if chosen < 0.45:
        return lambda: memory.async_read(granules, clock, mark, "the tensor core")
    if chosen < 0.6:
        generic = draw.random() < 0.3
        return lambda: memory.async_write_begins(granules, clock, line, "a copy", generic=generic)
    if chosen < 0.85:
        return lambda: memory.async_write_ends(granules, mark, line)
    offsets = RESERVED + 4 * draw.permutation(_BYTES // 4)[:8]
    if chosen < 0.9:
        width = int(draw.choice([1, 2, 4]))

        def load() -> object:
            agents.reads.read(own, 1, 0xFF)
            found = memory.load(offsets, width, clock, mark, lanes=np.arange(8), meetings=1)[0].tolist()
            agents.reads.release(own, epoch, 1, int(draw.choice([1, (1 << 32) - 1])))
            return found

        return load
    size = int(draw.choice([1, 2, 4]))
    values = draw.integers(0, 255, (8, size)).astype(np.uint8)

    def store() -> None:
        memory.store(offsets, values, clock, mark, line)
        memory.note_lanes(offsets, size, np.arange(8), 1)
        agents.releases.note(own, epoch, 1, int(draw.choice([1, (1 << 32) - 1])))

    return store


def _outcome(seed: int) -> tuple[object, ...]:
    """Everything observable of a program of accesses."""
    draw, agents = np.random.default_rng(seed), Agents(1, 1, 4, line=lambda: 7)
    memory, clocks = SharedMemory(agents, 0, _BYTES), [Clock.zero(agents.count) for _ in range(4)]
    told, answers = list[str](), list[object]()
    with collecting(lambda fault: told.append(f"{fault} {fault.lane} {fault.address}")):
        for _ in range(_DEEDS):
            try:
                answers.append(_deed(draw, memory, clocks)())
            except (Fault, IndexError) as error:
                answers.append(f"{error} {getattr(error, 'lane', None)} {getattr(error, 'address', None)}")
    arrays = [memory.in_flight, memory.defined, memory.divided, memory.many_readers]
    for one in (memory.writes, memory.reads):
        apart = (memory.divided & one.bit) != 0
        arrays += [np.where(apart, 0, each) for each in one.granules.arrays]
        if one.of_bytes.stamp.size:
            arrays += [np.where(np.repeat(apart, GRANULE), each, 0) for each in one.of_bytes.arrays]
    # An agent without readings may still have an array of zeros for them.
    kept = {agent: found.tolist() for agent, found in memory.readers.items() if found.any()}
    outcome = answers, told, memory.unfenced_overwrites, kept, *(one.tolist() for one in arrays)
    places = [*memory.readers.values()]
    memory.give_readings_back()
    assert not any(place.any() for place in places), "readings of a memory that has ended would be found in the next"
    return outcome


def _both(seed: int) -> list[int]:
    """Runs a program both ways and compares. Returns the answers of the machine code."""
    answers = list[int]()

    def noted(deed: compiled_granules.Deed) -> Perform:
        def perform(*arguments: int) -> int:
            answers.append(compiled_granules.performer(deed)(*arguments))
            return answers[-1]

        return perform

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_granules, "wanted", lambda deed: None)
        plain = _outcome(seed)
        patch.setattr(compiled_granules, "wanted", noted)
        quick = _outcome(seed)
    for number, (wanted, seen) in enumerate(zip(plain, quick, strict=True)):
        assert seen == wanted, f"program {seed}, observation {number}, with machine code: {seen}\nwithout: {wanted}"
    return answers


def test_machine_code_does_as_numpy_does() -> None:
    """Arrays and findings are the same. The programs reach both what the machine code does and what it refuses."""
    answers = [answer for seed in _PROGRAMS for answer in _both(seed)]
    assert {0, 1, NO} == {max(one, NO) for one in answers}, f"machine code has answered {sorted(set(answers))} only"
    assert min(answers) <= NO_ROOM, "no deed has lacked a place for readings"
    done = sum(answer > NO for answer in answers)
    assert 500 < done < len(answers), f"{done} of {len(answers)} deeds by machine code"


def _never(self: object, *arguments: object) -> ir.Constant:
    return ir.Constant(ir.IntType(1), 0)


def _nothing(*arguments: object) -> None:
    pass


@pytest.mark.parametrize(
    ("method", "broken"),
    [
        ("_late", _never),
        ("_beyond", _never),
        ("_kept_beside", _never),
        ("_check_kept", _nothing),
        ("_forget_kept", _nothing),
        ("_look_at_writer", _nothing),
        ("_given_back_alone", _never),
    ],
)
def test_machine_code_that_does_not_look_is_found_out(
    monkeypatch: pytest.MonkeyPatch, method: str, broken: object
) -> None:
    """With any one check removed, some program's result differs."""
    code = compiled_granules._GranuleAccess  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(code, method, broken)
    compiled_granules.performer.cache_clear()
    try:
        with pytest.raises(AssertionError, match="with machine code"):
            list(map(_both, _PROGRAMS))
    finally:
        compiled_granules.performer.cache_clear()


def _told_of_a_copy(compared: int, *, known: bool) -> list[str]:
    """The rules that machine code breaks where a copy overwrites 16 bytes, of which granule `compared` was compared."""
    memory = SharedMemory(agents := Agents(1, 1, 2, line=lambda: 7), 0, _BYTES)
    swaps, copies = (Clock.zero(agents.count) for _ in range(2))
    swaps.seen[0] = 1
    if known:
        copies.join(swaps)
    copies.fence_proxy()
    at = np.array([RESERVED + GRANULE * compared], np.int64)
    memory.note_comparison(at, GRANULE, swaps, stamp(0, 1), Strong(kind="comparison"))
    told = list[str]()
    with collecting(lambda fault: told.append(fault.rule)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_granules, "wanted", compiled_granules.performer)
        memory.async_write_begins(RESERVED // GRANULE + np.arange(4), copies, 9, "a copy")
    return told


@pytest.mark.parametrize("compared", range(4))
def test_machine_code_knows_where_a_swap_has_failed(monkeypatch: pytest.MonkeyPatch, compared: int) -> None:
    assert _told_of_a_copy(compared, known=False) == ["race"]
    assert _told_of_a_copy(compared, known=True) == []
    code = compiled_granules._GranuleAccess  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(code, "_none_compared", lambda *_: ir.Constant(ir.IntType(1), 1))
    compiled_granules.performer.cache_clear()
    try:
        assert not _told_of_a_copy(compared, known=False), "who does not look finds nothing, so the test would notice"
    finally:
        compiled_granules.performer.cache_clear()
