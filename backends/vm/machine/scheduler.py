"""Who moves next. A correct kernel computes the same bits under every schedule; one with a missing wait does not."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from backends.vm.machine.machine import Run
    from backends.vm.machine.warp import Warp

LONG_TURN = 64
"""Blocks that a warp may run before the others get their turn, so that a spinning warp does not starve them."""
PATIENCE = 50
"""Rounds in which warps run but nothing happens, which means that they spin. After these, a lazy schedule lets an
operation end, or launches one more cluster if no operation is pending."""


LONG_PATIENCE = 200
"""The same for rounds in which warps may spin together."""
LATE_PATIENCE = 3
"""Such rounds after which a late CTA or warp moves: the others may be spinning on it."""
GIVE_UP = 1 / 16
"""The probability per turn that a random schedule lets a wait that may time out (mbarrier.try_wait) do so."""


VAIN = 1 / 16
"""The least probability per turn that a random schedule also picks from the warps that poll in vain while others can
move. It is the share of the others if that is greater: one that polls in vain may count its polls and then go on."""


class Schedule(Protocol):
    """A policy. `defers`: whether operations outlive their issue; `resident`: clusters in flight at a time.
    `watches_polls`: it asks which warps poll in vain.

    Clusters start in ascending order and allocations get the first free place, unless the policy chooses others.
    """

    name: str
    defers: bool
    resident: int
    watches_polls: bool = False

    def order(self, count: int) -> list[int]:
        """The order in which `count` clusters are launched."""
        return list(range(count))

    def place(self, count: int) -> int:
        """Which of `count` free places an allocation in tensor memory gets."""
        return 0

    def turn(self, run: Run) -> bool:
        """Move something; False if nothing can move."""
        ...

    def turns_of(self, warps: int) -> int:
        """Turns in which each of `warps` warps is likely to have run."""
        ...


@dataclass(slots=True)
class InOrder(Schedule):
    """Warps in turn. `eager` performs operations as they are issued, `lazy` only when no warp can move without that.
    Before `lazy` does, waits that may time out give up once, except idle ones (Code.idle_waits).

    `vain_rounds`: rounds in which warps have done only what they may repeat for ever (Engine.repeat) while operations
    are pending: they may spin together until one ends. `gave_up`: waits have, since the last operation. No event of a
    warp resets it, because a kernel may store whenever it polls.
    """

    name: str
    defers: bool
    resident: int = 1
    quiet_rounds: int = 0
    vain_rounds: int = 0
    gave_up: bool = False

    def turns_of(self, warps: int) -> int:
        """Each warp runs in each turn."""
        return 1

    def turn(self, run: Run) -> bool:
        """One round over all warps; then, if nothing moved or all spin, one operation."""
        before, repeated = run.engine.events, run.engine.repeatable
        moved = sum(run.advance(warp, LONG_TURN) for warp in run.warps)
        self.quiet_rounds = self.quiet_rounds + 1 if run.engine.events == before else 0
        changed = run.engine.events - before != run.engine.repeatable - repeated
        self.vain_rounds = 0 if changed or not run.engine.pending else self.vain_rounds + 1
        if moved and self.quiet_rounds < PATIENCE and self.vain_rounds < LONG_PATIENCE:
            return True
        if not moved and self.defers and not self.gave_up:
            self.gave_up = True
            if run.expire(idle=False):
                return True
        operation = run.engine.most_wanted(run.awaited())
        if operation is not None:
            self.vain_rounds, self.gave_up = 0, False
            run.engine.perform(operation)
        elif moved:
            run.admit_one_more()
            self.quiet_rounds = 0
        return bool(moved) or operation is not None


@dataclass(slots=True)
class Late(Schedule):
    """All but one CTA of each cluster, or all but one warp of each CTA, run as far as they can before that one moves.

    Operations end as they are issued. Before the late one moves, waits of the others that may time out give up once,
    except idle ones (Code.idle_waits).
    `which`: "cta" or "warp", chosen by its rank or index `number`, modulo their count. `vain_rounds`: rounds in which
    the others have done only what they may repeat for ever (Engine.repeat), since they may spin together until the late
    one moves. `gave_up`: waits have, since the late one's last event. The events of the others do not reset it, because
    they may store whenever they poll.
    """

    name: str
    which: str
    number: int
    defers: bool = False
    resident: int = 1
    quiet_rounds: int = 0
    vain_rounds: int = 0
    gave_up: bool = False

    def _is_late(self, warp: Warp) -> bool:
        if self.which == "cta":
            size = warp.cta.cluster.size
            return size > 1 and warp.cta.place.cta_rank == self.number % size
        count = len(warp.cta.warps)
        return count > 1 and warp.index == self.number % count

    def turns_of(self, warps: int) -> int:
        """Turns in which each warp runs, including the late ones once the others spin."""
        return LATE_PATIENCE + 1

    def turn(self, run: Run) -> bool:
        """One round over the warps that are not late. If none moves or all spin, one block of each late warp."""
        before, repeated = run.engine.events, run.engine.repeatable
        late: list[Warp] = []
        moved = 0
        for warp in run.warps:
            if self._is_late(warp):
                late.append(warp)
            else:
                moved += run.advance(warp, LONG_TURN)
        self.quiet_rounds = self.quiet_rounds + 1 if run.engine.events == before else 0
        changed = run.engine.events - before != run.engine.repeatable - repeated
        self.vain_rounds = 0 if changed else self.vain_rounds + 1
        if moved and self.quiet_rounds < LATE_PATIENCE and self.vain_rounds < PATIENCE:
            return True
        if not moved and not self.gave_up:
            self.gave_up = True
            if run.expire([warp for warp in run.warps if not self._is_late(warp)], idle=False):
                return True
        known = run.engine.events
        behind = sum(run.advance(warp, 1) for warp in late)
        self.gave_up = self.gave_up and run.engine.events == known
        if not behind and moved and self.quiet_rounds >= PATIENCE:
            run.admit_one_more()
            self.quiet_rounds = 0
        return bool(moved or behind)


class Random(Schedule):
    """Picks any warp that can move, or any operation that may end, for a short turn; reproducible from its seed.

    Warps that poll in vain are seldom picked while others can move: many of them would keep the others from it.
    """

    defers = True
    resident = 2
    watches_polls = True

    def __init__(self, seed: int) -> None:
        self.name = f"random:{seed}"
        self.quiet_turns = 0
        self.events = 0
        self._random = random.Random(seed)
        self._places = random.Random(f"places {seed}")

    def order(self, count: int) -> list[int]:
        """Shuffled."""
        order = list(range(count))
        self._random.shuffle(order)
        return order

    def place(self, count: int) -> int:
        """Any."""
        return self._places.randrange(count)

    def turns_of(self, warps: int) -> int:
        """A turn runs only one warp."""
        return 4 * max(warps, 1)

    def turn(self, run: Run) -> bool:
        """One warp for up to four blocks, or one operation."""
        warps = [warp for warp in run.warps if (on := warp.strands) and (on[0].wait is None or warp.waiting() is None)]
        operations = run.engine.eligible()
        if not warps and not operations:
            return False
        if self._random.random() < GIVE_UP and run.expire_one(self._random):
            return True
        self._look_for_spinning(run)
        moving = [warp for warp in warps if not warp.polls_in_vain]
        share = max(VAIN, len(moving) / len(warps)) if warps else 1.0
        if len(moving) < len(warps) and (moving or operations) and self._random.random() >= share:
            warps = moving
        elif not moving and not operations:
            run.admit_one_more()
        choice = self._random.randrange(len(warps) + len(operations))
        if choice < len(warps):
            self._advance(warps[choice], run)
        else:
            run.engine.perform(operations[choice - len(warps)])
        return True

    def _advance(self, warp: Warp, run: Run) -> None:
        if warp.watch is not None:
            warp.watch.begin(run.engine.events)
        run.advance(warp, self._random.randint(1, 4))
        if warp.watch is not None:
            warp.watch.end(run.engine.events)

    def _look_for_spinning(self, run: Run) -> None:
        self.quiet_turns = self.quiet_turns + 1 if run.engine.events == self.events else 0
        self.events = run.engine.events
        if self.quiet_turns == PATIENCE:
            run.admit_one_more()
            self.quiet_turns = 0


def schedule(name: str) -> Schedule:
    """The policy called "eager", "lazy", "random:SEED", "late_cta:RANK" or "late_warp:INDEX"."""
    if name == "eager":
        return InOrder("eager", defers=False)
    if name == "lazy":
        return InOrder("lazy", defers=True)
    kind, _, seed = name.partition(":")
    if kind == "random" and seed.isdigit():
        return Random(int(seed))
    if kind in ("late_cta", "late_warp") and seed.isdigit():
        return Late(name, kind.removeprefix("late_"), int(seed))
    raise ValueError(
        f"no schedule is called {name!r}; there are eager, lazy, random:SEED, late_cta:RANK and late_warp:INDEX with "
        "whole numbers"
    )
