"""mbarrier objects: phases, pending arrivals and transaction counts (PTX ISA 9.7.13.15; facts.md 6.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from backends.vm.faults import Fault, counted
from backends.vm.memory.clocks import Carried, Clock

MAX_COUNT = (1 << 20) - 1


class Signaller(Protocol):
    """An asynchronous operation that signals an mbarrier, with what reports say about it."""

    what: str
    kernel: str
    line: int
    text: str
    issuer: str


@dataclass(slots=True)
class MBarrier:
    """One mbarrier at `offset` of a CTA's shared memory.

    `arriving` has the clocks of the arrivals of the current phase, `completed` the clocks of the phase before; a
    successful wait acquires these (PTX ISA 9.7.13.15.16: what came before the arrivals of the completed phase). `phase`
    counts completed phases: its lowest bit is the parity. Agent `creator` initialised it in its epoch `created`, at PTX
    `line`. Copies that signal it are agent `copy_agent`; `last_copy` is the latest. `announced`: its creator has
    executed fence.mbarrier_init since.
    """

    offset: int
    expected: int
    pending: int
    arriving: Carried = field(default_factory=Carried)
    completed: Carried = field(default_factory=Carried)
    transactions: int = 0
    phase: int = 0
    last_arrival: str = "nobody yet"
    creator: int = 0
    created: int = 0
    copy_agent: int = 0
    last_copy: Signaller | None = None
    last_copy_serial: int = 0
    line: int = 0
    announced: bool = False

    @property
    def unused(self) -> bool:
        """Whether nothing has happened to it since its initialisation."""
        return self.pending == self.expected and not (self.phase or self.transactions or self.last_copy_serial)

    @classmethod
    def create(cls, offset: int, count: int) -> MBarrier:
        """`mbarrier.init`: phase 0, `count` arrivals expected (1 .. 2^20-1)."""
        if not 1 <= count <= MAX_COUNT:
            raise Fault(
                "mbarrier-misuse",
                f"mbarrier.init with count {count}, which must be 1..{MAX_COUNT}",
                lane=0,
                address=offset,
            )
        return cls(offset, count, count)

    def expect(self, transactions: int) -> None:
        """Raise the transaction count (bytes) of the current phase."""
        self.transactions += transactions
        self._check_transactions()

    def complete_transactions(self, transactions: int, clock: Clock, by: str) -> None:
        """Count bytes of an asynchronous copy that have landed. This may precede the matching expect."""
        self.transactions -= transactions
        self._check_transactions()
        self.arriving.give(clock)
        self.last_arrival = by
        self._advance()

    def arrive(self, count: int, by: str, *clocks: tuple[Clock, int, bool], drop: bool = False) -> None:
        """Count `count` arrivals of the current phase; `drop` also lowers what later phases expect.

        `clocks`: what they release, each with the rank of the CTA and whether only to that CTA (see Carried).
        """
        if count > self.pending:
            raise Fault("mbarrier-misuse", f"{counted(count, 'arrival')} where phase {self.phase} of this mbarrier "
                        f"expects only {self.pending} more of {self.expected} (last arrival: {self.last_arrival})",
                        address=self.offset)  # fmt: skip
        self.pending -= count
        if drop:
            self.expected -= count
        for clock, rank, narrow in clocks:
            self.arriving.give(clock, rank, narrow=narrow)
        self.last_arrival = by
        self._advance()

    def _check_transactions(self) -> None:
        if not -MAX_COUNT <= self.transactions <= MAX_COUNT:
            raise Fault("mbarrier-misuse", f"transaction count {self.transactions} leaves the range of +-{MAX_COUNT}",
                        address=self.offset)  # fmt: skip

    def _advance(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.expected
            self.completed, self.arriving = self.arriving, Carried()

    def passed(self, parity: int) -> bool:
        """The result of `test_wait.parity`: the phase of that parity is over, since the current parity differs."""
        return (self.phase & 1) != parity

    def state(self) -> str:
        """One clause for deadlock reports."""
        tx = f", {counted(self.transactions, 'transaction byte')} outstanding" if self.transactions > 0 else ""
        tx = f", {counted(-self.transactions, 'byte')} more than expected" if self.transactions < 0 else tx
        return (f"phase {self.phase}, {self.pending} of {self.expected} arrivals missing{tx}, "
                f"last arrival: {self.last_arrival}")  # fmt: skip
