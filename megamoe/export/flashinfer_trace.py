"""From record files to a dataset of flashinfer-bench: definitions, workloads, solutions, traces.

A row that was timed becomes a trace with the median of its samples, in ms, at one temperature of the L2 (a cold one is
what flashinfer-bench itself times). A row without a time becomes a trace only if it went wrong: the format has no pass
without a latency. Rows that are unsupported or were not run say nothing of a kernel: they become their workload alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from megamoe.contract import Temperature
from megamoe.export.flashinfer_definition import (
    Call,
    ExportError,
    call_of,
    definition_of,
    solution_source,
    workload_of,
)
from megamoe.export.flashinfer_format import (
    BuildSpec,
    Correctness,
    Definition,
    Environment,
    Evaluation,
    Performance,
    Solution,
    SourceFile,
    Trace,
)
from megamoe.export.flashinfer_format import Status as TheirStatus
from megamoe.records.files import RecordFile
from megamoe.records.keys import Key
from megamoe.records.lines import Record, RunHeader, Timing
from megamoe.records.severity import worst
from megamoe.spec.error import SpecError
from megamoe.spec.spec import Spec

__all__ = ["Dataset", "ExportError", "dataset_of"]

ENTRY = "main.py"


@dataclass(slots=True)
class Dataset:
    """What is written: objects by name. `left_out` counts rows that the format cannot hold, by the reason."""

    definitions: dict[str, Definition] = field(default_factory=dict[str, Definition])
    solutions: dict[str, Solution] = field(default_factory=dict[str, Solution])
    workloads: dict[str, Trace] = field(default_factory=dict[str, Trace])
    traces: list[Trace] = field(default_factory=list[Trace])
    left_out: Counter[str] = field(default_factory=Counter[str])


@dataclass(slots=True)
class _Row:
    """All that one run says of one cell, under whichever schedules."""

    records: list[Record] = field(default_factory=list[Record])
    timings: list[Timing] = field(default_factory=list[Timing])


def dataset_of(files: Sequence[RecordFile], specs: Mapping[str, Spec], temperature: Temperature = "cold") -> Dataset:
    """The dataset. ExportError if there is no row of a case that the specs know, or a run without a header."""
    headers = {header.run: header for file in files for header in file.headers}
    dataset = Dataset()
    for (run, cell), row in _rows(files, temperature).items():
        call = _call(cell.case, specs)
        if call is None:
            dataset.left_out["of a case that no spec has"] += 1
            continue
        if run not in headers:
            raise ExportError(f"the header of run {run} is missing, so that the machine of its rows is unknown")
        workload = Trace(definition=call.name, workload=workload_of(call))
        dataset.definitions.setdefault(call.name, definition_of(call))
        dataset.workloads[cell.case] = workload
        evaluation = _evaluation(row, headers[run], cell.executor)
        if isinstance(evaluation, str):
            dataset.left_out[evaluation] += 1
            continue
        solution = _solution(call, cell.backend, cell.target, cell.executor)
        dataset.solutions[solution.name] = solution
        trace = workload.model_copy(update={"solution": solution.name, "evaluation": evaluation})
        dataset.traces.append(Trace.model_validate(trace.model_dump()))
    if not dataset.workloads:
        raise ExportError("no row of a case that a spec has is in these files, so there is nothing to export")
    return dataset


def _rows(files: Sequence[RecordFile], temperature: Temperature) -> dict[tuple[str, Key], _Row]:
    """By run and cell."""
    rows: dict[tuple[str, Key], _Row] = {}
    for line in (line for file in files for line in file.lines):
        if isinstance(line, Record):
            rows.setdefault((line.run, Key.of(line).cell), _Row()).records.append(line)
        elif isinstance(line, Timing) and (line.temperature == temperature or line.status != "passed"):
            rows.setdefault((line.run, Key.of(line).cell), _Row()).timings.append(line)
    return rows


def _call(case: str, specs: Mapping[str, Spec]) -> Call | None:
    spec = specs.get(case.partition(":")[0])
    try:
        return None if spec is None else call_of(spec, spec.parse_case(case))
    except SpecError:
        return None


def _evaluation(row: _Row, header: RunHeader, executor: str) -> Evaluation | str:
    """What the row says, or why the format cannot say it."""
    found = worst([*row.timings, *row.records])
    if found.status in ("unsupported", "not_run"):
        return found.status
    samples = [sample for line in row.timings for sample in line.samples_us]
    if found.status == "passed" and not samples:
        return "passed without a time"
    status = _status(found, row.records)
    return Evaluation(
        status=status,
        environment=_environment(header, executor),
        timestamp=header.started,
        log=found.sentence,
        correctness=_correctness(row) if status in ("PASSED", "INCORRECT_NUMERICAL") else None,
        performance=Performance(latency_ms=median(samples) / 1000) if status == "PASSED" else None,
    )


def _status(found: Record | Timing, records: Sequence[Record]) -> TheirStatus:
    """A failed row without metrics broke a rule before anything could be compared."""
    match found.status:
        case "passed":
            return "PASSED"
        case "failed":
            return "INCORRECT_NUMERICAL" if any(record.metrics for record in records) else "RUNTIME_ERROR"
        case "timed_out":
            return "TIMEOUT"
        case "error" if found.program_sha256 is None:
            return "COMPILE_ERROR"
        case _:
            return "RUNTIME_ERROR"


def _correctness(row: _Row) -> Correctness:
    """The largest error relative to the oracle (judge.tolerance, `max`); absolute ones are not kept, hence NaN."""
    metrics = {name: value for record in row.records for name, value in record.metrics.items()}
    errors = [value for name, value in metrics.items() if name.endswith(".max")]
    extra: dict[str, object] = {name: value for name, value in metrics.items() if math.isfinite(value)}
    for line in row.timings:
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


def _solution(call: Call, backend: str, target: str, executor: str) -> Solution:
    return Solution(
        name="_".join([call.name, backend, target, executor]),
        definition=call.name,
        author=f"megamoe backend {backend}",
        spec=BuildSpec(
            language="python",
            target_hardware=(target,),
            entry_point=f"{ENTRY}::run",
            dependencies=("megamoe",),
            destination_passing_style=True,
        ),
        sources=(SourceFile(path=ENTRY, content=solution_source(call, backend, target, executor)),),
        description=f"The kernel of megamoe's backend {backend} for {target}, on the executor {executor}.",
    )


def files_of(dataset: Dataset) -> Iterator[tuple[str, str]]:
    """Path inside of the dataset, and text, of every file of it."""
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
