"""Programmatic dependent launches: which earlier launches may still run, and what must not be touched before they end.

A launch with the attribute may begin as soon as the CTAs of the launch before it have executed
griddepcontrol.launch_dependents or ended, even before their writes have arrived. griddepcontrol.wait waits until the
launch before is complete and its memory operations are visible (PTX ISA 9.7.13.13; the CUDA programming guide,
"Programmatic Dependent Launch and Synchronization", asks for it even where nothing launches dependents early). Neither
source says that it waits for more: a launch further back is over only if the launch in between has itself waited. A
wait is one element of the vector clocks. Any order after a warp that has waited carries it along. Launches further
back than MOST_OVERLAPPING count as over: a door may launch thousands, and each keeps marks of all its memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from backends.vm.faults import Fault, OtherAccess, at_line, report
from backends.vm.memory.clocks import WAITED, Clock
from backends.vm.memory.global_memory import Addresses, Buffer
from backends.vm.numpy_calls import count_nonzero

if TYPE_CHECKING:
    from backends.vm.memory.global_races import Shadow


MOST_OVERLAPPING = 16


@dataclass(frozen=True, slots=True, eq=False)
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
        """Begin a launch of `kernel`; `last` are the shadows of the one before."""
        if dependent:
            unfinished = self.after if self.waited else self.before
            self.before = [Earlier(self.kernel, last), *self.before][:MOST_OVERLAPPING]
            self.after = [one for one in unfinished if one in self.before]
        else:
            self.before, self.after = [], []
        self.kernel, self.waited = kernel, False

    def wait(self, clock: Clock, released: Clock) -> None:
        """`griddepcontrol.wait` by the owner of `clock`.

        Its relaxed arrivals carry it too (`released`): they come after it, whatever they order.
        """
        self.waited = True
        clock.seen[WAITED] = released.seen[WAITED] = 1

    def check(
        self, buffer: Buffer, addresses: Addresses, size: int, clock: Clock, *, writes: bool, by_lane: bool
    ) -> None:
        """Report if a launch that may still run wrote any of `size` bytes at addresses [n] of one buffer.

        For a write, its reads count too.
        """
        for earlier in self._overlapping(clock):
            shadow = earlier.shadows.get(buffer.base)
            # At a door, memory may have been freed between the launches, and other memory may lie there now.
            if shadow is None or shadow.end != buffer.end:
                continue
            granules = shadow.granules(addresses, size)
            for marks in (shadow.writer, shadow.reader, shadow.comparer) if writes else (shadow.writer,):
                if marks is None:
                    continue
                found = marks[granules] != 0
                if not count_nonzero(found):
                    continue
                wrote = marks is shadow.writer
                at = int(granules[found][0])
                line = int(shadow.lines(marks)[at])
                did = f"{'wrote' if wrote else 'read'} it{at_line(line)}"
                offset = shadow.offset_in(buffer, at)
                report(Fault("dependent-launch-not-awaited", f"byte {offset} of `{buffer.name}` is "
                             f"{'overwritten' if writes else 'read'}, but {earlier.kernel}, which {did}, may still "
                             f"run: {self._missing(earlier, waited=_has_waited(clock))}",
                             lane=int(np.argwhere(found)[0][0]) if by_lane else None,
                             other=OtherAccess(earlier.kernel, "wrote" if wrote else "read", line)))  # fmt: skip
                return

    def concerns(self, buffer: Buffer, clock: Clock) -> bool:
        """Whether a launch that may still run has accessed `buffer`."""
        return any(buffer.base in earlier.shadows for earlier in self._overlapping(clock))

    def had(self, buffer: Buffer) -> bool:
        """Whether some launch that may still run for warps that have not waited has accessed `buffer`."""
        return any(buffer.base in earlier.shadows for earlier in self.before)

    def _overlapping(self, clock: Clock) -> list[Earlier]:
        return self.after if _has_waited(clock) else self.before

    def _missing(self, earlier: Earlier, *, waited: bool) -> str:
        if not waited:
            return "this is a dependent launch, and nothing orders the access after a griddepcontrol.wait"
        between = self.before[self.before.index(earlier) - 1].kernel
        return (
            f"griddepcontrol.wait waits for the launch before this one, and {between}, launched after "
            f"{earlier.kernel}, has ended without a griddepcontrol.wait of its own"
        )


def _has_waited(clock: Clock) -> bool:
    """Whether a griddepcontrol.wait of any warp comes before the next action of the owner of `clock`."""
    if clock.seen[WAITED]:
        return True
    grid = clock.grid
    return grid is not None and any(bool(epochs[WAITED]) for epochs in grid.known.values())
