"""Backend makes a Program of a Case; Executor runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from megamoe.contract.case import Case
from megamoe.contract.program import AnyProgram, Target
from megamoe.contract.trace import Trace

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How an executor runs a program.

    `schedule`: the order in which asynchronous work completes: "eager", "lazy" or "random:SEED" (VM only).
    `accumulate`: of matrix products: "fast" (float32 BLAS), "exact" (float64) or "hopper" (bit-exact model of an H200;
    VM only). `step_budget`: steps after which the VM calls a program hung. `trace`: record what the agents do; an
    executor that cannot record leaves Execution.trace None. `outputs`: the tensors that the program may write, None
    for any; an executor that can, refuses writes to the others.
    """

    schedule: str = "eager"
    accumulate: str = "fast"
    step_budget: int = 200_000_000
    trace: bool = False
    outputs: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Execution:
    """What an executor observed.

    `counters`: name -> count, the same on every run of one program. `violation`: a sentence if the kernel broke a rule
    of the machine, else None. `trace`: what the agents did, if RunOptions asked for it.
    """

    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    violation: str | None = None
    trace: Trace | None = None


@runtime_checkable
class Backend(Protocol):
    """A source of programs.

    A backend may have `executors`, a tuple of names: it then owes rows on these executors only, else on all.
    """

    name: str

    def targets(self, op: str) -> tuple[Target, ...]:
        """Targets for which this backend has `op`; empty if it has none."""
        ...

    def build(self, case: Case, target: Target) -> AnyProgram:
        """The program of `case` for `target`. Raises UnsupportedError, with the reason, for a case it cannot do."""
        ...


@runtime_checkable
class Borrowed(Backend, Protocol):
    """A backend that calls other people's packages. They need not be installed."""

    def missing(self) -> str | None:
        """A sentence that names what is not installed here; None if everything is."""
        ...


@runtime_checkable
class Executor(Protocol):
    """A machine that runs programs.

    An executor may have `device`, the torch device whose memory holds its tensors; the default is "cpu".
    It may have `schedules`, a tuple of names: rows are then owed on it under these schedules only, else under all.
    """

    name: str

    def unavailable(self, target: Target) -> str | None:
        """Why this machine cannot run `target` here and now, or None if it can."""
        ...

    def run(self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        """Runs every launch in order on `tensors`: by name, contiguous, in memory that this executor can address.

        A rule that the kernel broke is Execution.violation. Raises UnsupportedError for a kind of program that it does
        not run, DeviceError for what its device refuses.
        """
        ...
