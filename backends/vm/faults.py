"""Faults of a kernel, who collects them, and errors for PTX or launches that this machine does not support.

A Fault that is raised ends its launch. A Fault given to `report` is a missing order, or something else that the run can
survive: it is raised too, unless a collector takes it. backends.vm.rules has the rules and their grades.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt

from backends.vm.rules import COLLECTED_ONLY, COUNTERS, RULES, MachineRule

Lanes = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A place in the source that was compiled to PTX. `function`: the inlined function, "" if unknown."""

    file: str
    line: int
    column: int
    function: str = ""


@dataclass(slots=True)
class OtherAccess:
    """The access that a fault collides with: `who` `did` it ("wrote", "copied through") at PTX `line`, 0 if unknown.

    `elsewhere`: in a race, it is of another CTA.
    """

    who: str
    did: str
    line: int = 0
    source: tuple[SourcePlace, ...] = ()
    elsewhere: bool = False


@dataclass(slots=True, eq=False)
class Fault(Exception):
    """A rule of the machine broken at run time. The instruction says what; the machine fills in where.

    `rule` is a stable slug of RULES, `detail` a sentence fragment with the values seen. `source`: the place in the
    source, innermost first. `times`: how often a launch met it. `ends`: the launch could not go on. `address`: not of
    global memory. Kernels see the memory of this process there, so it would differ from run to run; `detail` names the
    byte of a buffer instead. `spot`: the variable and byte at `address`, "" if unknown. `named`: `lane` was a position
    in an access, and is now the lane of the warp (ByLanes).
    """

    rule: str
    detail: str
    lane: int | None = None
    address: int | None = None
    kernel: str = ""
    line: int = 0
    text: str = ""
    where: str = ""
    history: list[str] = field(default_factory=list[str])
    other: OtherAccess | None = None
    source: tuple[SourcePlace, ...] = ()
    times: int = 1
    ends: bool = True
    spot: str = ""
    named: bool = False

    def __str__(self) -> str:
        place = f"kernel {self.kernel}, PTX line {self.line} `{self.text}`" if self.line else f"kernel {self.kernel}"
        lane = f", lane {self.lane}" if self.lane is not None else ""
        address = f", address {self.address:#x}" if self.address is not None else ""
        history = "".join(f"; {item}" for item in self.history)
        return f"[{self.rule}] {place}, {self.where}{lane}{address}: {self.detail}{history}"

    def __reduce__(self):
        # Exceptions are pickled without their slots.
        return type(self), tuple(getattr(self, one.name) for one in fields(self)), self.__dict__

    @property
    def about(self) -> MachineRule:
        """The rule with its grade. A fault of an unknown rule is an error."""
        return RULES.get(self.rule) or MachineRule(self.rule, "error", "", self.rule, "")

    @property
    def fails_rows(self) -> bool:
        """Whether a judged row fails on this fault."""
        return self.rule not in COLLECTED_ONLY

    @property
    def counter(self) -> str:
        """The counter of a judged row that does not fail on this fault; "" if the fault is counted where it is
        found."""
        return COUNTERS.get(self.rule, "")

    @property
    def site(self) -> tuple[object, ...]:
        """The key of a finding: the rule, the kernel, the lines of both accesses, and whether two CTAs make them. Equal
        keys are one finding."""
        return *self.lines_at, self.other is not None and self.other.elsewhere

    @property
    def lines_at(self) -> tuple[object, ...]:
        """The key without the CTAs."""
        lines = {self.line} if self.other is None else {self.line, self.other.line}
        return self.rule, self.kernel, frozenset(lines)


@dataclass(slots=True)
class Findings:
    """The faults of a launch, one per site."""

    by_site: dict[tuple[object, ...], Fault] = field(default_factory=dict[tuple[object, ...], Fault])

    def add(self, fault: Fault, *, ends: bool) -> None:
        """Add a fault whose place is filled in."""
        fault.ends = ends
        known = self.by_site.setdefault(fault.site, fault)
        if known is not fault:
            known.times += 1
            known.ends |= ends

    @property
    def worse_first(self) -> list[Fault]:
        """All of them as they were added, but of the same two lines the one between CTAs first."""
        places = dict[tuple[object, ...], int]()
        for one in self.by_site.values():
            places.setdefault(one.lines_at, len(places))
        return sorted(self.by_site.values(), key=lambda one: (places[one.lines_at], not one.site[-1]))

    def is_between_ctas_too(self, fault: Fault) -> bool:
        """Whether two CTAs have been found at the lines of `fault`."""
        return (*fault.lines_at, True) in self.by_site


_TAKES: ContextVar[Callable[[Fault], None] | None] = ContextVar("takes", default=None)


@contextmanager
def collecting(take: Callable[[Fault], None]) -> Iterator[None]:
    """Give every fault passed to `report` to `take` instead of raising it."""
    token = _TAKES.set(take)
    try:
        yield
    finally:
        _TAKES.reset(token)


class ByLanes:
    """A context in which `lanes` [n] of a warp access memory: there, the lane of a fault is a position among them.

    Memories know the n addresses of an access and not whose they are. Whatever they report or raise gets the lane of
    the warp here, so that no memory has to be told. The innermost context counts.
    """

    __slots__ = ("_lanes", "_token")

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def __enter__(self) -> None:
        self._token: Token[Lanes | None] = _LANES.set(self._lanes)

    def __exit__(self, kind: object, raised: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(raised, Fault):
            _name_lane(raised)
        _LANES.reset(self._token)


_LANES: ContextVar[Lanes | None] = ContextVar("lanes", default=None)


def _name_lane(fault: Fault) -> None:
    lanes = _LANES.get()
    if fault.lane is not None and lanes is not None and not fault.named:
        fault.lane, fault.named = int(lanes[fault.lane]), True


def report(fault: Fault) -> None:
    """Report a fault that the run can survive as if the order were there. Raises it if there is no collector."""
    _name_lane(fault)
    take = _TAKES.get()
    if take is None:
        raise fault
    take(fault)


def at_line(line: int) -> str:
    """The end of a clause about another access; "" for line 0, which means unknown."""
    return f" at PTX line {line}" if line else ""


UNORDERED: Final = "but nothing orders the two, which may happen in either order"
"""What a race says behind its two accesses: the machine has met them in only one of the orders."""


def counted(count: int, name: str) -> str:
    """ "1 byte", "2 bytes". `name` takes an s in the plural."""
    return f"{count} {name}{'' if count == 1 else 's'}"


class UnknownInstructionError(Exception):
    """PTX that this machine does not implement: the text names the spelling, the line and what is known.

    `by_line`: a PTX line, 0 if unknown, and a sentence for each refused instruction of a function, in order.
    """

    def __init__(self, text: str, by_line: Sequence[tuple[int, str]] = ()) -> None:
        super().__init__(text)
        self.by_line = tuple(by_line) or ((0, text),)

    @classmethod
    def of(cls, refusals: Refusals) -> UnknownInstructionError:
        """One for all `refusals` of a function. The text has a line for each."""
        by_line = sorted({str(one): (line, str(one)) for line, one in reversed(refusals)}.values())
        return cls("\n".join(first_told([said for _, said in by_line])), by_line)


Refusals = Sequence[tuple[int, UnknownInstructionError]]
"""Refusals of a function, each with its PTX line, 0 if unknown."""


def first_told(said: Sequence[str]) -> list[str]:
    """The first sentences of many, and how many more there are."""
    more = len(said) - MOST_TOLD
    return [*said[:MOST_TOLD], *([f"and {more} more"] if more > 0 else [])]


MOST_TOLD: Final = 10
"""The most refused instructions that are told."""


class LaunchError(Exception):
    """A launch that cannot be performed: wrong parameters, too much shared memory, no such entry.

    `cuda_error`: the cudaError_t that host code would get and may handle; 0 for none.
    """

    def __init__(self, text: str, cuda_error: int = 0) -> None:
        super().__init__(text)
        self.cuda_error = cuda_error
