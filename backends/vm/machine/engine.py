"""Work that runs beside the warps: bulk copies and the tensor core. Each operation ends at a moment of its own.

A warp submits an operation. The schedule says when it is performed: at once (eager), as late as the waits of the warps
allow (lazy), or at any time (random). Operations of one queue end in the order of their issue; the tensor core of a CTA
is one queue. The ISA does not order MMAs of different accumulators there: clocks tell these apart, not reordering; see
isa/tensor_core.py. Copies are in no queue and may end in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from backends.vm.faults import Fault

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp


@dataclass(slots=True, eq=False)
class Operation:
    """One asynchronous operation. `signals`: the objects that its end, or a commit behind it, signals."""

    what: str
    kernel: str
    line: int
    text: str
    issuer: str
    perform: Callable[[], None]
    queue: object | None = None
    signals: tuple[object, ...] = ()
    done: bool = False


@dataclass(slots=True)
class Engine:
    """Pending operations in order of issue. `events` counts everything that could let a warp move on."""

    defers: bool
    pending: list[Operation] = field(default_factory=list[Operation])
    events: int = 0

    def submit(self, operation: Operation) -> None:
        """Take an operation. Without deferral, perform it at once."""
        self.events += 1
        self.pending.append(operation)
        if not self.defers:
            self.perform(operation)

    def eligible(self) -> list[Operation]:
        """Operations that may end now: every copy, and the oldest of each queue."""
        heads: set[int] = set()
        able: list[Operation] = []
        for operation in self.pending:
            if operation.queue is None:
                able.append(operation)
            elif id(operation.queue) not in heads:
                heads.add(id(operation.queue))
                able.append(operation)
        return able

    def perform(self, operation: Operation) -> None:
        """Let `operation` end: move its data and signal its mbarriers."""
        self.events += 1
        self.pending.remove(operation)
        try:
            operation.perform()
        except Fault as fault:
            if not fault.line:
                fault.kernel, fault.line, fault.text = operation.kernel, operation.line, operation.text
                fault.where = f"{operation.what} issued by {operation.issuer}"
            raise
        operation.done = True

    def most_wanted(self, awaited: list[object]) -> Operation | None:
        """The oldest eligible operation that leads to one of the `awaited` mbarriers, else the oldest of all."""
        able = self.eligible()
        if not able:
            return None
        wanted = {id(target) for target in awaited}
        for operation in able:
            chain = [operation] if operation.queue is None else [o for o in self.pending if o.queue is operation.queue]
            if any(id(signal) in wanted for link in chain for signal in link.signals):
                return operation
        return able[0]


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
