"""Strands: the lanes of a diverged warp that share a program counter, and whose turn it is among them.

The strand in the lowest block runs first, which brings lanes together again soonest. Threads of a warp are concurrent
all the same (PTX ISA 3.2), and lanes that spin must not starve those that they wait for: when a strand has run long and
nothing has happened in the machine, another one runs for a while. Nothing happens in a spin. Lanes that copy, store or
wait are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backends.vm.machine.code import Wait

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp

Mask = npt.NDArray[np.bool_]

FIRST_PATIENCE = 4096
"""Blocks in which nothing happens before other lanes get a turn. A long computation of some lanes ends before."""
LATER_PATIENCE = 32
"""The same in a warp that has spun before."""
TURN = 32


@dataclass(slots=True)
class Strand:
    """Lanes that share a program counter. `wait` is set while they are parked at the tail of `block`."""

    block: int
    mask: Mask
    wait: Wait | None = None


@dataclass(slots=True)
class LaneTurns:
    """`quiet` blocks have run since event `events` of the machine. Lane `chosen` has `left` blocks of its turn left."""

    patience: int = FIRST_PATIENCE
    quiet: int = 0
    events: int = -1
    left: int = 0
    chosen: int = 0
    given: int = 0

    def after_block(self, warp: Warp) -> None:
        """A strand of the diverged `warp` has run a block: order the strands for the next one."""
        events = warp.cta.machine.engine.events
        if events != self.events:
            self.events, self.quiet = events, 0
        self.quiet += 1
        if self.left:
            self.left -= 1
            if not (self.left and self._bring_forward(warp)):
                self.left = self.quiet = 0
                warp.sort_strands()
        elif self.quiet >= self.patience:
            self._choose(warp)

    def _choose(self, warp: Warp) -> None:
        able = [strand for strand in warp.strands[1:] if strand.wait is None or strand.wait.ready()]
        self.quiet = 0
        if able:
            self.given += 1
            self.patience, self.left = LATER_PATIENCE, TURN
            self.chosen = int(able[self.given % len(able)].mask.argmax())
            self._bring_forward(warp)

    def _bring_forward(self, warp: Warp) -> bool:
        for position, strand in enumerate(warp.strands):
            if strand.mask[self.chosen]:
                if strand.wait is not None and not strand.wait.ready():
                    return False
                warp.strands.insert(0, warp.strands.pop(position))
                return True
        return False


def merged(strands: list[Strand]) -> list[Strand]:
    """Strands by block; those that run at the same block become one."""
    found: list[Strand] = []
    for strand in sorted(strands, key=lambda one: one.block):
        last = found[-1] if found else None
        if last is not None and last.block == strand.block and last.wait is None and strand.wait is None:
            last.mask = last.mask | strand.mask
        else:
            found.append(strand)
    return found
