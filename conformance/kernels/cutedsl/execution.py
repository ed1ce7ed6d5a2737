"""Runs CuTeDSL programs on the machine beyond the harness's cases: forced ways to compute, planted faults."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from conformance.kernels.laws.law import spec_of
from megamoe.contract import Case, HostProgram, RunOptions, UnsupportedError, load_executor
from megamoe.judge.guarded import GuardedCase, GuardedRun

SCHEDULES = ("eager", "lazy", "random:1", "random:2")
Made = TypeVar("Made")


def made(make: Callable[[], Made]) -> Made:
    """Returns what `make` compiles. Skips the test if CuTeDSL is missing."""
    try:
        return make()
    except UnsupportedError as missing:
        pytest.skip(f"unsupported: {missing}")


def outputs(
    case: Case, program: HostProgram, schedule: str = "eager", inputs: dict[str, torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], str | None]:
    """Returns the outputs of `program` for `case`, and the first broken rule, damaged byte or unwritten output.

    `inputs`: None for the reference's.
    """
    ran = _run(case, program, schedule, inputs)
    return ran.outputs, ran.fault() or None


def counters(case: Case, program: HostProgram) -> dict[str, int]:
    """Returns the machine's counters of a run of `program`."""
    return dict(_run(case, program, "eager", None).execution.counters)


def _run(case: Case, program: HostProgram, schedule: str, inputs: dict[str, torch.Tensor] | None) -> GuardedRun:
    return GuardedCase(spec_of(case.op), case, load_executor("vm"), inputs).run(program, RunOptions(schedule=schedule))


def without(pattern: str) -> Callable[[str], str]:
    """A fault: removes every instruction that matches."""
    return lambda ptx: re.sub(rf"(?m)^\s*(@%\w+ )?{pattern}[^;]*;", "", ptx)
