"""A law of an op, and the bench that tries it: one backend, target and executor.

A law is a property of every correct kernel, stated without a reference (except `matches_reference`): a function of a
bench and a case that raises BrokenLawError. It draws nothing, so a case id and the schedules name one trial exactly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch
from hypothesis.vendor.pretty import RepresentationPrinter

from megamoe.contract import (
    AxisValue,
    Case,
    Executor,
    Row,
    RunOptions,
    Target,
    UnsupportedError,
    as_program,
    load_backend,
    load_executor,
)
from megamoe.judge.guarded import GuardedCase
from megamoe.ops import reference
from megamoe.spec.load import load_specs
from megamoe.spec.spec import Spec

ACCUMULATE = "exact"
"""How matrix products are summed. A sum in float32 by BLAS depends on the place of its row in the matrix, so it would
break laws that move rows."""

Tensors = Mapping[str, torch.Tensor]
Axes = Mapping[str, AxisValue]
Exactness = Literal["bitwise", "tolerance"]


class BrokenLawError(AssertionError):
    """A law does not hold. The text is one line: the observation, the law, and the command that reruns the case."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The names of a backend, a target and an executor."""

    backend: str
    target: Target
    executor: str

    def row(self, case: Case, schedule: str) -> Row:
        """The row of `case` on this machine."""
        return Row(case.id, self.backend, self.target, self.executor, schedule)

    def __str__(self) -> str:
        return f"{self.backend}-{self.target}-{self.executor}"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        printer.text(str(self))


@dataclass(slots=True)
class Bench:
    """Runs cases on one machine. `schedules`: the trial's, with the schedule of plain runs first."""

    machine: Machine
    schedules: tuple[str, ...] = ("eager",)
    last: Row | None = field(default=None, init=False)

    @property
    def schedule(self) -> str:
        """The schedule of plain runs."""
        return self.schedules[0]

    def run(self, case: Case, inputs: Tensors, schedule: str | None = None) -> dict[str, torch.Tensor]:
        """Returns the outputs of `case` on `inputs`, every element written; elements that may hold anything are 0.

        UnsupportedError if the machine cannot run the case. BrokenLawError if it raises an error, breaks a rule of the
        machine, leaves outputs unwritten or damages memory outside its outputs.
        """
        executor = load_executor(self.machine.executor)
        self.last = self.machine.row(case, _possible(executor, schedule or self.schedule))
        guarded = GuardedCase(spec_of(case.op), case, executor, inputs)
        try:
            built = load_backend(self.machine.backend).build(case, self.machine.target)
            program = as_program(built, self.machine.backend)
            ran = guarded.run(program, RunOptions(schedule=self.last.schedule, accumulate=ACCUMULATE))
        except UnsupportedError:
            raise
        except Exception as error:
            raise BrokenLawError(f"{case.id} ends in {type(error).__name__}: {error}") from error
        if fault := ran.fault():
            raise BrokenLawError(f"{case.id}: {fault}")
        return ran.settled


def _possible(executor: Executor, schedule: str) -> str:
    """Returns `schedule`, or the executor's own if it lacks that one. A law about schedules then compares repeated
    runs."""
    own: tuple[str, ...] | None = getattr(executor, "schedules", None)
    return schedule if own is None or schedule in own else own[0]


@dataclass(frozen=True, repr=False, eq=False)
class Law:
    """A law of `op`. The first paragraph of the docstring of `hold` states it.

    `exactness`: outputs agree in every bit, or within the rounding that the contract allows. The law covers cases with
    the values in `fixed` and at least those in `least`, if `speaks_of` admits their axes. `runs`: the axes of all
    kernel runs of a trial, for the budget. `schedules`: how many different ones a trial takes.
    """

    op: str
    name: str
    exactness: Exactness
    hold: Callable[[Bench, Case], None]
    fixed: Axes
    least: Mapping[str, int]
    speaks_of: Callable[[Axes], bool]
    runs: Callable[[Axes], list[Axes]]
    schedules: int

    def __repr__(self) -> str:
        return f"{self.op}.{self.name}"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        # Hypothesis would print every field of a dataclass.
        printer.text(repr(self))

    @property
    def sentence(self) -> str:
        """The law, as one sentence."""
        return " ".join((inspect.getdoc(self.hold) or "").split("\n\n")[0].split())

    def covers(self, case: Case) -> bool:
        """Whether the law covers `case`."""
        axes = dict(case.axes)
        fixed = all(axes[name] == value for name, value in self.fixed.items())
        return fixed and all(case.int(name) >= low for name, low in self.least.items()) and self.speaks_of(axes)

    def try_on(self, bench: Bench, case: Case) -> None:
        """Holds the law on `case`. Raises BrokenLawError with everything in one line, or UnsupportedError."""
        try:
            self.hold(bench, case)
        except BrokenLawError as broken:
            rerun = bench.machine.row(case, (bench.last or bench.machine.row(case, bench.schedule)).schedule).rerun
            schedules = "".join(f" --schedule {schedule}" for schedule in bench.schedules)
            raise BrokenLawError(
                f"{self.name} is broken: {broken}. The law: {self.sentence} Rerun the case: {rerun} "
                f"Rerun the law: pytest conformance/kernels/laws/test_laws.py -k '{self.name} and {bench.machine}' "
                f"--case {case.id}{schedules}"
            ) from broken.__cause__


EVERY_OP = "*"
_LAWS: dict[tuple[str, str], Law] = {}


def law(
    op: str,
    exactness: Exactness,
    *,
    fixed: Axes | None = None,
    least: Mapping[str, int] | None = None,
    speaks_of: Callable[[Axes], bool] = lambda axes: True,
    runs: Callable[[Axes], list[Axes]] = lambda axes: [axes],
    schedules: int = 1,
) -> Callable[[Callable[[Bench, Case], None]], Callable[[Bench, Case], None]]:
    """Registers the decorated function under its name as a law of `op`, or of EVERY_OP."""

    def register(hold: Callable[[Bench, Case], None]) -> Callable[[Bench, Case], None]:
        name = hold.__name__
        _LAWS[op, name] = Law(op, name, exactness, hold, fixed or {}, least or {}, speaks_of, runs, schedules)
        return hold

    return register


@cache
def laws_of(op: str) -> dict[str, Law]:
    """Returns the laws of `op` by name: those of laws/every_op.py, and those of laws/OP.py if there is such a
    module."""
    modules = ["every_op", *([op] if find_spec(f"{__package__}.{op}") else [])]
    for module in modules:
        import_module(f"{__package__}.{module}")
    return {name: replace(law, op=op) for (of, name), law in _LAWS.items() if of in (EVERY_OP, op)}


@cache
def specs() -> dict[str, Spec]:
    """The specs of the repository, by op."""
    return load_specs()


def spec_of(op: str) -> Spec:
    """The spec of `op`."""
    return specs()[op]


def inputs_of(case: Case) -> dict[str, torch.Tensor]:
    """The inputs of `case`, made by the reference."""
    return reference(case.op).make_inputs(case)


def all_laws() -> Iterator[Law]:
    """Every law of every op that a spec names, in the order of the spec."""
    for op, spec in specs().items():
        registered = laws_of(op)
        yield from (registered[name] for name in spec.laws if name in registered)
