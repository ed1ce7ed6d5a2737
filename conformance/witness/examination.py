"""Compiles one witness, runs it in the VM and compares its results, in a child process of the runner."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import torch

from backends.vm.executor import map_tensors, workspace_seeds
from backends.vm.faults import Fault, LaunchError, UnknownInstructionError
from backends.vm.host.abi import HostError
from backends.vm.host.program import run_host_program
from backends.vm.machine.machine import Machine
from backends.vm.ptx.tree import PtxSyntaxError
from conformance.witness import flash_attention, quack_kernels
from conformance.witness.record import Row, Status
from conformance.witness.witness import TOLERANCE, Call, Witness, error
from megamoe.contract import Target

WITNESSES = tuple(
    sorted((*flash_attention.WITNESSES, *quack_kernels.WITNESSES), key=lambda one: (one.package, one.target))
)
"""All witnesses, in the order of the record: by package, then by target."""
SCHEDULES = ("eager", "lazy", "random:7")
SM_COUNT = 4
"""The number of SMs for persistent kernels, read at compile time: few, so that each CTA does several tiles."""


@dataclass(frozen=True, slots=True)
class Examination:
    """A row of the record and the opcodes that the witness executed."""

    row: Row
    opcodes: frozenset[str]


def settle(target: Target) -> None:
    """Prepares this process to compile for `target`: the packages query the environment and the GPU driver."""
    os.environ["CUTE_DSL_ARCH"] = target
    os.environ["QUACK_ARCH"] = os.environ["FLASH_ATTENTION_ARCH"] = "".join(filter(str.isdigit, target))
    torch.set_num_threads(1)
    import cutlass.utils

    class NoDevice:
        """Stands in for cutlass.utils.HardwareInfo, which needs a driver."""

        def __init__(self, device_id: int = 0) -> None: ...

        def get_device_multiprocessor_count(self) -> int:
            return SM_COUNT

        def get_max_active_clusters(self, cluster_size: int) -> int:
            return max(SM_COUNT // cluster_size, 1)

    cutlass.utils.HardwareInfo = NoDevice  # type: ignore[misc,assignment]


def examine(name: str, schedules: Sequence[str] = SCHEDULES) -> Examination:
    """Compiles the named witness, runs it under each of `schedules` and judges it; the row says what failed."""
    witness = next(one for one in WITNESSES if one.name == name)
    begin = time.perf_counter()
    try:
        call = witness.prepare()
    except Exception as problem:  # code of other packages raises anything, and each failure is a finding
        refused = _Run("cannot run", _sentence(problem))
        return Examination(_row(witness, refused, time.perf_counter() - begin, 0.0), frozenset())
    compiled = time.perf_counter() - begin
    runs: list[_Run] = []
    for schedule in schedules:
        runs.append(_run(call, schedule))
        if runs[-1].status != "pass":
            break
    return Examination(_row(witness, runs[-1], compiled, runs[0].seconds), runs[-1].opcodes)


@dataclass(frozen=True, slots=True)
class _Run:
    """One run under one schedule."""

    status: Status
    reason: str = ""
    error: float | None = None
    seconds: float = 0.0
    launches: int = 0
    instructions: int = 0
    opcodes: frozenset[str] = frozenset()


def _run(call: Call, schedule: str) -> _Run:
    machine, begin = Machine(schedule), time.perf_counter()
    tensors = {name: tensor.clone() for name, tensor in call.tensors.items()}
    scratch = {name: size for program in call.programs for name, size in program.scratch.items()}
    seeds = {name: seed for program in call.programs for name, seed in workspace_seeds(program, tensors).items()}
    try:
        buffers = map_tensors(machine, tensors, seeds, scratch)
        launches = sum(len(run_host_program(program, machine, buffers)) for program in call.programs)
    except (Fault, LaunchError, UnknownInstructionError, PtxSyntaxError) as broken:
        return _Run("fault", f"{broken} (schedule {schedule})")
    except HostError as refused:
        return _Run("cannot run", str(refused))
    seconds = time.perf_counter() - begin
    errors = {output: error(tensors[output], value) for output, value in call.expected.items()}
    beyond = [output for output, size in errors.items() if not size <= TOLERANCE[tensors[output].dtype]]
    return _Run(
        status="wrong" if beyond else "pass",
        reason="; ".join(f"{output} has error {errors[output]:.2g} (schedule {schedule})" for output in beyond),
        error=max(errors.values()),
        seconds=seconds,
        launches=launches,
        instructions=sum(number for name, number in machine.counters.items() if name.startswith("instructions_")),
        opcodes=frozenset() if beyond else frozenset(".".join(parts) for parts in machine.opcodes_run()),
    )


def _sentence(problem: Exception) -> str:
    """Type and first line of an exception, and its place in the package's code."""
    trace, place = problem.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        for package in ("flash_attn", "quack", "cutlass"):
            if f"/{package}/" in code.co_filename:
                place = f"{package}/{code.co_filename.split(f'/{package}/')[-1]} line {trace.tb_lineno}"
        trace = trace.tb_next
    said = next((line.strip() for line in str(problem).splitlines() if line.strip()), "no message")
    return f"{type(problem).__name__} at {place or 'no line of the package'}: {said}"


def _row(witness: Witness, run: _Run, compiled: float, seconds: float) -> Row:
    return Row(
        package=witness.package,
        version=metadata.version(witness.package),
        kernel=witness.kernel,
        target=witness.target,
        options=witness.options,
        shape=witness.shape,
        status=run.status,
        error=None if run.error is None else float(f"{run.error:.3g}"),
        instructions=run.instructions,
        launches=run.launches,
        compile_seconds=round(compiled, 1),
        run_seconds=round(seconds, 1),
        reason=" ".join(f"{run.reason} {witness.known_fault if run.status == 'fault' else ''}".split()),
    )
