"""An executor that computes, with torch, what a fake backend wrote into its program: a style or a fault, and a case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from conformance.kernels.laws.law import spec_of
from megamoe.contract import Case, Execution, Program, RunOptions, Target


class Emulate(Protocol):
    """Writes the outputs of `case`, as the style or with the fault `name` makes them.

    `run` counts the runs of the executor. What it returns is the rule of the machine that was broken, if one was.
    """

    def __call__(
        self, case: Case, tensors: Mapping[str, torch.Tensor], name: str, schedule: str, run: int
    ) -> str | None: ...


class FakeExecutor:
    """Emulates what the program names. It counts its runs, which is the history that leaks."""

    name = "fake"

    def __init__(self, emulate: Emulate) -> None:
        self._emulate = emulate
        self.runs = 0

    def unavailable(self, target: Target) -> str | None:
        return None

    def run(self, program: Program, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        name, case_id = program.ptx.split("\n")
        self.runs += 1
        case = spec_of(case_id.partition(":")[0]).parse_case(case_id)
        return Execution({}, self._emulate(case, tensors, name, options.schedule, self.runs))
