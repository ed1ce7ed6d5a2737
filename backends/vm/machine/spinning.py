"""Detects warps that run without progress: their state recurs while nothing happens in the machine.

A warp that returns to the same place with the same registers, while no memory, mbarrier or barrier has changed and no
operation is pending, will do the same for ever. Registers that come from a clock are left out, since they never recur.
A kernel that reads clocks may be waiting for a time, so it gets CLOCK_PATIENCE blocks.

Warps of a cluster may spin together: one polls, stores the result to shared memory, and all read it behind a barrier,
or behind a wait for an mbarrier. Then their joint state must recur, with shared and tensor memory, the barriers and the
mbarriers, while nothing else has changed. From there each warp's path is the same in every order of turns: barriers,
waits and weak accesses to shared memory do not show a warp in what order the others move, unless they race.
mbarrier.test_wait and pending_count do show it. A kernel with these is looked at only under schedules in which the same
state leads to the same turns, which are all but the random ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from backends.vm.machine.code import WIDTH_OF_TYPE, Key
from backends.vm.machine.warp import FIRST_PATIENCE, Warp
from backends.vm.ptx.ast import Address, Instruction, Pair, Register, Vector

if TYPE_CHECKING:
    from backends.vm.machine.machine import Run
    from backends.vm.ptx.ast import Function, Operand

QUIET_TURNS = 16
"""Turns of the schedule per warp without an event before the warps are looked at, and between looks."""
CLOCK_PATIENCE = 200_000
"""Blocks that a warp that reads clocks may run while nothing happens: a second or two."""
DIVERGED_PATIENCE = 3 * FIRST_PATIENCE
"""The same for a warp with other lanes that could run, because they get a turn only after FIRST_PATIENCE blocks."""
_TELLING = (("mbarrier", "test_wait"), ("mbarrier", "pending_count"))
"""Instructions that tell a warp what others have done so far."""
_POLLS = ("ld", "atom", "mbarrier")
_CLOCKS = ("%clock", "%globaltimer")


@dataclass(slots=True)
class _Watched:
    """A warp since the last event: its block counts at first and at the last look, and its states."""

    first: int
    executed: list[int]
    states: set[bytes] = field(default_factory=set[bytes])
    blocks: tuple[int, ...] = ()


@dataclass(slots=True)
class RoundWatch:
    """Detects warps that spin together. `events`: at the last look; `changes`: those that no spinning CTA repeats."""

    changes: int = -1
    events: int = -1
    turns: int = 0
    expired: bool = False
    states: set[bytes] = field(default_factory=set[bytes])
    watched: dict[int, _Watched] = field(default_factory=dict[int, _Watched])

    def stuck(self, run: Run) -> str | None:
        """As SpinWatch.stuck."""
        engine = run.engine
        if engine.events - engine.repeatable != self.changes:
            self.changes, self.turns, self.expired = engine.events - engine.repeatable, 0, False
            self.states.clear()
            self.watched.clear()
            return None
        self.turns += 1
        every = QUIET_TURNS * run.machine.schedule.turns_of(len(run.warps))
        if self.turns % every or engine.pending or run.queue or engine.events == self.events or _by_chance(run):
            return None
        self.events = engine.events
        living = [warp for warp in run.warps if not warp.done]
        moving = [warp for warp in living if _looked_at(self.watched, warp).blocks]
        able = [warp for warp in living if warp.waiting() is None]
        if any(warp not in moving for warp in able) or not all(self._patient(warp) for warp in living):
            self.states.clear()
            return None
        state = _state_of_all(run, living)
        if state not in self.states:
            self.states.add(state)
            return None
        if not self.expired:
            self.expired = True
            if run.expire():
                self.states.clear()
                return None
        return "; ".join(grouped(moving, self.watched))

    def _patient(self, warp: Warp) -> bool:
        """Whether `warp` waits for no clock and has no other lanes that could run."""
        if any(strand.able for strand in warp.strands[1:]):
            return False
        return not _clock_registers(warp) or sum(warp.executed) - self.watched[id(warp)].first >= CLOCK_PATIENCE


@dataclass(slots=True)
class SpinWatch:
    """Looks at the warps of a run from time to time.

    `expired`: the waits that may time out have done so since the last event.
    """

    events: int = -1
    turns: int = 0
    expired: bool = False
    watched: dict[int, _Watched] = field(default_factory=dict[int, _Watched])

    def stuck(self, run: Run) -> str | None:
        """Call after a turn in which a warp ran. Returns None, or the sentence about a run that will never end."""
        if run.engine.events != self.events:
            self.events, self.turns, self.expired = run.engine.events, 0, False
            self.watched.clear()
            return None
        self.turns += 1
        every = QUIET_TURNS * run.machine.schedule.turns_of(len(run.warps))
        if self.turns % every or run.engine.pending or run.queue:
            return None
        spinning = [warp for warp in run.warps if not warp.done and warp.waiting() is None]
        recurring = [warp for warp in spinning if self._recurs(warp)]
        if not spinning or len(recurring) < len(spinning):
            return None
        if not self.expired:
            self.expired = True
            if run.expire():
                self.watched.clear()
                return None
        return "; ".join(grouped(spinning, self.watched))

    def _recurs(self, warp: Warp) -> bool:
        known = _looked_at(self.watched, warp)
        clocks = _clock_registers(warp)
        state = _state(warp, clocks)
        recurs = state in known.states
        known.states.add(state)
        # Waiting for the spinning lanes changes nothing, so such lanes add no patience.
        others = any(strand.able for strand in warp.strands[1:])
        patience = CLOCK_PATIENCE if clocks else DIVERGED_PATIENCE if others else 0
        return recurs and sum(warp.executed) - known.first >= patience


def _by_chance(run: Run) -> bool:
    """Whether the schedule is random, and the kernel can tell in what order its warps move."""
    random = run.machine.schedule.name.startswith("random")
    return random and any(one.parts[:2] in _TELLING for one in run.function.code.function.instructions)


def _looked_at(watched: dict[int, _Watched], warp: Warp) -> _Watched:
    """The record of `warp`, updated with the blocks it has run since the last look (none at the first look)."""
    known = watched.get(id(warp))
    if known is None:
        known = watched[id(warp)] = _Watched(sum(warp.executed), list(warp.executed))
    ran = zip(warp.executed, known.executed, strict=True)
    known.blocks = tuple(number for number, (now, then) in enumerate(ran) if now > then)
    known.executed = list(warp.executed)
    return known


_CLOCKED: dict[int, tuple[Function, frozenset[Key]]] = {}


def _clock_registers(warp: Warp) -> frozenset[Key]:
    """The registers of a function whose values derive from a clock, through any number of instructions."""
    function, rows = warp.code.function, warp.code.rows.rows
    known = _CLOCKED.get(id(function))
    if known is not None and known[0] is function:
        return known[1]
    named: set[str] = set()
    before = -1
    while len(named) != before:
        before = len(named)
        for one in function.instructions:
            first, *others = [set(_registers((operand,))) for operand in one.operands] or [set[str]()]
            if any(name in named or name.startswith(_CLOCKS) for other in others for name in other):
                named |= first
    found = frozenset(rows[name] for name in named if name in rows)
    _CLOCKED.clear()
    _CLOCKED[id(function)] = (function, found)
    return found


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


def _state(warp: Warp, without: frozenset[Key]) -> bytes:
    digest = hashlib.blake2b(warp.registers.content(without), digest_size=16)
    for strand in warp.strands:
        digest.update(f"{strand.block} {strand.wait is not None}".encode() + strand.mask.tobytes())
    return digest.digest()


def _state_of_all(run: Run, warps: Sequence[Warp]) -> bytes:
    """The joint state of `warps`, with the barriers, mbarriers, shared and tensor memory of their clusters."""
    digest = hashlib.blake2b(digest_size=16)
    for warp in warps:
        digest.update(_state(warp, _clock_registers(warp)) + bytes([warp.waiting() is None]))
        digest.update(warp.cluster_arrived.tobytes() + warp.cluster_owed.tobytes())
        ahead = warp.cluster_phase - warp.cta.cluster.generation
        digest.update(np.where(warp.cluster_owed, ahead, 0).tobytes())
    for cluster in run.resident:
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


def grouped(warps: Sequence[Warp], watched: dict[int, _Watched]) -> list[str]:
    """One clause for all warps that do the same: where, and on which values. `watched`: the blocks that each runs."""
    clauses: dict[str, list[str]] = {}
    for warp in warps:
        known = watched.get(id(warp))
        clauses.setdefault(spins(warp, known.blocks if known else ()), []).append(warp.name)
    others = {what: f" and {len(names) - 1} more" if len(names) > 1 else "" for what, names in clauses.items()}
    return [f"{names[0]}{others[what]} {what}" for what, names in clauses.items()]


def spins(warp: Warp, blocks: Sequence[int] = ()) -> str:
    """Describes what `warp` does in `blocks` (by default where it is): lines, and the values that it polls there."""
    numbers = blocks or ([warp.strands[0].block] if warp.strands else [warp.block])
    there = [warp.code.blocks[number] for number in numbers if number < len(warp.code.blocks)]
    inside = [one for block in there for one in block.instructions]
    lines = sorted({one.line for one in inside}) or [warp.line]
    where = f"PTX line {lines[0]}" if len(lines) == 1 else f"PTX lines {lines[0]} to {lines[-1]}"
    polls = [f"`{one.text}` ({_values(warp, one)})" for one in inside if one.parts[0] in _POLLS]
    return f"spins at {where}{' on ' + ' and '.join(polls[:3]) if polls else ''}"


def _values(warp: Warp, one: Instruction) -> str:
    """The registers of an instruction with their values in the first living lane."""
    lane = int(np.argmax(warp.alive))
    rows, types = warp.code.rows.rows, warp.code.function.registers
    shown: list[str] = []
    for name in dict.fromkeys(_registers(one.operands)):
        if name in rows and WIDTH_OF_TYPE[types[name]] <= 64:
            width = WIDTH_OF_TYPE[types[name]]
            value = int(getattr(warp, {1: "pred", 16: "u16", 32: "u32", 64: "u64"}[width])[rows[name][1]][lane])
            shown.append(f"{name} = {value:#x}" if value > 9 else f"{name} = {value}")
    return ", ".join(shown) or "no register"
