"""The observer of a machine that fills a Trace for a person to look at. A machine without one pays nothing.

A recorder instruments a private copy of a kernel's code, so that notable instructions report themselves. It sits
between the schedule and the warps, and it watches operations begin and end. It never changes which agent moves next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from backends.vm.machine.code import BoundFunction
from backends.vm.machine.engine import Engine, Operation
from backends.vm.trace.recorded_cta import RecordedCta, States, instrumented
from megamoe.contract.trace import (
    BankConflicts,
    LaunchTrace,
    OperationTrace,
    Release,
    TmemTouch,
    Trace,
)

if TYPE_CHECKING:
    from backends.vm.machine.cta import Cluster
    from backends.vm.machine.machine import Run
    from backends.vm.machine.warp import Warp
    from backends.vm.ptx.ast import Instruction

_SIGNALS = ("mbarrier", "bar", "barrier", "cp", "tcgen05")
"""First parts of the opcodes that may arrive at a barrier."""
MAX_EVENTS = 200_000
MAX_CTAS = 4


class RecordedEngine(Engine):
    """An engine that reports when operations begin and end."""

    __slots__ = ("recorder",)

    def __init__(self, defers: bool, recorder: Recorder) -> None:
        super().__init__(defers)
        self.recorder = recorder

    def submit(self, operation: Operation) -> None:
        """As Engine.submit."""
        self.recorder.issued(operation)
        super().submit(operation)

    def perform(self, operation: Operation) -> None:
        """As Engine.perform."""
        with self.recorder.ending(operation):
            super().perform(operation)


@dataclass(slots=True)
class Doing:
    """The running agent, a warp in an instruction or an operation that ends, and the barrier states before it."""

    warp: Warp | None = None
    instruction: Instruction | None = None
    operation: tuple[RecordedCta, OperationTrace] | None = None
    states: States = field(default_factory=dict[object, tuple[int, ...]])


class Recorder:
    """Fills a Trace with at most `cta_limit` CTAs per launch and `event_limit` events in all."""

    def __init__(self, event_limit: int = MAX_EVENTS, cta_limit: int = MAX_CTAS) -> None:
        self.trace = Trace("", event_limit=event_limit)
        self.cta_limit = cta_limit
        self.step = 0
        self.events = 0
        self.doing = Doing()
        self.releases: dict[object, Release] = {}
        self.unclaimed: list[TmemTouch] = []
        self._functions: dict[int, tuple[BoundFunction, BoundFunction]] = {}
        self._ctas: dict[int, RecordedCta] = {}
        self._operations: dict[int, tuple[RecordedCta, OperationTrace]] = {}
        self._conflicts: dict[int, BankConflicts] = {}
        self._issued = 0

    def room(self) -> bool:
        """Whether one more event may be kept. The event is counted either way."""
        self.events += 1
        if self.events > self.trace.event_limit:
            self.trace.left_out += 1
        return self.events <= self.trace.event_limit

    def next_operation(self) -> int:
        """A number for one more operation."""
        self._issued += 1
        return self._issued

    def engine(self, defers: bool) -> Engine:
        """The engine for the recorded machine."""
        return RecordedEngine(defers, self)

    def function(self, function: BoundFunction) -> BoundFunction:
        """A copy of `function` with instrumented code."""
        if id(function) not in self._functions:
            made = replace(function, code=instrumented(function.code, self))
            self._functions[id(function)] = (function, made)
        return self._functions[id(function)][1]

    @contextmanager
    def launch(self, run: Run) -> Iterator[None]:
        """Record a grid while it runs, to its end or to the first fault."""
        shape, function = run.shape, run.function
        self.trace.schedule = run.machine.schedule.name
        launch = LaunchTrace(function.name, shape.grid, shape.cluster, shape.block, shape.dynamic_smem,
                             function.static_shared, total_ctas=prod(shape.grid), begins=self.step)  # fmt: skip
        self.trace.launches.append(launch)
        self._ctas.clear()
        self._conflicts = {}
        try:
            yield
        finally:
            launch.ends = self.trace.steps = self.step
            launch.bank_conflicts = sorted(self._conflicts.values(), key=lambda one: -one.conflicts)
            for cta in self._ctas.values():
                cta.end()
            self._operations.clear()

    def cluster_begins(self, cluster: Cluster) -> None:
        """Record the CTAs of a newly resident cluster while `cta_limit` allows."""
        launch = self.trace.launches[-1]
        for cta in cluster.ctas:
            if len(launch.ctas) < self.cta_limit:
                recorded = RecordedCta(self, cta, len(launch.ctas))
                self._ctas[id(cta)] = recorded
                launch.ctas.append(recorded.trace)

    def cta_of(self, warp: Warp) -> RecordedCta | None:
        """The recorded CTA of a warp, if it is recorded."""
        return self._ctas.get(id(warp.cta))

    def run(self, warp: Warp, quantum: int) -> int:
        """Let a warp run up to `quantum` blocks, one at a time; otherwise as Warp.run."""
        cta, done = self.cta_of(warp), 0
        while done < quantum and not warp.done:
            if cta is not None:
                cta.resumes(warp)
            if warp.run(1) == 0:
                break
            done += 1
            self.step += 1
            if cta is not None:
                cta.ran(warp)
        if cta is not None:
            cta.parks(warp)
        return done

    def issued(self, operation: Operation) -> None:
        """Record that a warp issues an operation."""
        warp = self.doing.warp
        cta = self.cta_of(warp) if warp is not None else None
        if cta is not None and warp is not None and self.room():
            self._operations[id(operation)] = (cta, cta.issued(warp, operation))

    @contextmanager
    def ending(self, operation: Operation) -> Iterator[None]:
        """Attribute to an ending operation what it signals."""
        self.step += 1
        found = self._operations.pop(id(operation), None)
        before, self.doing = self.doing, Doing(operation=found, states=self._barrier_states())
        try:
            yield
        finally:
            if found is not None:
                cta, trace = found
                trace.ended = self.step
                release = Release(self.step, cta.number, trace.warp, trace.number)
                self.releases["groups", cta.number, trace.warp] = release
                self._note_arrivals(release)
            if before.states:
                before.states = self._barrier_states()
            self.doing = before

    @contextmanager
    def instruction(self, warp: Warp, instruction: Instruction) -> Iterator[None]:
        """Attribute to a notable instruction the barriers that change while it executes."""
        signals = instruction.parts[0] in _SIGNALS
        before, self.doing = self.doing, Doing(warp, instruction, states=self._barrier_states() if signals else {})
        counters = warp.cta.machine.counters
        conflicts = counters["smem_bank_conflicts"]
        try:
            yield
        finally:
            more = counters["smem_bank_conflicts"] - conflicts
            if more:
                blank = BankConflicts(instruction.line, instruction.text)
                self._conflicts.setdefault(instruction.line, blank).conflicts += more
            cta = self.cta_of(warp)
            if signals and cta is not None:
                self._note_arrivals(Release(self.step, cta.number, warp.index))
            self.doing = before

    def _barrier_states(self) -> States:
        states: States = {}
        for cta in self._ctas.values():
            states.update(cta.barrier_states())
        return states

    def _note_arrivals(self, release: Release) -> None:
        for cta in self._ctas.values():
            cta.note_arrivals(self.doing.states, release)

    def finished(self) -> Trace:
        """The trace of everything that has run."""
        self.trace.steps = self.step
        return self.trace
