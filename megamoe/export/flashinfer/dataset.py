"""From record files to a dataset for flashinfer-bench: definitions, workloads, solutions, traces.

A run gives one trace per cell, that is per case on a backend, target and executor, over all its schedules; the worst
verdict counts. A timed cell gets the median of its samples, in ms, at one L2 temperature (flashinfer-bench itself
measures with a cold L2). A cell without a time gets a trace only if it went wrong, because the format requires a
latency for a pass. A cell that is unsupported or was not run says nothing about a kernel and only adds its workload.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from megamoe.contract import Temperature, file_name
from megamoe.export.flashinfer.definition import Call, ExportError, call_of, definition_of, solution_source, workload_of
from megamoe.export.flashinfer.format import (
    BuildSpec,
    Correctness,
    Definition,
    Environment,
    Evaluation,
    EvaluationStatus,
    Performance,
    Solution,
    SourceFile,
    TraceLine,
)
from megamoe.records.files import RecordFile
from megamoe.records.keys import Key, worst
from megamoe.records.lines import Record, RunHeader, Timing
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.spec import Spec

__all__ = ["Dataset", "ExportError", "dataset_of"]

ENTRY = "main.py"


@dataclass(slots=True)
class Dataset:
    """The objects by name. `left_out`: reason -> number of cells without a trace for that reason."""

    definitions: dict[str, Definition] = field(default_factory=dict[str, Definition])
    solutions: dict[str, Solution] = field(default_factory=dict[str, Solution])
    workloads: dict[str, TraceLine] = field(default_factory=dict[str, TraceLine])
    traces: list[TraceLine] = field(default_factory=list[TraceLine])
    left_out: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True)
class _Cell:
    """One run's lines for a case on a backend, target and executor: verdicts by schedule, and times."""

    records: list[Record] = field(default_factory=list[Record])
    timings: list[Timing] = field(default_factory=list[Timing])


def dataset_of(files: Sequence[RecordFile], specs: Mapping[str, Spec], temperature: Temperature = "cold") -> Dataset:
    """The dataset. ExportError if no line's case is in the specs, and for a run without a header."""
    headers = {header.run: header for file in files for header in file.headers}
    dataset = Dataset()
    for (run, key), cell in _cells(files, temperature).items():
        call = _call(key.case, specs)
        if call is None:
            dataset.left_out["of a case that no spec has"] += 1
            continue
        if dict(call.case.axes).get("sms") is not None:
            # A definition is mathematical: its reference does not depend on a number of SMs.
            dataset.left_out["launched for fewer SMs than the device has"] += 1
            continue
        if run not in headers:
            raise ExportError(f"the header of run {run} is missing, so that the machine of its rows is unknown")
        workload = TraceLine(definition=call.name, workload=workload_of(call))
        dataset.definitions.setdefault(call.name, definition_of(call))
        dataset.workloads[key.case] = workload
        evaluation = _evaluation(cell, headers[run], key.executor)
        if isinstance(evaluation, str):
            dataset.left_out[evaluation] += 1
            continue
        solution = _solution(call, key)
        dataset.solutions[solution.name] = solution
        trace = workload.model_copy(update={"solution": solution.name, "evaluation": evaluation})
        dataset.traces.append(TraceLine.model_validate(trace.model_dump()))
    if not dataset.workloads:
        raise ExportError("no row of a case that a spec has is in these files, so there is nothing to export")
    return dataset


def _cells(files: Sequence[RecordFile], temperature: Temperature) -> dict[tuple[str, Key], _Cell]:
    """Cells by run and Key.cell."""
    cells: dict[tuple[str, Key], _Cell] = {}
    for line in (line for file in files for line in file.lines):
        if isinstance(line, Record):
            cells.setdefault((line.run, Key.of(line).cell), _Cell()).records.append(line)
        elif isinstance(line, Timing) and (line.temperature == temperature or line.status != "passed"):
            cells.setdefault((line.run, Key.of(line).cell), _Cell()).timings.append(line)
    return cells


def _call(case: str, specs: Mapping[str, Spec]) -> Call | None:
    spec = specs.get(case.partition(":")[0])
    try:
        return None if spec is None else call_of(spec, spec.parse_case(case))
    except SpecError:
        return None


def _evaluation(cell: _Cell, header: RunHeader, executor: str) -> Evaluation | str:
    """The result of the cell, or the reason why the format cannot represent it."""
    telling = worst([*cell.records, *cell.timings])
    if telling.status in ("unsupported", "not_run"):
        return telling.status
    samples = [sample for line in cell.timings for sample in line.samples_us]
    if telling.status == "passed" and not samples:
        return "passed without a time"
    status = _status(telling, cell.records)
    return Evaluation(
        status=status,
        environment=_environment(header, executor),
        timestamp=header.started,
        log=telling.sentence,
        correctness=_correctness(cell) if status in ("PASSED", "INCORRECT_NUMERICAL") else None,
        performance=Performance(latency_ms=median(samples) / 1000) if status == "PASSED" else None,
    )


def _status(telling: Record | Timing, records: Sequence[Record]) -> EvaluationStatus:
    """The status in the format's words. A failure without metrics broke a rule before outputs were compared."""
    match telling.status:
        case "passed":
            return "PASSED"
        case "failed":
            compared = [telling] if isinstance(telling, Record) else records
            return "INCORRECT_NUMERICAL" if any(record.metrics for record in compared) else "RUNTIME_ERROR"
        case "timed_out":
            return "TIMEOUT"
        case "error" if telling.program_sha256 is None:
            return "COMPILE_ERROR"
        case _:
            return "RUNTIME_ERROR"


def _correctness(cell: _Cell) -> Correctness:
    """The largest relative error against the oracle (`max` of judge.tolerance) under any schedule. Absolute errors are
    not recorded, hence NaN. `extra`: the metrics of the worst record, and how the time was taken."""
    errors = [value for one in cell.records for name, value in one.metrics.items() if name.endswith(".max")]
    metrics = worst(cell.records).metrics if cell.records else {}
    extra: dict[str, object] = {name: value for name, value in metrics.items() if math.isfinite(value)}
    for line in cell.timings:
        if line.samples_us:
            extra |= {
                "temperature": line.temperature,
                "samples": len(line.samples_us),
                "launches_per_sample": line.launches_per_sample,
            }
            extra |= {} if line.floor_us is None else {"floor_ms": line.floor_us / 1000}
    largest = max(errors, key=lambda error: (math.isnan(error), error), default=math.nan)
    return Correctness(max_relative_error=largest, max_absolute_error=math.nan, extra=extra or None)


def _environment(header: RunHeader, executor: str) -> Environment:
    device = header.device
    libs = {"megamoe": header.megamoe, "python": header.python, **header.software}
    if header.torch:
        libs["torch"] = header.torch
    if device is None:
        return Environment(hardware=f"{header.machine}, executor {executor}", libs=libs)
    return Environment(
        hardware=device.name.replace(" ", "_"), libs={**libs, "driver": device.driver, "cuda": device.toolkit}
    )


def _solution(call: Call, key: Key) -> Solution:
    return Solution(
        name=file_name("_".join([call.name, key.backend, key.target, key.executor])),
        definition=call.name,
        author=f"megamoe backend {key.backend}",
        spec=BuildSpec(
            language="python",
            target_hardware=(key.target,),
            entry_point=f"{ENTRY}::run",
            dependencies=("megamoe",),
            destination_passing_style=True,
        ),
        sources=(SourceFile(path=ENTRY, content=solution_source(call, key.backend, key.target, key.executor)),),
        description=f"The kernel of megamoe's backend {key.backend} for {key.target}, on the executor {key.executor}.",
    )


def files_of(dataset: Dataset) -> Iterator[tuple[str, str]]:
    """The path within the dataset and the text of every file."""
    for definition in dataset.definitions.values():
        yield f"definitions/{definition.op_type}/{definition.name}.json", definition.model_dump_json(indent=1)
    for solution in dataset.solutions.values():
        folder = f"solutions/{dataset.definitions[solution.definition].op_type}/{solution.definition}"
        yield f"{folder}/{solution.name}.json", solution.model_dump_json(indent=1)
    for kind, traces in (("workloads", list(dataset.workloads.values())), ("traces", dataset.traces)):
        lines: dict[str, list[str]] = {}
        for trace in traces:
            lines.setdefault(trace.definition, []).append(trace.model_dump_json())
        for name, texts in lines.items():
            yield f"{kind}/{dataset.definitions[name].op_type}/{name}.jsonl", "\n".join(texts) + "\n"
