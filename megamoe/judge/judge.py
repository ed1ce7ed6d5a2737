"""One row to one Record: build the program, run it between guard bands, compare with the references."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megamoe.contract import (
    DeviceLostError,
    Row,
    RunOptions,
    Status,
    Target,
    UnsupportedError,
    load_backend,
    load_executor,
)
from megamoe.judge.arena import Arena
from megamoe.judge.bundle import Evidence, write_bundle
from megamoe.judge.figures import leave_program, program_sha256
from megamoe.judge.side_by_side import leave_outputs
from megamoe.judge.verdict import Expected, compared, complaints, expected_of
from megamoe.ops import reference
from megamoe.records.lines import Record, record_of
from megamoe.spec.load import load_specs
from megamoe.spec.spec import Spec

if TYPE_CHECKING:
    from megamoe.contract import AnyProgram, Backend, Case, Executor


@dataclass(slots=True)
class _Findings(Evidence):
    """What is known about a row so far; what a later step did not reach stays empty."""

    status: Status = "error"
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    input_sha256: Mapping[str, str] = field(default_factory=dict[str, str])

    def conclude(self, status: Status, sentence: str) -> None:
        self.status, self.sentence = status, sentence


@lru_cache(maxsize=2)
def _specs(folder: Path | None) -> dict[str, Spec]:
    return load_specs(folder)


# Rows of one case under several schedules follow each other, and the float64 oracle costs more than a small kernel.
@lru_cache(maxsize=2)
def _expected(case: Case) -> Expected:
    """Inputs, oracle and simulated reference of `case`."""
    return expected_of(case, reference(case.op).make_inputs(case))


def judge(
    row: Row,
    run: str,
    specs: Path | None = None,
    failures: Path | None = None,
    outputs: Path | None = None,
    programs: Path | None = None,
) -> Record:
    """Judges `row` in this process. Never raises for what the backend, the executor or the kernel does wrong.

    `run` is the id of the run; `specs` the folder of the specs (None: ours); `failures` the folder that takes the
    bundle of a failure (None: none is written); `outputs` the folder that takes the outputs (None: they are dropped);
    `programs` the one that takes the PTX (None: it is dropped).
    """
    started = time.perf_counter()
    findings = _Findings()
    try:
        _investigate(row, _specs(specs), findings)
    except UnsupportedError as error:
        findings.conclude("unsupported", str(error))
    except DeviceLostError as error:
        # As a rule broken on the VM: the kernel did it, and the sentence says what.
        findings.conclude("failed", str(error))
    except (Exception, SystemExit) as error:
        findings.conclude("error", explain_error(error))
        findings.traceback = "".join(traceback.format_exception(error))
    if outputs is not None and findings.outputs:
        leave_outputs(outputs, row, findings.outputs)
    if programs is not None and findings.ptx is not None:
        leave_program(programs, findings.ptx)
    bundle = _bundle(row, findings, failures, specs)
    return record_of(
        run,
        row,
        findings.status,
        findings.sentence,
        host_seconds=time.perf_counter() - started,
        metrics=findings.metrics,
        counters=findings.counters,
        program_sha256=program_sha256(findings.ptx),
        input_sha256=findings.input_sha256,
        bundle=bundle,
        specs=specs,
    )


def _investigate(row: Row, specs: Mapping[str, Spec], findings: _Findings) -> None:
    spec = specs[row.op]
    case = spec.parse_case(row.case)
    backend, executor = load_backend(row.backend), load_executor(row.executor)
    program = build_program(row, case, backend, executor)
    findings.ptx = program.ptx
    expected = _expected(case)
    findings.inputs, findings.oracle = expected.inputs, expected.oracle
    arena = Arena(spec, case, expected.inputs, getattr(executor, "device", "cpu"))
    findings.input_sha256 = dict(arena.input_sha256)
    options = RunOptions(schedule=row.schedule, outputs=tuple(expected.oracle))
    execution = executor.run(program, arena.tensors, options)
    findings.outputs = {name: arena.tensors[name].cpu() for name in expected.oracle}
    findings.counters = {**execution.counters, **least_work(case)}
    if execution.violation:
        # The run stopped there: what the outputs lack besides would only hide the cause.
        findings.conclude("failed", execution.violation)
        return
    comparison = compared(spec, expected, findings.outputs)
    findings.metrics = comparison.metrics
    wrong = complaints(arena, expected, comparison)
    findings.conclude("failed" if wrong or not comparison.passed else "passed", wrong)


def build_program(row: Row, case: Case, backend: Backend, executor: Executor) -> AnyProgram:
    """The program of `row`. Raises UnsupportedError for a target that the backend or this machine does not have."""
    target = cast(Target, row.target)
    offered = backend.targets(row.op)
    if target not in offered:
        raise UnsupportedError(
            f"backend {row.backend} has {row.op} for {', '.join(offered) or 'no target'}, not {target}"
        )
    reason = executor.unavailable(target)
    if reason:
        raise UnsupportedError(f"executor {row.executor} cannot run {target} here: {reason}")
    return backend.build(case, target)


def least_work(case: Case) -> dict[str, int]:
    """What the op needs at the least, as counters to hold those of an executor against."""
    room = reference(case.op)
    return {"useful_flops": room.useful_flops(case), "minimum_bytes": room.minimum_bytes(case)}


def explain_error(error: BaseException) -> str:
    """An exception as a sentence: its type, its message, and where in which file it came from."""
    # The import machinery's own frames say nothing about where the fault is.
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<")]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {str(error) or 'no message'}{where}"


def _bundle(row: Row, findings: _Findings, failures: Path | None, specs: Path | None) -> str | None:
    if failures is None or findings.status not in ("failed", "error"):
        return None
    try:
        place = write_bundle(failures, row, findings, specs)
    except OSError as error:
        findings.sentence += f" (no bundle: cannot write to {failures}: {error.strerror})"
        return None
    findings.sentence = f"{findings.sentence.rstrip('.')}. Evidence: {place}"
    return str(place)
