"""Detects warps that run without progress: their state recurs while nothing happens in the machine.

A warp that returns to the same place with the same deciding registers (Code.deciding), while no memory, mbarrier or
barrier has changed and no operation is pending, will do the same for ever. Stores and atomics that leave what was there
change nothing: whoever moves first, all read and write the same again. A counter that only counts the rounds of a loop
decides nothing, so it is no state. Registers that come from a clock are left out, since they never recur. A kernel
that decides by clocks may be waiting for a time, so it gets CLOCK_PATIENCE blocks.

Warps of a cluster may spin together: one polls, stores the result to shared memory, and all read it behind a barrier,
or behind a wait for an mbarrier. Then their joint state must recur, with shared and tensor memory, the barriers and the
mbarriers, while nothing else has changed. From there each warp's path is the same in every order of turns: barriers,
waits and weak accesses to shared memory do not show a warp in what order the others move, unless they race.
mbarrier.test_wait and pending_count do show it. A kernel with these is looked at only under schedules in which the same
state leads to the same turns, which are all but the random ones.

If clusters are left that have not begun, the others may be spinning on them: then more of them begin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from backends.vm.machine.code import WIDTH_OF_TYPE, index_of
from backends.vm.machine.warp import FIRST_PATIENCE, Warp
from backends.vm.ptx.ast import Address, Instruction, Pair, Register, Vector

if TYPE_CHECKING:
    from backends.vm.machine.cta import Cluster
    from backends.vm.machine.machine import Run
    from backends.vm.ptx.ast import Operand

QUIET_TURNS = 16
"""Turns of the schedule per warp without an event before the warps are looked at, and between looks."""
EARLY_TURNS = 5
"""The warps are also looked at in each of so many first turns: most spins have shown their state twice by then, and a
turn of warps that poll takes longer than a look."""
CLOCK_PATIENCE = 200_000
"""Blocks that a warp that reads clocks may run while nothing happens: a second or two."""
DIVERGED_PATIENCE = 3 * FIRST_PATIENCE
"""The same for a warp with other lanes that could run, because they get a turn only after FIRST_PATIENCE blocks."""
_TELLING = (("mbarrier", "test_wait"), ("mbarrier", "pending_count"))
"""Instructions that tell a warp what others have done so far."""
_POLLS = ("ld", "atom", "mbarrier")


@dataclass(slots=True)
class _Watched:
    """A warp since the last event: its block counts at first and at the last look, and its states.

    `blocks` are those that it has run since the last look, `path` those since the first of `states`. `recurs`: a state
    has recurred, so that it will for ever.
    """

    first: int
    executed: list[int]
    states: set[bytes] = field(default_factory=set[bytes])
    blocks: tuple[int, ...] = ()
    path: frozenset[int] = frozenset()
    recurs: bool = False

    def look(self, warp: Warp, *, afresh: bool) -> bool:
        """Update the record. Returns whether the earlier states are of no use: `afresh`, or the path has grown."""
        ran = zip(warp.executed, self.executed, strict=True)
        self.blocks = tuple(number for number, (now, then) in enumerate(ran) if now > then)
        self.executed = list(warp.executed)
        path = frozenset(self.blocks) if afresh else self.path.union(self.blocks)
        grown = len(path) > len(self.path)
        self.path = path
        return afresh or grown

    def clocked(self, warp: Warp) -> bool:
        """Whether values from a clock decide on the path."""
        return bool(warp.code.deciding(self.path).clocked)


@dataclass(slots=True)
class _Looks:
    """The looks at the warps of a run since the last event. A warp may come to its loop late, so that its path has
    blocks which it does not run again: paths begin afresh at looks 2, 4, 8 and so on."""

    count: int = 0
    watched: dict[int, _Watched] = field(default_factory=dict[int, _Watched])

    def clear(self) -> None:
        """Forget all."""
        self.count = 0
        self.watched.clear()

    def begin(self) -> bool:
        """Begin a look. Returns whether paths begin afresh."""
        self.count += 1
        return self.count & (self.count - 1) == 0

    def at(self, warp: Warp, *, afresh: bool) -> tuple[_Watched, bool]:
        """The record of `warp`, and whether its earlier states are of no use."""
        known = self.watched.get(id(warp))
        if known is None:
            self.watched[id(warp)] = known = _Watched(sum(warp.executed), list(warp.executed))
        return known, known.look(warp, afresh=afresh)


def _time_to_look(run: Run, turns: int, early: int = 0) -> bool:
    """Whether to look at the warps after `turns` turns: in each of the first `early` turns per warp, and later once in
    QUIET_TURNS."""
    rounds, rest = divmod(turns, run.machine.schedule.turns_of(len(run.warps)))
    return not rest and (rounds <= early or rounds % QUIET_TURNS == 0)


@dataclass(slots=True)
class RoundWatch:
    """Detects warps that spin together. `events`: at the last look; `changes`: those that no spinning CTA repeats.

    `states`: the joint states of each cluster, by its serial number. `recurring`: clusters of which one has recurred,
    so that it will for ever.
    """

    changes: int = -1
    events: int = -1
    turns: int = 0
    expired: bool = False
    states: dict[int, set[bytes]] = field(default_factory=dict[int, set[bytes]])
    recurring: set[int] = field(default_factory=set[int])
    looks: _Looks = field(default_factory=_Looks)

    def stuck(self, run: Run) -> str | None:
        """As SpinWatch.stuck."""
        engine = run.engine
        if engine.events - engine.repeatable != self.changes:
            self.changes, self.turns, self.expired = engine.events - engine.repeatable, 0, False
            self._forget()
            return None
        self.turns += 1
        if engine.pending or engine.events == self.events or not _time_to_look(run, self.turns) or _by_chance(run):
            return None
        self.events = engine.events
        afresh = self.looks.begin()
        # No cluster sees what another does, since only shared memory changes.
        recurring = [self._recurs(cluster, afresh=afresh) for cluster in run.resident]
        if not all(recurring):
            return None
        if run.admit_more() or (not self.expired and run.expire()):
            self.expired = True
            self._forget()
            return None
        moving = [warp for warp in run.warps if not warp.done and self.looks.watched[id(warp)].path]
        return "; ".join(grouped(moving, self.looks.watched))

    def _recurs(self, cluster: Cluster, *, afresh: bool) -> bool:
        serial, states = cluster.agents.serial, self.states.setdefault(cluster.agents.serial, set())
        living = [warp for warp in cluster.warps if not warp.done]
        looked = {id(warp): self.looks.at(warp, afresh=afresh) for warp in living}
        if any(useless for _, useless in looked.values()):
            states.clear()
        clocked = any(looked[id(warp)][0].clocked(warp) for warp in living)
        if clocked or any(_others(warp) for warp in living):
            self.recurring.discard(serial)
        still = any(not looked[id(warp)][0].blocks for warp in living if warp.waiting() is None)
        if still or not all(self._patient(warp) for warp in living):
            states.clear()
            return serial in self.recurring
        state = _state_of(cluster, living, self.looks.watched)
        recurs = state in states
        states.add(state)
        if recurs and not clocked:
            self.recurring.add(serial)
        return recurs or serial in self.recurring

    def _forget(self) -> None:
        self.states.clear()
        self.recurring.clear()
        self.looks.clear()

    def _patient(self, warp: Warp) -> bool:
        """Whether `warp` waits for no clock and has no other lanes that could run."""
        known = self.looks.watched[id(warp)]
        return not _others(warp) and (not known.clocked(warp) or sum(warp.executed) - known.first >= CLOCK_PATIENCE)


@dataclass(slots=True)
class SpinWatch:
    """Looks at the warps of a run from time to time.

    `expired`: the waits that may time out have done so since the last event.
    """

    events: int = -1
    turns: int = 0
    expired: bool = False
    looks: _Looks = field(default_factory=_Looks)

    def stuck(self, run: Run) -> str | None:
        """Call after a turn in which a warp ran. Returns None, or the sentence about a run that will never end."""
        if run.engine.events != self.events:
            self.events, self.turns, self.expired = run.engine.events, 0, False
            self.looks.clear()
            return None
        self.turns += 1
        if run.engine.pending or not _time_to_look(run, self.turns, EARLY_TURNS):
            return None
        spinning = [warp for warp in run.warps if not warp.done and warp.waiting() is None]
        afresh = self.looks.begin()
        recurring = [warp for warp in spinning if self._recurs(warp, afresh=afresh)]
        if not spinning or len(recurring) < len(spinning):
            return None
        if run.admit_more() or (not self.expired and run.expire()):
            self.expired, self.turns = True, 0
            self.looks.clear()
            return None
        return "; ".join(grouped(spinning, self.looks.watched))

    def _recurs(self, warp: Warp, *, afresh: bool) -> bool:
        known, useless = self.looks.at(warp, afresh=afresh)
        if useless:
            known.states.clear()
        clocks, others = known.clocked(warp), _others(warp)
        state = _state(warp, known.path)
        known.recurs |= state in known.states and bool(known.blocks)
        known.states.add(state)
        # Waiting for the spinning lanes changes nothing, so such lanes add no patience.
        patience = CLOCK_PATIENCE if clocks else DIVERGED_PATIENCE if others else 0
        stuck = known.recurs and sum(warp.executed) - known.first >= patience
        # A clock, or a turn of the other lanes, may end what has recurred.
        known.recurs &= not (clocks or others)
        return stuck


def _others(warp: Warp) -> bool:
    """Whether `warp` has lanes that could run and do not."""
    return any(strand.able for strand in warp.strands[1:])


def _by_chance(run: Run) -> bool:
    """Whether the schedule is random, and the kernel can tell in what order its warps move."""
    random = run.machine.schedule.name.startswith("random")
    return random and any(one.parts[:2] in _TELLING for one in run.function.code.function.instructions)


def _registers(operands: Iterable[Operand]) -> Iterable[str]:
    for operand in operands:
        if isinstance(operand, Register):
            yield operand.name
        elif isinstance(operand, Vector):
            yield from _registers(operand.items)
        elif isinstance(operand, Pair):
            yield from _registers((operand.first, operand.second))
        elif isinstance(operand, Address):
            yield from _registers((operand.base,))


def _state(warp: Warp, path: frozenset[int]) -> bytes:
    """The place of each of the warp's lanes, and the registers that decide on its `path`, but for those from clocks."""
    registers = sorted(warp.code.deciding(path).others)
    rows = {width: index_of([row for wide, row in registers if wide == width]) for width, _ in registers}
    content = warp.registers.content(rows)
    digest = hashlib.blake2b(content, digest_size=16)
    for strand in warp.strands:
        digest.update(f"{strand.block} {strand.wait is not None}".encode() + strand.mask.tobytes())
    return digest.digest()


def _state_of(cluster: Cluster, warps: Sequence[Warp], watched: Mapping[int, _Watched]) -> bytes:
    """The joint state of the living `warps` of a cluster, with its barriers, mbarriers, shared and tensor memory."""
    digest = hashlib.blake2b(digest_size=16)
    for warp in warps:
        digest.update(_state(warp, watched[id(warp)].path) + bytes([warp.waiting() is None]))
        digest.update(warp.cluster_arrived.tobytes() + warp.cluster_owed.tobytes())
        ahead = warp.cluster_phase - cluster.generation
        digest.update(np.where(warp.cluster_owed, ahead, 0).tobytes())
    for cta in cluster.ctas:
        digest.update(cta.smem.data.data)
        barriers = [(number, one.arrived, one.expected, one.votes, one.outcome) for number, one in
                    sorted(cta.named.items())]  # fmt: skip
        mbarriers = [(one.offset, one.expected, one.pending, one.transactions, one.phase & 1) for one in
                     cta.mbarriers.values()]  # fmt: skip
        digest.update(repr((barriers, mbarriers)).encode())
        if cta.used_tmem is not None:
            digest.update(cta.used_tmem.data.data)
    return digest.digest()


def grouped(warps: Sequence[Warp], watched: Mapping[int, _Watched]) -> list[str]:
    """One clause for all warps that do the same: where, and on which values. `watched`: the blocks that each runs."""
    clauses: dict[str, list[str]] = {}
    for warp in warps:
        known = watched.get(id(warp))
        clauses.setdefault(_spot(warp, known.blocks if known else ()), []).append(warp.name)
    return [f"{who_does(names, 'spin')} {what}" for what, names in clauses.items()]


def who_does(names: Sequence[str], verb: str) -> str:
    """ "warp 0 waits", or "warp 0 and 2 more wait"."""
    unique = list(dict.fromkeys(names))
    return f"{unique[0]} {verb}s" if len(unique) == 1 else f"{unique[0]} and {len(unique) - 1} more {verb}"


def spins(warp: Warp, blocks: Sequence[int] = ()) -> str:
    """Describes what `warp` does in `blocks` (by default where it is): lines, and the values that it polls there."""
    return f"spins {_spot(warp, blocks)}"


def _spot(warp: Warp, blocks: Sequence[int]) -> str:
    numbers = blocks or ([warp.strands[0].block] if warp.strands else [warp.block])
    there = [warp.code.blocks[number] for number in numbers if number < len(warp.code.blocks)]
    inside = [one for block in there for one in block.instructions]
    lines = sorted({one.line for one in inside}) or [warp.line]
    where = f"PTX line {lines[0]}" if len(lines) == 1 else f"PTX lines {lines[0]} to {lines[-1]}"
    polls = [f"`{one.text}` ({_values(warp, one)})" for one in inside if one.parts[0] in _POLLS]
    return f"at {where}{' on ' + ' and '.join(polls[:3]) if polls else ''}"


def _values(warp: Warp, one: Instruction) -> str:
    """The registers of an instruction with their values in the first lane that runs it; of an address in a buffer, its
    byte there."""
    loaded = set(_registers(one.operands[:1]))
    polled = {
        item.base.name: item.offset
        for item in one.operands
        if isinstance(item, Address) and isinstance(item.base, Register) and item.base.name not in loaded
    }
    shown: list[str] = []
    for name in dict.fromkeys(_registers(one.operands)):
        if (value := _value(warp, name)) is not None:
            at = value + polled.get(name, 0)
            buffer = warp.cta.machine.memory.holding(at) if name in polled else None
            said = f"{name} = {value:#x}" if value > 9 else f"{name} = {value}"
            shown.append(said if buffer is None else f"byte {at - buffer.base} of `{buffer.name}`")
    return ", ".join(shown) or "no register"


def _value(warp: Warp, name: str) -> int | None:
    """A register of the first lane that runs; None if it has more than 64 bits or no row."""
    lane = int(np.argmax(warp.strands[0].mask if warp.strands else warp.alive))
    rows, types = warp.code.rows.rows, warp.code.function.registers
    if name not in rows or WIDTH_OF_TYPE[types[name]] > 64:
        return None
    view = {1: "pred", 16: "u16", 32: "u32", 64: "u64"}[WIDTH_OF_TYPE[types[name]]]
    return int(getattr(warp, view)[rows[name][1]][lane])
