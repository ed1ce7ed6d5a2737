"""Work that runs beside the warps: bulk copies and the tensor core. Each operation ends at its own time.

A warp submits an operation. The schedule says when it is performed: at once (eager), as late as the waits of the warps
allow (lazy), or at any time (random). Operations of one queue end in order of issue; the tensor core of a CTA is one
queue. The ISA does not order MMAs of different accumulators there. Clocks express that, not reordering; see
isa/tensor_core.py. Bulk copies are in no queue and may end in any order; the cp.async of a warp are in one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault
from backends.vm.memory.clocks import Agents

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp


@dataclass(slots=True, eq=False)
class Operation:
    """One asynchronous operation. `signals`: the objects that its end, or a commit after it, signals."""

    what: str
    kernel: str
    line: int
    text: str
    issuer: str
    perform: Callable[[], None]
    queue: object | None = None
    signals: tuple[object, ...] = ()
    done: bool = False

    def locate(self, fault: Fault) -> None:
        """Fill in this operation as the place of `fault`, unless its place is known."""
        if not fault.line:
            fault.kernel, fault.line, fault.text = self.kernel, self.line, self.text
            fault.where = f"{self.what} issued by {self.issuer}"

    def let_go(self) -> None:
        """Drop what it acts on: an mbarrier keeps the operation for reports, which would keep the CTA's memory."""
        self.perform, self.signals = _nothing, ()


@dataclass(slots=True)
class Engine:
    """Pending operations in order of issue. `events` counts everything that could let a warp move on.

    A store or an atomic that leaves what was there, such as a failed cas, lets nobody move on. `repeatable`: how many
    events were arrivals at barriers and mbarriers, or weak stores to shared memory. `performing`: the operation that is
    ending right now.
    """

    defers: bool
    pending: list[Operation] = field(default_factory=list[Operation])
    events: int = 0
    repeatable: int = 0
    performing: Operation | None = None

    def repeat(self, count: int = 1) -> None:
        """Count events that spinning warps may repeat for ever."""
        self.events += count
        self.repeatable += count

    def submit(self, operation: Operation) -> None:
        """Add an operation. Perform it at once if the engine does not defer."""
        self.events += 1
        self.pending.append(operation)
        if not self.defers:
            self.perform(operation)

    def eligible(self) -> list[Operation]:
        """Operations that may end now: every copy, and the oldest of each queue."""
        heads: set[int] = set()
        able: list[Operation] = []
        for operation in self.pending:
            if (queue := operation.queue) is None:
                able.append(operation)
            elif (head := id(queue)) not in heads:
                heads.add(head)
                able.append(operation)
        return able

    def perform(self, operation: Operation) -> None:
        """End `operation`: move its data and signal its mbarriers."""
        self.events += 1
        self.pending.remove(operation)
        outer, self.performing = self.performing, operation
        try:
            operation.perform()
        except Fault as fault:
            operation.locate(fault)
            raise
        finally:
            self.performing = outer
        operation.done = True
        operation.let_go()

    def abandon(self) -> None:
        """Drop what a fault has left in flight."""
        for operation in self.pending:
            operation.let_go()
        self.pending.clear()

    def settle(self, kernel: str, line: int) -> None:
        """End the operations that PTX `line` of `kernel` has issued, and those that must end before them."""
        for operation in [one for one in self.pending if (one.kernel, one.line) == (kernel, line)]:
            while operation in self.pending:
                queue = operation.queue
                self.perform(
                    next(one for one in self.pending if one is operation or (queue is not None and one.queue is queue))
                )

    def most_wanted(self, awaited: list[object]) -> Operation | None:
        """What ends if nobody can move without it. Products before copies, so that a copy is in flight as long as the
        waits allow; the oldest that leads to one of the `awaited` mbarriers before others."""
        able = self.eligible()
        products = [one for one in able if one.queue is not None and not isinstance(one.queue, CopyGroups)]
        wanted = {id(target) for target in awaited}
        for operation in products or able:
            chain = [operation] if operation.queue is None else [o for o in self.pending if o.queue is operation.queue]
            if any(id(signal) in wanted for link in chain for signal in link.signals):
                return operation
        return next(iter(products or able), None)


def _nothing() -> None:
    """Replaces `perform` of an operation that has been performed."""


def submit(
    warp: Warp,
    what: str,
    line: int,
    text: str,
    perform: Callable[[], None],
    *,
    queue: object | None = None,
    signals: tuple[object, ...] = (),
) -> Operation:
    """Submit an operation on behalf of `warp` (PTX `line` and `text` for reports) and return it."""
    operation = Operation(what, warp.code.function.name, line, text, warp.name, perform, queue, signals)
    warp.cta.machine.engine.submit(operation)
    return operation


# Groups of asynchronous copies that a thread commits and waits for: bulk async-groups and cp.async groups.


@dataclass(slots=True)
class Copy:
    """A copy and its serial number in the cluster. A wait for it makes that number visible.

    `granules`: of a cp.async, what the thread writes.
    """

    operation: Operation
    serial: int
    granules: npt.NDArray[np.int64] | None = None


@dataclass(slots=True)
class ThreadGroups:
    """One thread's open group, and the committed ones that no wait has covered, oldest first.

    `agent` is the clock index of their reads and of their writes to shared memory, `writer` the clock index of their
    writes to global memory. `writing` holds the newest serial number of each group whose writes no wait has covered.
    `issued_before` holds, for each committed group, the newest serial number in the cluster at its commit.
    `issuers`: as bits, the lanes that have issued bulk copies here; more than one if one copy was issued for all.
    """

    agent: int
    writer: int
    issuers: int = 0
    open: list[Copy] = field(default_factory=list[Copy])
    committed: list[list[Copy]] = field(default_factory=list[list[Copy]])
    writing: list[int] = field(default_factory=list[int])
    issued_before: list[int] = field(default_factory=list[int])

    def commit(self, newest: int = 0) -> None:
        """Close the open group; an empty one counts (PTX ISA 9.7.9.27.2.1). `newest`: the cluster's last copy."""
        self.committed.append(self.open)
        self.issued_before.append(newest)
        self.writing.append(max((copy.serial for copy in self.open), default=0))
        self.open = []

    def covered(self, allowed: int) -> list[Copy]:
        """The copies that a wait for all but the latest `allowed` groups waits for."""
        return [copy for group in self.committed[: max(len(self.committed) - allowed, 0)] for copy in group]

    def outstanding(self, allowed: int) -> list[Copy]:
        """Those of them that have not ended."""
        return [copy for copy in self.covered(allowed) if not copy.operation.done]

    def waited(self, allowed: int) -> int:
        """Forget the groups that a wait for all but `allowed` covers. Returns their highest serial number, or 0."""
        count = max(len(self.committed) - allowed, 0)
        newest = max((copy.serial for group in self.committed[:count] for copy in group), default=0)
        del self.committed[:count], self.issued_before[:count]
        return newest

    def issued(self, allowed: int) -> int:
        """The newest serial number in the cluster when the last group was committed that a wait for all but `allowed`
        covers, or 0."""
        count = max(len(self.issued_before) - allowed, 0)
        return self.issued_before[count - 1] if count else 0

    def written(self, allowed: int) -> int:
        """As `waited`, for the writes: only a wait without .read covers them."""
        count = max(len(self.writing) - allowed, 0)
        newest = max(self.writing[:count], default=0)
        del self.writing[:count]
        return newest

    def hand_over(self) -> None:
        """Forget everything issued: an mbarrier waits for it instead (cp.async.mbarrier.arrive)."""
        self.open, self.committed, self.writing, self.issued_before = [], [], [], []

    def unread(self) -> list[Copy]:
        """The copies that no wait has covered."""
        return [copy for group in [*self.committed, self.open] for copy in group]


@dataclass(slots=True)
class CopyGroups:
    """The groups of a warp's lanes: `bulk` for cp.async.bulk, `plain` for cp.async."""

    bulk: dict[int, ThreadGroups] = field(default_factory=dict[int, ThreadGroups])
    plain: dict[int, ThreadGroups] = field(default_factory=dict[int, ThreadGroups])
    plain_agent: int | None = None

    @staticmethod
    def of(groups: dict[int, ThreadGroups], lane: int, agents: Agents) -> ThreadGroups:
        """The groups of one lane, made on first use."""
        if lane not in groups:
            groups[lane] = ThreadGroups(agents.new_copy(), agents.new_copy())
        return groups[lane]
