"""Groups of asynchronous copies that a thread commits and waits for: bulk async-groups and cp.async groups."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.vm.machine.engine import Operation
from backends.vm.memory.agents import Agents


@dataclass(slots=True)
class Copy:
    """A copy and its serial number in the cluster. A wait for it makes that number visible."""

    operation: Operation
    serial: int


@dataclass(slots=True)
class ThreadGroups:
    """One thread's open group, and the committed ones that no wait has covered, oldest first.

    `agent` is the clock index of their reads and of their writes to shared memory, `writer` that of their writes to
    global memory. `writing` holds the newest serial number of each group whose end no wait has covered.
    """

    agent: int
    writer: int
    open: list[Copy] = field(default_factory=list[Copy])
    committed: list[list[Copy]] = field(default_factory=list[list[Copy]])
    writing: list[int] = field(default_factory=list[int])

    def commit(self) -> None:
        """Close the open group; an empty one counts (PTX ISA 9.7.9.27.2.1)."""
        self.committed.append(self.open)
        self.writing.append(max((copy.serial for copy in self.open), default=0))
        self.open = []

    def outstanding(self, allowed: int) -> list[Copy]:
        """Copies that must end before at most `allowed` of the latest groups are pending."""
        waited = self.committed[: max(len(self.committed) - allowed, 0)]
        return [copy for group in waited for copy in group if not copy.operation.done]

    def waited(self, allowed: int) -> int:
        """Forget the groups that a wait for all but `allowed` covers. Their highest serial number, 0 for none."""
        count = max(len(self.committed) - allowed, 0)
        newest = max((copy.serial for group in self.committed[:count] for copy in group), default=0)
        del self.committed[:count]
        return newest

    def written(self, allowed: int) -> int:
        """As `waited`, for the writes: a wait without .read covers them."""
        count = max(len(self.writing) - allowed, 0)
        newest = max(self.writing[:count], default=0)
        del self.writing[:count]
        return newest

    def hand_over(self) -> None:
        """Forget everything issued: an mbarrier waits for it (cp.async.mbarrier.arrive)."""
        self.open, self.committed, self.writing = [], [], []

    def unread(self) -> Copy | None:
        """The first copy that no wait has covered."""
        return next((copy for group in [*self.committed, self.open] for copy in group), None)


@dataclass(slots=True)
class CopyGroups:
    """The groups of a warp's lanes; `bulk` for cp.async.bulk, `plain` for cp.async."""

    bulk: dict[int, ThreadGroups] = field(default_factory=dict[int, ThreadGroups])
    plain: dict[int, ThreadGroups] = field(default_factory=dict[int, ThreadGroups])
    plain_agent: int | None = None

    @staticmethod
    def of(groups: dict[int, ThreadGroups], lane: int, agents: Agents) -> ThreadGroups:
        """The groups of one lane, made on first use."""
        if lane not in groups:
            groups[lane] = ThreadGroups(agents.new_copy(), agents.new_copy())
        return groups[lane]
