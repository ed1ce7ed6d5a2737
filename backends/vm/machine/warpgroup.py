"""Warpgroups: four neighbouring warps that execute wgmma as one (PTX ISA 9.7.15), and setmaxnreg (register_pool.py).

Each warp computes its own 16 of the 64 rows, as the fragments are laid out. A wait checks that all four have issued the
same instructions in the same order. A warp's operations end in order of issue. A group belongs to the warpgroup (PTX
ISA 9.7.15.7.2): after a wait for it, all four warps' shares have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


def incomplete(warp: Warp, what: str) -> Fault | None:
    """The fault of executing `what` in a warpgroup that lacks warps, because the CTA ends within it; None if it has
    all four."""
    first = warp.index // WARPS * WARPS
    if first + WARPS <= len(warp.cta.warps):
        return None
    warps = counted(len(warp.cta.warps), "warp")
    return Fault("warpgroup-diverged", f"{what} in warp {warp.index} of a CTA of {warps}, where a warpgroup is warps "
                 f"{first}..{first + WARPS - 1}")  # fmt: skip


def warpgroup_of(warp: Warp) -> Warpgroup:
    """The warpgroup of `warp`, which must have all four warps: those of indices 4i .. 4i + 3."""
    cta, number = warp.cta, warp.index // WARPS
    if number not in cta.warpgroups:
        if (fault := incomplete(warp, "wgmma")) is not None:
            raise fault
        cta.warpgroups[number] = Warpgroup(WARPS * number, warp.agents.new_copy(), [Part() for _ in range(WARPS)])
    return cta.warpgroups[number]


def part_of(warp: Warp) -> Part:
    """The share of `warp` in its warpgroup."""
    return warpgroup_of(warp).parts[warp.index % WARPS]
