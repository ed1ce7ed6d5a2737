"""Runs of CuTeDSL programs on the machine, beyond the harness's cases: forced ways to compute, planted faults."""

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
    """What `make` compiles. A missing CuTeDSL is reported as skipped, never as passed."""
    try:
        return make()
    except UnsupportedError as missing:
        pytest.skip(f"unsupported: {missing}")


def outputs(
    case: Case, program: HostProgram, schedule: str = "eager", inputs: dict[str, torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], str | None]:
    """What `program` writes for `case`, and the first rule broken, byte damaged or output left unwritten.

    `inputs`: None for those that the reference makes.
    """
    ran = _run(case, program, schedule, inputs)
    return ran.outputs, ran.fault() or None


def counters(case: Case, program: HostProgram) -> dict[str, int]:
    """What the machine counts of a run of `program`."""
    return dict(_run(case, program, "eager", None).execution.counters)


def _run(case: Case, program: HostProgram, schedule: str, inputs: dict[str, torch.Tensor] | None) -> GuardedRun:
    return GuardedCase(spec_of(case.op), case, load_executor("vm"), inputs).run(program, RunOptions(schedule=schedule))


def without(pattern: str) -> Callable[[str], str]:
    """A fault: every instruction that matches is taken out."""
    return lambda ptx: re.sub(rf"(?m)^\s*(@%\w+ )?{pattern}[^;]*;", "", ptx)
