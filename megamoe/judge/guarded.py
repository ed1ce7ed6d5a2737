"""Runs one program on the tensors of one case, between guard bands: build it, lay the tensors out, run it, collect."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

from megamoe.contract import (
    HostProgram,
    PythonProgram,
    RunOptions,
    Target,
    UnsupportedError,
    as_program,
    device_of,
    load_backend,
    load_executor,
)
from megamoe.contract.counted import counted
from megamoe.judge.arena import Arena
from megamoe.ops import reference

if TYPE_CHECKING:
    import torch

    from megamoe.contract import AnyProgram, Backend, Case, Execution, Executor, Row
    from megamoe.spec.spec import Spec

Tensors = Mapping[str, "torch.Tensor"]


class GuardedCase:
    """The tensors of `case` in the memory of `executor`, between guard bands, with inputs filled in and sealed."""

    def __init__(self, spec: Spec, case: Case, executor: Executor, inputs: Tensors | None = None) -> None:
        """`inputs`: None uses the inputs that the reference makes."""
        self.case, self.executor = case, executor
        self.inputs = reference(case.op).make_inputs(case) if inputs is None else inputs
        self.arena = Arena(spec, case, self.inputs, device_of(executor))

    @cached_property
    def free(self) -> Tensors:
        """Output elements that may hold anything: bool, by name, in the shape of the output."""
        return reference(self.case.op).free(self.case, self.inputs)

    def run(self, program: AnyProgram, options: RunOptions | None = None) -> GuardedRun:
        """Runs `program` once on poisoned outputs. Where the executor can tell, stores to other tensors are refused.

        Exceptions of the executor pass through.
        """
        self.arena.poison()
        execution = self.executor.run(
            program, self.arena.tensors, replace(options or RunOptions(), outputs=self.arena.outputs)
        )
        outputs = {name: self.arena.tensors[name].to("cpu", copy=True) for name in self.arena.outputs}
        return GuardedRun(self, execution, outputs)


@dataclass(frozen=True, slots=True)
class GuardedRun:
    """The result of a run. `outputs`: copies of every output of the case, on the CPU.

    `fault` looks at the current memory, so call it before the next run.
    """

    guarded: GuardedCase
    execution: Execution
    outputs: dict[str, torch.Tensor]

    @property
    def settled(self) -> dict[str, torch.Tensor]:
        """The outputs with 0 where anything is allowed, for a bit-by-bit comparison."""
        free = self.guarded.free
        return {name: out.masked_fill(free[name], 0) if name in free else out for name, out in self.outputs.items()}

    def fault(self, *, may_leave_unwritten: bool = False) -> str:
        """The first fault found: a broken rule, damage to bands or inputs, elements never written; "" if there is
        none."""
        sentence = self.execution.violation or self.guarded.arena.damage() or ""
        if sentence or may_leave_unwritten:
            return sentence
        left = self.guarded.arena.unwritten(self.guarded.free)
        return "; ".join(
            f"{counted(count, 'element')} of {name} {'was' if count == 1 else 'were'} never written"
            for name, count in left.items()
            if count
        )


@dataclass(frozen=True, slots=True)
class Built:
    """A program and how to run it. `call`: number of a Python call in the process that built it; `program` is None
    then.

    `software`: the packages that a Python call names as what runs. `prepares`: see PythonProgram.
    """

    program: AnyProgram | None
    call: int | None = None
    software: Mapping[str, str] = field(default_factory=dict[str, str])
    prepares: frozenset[str] = frozenset()

    @property
    def ptx(self) -> str | None:
        """The text that is hashed and run; None for a Python call."""
        return None if self.program is None else self.program.ptx

    @property
    def artifact(self) -> dict[str, str]:
        """What ran, where the PTX alone does not say it: the digest of a host object, or the packages of a Python
        call."""
        if isinstance(self.program, HostProgram):
            digest = hashlib.sha256(self.program.host_object).hexdigest()
            return {"host_object": digest, "entry": self.program.entry, "compiler": self.program.compiler}
        return {f"python {name}": version for name, version in self.software.items()}


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of one run. `arena`: the memory as the run left it, where nothing changes it any more."""

    arena: Arena
    counters: Mapping[str, int]
    violation: str | None

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """Every output of the case."""
        return {name: self.arena.tensors[name] for name in self.arena.outputs}


class InThisProcess:
    """Builds and runs in the judge's process. Backends and executors must be trusted: for a debugger, and for tests
    that install a fake."""

    def build(self, row: Row, case: Case, deadline: float) -> Built:
        """The program of `row`. Raises what the backend raises."""
        program = build_program(row, case, load_backend(row.backend), load_executor(row.executor))
        return Built(program, software=program.software if isinstance(program, PythonProgram) else {})

    def device(self, row: Row, deadline: float) -> str:
        """The device on which the executor of `row` runs programs."""
        return device_of(load_executor(row.executor))

    def run(self, row: Row, built: Built, tensors: tuple[Spec, Case, Tensors], deadline: float) -> Ran:
        """Runs a program once on poisoned outputs. Raises what the executor raises."""
        spec, case, inputs = tensors
        assert built.program is not None
        guarded = GuardedCase(spec, case, load_executor(row.executor), inputs)
        execution = guarded.run(built.program, RunOptions(schedule=row.schedule)).execution
        return Ran(guarded.arena, execution.counters, execution.violation)


def build_program(row: Row, case: Case, backend: Backend, executor: Executor) -> AnyProgram:
    """The program of `row`. Raises UnsupportedError if the backend or this machine lacks the target."""
    target = cast(Target, row.target)
    offered = backend.targets(case.op)
    if target not in offered:
        raise UnsupportedError(
            f"backend {row.backend} has {case.op} for {', '.join(offered) or 'no target'}, not {target}"
        )
    reason = executor.unavailable(target)
    if reason:
        raise UnsupportedError(f"executor {row.executor} cannot run {target} here: {reason}")
    return as_program(backend.build(case, target), row.backend)


def needed_work(case: Case) -> dict[str, int]:
    """The least work that the op needs, as counters next to the executor's: useful_flops and minimum_bytes."""
    room = reference(case.op)
    return {"useful_flops": room.useful_flops(case), "minimum_bytes": room.minimum_bytes(case)}
