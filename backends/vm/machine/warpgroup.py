"""Warpgroups: four neighbouring warps that execute wgmma and setmaxnreg as one (PTX ISA 9.7.15, 9.7.19.5).

Each warp computes its own 16 of the 64 rows, as the fragments are laid out. A wait checks that all four have issued the
same instructions in the same order. A warp's operations end in order of issue. A group belongs to the warpgroup (PTX
ISA 9.7.15.7.2): after a wait for it, all four warps' shares have ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from backends.vm.faults import Fault, OtherAccess, counted, report
from backends.vm.machine.code import Key
from backends.vm.machine.engine import Operation

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp

WARPS = 4


@dataclass(slots=True)
class Multiplication:
    """One wgmma.mma_async in flight for one warp, with the registers that no other instruction may touch.

    `number` counts the warp's multiplications from 0. `shape` is the accumulator's: instructions of one shape may
    follow each other on the same registers.
    """

    accumulators: frozenset[Key]
    inputs: frozenset[Key]
    shape: str
    line: int
    number: int
    serial: int
    operation: Operation


@dataclass(slots=True)
class Part:
    """One warp's share of a warpgroup: how many multiplications it has `issued`, and how many of these have `ended`.

    Since the last wgmma.fence, wgmma has `used` some registers, other instructions have then `touched` some of these
    (None: there has been no wgmma.fence), and other instructions have used the registers in `late`.
    """

    issued: int = 0
    ended: int = 0
    open: list[Multiplication] = field(default_factory=list[Multiplication])
    committed: list[list[Multiplication]] = field(default_factory=list[list[Multiplication]])
    used: set[Key] = field(default_factory=set[Key])
    touched: set[Key] | None = None
    late: set[Key] = field(default_factory=set[Key])

    @property
    def busy(self) -> bool:
        """Whether some multiplication may not be covered by a wait."""
        return bool(self.open or self.committed)

    def pending(self) -> list[Multiplication]:
        """Every multiplication that no wait has covered, oldest first."""
        return [item for group in [*self.committed, self.open] for item in group]

    def covered(self, allowed: int) -> list[Multiplication]:
        """The multiplications that a wait for all but `allowed` groups covers."""
        return [item for group in self.committed[: max(len(self.committed) - allowed, 0)] for item in group]

    def retire(self, allowed: int) -> int:
        """Forget what such a wait covers. Returns the highest serial number, 0 if there is none."""
        newest = max((item.serial for item in self.covered(allowed)), default=0)
        del self.committed[: max(len(self.committed) - allowed, 0)]
        return newest

    def check_access(self, keys: frozenset[Key], names: str) -> None:
        """Report a register of `keys` that belongs to a multiplication no wait has covered."""
        for item in self.pending():
            if not (keys.isdisjoint(item.accumulators) and keys.isdisjoint(item.inputs)):
                what = "accumulates into" if not keys.isdisjoint(item.accumulators) else "reads A from"
                report(Fault("register-in-flight", f"a register of {names} is used while the wgmma of PTX line "
                             f"{item.line} {what} it: a wgmma.wait_group that covers it is missing",
                             other=OtherAccess("the wgmma", what, item.line)))  # fmt: skip

    def check_fenced(self, keys: frozenset[Key]) -> None:
        """Report another instruction's use of a register in `keys` between a wgmma and this one without a wgmma.fence.

        The ISA wants the fence after that other use. NVIDIA's compiler moves writes of accumulators across it (the
        Hopper GEMM of CuTeDSL clears them after its fence). So a judged row accepts a fence anywhere between the two
        wgmma and only counts one that comes too early.
        """
        if self.touched is None:
            report(Fault("missing-wgmma-fence", "no wgmma.fence has been executed before this wgmma"))
        elif not keys.isdisjoint(self.touched):
            report(Fault("missing-wgmma-fence", "other instructions have used registers of this wgmma since a wgmma "
                         "did, with no wgmma.fence in between (PTX ISA 9.7.15.7.1)"))  # fmt: skip
        elif not keys.isdisjoint(self.late):
            report(Fault("wgmma-fence-early", "other instructions have used registers of this wgmma since the last "
                         "wgmma.fence: it stands before that use, not behind it"))  # fmt: skip

    def fence(self) -> None:
        """`wgmma.fence`: registers used before now may be used by wgmma."""
        self.used, self.touched, self.late = set(), set(), set()

    def touch(self, keys: frozenset[Key]) -> None:
        """Record that another instruction uses `keys`."""
        if self.touched is not None:
            self.touched |= keys & self.used
        self.late |= keys

    def check_overlap(self, accumulators: frozenset[Key], inputs: frozenset[Key], shape: str) -> None:
        """Report a new multiplication that overlaps one in flight without any order between them."""
        for item in self.pending():
            if not inputs.isdisjoint(item.accumulators):
                clash = "reads A from registers that it accumulates into"
            elif not accumulators.isdisjoint(item.inputs):
                clash = "accumulates into registers that it reads A from"
            elif item.shape != shape and not accumulators.isdisjoint(item.accumulators):
                clash = f"accumulates as {shape} into registers that it uses as {item.shape}"
            else:
                continue
            other = OtherAccess("the wgmma", "uses", item.line)
            report(Fault("register-in-flight", f"the wgmma of PTX line {item.line} is in flight and this one {clash}: "
                         "a wgmma.wait_group is missing", other=other))  # fmt: skip


@dataclass(slots=True)
class Warpgroup:
    """Four warps. `agent` is the clock index of the reads of their multiplications.

    `issues` holds the multiplications that some but not all of its warps have issued: (PTX line, descriptors, serial,
    number of warps) by number.
    """

    first: int
    agent: int
    parts: list[Part]
    issues: dict[int, tuple[int, tuple[int, ...], int, int]] = field(
        default_factory=dict[int, tuple[int, tuple[int, ...], int, int]]
    )

    def issue(self, warp: Warp, line: int, descriptors: tuple[int, ...]) -> tuple[Part, int]:
        """Record that `warp` issues its next multiplication. Returns its part and the serial number that all four
        share.

        Raises Fault if another warp of the group issued a different one.
        """
        part = self.parts[warp.index - self.first]
        known = self.issues.get(part.issued)
        if known is not None and known[:2] != (line, descriptors):
            values = ", ".join(f"{raw:#x}" for raw in known[1])
            other = f"that of PTX line {known[0]}" if known[0] != line else f"this one with matrix descriptors {values}"
            raise Fault("warpgroup-diverged", f"wgmma number {part.issued} of this warp differs from what another warp "
                        f"of its warpgroup issued, {other}; all four must execute the same")  # fmt: skip
        serial, count = (warp.cta.cluster.next_copy(), 1) if known is None else (known[2], known[3] + 1)
        if count == WARPS:
            del self.issues[part.issued]
        else:
            self.issues[part.issued] = (line, descriptors, serial, count)
        part.issued += 1
        return part, serial

    def behind(self, number: int) -> list[int]:
        """The warps that have not issued multiplication `number` (from 0)."""
        return [self.first + i for i, part in enumerate(self.parts) if part.issued <= number]

    def ended(self, number: int) -> bool:
        """Whether all four shares of all multiplications up to `number` have ended."""
        a, b, c, d = self.parts  # checked at every turn of a schedule, so unrolled
        return a.ended > number and b.ended > number and c.ended > number and d.ended > number


REGISTERS = 65536
"""32-bit registers of an SM (CUDA programming guide, compute capabilities 9.0 and 10.0)."""


@dataclass(slots=True)
class Resize:
    """One setmaxnreg of a warp: the direction, the registers per thread that it asks for, its PTX line and text."""

    way: str
    count: int
    line: int
    text: str


@dataclass(slots=True)
class RegisterPool:
    """The registers of a CTA that setmaxnreg moves between its warps.

    A launch gives every thread as many as the code may use: .maxnreg, or what .reqntid or .maxntid leaves of an SM.
    Without either the number is unknown, and ptxas ignores setmaxnreg: `size` is None. `held` is the registers per
    thread of each warp, `done` what each warp has executed.
    """

    size: int | None
    held: list[int]
    done: list[list[Resize]]

    @classmethod
    def of(cls, directives: Mapping[str, tuple[int, ...]], warps: int) -> RegisterPool:
        """The pool of a new CTA of `warps` warps."""
        most = directives.get("reqntid") or directives.get("maxntid")
        given = directives["maxnreg"][0] if "maxnreg" in directives else 0
        if not given and most:
            threads = -(-prod(most) // 32) * 32 * max(directives.get("minnctapersm", (1,))[0], 1)
            given = min(REGISTERS // threads // 8 * 8, 256)
        return cls(32 * given * warps if given else None, [given] * warps, [[] for _ in range(warps)])

    @property
    def free(self) -> int:
        """Registers that no warp holds."""
        return 0 if self.size is None else self.size - 32 * sum(self.held)

    def check_possible(self, warp: int, one: Resize) -> None:
        """Raise Fault if the launch can never satisfy `one`: .inc would wait for ever, .dec has nothing to free."""
        if self.size is None:
            return
        most = self.size // (32 * min(WARPS, len(self.held)))
        if one.way == "inc" and one.count > most:
            raise Fault("register-pool", f"setmaxnreg.inc to {one.count} registers a thread, but the CTA was launched "
                        f"with {self.size} in all, {most} a thread if one warpgroup has them all")  # fmt: skip
        if one.way == "dec" and one.count > self.held[warp]:
            raise Fault("register-pool", f"setmaxnreg.dec to {one.count} registers a thread by a warp that holds "
                        f"{self.held[warp]}: .dec only gives back")  # fmt: skip

    def resize(self, warp: int, one: Resize) -> None:
        """Record that `warp` executes `one`. Reports another one in its place, executed by a warp of its warpgroup.

        The launch goes on: a warp has the registers that it asked for, whatever its neighbours have.
        """
        place, first = len(self.done[warp]), warp // WARPS * WARPS
        for other in range(first, min(first + WARPS, len(self.done))):
            if place < len(self.done[other]):
                known = self.done[other][place]
                if (known.way, known.count) != (one.way, one.count):
                    report(Fault("warpgroup-diverged", f"setmaxnreg.{one.way} {one.count} by warp {warp}, where warp "
                                 f"{other} of its warpgroup has executed setmaxnreg.{known.way} {known.count} (PTX "
                                 f"line {known.line}); all warps of a warpgroup execute the same"))  # fmt: skip
                    break
        self.done[warp].append(one)

    def lacking(self, warp: int, count: int) -> int:
        """Registers that must still become free before `warp` can have `count` per thread."""
        return 0 if self.size is None else max(32 * (count - self.held[warp]) - self.free, 0)

    def take(self, warp: int, one: Resize) -> None:
        """Give `warp` what `one` asked for."""
        self.held[warp] = (min if one.way == "dec" else max)(self.held[warp], one.count)

    def left_alone(self) -> tuple[int, int, Resize] | None:
        """A warp that did not execute a setmaxnreg that another of its warpgroup did: both, and the instruction."""
        for first in range(0, len(self.done), WARPS):
            group = range(first, min(first + WARPS, len(self.done)))
            eager = max(group, key=lambda warp: len(self.done[warp]))
            for warp in group:
                if len(self.done[warp]) < len(self.done[eager]):
                    return warp, eager, self.done[eager][len(self.done[warp])]
        return None


def warpgroup_of(warp: Warp) -> Warpgroup:
    """The warpgroup of `warp`, which must have all four warps: those of indices 4i .. 4i + 3."""
    cta, number = warp.cta, warp.index // WARPS
    if number not in cta.warpgroups:
        first = WARPS * number
        if first + WARPS > len(cta.warps):
            warps = counted(len(cta.warps), "warp")
            raise Fault("warpgroup-diverged", f"wgmma in warp {warp.index} of a CTA of {warps}, where a warpgroup is "
                        f"warps {first}..{first + WARPS - 1}")  # fmt: skip
        cta.warpgroups[number] = Warpgroup(first, warp.agents.new_copy(), [Part() for _ in range(WARPS)])
    return cta.warpgroups[number]


def part_of(warp: Warp) -> Part:
    """The share of `warp` in its warpgroup."""
    return warpgroup_of(warp).parts[warp.index % WARPS]
