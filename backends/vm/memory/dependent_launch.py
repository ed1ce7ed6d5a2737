"""Programmatic dependent launch: which earlier launches may still run, and which of their bytes nobody may touch yet.

A launch with the attribute may begin as soon as the CTAs of the launch before it have executed
griddepcontrol.launch_dependents or ended, even before their writes have arrived. griddepcontrol.wait waits until the
launch before is complete and its memory operations are visible (PTX ISA 9.7.13.13; the CUDA programming guide,
"Programmatic Dependent Launch and Synchronization", asks for it also where nobody launches dependents early). Neither
source says that it waits for more: the launch before that one is over only if that one has itself waited.

A wait is one element of the vector clocks. Any order after a warp that has waited carries it along.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from backends.vm.faults import Fault
from backends.vm.memory.clocks import WAITED

if TYPE_CHECKING:
    from backends.vm.memory.clocks import Clock
    from backends.vm.memory.global_memory import Buffer
    from backends.vm.memory.global_races import Addresses, Shadow


@dataclass(frozen=True, slots=True)
class Earlier:
    """A launch that may still run: its kernel, and its shadows by the base of the buffer."""

    kernel: str
    shadows: dict[int, Shadow]


@dataclass(slots=True)
class LaunchChain:
    """The launches that may overlap the running one, the latest first.

    `before` holds for warps that have not waited, `after` for those that have. `waited`: a warp of the running launch
    has waited.
    """

    kernel: str = ""
    before: list[Earlier] = field(default_factory=list[Earlier])
    after: list[Earlier] = field(default_factory=list[Earlier])
    waited: bool = False

    def begin(self, kernel: str, last: dict[int, Shadow], *, dependent: bool) -> None:
        """A launch of `kernel` begins; `last` are the shadows of the one before."""
        if dependent:
            unfinished = self.after if self.waited else self.before
            self.before = [Earlier(self.kernel, last), *self.before]
            self.after = unfinished
        else:
            self.before, self.after = [], []
        self.kernel, self.waited = kernel, False

    def wait(self, clock: Clock, released: Clock) -> None:
        """`griddepcontrol.wait` of the owner of `clock`.

        What its relaxed arrivals carry (`released`) has it too: they come after it, whatever they order.
        """
        self.waited = True
        clock.seen[WAITED] = released.seen[WAITED] = 1

    def check(
        self, buffer: Buffer, addresses: Addresses, size: int, clock: Clock, *, writes: bool, by_lane: bool
    ) -> None:
        """Fault if a launch that may still run wrote any of `size` bytes at addresses [n] of one buffer.

        A write may not meet its reads either.
        """
        waited = has_waited(clock)
        for earlier in self.after if waited else self.before:
            shadow = earlier.shadows.get(buffer.base)
            if shadow is None:
                continue
            granules = shadow.granules(addresses, size)
            for marks in (shadow.writer, shadow.reader) if writes else (shadow.writer,):
                found = marks[granules] != 0
                if not np.count_nonzero(found):
                    continue
                at = int(granules[found][0])
                did = f"wrote it at PTX line {shadow.line[at]}" if marks is shadow.writer else "read it"
                offset = max(shadow.base + (at << shadow.shift) - buffer.base, 0)
                raise Fault("dependent-launch-not-awaited", f"byte {offset} of `{buffer.name}` is "
                            f"{'overwritten' if writes else 'read'}, but {earlier.kernel}, which {did}, may still run: "
                            f"{self._missing(earlier, waited=waited)}",
                            lane=int(np.argwhere(found)[0][0]) if by_lane else None,
                            address=buffer.base + offset)  # fmt: skip

    def _missing(self, earlier: Earlier, *, waited: bool) -> str:
        if not waited:
            return "this is a dependent launch, and nothing orders the access after a griddepcontrol.wait"
        between = self.before[self.before.index(earlier) - 1].kernel
        return (
            f"griddepcontrol.wait waits for the launch before this one, and {between}, launched after "
            f"{earlier.kernel}, has ended without a griddepcontrol.wait of its own"
        )


def has_waited(clock: Clock) -> bool:
    """Whether a griddepcontrol.wait of any warp comes before the next action of the owner of `clock`."""
    if clock.seen[WAITED]:
        return True
    grid = clock.grid
    return grid is not None and any(bool(epochs[WAITED]) for epochs in grid.known.values())
