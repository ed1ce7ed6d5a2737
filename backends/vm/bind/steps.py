"""Wrappers around the steps of a block: guards, register tracking, jumps and the wait protocol.

A tail returns the number of the next block (int), NEXT to fall through, a Wait to park, or HANDLED when it has
rearranged the strands of the warp itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from backends.vm.bind.forms import Step
from backends.vm.bind.register_copies import WRITTEN
from backends.vm.faults import Fault

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp

Key = tuple[int, int]


class _Sentinel:
    pass


NEXT: Final = None
HANDLED: Final = _Sentinel()


@dataclass(slots=True)
class Wait:
    """Why a strand cannot go on. When `ready` answers true, `finish` runs (for its effects) and the strand continues
    after the instruction; with `again` it executes the instruction anew instead.

    `expire` is set by waits that may give up (mbarrier.try_wait): called when nothing else in the machine can move.
    `local`: only other lanes of the same warp can end the wait, so they run on meanwhile.
    """

    ready: Callable[[], bool]
    reason: Callable[[], str]
    finish: Callable[[], None] | None = None
    again: bool = False
    expire: Callable[[], None] | None = None
    target: object = None
    local: bool = False


def guarded(step: Step, guard: tuple[int, bool]) -> Step:
    """`@%p step`: only the active lanes whose predicate holds execute."""
    row, negated = guard

    def run(warp: Warp) -> None:
        predicate = warp.pred[row]
        lanes = warp.mask & ~predicate if negated else warp.mask & predicate
        if not lanes.any():
            return
        saved = warp.mask
        warp.set_mask(lanes)
        try:
            step(warp)
        finally:
            warp.set_mask(saved)

    return run


def jump(target: int) -> Step:
    """`bra target`."""
    return lambda warp: target


def jump_if(target: int, after: int, guard: tuple[int, bool]) -> Step:
    """`@%p bra target`: splits the strand where lanes disagree."""
    row, negated = guard

    def run(warp: Warp) -> object:
        predicate = warp.pred[row]
        taken = warp.mask & ~predicate if negated else warp.mask & predicate
        if not taken.any():
            return after
        if (taken == warp.mask).all():
            return target
        warp.split((target, taken), (after, warp.mask & ~taken))
        return HANDLED

    return run


def guarded_tail(tail: Step, guard: tuple[int, bool], after: int) -> Step:
    """`@%p` before an instruction that may wait or leave: lanes that do not take part go on behind it."""
    row, negated = guard

    def run(warp: Warp) -> object:
        predicate = warp.pred[row]
        lanes = warp.mask & ~predicate if negated else warp.mask & predicate
        if not lanes.any():
            return after
        if (lanes == warp.mask).all():
            return tail(warp)
        warp.split((warp.block, lanes), (after, warp.mask & ~lanes))
        return HANDLED

    return run


def guarded_leave(guard: tuple[int, bool]) -> Step:
    """`@%p ret`: the lanes whose predicate holds end, the others go on."""
    row, negated = guard

    def run(warp: Warp) -> object:
        predicate = warp.pred[row]
        lanes = warp.mask & ~predicate if negated else warp.mask & predicate
        if (lanes == warp.mask).all():
            return leave(warp)
        if lanes.any():
            warp.drop(lanes)
        return NEXT

    return run


def leave(warp: Warp) -> object:
    """`ret` or `exit` of an entry: the active lanes end."""
    warp.retire()
    return HANDLED


def tracked(step: Step, keys: tuple[Key, ...]) -> Step:
    """Note which lanes have written registers whose reads must be checked."""

    def run(warp: Warp) -> object:
        outcome = step(warp)
        for key in keys:
            np.copyto(warp.written[key], WRITTEN, where=warp.mask)
        return outcome

    return run


def checked(step: Step, keys: tuple[Key, ...]) -> Step:
    """Fault when an active lane reads one of `keys` without having written it."""
    if not keys:
        return step

    def run(warp: Warp) -> object:
        for key in keys:
            missing = warp.mask & (warp.written[key] != WRITTEN)
            if missing.any():
                name = _name_of(key, warp)
                raise Fault("uninitialised-register", f"`{name}` is read but was never written in this lane",
                            lane=int(np.flatnonzero(missing)[0]))  # fmt: skip
        return step(warp)

    return run


def _name_of(key: Key, warp: Warp) -> str:
    for name, row in warp.code.rows.rows.items():
        if row == key:
            return name
    return str(key)
