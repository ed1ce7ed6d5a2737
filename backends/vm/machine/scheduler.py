"""Who moves next. A correct kernel computes the same bits under every schedule; one with a missing wait does not."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from backends.vm.machine.machine import Run

LONG_TURN = 64
"""Blocks that a warp may run before the others get their turn: a spinning warp must not starve them."""
PATIENCE = 50
"""Rounds in which warps run but nothing happens, for they are spinning. Then a lazy schedule lets an operation end, or
launches one more cluster when there is none."""


GIVE_UP = 1 / 16
"""How often a random schedule lets a wait that may time out (mbarrier.try_wait) do so."""


class Schedule(Protocol):
    """A policy. `defers`: whether operations outlive their issue; `resident`: clusters in flight at a time."""

    name: str
    defers: bool
    resident: int

    def order(self, count: int) -> list[int]:
        """The order in which `count` clusters are launched."""
        ...

    def turn(self, run: Run) -> bool:
        """Let somebody move; False if nobody can."""
        ...


@dataclass(slots=True)
class InOrder:
    """Warps in turn. `eager` performs operations as they are issued, `lazy` only when no warp can move without."""

    name: str
    defers: bool
    resident: int = 1
    quiet_rounds: int = 0

    def order(self, count: int) -> list[int]:
        """Ascending."""
        return list(range(count))

    def turn(self, run: Run) -> bool:
        """One round over all warps; then, if nothing moved, one operation."""
        before = run.engine.events
        moved = sum(run.advance(warp, LONG_TURN) for warp in run.warps)
        self.quiet_rounds = self.quiet_rounds + 1 if run.engine.events == before else 0
        if moved and self.quiet_rounds < PATIENCE:
            return True
        operation = run.engine.most_wanted(run.awaited())
        if operation is not None:
            run.engine.perform(operation)
        elif moved:
            run.admit_one_more()
            self.quiet_rounds = 0
        return bool(moved) or operation is not None


class Random:
    """Any warp that can move, or any operation that may end, with short turns; reproducible from its seed."""

    defers = True
    resident = 2

    def __init__(self, seed: int) -> None:
        self.name = f"random:{seed}"
        self.quiet_turns = 0
        self.events = 0
        self._random = random.Random(seed)

    def order(self, count: int) -> list[int]:
        """Shuffled."""
        order = list(range(count))
        self._random.shuffle(order)
        return order

    def turn(self, run: Run) -> bool:
        """One warp for up to four blocks, or one operation."""
        warps = [warp for warp in run.warps if not warp.done and warp.waiting() is None]
        operations = run.engine.eligible()
        if not warps and not operations:
            return False
        if self._random.random() < GIVE_UP and run.expire_one(self._random):
            return True
        self._look_for_spinning(run)
        choice = self._random.randrange(len(warps) + len(operations))
        if choice < len(warps):
            run.advance(warps[choice], self._random.randint(1, 4))
        else:
            run.engine.perform(operations[choice - len(warps)])
        return True

    def _look_for_spinning(self, run: Run) -> None:
        self.quiet_turns = self.quiet_turns + 1 if run.engine.events == self.events else 0
        self.events = run.engine.events
        if self.quiet_turns == PATIENCE:
            run.admit_one_more()
            self.quiet_turns = 0


def schedule(name: str) -> Schedule:
    """The policy called "eager", "lazy" or "random:SEED"."""
    if name == "eager":
        return InOrder("eager", defers=False)
    if name == "lazy":
        return InOrder("lazy", defers=True)
    kind, _, seed = name.partition(":")
    if kind == "random" and seed.isdigit():
        return Random(int(seed))
    raise ValueError(f"no schedule is called {name!r}; there are eager, lazy and random:SEED with a whole number SEED")
