"""From one row to one Record: build the program, run it between guard bands, compare with the references."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from megamoe.contract import DeviceLostError, Row, RunOptions, Status, UnsupportedError, load_backend, load_executor
from megamoe.judge.bundle import BundleContents, unwritten, write_bundle
from megamoe.judge.figures import leave_program, program_sha256
from megamoe.judge.guarded import GuardedCase, build_program, needed_work
from megamoe.judge.side_by_side import leave_outputs
from megamoe.judge.tolerance import Judgement, compare
from megamoe.ops import Codes, Latitude, Sample, reference
from megamoe.records.lines import Evidence, Record, record_of
from megamoe.spec.load import load_specs
from megamoe.spec.spec import Spec

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Case
    from megamoe.judge.arena import Arena
    from megamoe.spec.spec import Spec


Tensors = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class Expected:
    """The references of one case, or of a sample of it where the whole would cost too much.

    `oracle` and `simulated` are on the CPU, `inputs` on the device that computed the references. With a `sample`, all
    three, and `case`, are those of the sample.
    """

    case: Case
    inputs: Tensors
    oracle: Tensors
    simulated: Tensors
    sample: Sample | None = None

    @cached_property
    def free(self) -> Tensors:
        """bool, on the CPU: output elements that may hold anything."""
        return on_cpu(reference(self.case.op).free(self.case, self.inputs))

    def part(self, outputs: Tensors) -> Tensors:
        """The part of the whole case's outputs that is judged, on the CPU."""
        if self.sample is None:
            return on_cpu(outputs)
        return {name: outputs[name][rows.to(outputs[name].device)].cpu() for name, rows in self.sample.rows.items()}


def expected_of(case: Case, inputs: Tensors, max_flops: int | None = None) -> Expected:
    """The references of `case` for `inputs`, computed on the device of the inputs.

    With `max_flops`, a case of more useful operations is judged by a sample of its outputs, if its reference can take
    one (`Reference.sample`). None: judge all outputs, at any cost.
    """
    room = reference(case.op)
    sample = None if max_flops is None else room.sample(case, inputs, max_flops)
    if sample is not None:
        case, inputs = sample.case, sample.inputs
    oracle, simulated = room.oracle(case, inputs), room.simulated(case, inputs)
    return Expected(case, inputs, on_cpu(oracle), on_cpu(simulated), sample)


def compared(spec: Spec, expected: Expected, outputs: Tensors) -> Judgement:
    """Compares `outputs` (of the whole case, on any device) with the references, by the tolerance of `spec`."""
    case, room = expected.case, reference(expected.case.op)
    part = expected.part(outputs)
    latitude = room.latitude(
        case, expected.inputs, _beside(expected.inputs, part), _beside(expected.inputs, expected.oracle)
    )
    return compare(
        case,
        part,
        expected.oracle,
        expected.simulated,
        spec.tolerance,
        spec.published(case),
        axes={name: spec.tensors[name].shape for name in expected.oracle},
        absolute_scale=room.ABSOLUTE_SCALE,
        free=expected.free,
        latitude=_latitude_on_cpu(latitude),
    )


def complaints(arena: Arena, expected: Expected, judgement: Judgement) -> str:
    """One sentence with all faults of the memory and outputs of a call; "" if there is none.

    Unwritten outputs count here: their poison is NaN, which `compared` excuses where the oracle has NaN.
    """
    # A sample does not tell which other elements may stay unwritten.
    left = {} if expected.sample else arena.unwritten(expected.free)
    unwritten = [f"{count} elements of {name}" for name, count in left.items() if count]
    never = f"{' and '.join(unwritten)} were never written" if unwritten else None
    sampled = f" (among {expected.sample.doc}, which alone were judged)" if expected.sample else ""
    verdict = f"{judgement.sentence}{sampled}" if judgement.sentence else ""
    return "; ".join(sentence for sentence in (arena.damage(), never, verdict) if sentence)


def on_cpu(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors in host memory. Does not copy those that are there already."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _beside(inputs: Tensors, tensors: Tensors) -> Tensors:
    """`tensors` on the device of `inputs`."""
    device = next(iter(inputs.values())).device
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _latitude_on_cpu(latitude: Latitude) -> Latitude:
    codes = {
        name: Codes(part.seen.cpu(), part.lowest.cpu(), part.highest.cpu(), part.axes, part.rows.cpu())
        for name, part in latitude.codes.items()
    }
    return Latitude(on_cpu(latitude.oracle), codes)


@dataclass(slots=True)
class _Findings(BundleContents):
    """What the judge knows about a row so far. Fields of steps not yet reached stay empty."""

    status: Status = "error"
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    input_sha256: Mapping[str, str] = field(default_factory=dict[str, str])

    def conclude(self, status: Status, sentence: str) -> None:
        self.status, self.sentence = status, sentence


@lru_cache(maxsize=2)
def _specs(folder: Path | None) -> dict[str, Spec]:
    return load_specs(folder)


# The last case and its references. Rows of one case under several schedules follow each other, and the float64 oracle
# costs more than a small kernel. One case at a time: the references of a large one take gigabytes.
_LAST: dict[Case, Expected] = {}


def _expected(case: Case) -> Expected:
    """Inputs, oracle and simulated reference of `case`."""
    if case not in _LAST:
        _LAST.clear()
        _LAST[case] = expected_of(case, reference(case.op).make_inputs(case))
    return _LAST[case]


def judge(
    row: Row,
    run: str,
    specs: Path | None = None,
    failures: Path | None = None,
    outputs: Path | None = None,
    programs: Path | None = None,
) -> Record:
    """Judges `row` in this process. Faults of the backend, executor or kernel become a status, never an exception.

    `run`: id of the run. `specs`: folder of the specs (None: ours). Folders to write to, None to write nothing:
    `failures` takes the bundle of a failure, `outputs` the outputs, `programs` the PTX.
    """
    started = time.perf_counter()
    findings = _Findings()
    try:
        _investigate(row, _specs(specs), findings)
    except UnsupportedError as error:
        findings.conclude("unsupported", str(error))
    except DeviceLostError as error:
        # The kernel did it, as with a rule broken on the VM.
        findings.conclude("failed", str(error))
    except (Exception, SystemExit) as error:
        findings.conclude("error", explain_error(error))
        findings.traceback = "".join(traceback.format_exception(error))
    ptx, outs, lost = findings.ptx, findings.outputs, ""
    if outputs is not None and outs:
        lost = unwritten(lambda: leave_outputs(outputs, row, outs))
    if programs is not None and ptx is not None:
        lost = unwritten(lambda: leave_program(programs, ptx)) or lost
    if lost and findings.status != "passed":
        findings.sentence += f" (not all evidence is kept: {lost})"
    bundle = _bundle(row, findings, failures, specs)
    return record_of(
        run,
        row,
        findings.status,
        findings.sentence,
        Evidence(findings.metrics, findings.counters, program_sha256(findings.ptx), findings.input_sha256, bundle),
        host_seconds=time.perf_counter() - started,
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
    guarded = GuardedCase(spec, case, executor, expected.inputs)
    findings.input_sha256 = guarded.arena.input_sha256
    ran = guarded.run(program, RunOptions(schedule=row.schedule))
    findings.outputs = ran.outputs
    findings.counters = {**ran.execution.counters, **needed_work(case)}
    if ran.execution.violation:
        # The run stopped there. Complaints about the rest of the outputs would hide the cause.
        findings.conclude("failed", ran.execution.violation)
        return
    judgement = compared(spec, expected, ran.outputs)
    findings.metrics = judgement.metrics
    wrong = complaints(guarded.arena, expected, judgement)
    findings.conclude("failed" if wrong or not judgement.passed else "passed", wrong)


def explain_error(error: BaseException) -> str:
    """An exception as a sentence: type, message, file, line and function."""
    # Skip the frames of the import machinery.
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
