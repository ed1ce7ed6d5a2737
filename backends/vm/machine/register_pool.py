"""The registers that setmaxnreg moves between the warps of a CTA (PTX ISA 9.7.19.5).

All warps of a warpgroup execute the same setmaxnreg, and synchronise before the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from backends.vm.faults import Fault, OtherAccess, report
from backends.vm.machine.warpgroup import WARPS, incomplete
from backends.vm.memory.lane_releases import NOBODY

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp

REGISTERS = 65536
"""32-bit registers of an SM (CUDA programming guide, compute capabilities 9.0 and 10.0)."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A setmaxnreg: the direction, the registers per thread that it asks for, its PTX line and text."""

    way: str
    count: int
    line: int
    text: str


class Done(NamedTuple):
    """A setmaxnreg that the warp with clock index `agent` has executed in its epoch `epoch`."""

    one: Resize
    agent: int
    epoch: int


@dataclass(slots=True)
class Excess:
    """After `done`, warp `warp` and the others held `held` registers, `over` more than an SM has.

    `over` becomes less by what others give back, unless they do so only after `done`.
    """

    warp: int
    done: Done
    held: int
    over: int


@dataclass(slots=True)
class RegisterPool:
    """The registers of a CTA that setmaxnreg moves between its warps.

    A launch gives every thread as many as the code may use: .maxnreg, or what .reqntid or .maxntid leaves of an SM.
    Without either the number is unknown, and ptxas ignores setmaxnreg: `size` is None. `held` is the registers per
    thread of each warp, 0 if unknown, and at most so many unless they are `stated` by .maxnreg. `done` is what each
    warp has executed, `excesses` what does not fit on an SM.
    """

    size: int | None
    held: list[int]
    done: list[list[Done]]
    stated: bool = False
    excesses: list[Excess] = field(default_factory=list[Excess])

    @classmethod
    def of(cls, directives: Mapping[str, tuple[int, ...]], warps: int) -> RegisterPool:
        """The pool of a new CTA of `warps` warps."""
        most = directives.get("reqntid") or directives.get("maxntid")
        given = directives["maxnreg"][0] if "maxnreg" in directives else 0
        if not given and most:
            threads = -(-prod(most) // 32) * 32 * max(directives.get("minnctapersm", (1,))[0], 1)
            given = min(REGISTERS // threads // 8 * 8, 256)
        size = 32 * given * warps if given else None
        return cls(size, [given] * warps, [[] for _ in range(warps)], "maxnreg" in directives)

    @property
    def free(self) -> int:
        """Registers that no warp holds."""
        return 0 if self.size is None else self.size - 32 * sum(self.held)

    def check_possible(self, warp: int, one: Resize) -> None:
        """Report `one` if it is in the wrong direction. Raise Fault if .inc would wait for ever."""
        held = self.held[warp]
        most = None if self.size is None else self.size // (32 * min(WARPS, len(self.held)))
        if most is not None and one.way == "inc" and one.count > most:
            raise Fault("register-pool", f"setmaxnreg.inc to {one.count} registers a thread, but the CTA was launched "
                        f"with {self.size} in all, {most} a thread if one warpgroup has them all")  # fmt: skip
        if held and (one.count > held if one.way == "dec" else self.stated and one.count < held):
            only = "gives back" if one.way == "dec" else "asks for more"
            report(Fault("register-pool", f"setmaxnreg.{one.way} to {one.count} registers a thread by a warp that "
                         f"holds {held}: .{one.way} only {only}"))  # fmt: skip

    def execute(self, warp: Warp, one: Resize) -> None:
        """Record that `warp` executes `one`. Reports a warpgroup that is not whole, that executes something else in
        its place, or that has not synchronised since the setmaxnreg before it.

        The launch goes on: a warp has the registers that it asked for, whatever its neighbours have.
        """
        if (fault := incomplete(warp, f"setmaxnreg.{one.way}")) is not None:
            report(fault)
        index, first = warp.index, warp.index // WARPS * WARPS
        others = [other for other in range(first, min(first + WARPS, len(self.done))) if other != index]
        self._check_same(index, one, others)
        self._check_synchronised(warp, others)
        self.done[index].append(Done(one, warp.agent, int(warp.clock.seen[warp.agent])))
        # A relaxed arrival tells of the epochs before the current one.
        warp.next_epoch(NOBODY)

    def _check_same(self, warp: int, one: Resize, others: list[int]) -> None:
        place = len(self.done[warp])
        for other in others:
            if place < len(self.done[other]):
                known = self.done[other][place].one
                if (known.way, known.count) != (one.way, one.count):
                    report(Fault("warpgroup-diverged", f"setmaxnreg.{one.way} {one.count} by warp {warp}, where warp "
                                 f"{other} of its warpgroup has executed setmaxnreg.{known.way} {known.count} (PTX "
                                 f"line {known.line}); all warps of a warpgroup execute the same"))  # fmt: skip
                    return

    def _check_synchronised(self, warp: Warp, others: list[int]) -> None:
        place = len(self.done[warp.index]) - 1
        for other in others if place >= 0 else ():
            known = self.done[other][place] if place < len(self.done[other]) else None
            if known is None or not warp.clock.comes_after(known.agent, known.epoch):
                who = warp.cta.warps[other].name
                line = 0 if known is None else known.one.line
                report(Fault("setmaxnreg-unsynchronised", f"nothing orders this setmaxnreg after the one before it by "
                             f"warp {other}: a barrier of the warpgroup is missing between the two",
                             other=OtherAccess(who, "executed setmaxnreg", line)))  # fmt: skip
                return

    def lacking(self, warp: int, count: int) -> int:
        """Registers that must still become free before `warp` can have `count` per thread."""
        return 0 if self.size is None else max(32 * (count - self.held[warp]) - self.free, 0)

    def take(self, warp: Warp, one: Resize) -> None:
        """Give `warp` what its last setmaxnreg, `one`, asked for."""
        held = self.held[warp.index] or one.count
        self.held[warp.index] = (min if one.way == "dec" else max)(held, one.count)
        for known in self.excesses:
            if not warp.clock.comes_after(known.done.agent, known.done.epoch):
                known.over -= 32 * (held - self.held[warp.index])
        together = 32 * sum(self.held)
        if self.size is None and together > REGISTERS:
            done = self.done[warp.index][-1]
            self.excesses.append(Excess(warp.index, done, together, together - REGISTERS))

    def beyond_the_sm(self) -> Excess | None:
        """When the CTA ends: the largest excess that nobody could have waited for to end."""
        left = [known for known in self.excesses if known.over > 0]
        return max(left, key=lambda known: known.over, default=None)

    def left_alone(self) -> tuple[int, int, Resize] | None:
        """A warp that did not execute a setmaxnreg that another of its warpgroup did: both, and the instruction."""
        for first in range(0, len(self.done), WARPS):
            group = range(first, min(first + WARPS, len(self.done)))
            eager = max(group, key=lambda warp: len(self.done[warp]))
            for warp in group:
                if len(self.done[warp]) < len(self.done[eager]):
                    return warp, eager, self.done[eager][len(self.done[warp])].one
        return None
