"""A backend that writes a name and a case into its program, and an executor that emulates them with torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from megamoe.contract import Case, Execution, Program, RunOptions, Target, UnsupportedError
from megamoe.spec.load import load_specs
from megamoe.spec.spec import Spec


@dataclass(frozen=True)
class NamedBackend:
    """Writes `name`, a style or a fault, and the case into the program. Declines all cases if `nothing` is its name."""

    op: str
    name: str

    def targets(self, op: str) -> tuple[Target, ...]:
        return ("sm_100a",) if op == self.op else ()

    def build(self, case: Case, target: Target) -> Program:
        if self.name == "nothing":
            raise UnsupportedError(f"{case.id}: this backend has no kernel that works")
        return Program(target, f"{self.name}\n{case.id}", ())


class Emulate(Protocol):
    """Writes the outputs of `case` into `tensors`, as the style or with the fault `name` makes them.

    `run` counts the runs of the executor. Returns the rule of the machine that was broken, if one was.
    """

    def __call__(
        self, case: Case, tensors: Mapping[str, torch.Tensor], name: str, schedule: str, run: int
    ) -> str | None: ...


class FakeExecutor:
    """Emulates what the program names. It counts its runs: that is the history which leaks."""

    name = "fake"

    def __init__(self, emulate: Emulate) -> None:
        self._emulate = emulate
        self.runs = 0

    def unavailable(self, target: Target) -> str | None:
        return None

    def run(self, program: Program, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        name, case_id = program.ptx.split("\n")
        self.runs += 1
        case = _specs()[case_id.partition(":")[0]].parse_case(case_id)
        return Execution({}, self._emulate(case, tensors, name, options.schedule, self.runs))


@cache
def _specs() -> dict[str, Spec]:
    return load_specs()
