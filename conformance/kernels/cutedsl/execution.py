"""Runs of CuTeDSL programs on the machine, beyond the harness's cases: forced ways to compute, planted faults."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from backends.vm.executor import EXECUTOR
from conformance.kernels.laws.law import inputs_of, spec_of
from megamoe.contract import Case, HostProgram, RunOptions, UnsupportedError
from megamoe.judge.arena import Arena
from megamoe.ops import reference

SCHEDULES = ("eager", "lazy", "random:1", "random:2")
Made = TypeVar("Made")


def made(make: Callable[[], Made]) -> Made:
    """What `make` compiles. A missing CuTeDSL is reported as skipped, never as passed."""
    try:
        return make()
    except UnsupportedError as missing:
        pytest.skip(f"unsupported: {missing}")


def outputs(case: Case, program: HostProgram, schedule: str = "eager") -> tuple[dict[str, torch.Tensor], str | None]:
    """What `program` writes for `case`, and the first rule broken, byte damaged or output left unwritten."""
    inputs = inputs_of(case)
    arena = Arena(spec_of(case.op), case, inputs)
    execution = EXECUTOR.run(program, arena.tensors, RunOptions(schedule=schedule))
    unwritten = arena.unwritten(reference(case.op).free(case, inputs))
    left = [f"{count} elements of {name} were never written" for name, count in unwritten.items() if count]
    broken = execution.violation or arena.damage() or (left[0] if left else None)
    return {name: arena.tensors[name] for name in unwritten}, broken


def without(pattern: str) -> Callable[[str], str]:
    """A fault: every instruction that matches is taken out."""
    return lambda ptx: re.sub(rf"(?m)^\s*(@%\w+ )?{pattern}[^;]*;", "", ptx)
