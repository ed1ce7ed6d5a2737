"""Backend and Executor: who makes a Program of a Case, and who runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from megamoe.contract.case import Case
from megamoe.contract.program import AnyProgram, Target

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How an executor shall run a program. `schedule`: "eager", "lazy" or "random:SEED" (VM only).

    `accumulate`: "fast" (float32 BLAS), "exact" (float64) or "hopper" (bit-exact model of an H200; VM only).
    `trace`: whether to record what the agents do; an executor that cannot leaves Execution.trace None.
    `outputs`: the tensors that the program may write, None for any; an executor that can refuses writes to others.
    """

    schedule: str = "eager"
    accumulate: str = "fast"
    step_budget: int = 200_000_000
    trace: bool = False
    outputs: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Execution:
    """What an executor observed. `violation` is a sentence when the kernel broke a rule of the machine.

    `trace` is JSON-like data that megamoe.contract.trace reads.
    """

    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    violation: str | None = None
    trace: Mapping[str, object] | None = None


@runtime_checkable
class Backend(Protocol):
    """A source of programs.

    A backend may have `executors`, a tuple of names: it owes rows on these only. Without it, it owes rows on all.
    """

    name: str

    def targets(self, op: str) -> tuple[Target, ...]:
        """Targets for which this backend has `op`; empty if it has none."""
        ...

    def build(self, case: Case, target: Target) -> AnyProgram:
        """The program of `case`. Raises UnsupportedError with a reason for what it cannot do."""
        ...


@runtime_checkable
class Borrowed(Backend, Protocol):
    """A backend that calls packages of others, which need not be installed."""

    def missing(self) -> str | None:
        """A sentence about what is not installed here; None if all is."""
        ...


@runtime_checkable
class Executor(Protocol):
    """A machine that runs programs.

    An executor may have `device`, the torch device in whose memory the tensors of its programs lie; without it, "cpu".
    It may have `schedules`, a tuple of names: rows are owed on it under these only. Without it, under all.
    """

    name: str

    def unavailable(self, target: Target) -> str | None:
        """Why this machine cannot run `target` here and now, or None if it can."""
        ...

    def run(self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        """Run every launch in order on `tensors` (contiguous, in memory that this executor can address).

        UnsupportedError, or an exception of its own, for a kind of program that it does not run.
        """
        ...
