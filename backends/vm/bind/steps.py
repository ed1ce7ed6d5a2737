"""Wrappers around the steps of a block: guards and jumps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backends.vm.machine.code import HANDLED, NEXT, Step

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp


def guarded(step: Step, guard: tuple[int, bool]) -> Step:
    """`@%p step`: only the active lanes whose predicate holds execute."""
    row, negated = guard

    def run(warp: Warp) -> None:
        predicate = warp.pred[row]
        lanes = warp.mask & ~predicate if negated else warp.mask & predicate
        if not np.count_nonzero(lanes):
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
        if not np.count_nonzero(taken):
            return after
        if not np.count_nonzero(taken != warp.mask):
            return target
        warp.split((target, taken), (after, warp.mask & ~taken))
        return HANDLED

    return run


def guarded_tail(tail: Step, guard: tuple[int, bool], after: int) -> Step:
    """`@%p` before an instruction that may wait: lanes that do not take part go on behind it."""
    row, negated = guard

    def run(warp: Warp) -> object:
        predicate = warp.pred[row]
        lanes = warp.mask & ~predicate if negated else warp.mask & predicate
        if not np.count_nonzero(lanes):
            return after
        if not np.count_nonzero(lanes != warp.mask):
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
        if not np.count_nonzero(lanes != warp.mask):
            return leave(warp)
        if np.count_nonzero(lanes):
            warp.drop(lanes)
        return NEXT

    return run


def leave(warp: Warp) -> object:
    """`ret` or `exit` of an entry: the active lanes end."""
    warp.retire()
    return HANDLED
