"""The export to flashinfer-bench fits the format, claims no more than is known, and its Python runs."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ValidationError

from conformance.fakes.results import CASE, H200, header, record, timing, write
from conformance.kernels.laws.law import specs
from megamoe.cli.main import main
from megamoe.export.flashinfer import format as ours
from megamoe.export.flashinfer.definition import call_of, definition_of, solution_source, workload_of
from megamoe.ops import reference
from megamoe.records.lines import AnyLine
from megamoe.spec.selection import known_cases

SPECS = specs()
TIMES = 10 + np.linspace(0, 1, 50).reshape(10, 5)
METRICS = {"o.max": 0.009, "o.rms": 0.002, "lse.max": 1e-7, "lse.cosine": 1.0, "o.max.bar": 0.02}
# Model name in flashinfer-bench -> ours.
MODELS = {"Definition": ours.Definition, "Workload": ours.Workload, "Solution": ours.Solution, "Trace": ours.TraceLine}


@cache
def theirs() -> dict[str, type[BaseModel]]:
    """The models of flashinfer-bench alone, because the rest needs a device. Empty if it is not installed."""
    found = importlib.util.find_spec("flashinfer_bench")
    if found is None or found.submodule_search_locations is None:
        return {}
    root = Path(next(iter(found.submodule_search_locations)))
    for name, folder in (("flashinfer_bench", root), ("flashinfer_bench.data", root / "data")):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    modules = {name: importlib.import_module(f"flashinfer_bench.data.{name.lower()}") for name in MODELS}
    return {name: getattr(module, name) for name, module in modules.items()}


def exported(tmp_path: Path, capsys: pytest.CaptureFixture[str], *lines: AnyLine, more: tuple[str, ...] = ()) -> Path:
    file = write(tmp_path / "records.jsonl", header(software={"triton": "3.9.0"}), *lines)
    out = tmp_path / "dataset"
    assert main(["export", "flashinfer", str(file), "--out", str(out), *more]) == 0, capsys.readouterr().err
    return out


def traces(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("traces/**/*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


def gpu(**options: Any) -> AnyLine:
    """A verdict on the row of `timing`."""
    changes = {"executor": "gpu", "target": "sm_90a", "metrics": METRICS}
    return record(**options).model_copy(update=changes)


def test_a_timed_row_is_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trace,) = traces(exported(tmp_path, capsys, gpu(), timing(TIMES), timing(TIMES / 2, temperature="hot")))
    evaluation = trace["evaluation"]
    assert trace["definition"] == "fmha"
    assert trace["solution"] == "fmha_ptx_sm_90a_gpu"
    assert trace["workload"]["uuid"] == CASE
    assert trace["workload"]["axes"] == {"batch": 1, "heads": 1, "t": 1, "hd": 64, "kv_heads": 1, "s_k": 128}
    assert trace["workload"]["inputs"]["causal"] == {"type": "scalar", "value": False}
    assert evaluation["status"] == "PASSED"
    assert evaluation["performance"] == {"latency_ms": pytest.approx(0.0105)}, "the median of the cold samples, in ms"
    assert evaluation["correctness"]["max_relative_error"] == 0.009, "the largest of the `max` errors, and no bar"
    assert evaluation["correctness"]["max_absolute_error"] == "NaN", "it is not known, which is not 0"
    assert evaluation["environment"]["hardware"] == "NVIDIA_H200"
    assert evaluation["environment"]["libs"]["driver"] == H200.driver
    assert evaluation["environment"]["libs"]["triton"] == "3.9.0"


def test_the_temperature_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (gpu(), timing(TIMES), timing(TIMES / 2, temperature="hot"))
    (trace,) = traces(exported(tmp_path, capsys, *lines, more=("--temperature", "hot")))
    assert trace["evaluation"]["performance"] == {"latency_ms": pytest.approx(0.00525)}
    assert trace["evaluation"]["correctness"]["extra"]["temperature"] == "hot"


@pytest.mark.parametrize(
    ("status", "program", "metrics", "expected"),
    [
        ("failed", "ab", METRICS, "INCORRECT_NUMERICAL"),
        ("failed", "ab", {}, "RUNTIME_ERROR"),
        ("error", "ab", {}, "RUNTIME_ERROR"),
        ("error", None, {}, "COMPILE_ERROR"),
        ("crashed", "ab", {}, "RUNTIME_ERROR"),
        ("timed_out", "ab", {}, "TIMEOUT"),
        ("unsupported", None, {}, None),
        ("not_run", None, {}, None),
        ("passed", "ab", METRICS, None),
    ],
)
def test_numbers_are_there_only_where_they_mean_something(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    status: Any,
    program: str | None,
    metrics: dict[str, float],
    expected: str | None,
) -> None:
    """Rows without a time have none: the format has no pass without a latency."""
    line = record(status, program=program).model_copy(update={"metrics": metrics})
    folder = exported(tmp_path, capsys, line)
    found = [trace["evaluation"] for trace in traces(folder)]
    assert [one["status"] for one in found] == ([] if expected is None else [expected])
    for one in found:
        assert one["performance"] is None, "a time of what is not right"
        assert (one["correctness"] is not None) == (expected == "INCORRECT_NUMERICAL")
        assert f"it {status}" in one["log"], "the sentence says why"
    assert list(folder.glob("workloads/**/*.jsonl")), "the workload is there in any case"


@pytest.mark.parametrize("turned", [False, True], ids=["failure first", "failure last"])
@pytest.mark.parametrize("other", ["passed", "not_run", "unsupported", "error", "timed_out", "crashed"])
@pytest.mark.parametrize("wrong", [{"o.max": 0.5, "o.max.bar": 0.02}, {}], ids=["wrong", "rule broken"])
def test_a_failure_under_one_schedule_is_exported_whatever_the_others_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: Any, wrong: dict[str, float], turned: bool
) -> None:
    failed = record("failed", schedule="eager").model_copy(update={"metrics": wrong})
    beside = record(other, schedule="lazy").model_copy(update={"metrics": METRICS if other == "passed" else {}})
    (trace,) = traces(exported(tmp_path, capsys, *((beside, failed) if turned else (failed, beside))))
    evaluation = trace["evaluation"]
    status = "INCORRECT_NUMERICAL" if wrong else "RUNTIME_ERROR"
    assert evaluation["status"] == status, f"a schedule that {other} hides the failure of another"
    assert evaluation["log"] == failed.sentence
    if not wrong:
        return
    assert evaluation["correctness"]["max_relative_error"] == 0.5, "the error of the failure, not of the pass"
    assert evaluation["correctness"]["extra"] == wrong


def test_a_time_of_a_row_that_failed_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trace,) = traces(exported(tmp_path, capsys, gpu(status="failed"), timing(TIMES)))
    assert trace["evaluation"]["status"] == "INCORRECT_NUMERICAL"
    assert trace["evaluation"]["performance"] is None


def test_a_time_without_a_verdict_has_no_known_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trace,) = traces(exported(tmp_path, capsys, timing(TIMES)))
    assert trace["evaluation"]["correctness"]["max_relative_error"] == "NaN"


def test_a_row_of_fewer_sms_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trace,) = traces(exported(tmp_path, capsys, gpu(), timing(TIMES), gpu(case=f"{CASE},sms=1")))
    assert trace["workload"]["uuid"] == CASE, "a definition is mathematics, which knows no number of SMs"
    assert "launched for fewer SMs" in capsys.readouterr().out, "nobody is told that a row is left out"


def every_case() -> Iterator[tuple[str, str]]:
    yield from ((op, case) for op, spec in SPECS.items() for case in known_cases(spec))


def test_every_case_of_every_spec_has_a_definition_that_others_of_its_name_share() -> None:
    definitions: dict[str, ours.Definition] = {}
    for op, case_id in every_case():
        call = call_of(SPECS[op], SPECS[op].parse_case(case_id))
        definition, workload = definition_of(call), workload_of(call)
        assert definitions.setdefault(call.name, definition) == definition, f"{call.name} of {case_id} means two things"
        variable = {name for name, axis in definition.axes.items() if axis.type == "var"}
        assert workload.axes.keys() == variable, f"{case_id}: every variable axis needs a value, and nothing else"
        assert workload.inputs.keys() == definition.inputs.keys()
        for name, tensor in definition.inputs.items():
            assert (workload.inputs[name].type == "scalar") == (tensor.shape is None)
    assert len(definitions) > 5


def run(source: str, *arguments: object) -> Any:
    namespace: dict[str, Any] = {}
    exec(compile(source, "main.py", "exec"), namespace)
    return namespace["run"](*arguments)


def arguments(op: str, case_id: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The simulated reference's inputs and outputs in the format's form: signed bytes, scalars."""
    spec = SPECS[op]
    case = spec.parse_case(case_id)
    call, room = call_of(spec, case), reference(op)
    inputs = room.make_inputs(case)
    signed = {torch.uint8: torch.int8}
    given: dict[str, Any] = {name: t.view(signed.get(t.dtype, t.dtype)) for name, t in inputs.items()}
    given = {name: given[name] for name in call.inputs} | {name: case[axis] for name, axis in call.scalars.items()}
    expected = room.simulated(case, inputs)
    return given, {name: expected[name].view(signed.get(t.dtype, t.dtype)) for name, t in expected.items()}


@pytest.mark.parametrize(
    ("op", "case_id"),
    [
        ("fmha", "fmha:hd=64,t=3,s_k=129"),
        ("fmha", "fmha:hd=64,t=1,s_k=512,causal=true,window=100"),
        ("fmha", "fmha:hd=64,t=17,s_k=96,lse=false"),
        ("nvfp4_moe", "nvfp4_moe:hidden=256,intermediate=128,num_experts=2,tokens=3,topk=2"),
        ("nvfp4_moe", "nvfp4_moe:hidden=256,intermediate=128,num_experts=4,tokens=20,topk=2,stage=l1"),
        ("nvfp4_moe", "nvfp4_moe:hidden=256,intermediate=128,num_experts=4,tokens=20,topk=2,stage=combine"),
    ],
)
def test_the_reference_that_is_written_computes_the_outputs(op: str, case_id: str) -> None:
    definition = definition_of(call_of(SPECS[op], SPECS[op].parse_case(case_id)))
    given, expected = arguments(op, case_id)
    assert list(given) == list(definition.inputs), "arguments come in the order of the definition"
    found = run(definition.reference, *given.values())
    outputs = found if isinstance(found, tuple) else (found,)
    assert len(outputs) == len(definition.outputs)
    for name, output in zip(definition.outputs, outputs, strict=True):
        assert torch.equal(output, expected[name]), f"{name} is not what the reference says"
        assert str(output.dtype) == f"torch.{definition.outputs[name].dtype}"


def test_the_solution_that_is_written_runs_the_kernel() -> None:
    """Runs on the VM, because there is no device here."""
    case_id = "fmha:hd=64,t=1,s_k=128"
    call = call_of(SPECS["fmha"], SPECS["fmha"].parse_case(case_id))
    given, expected = arguments("fmha", case_id)
    outputs = {name: torch.full_like(tensor, float("nan")) for name, tensor in expected.items()}
    run(solution_source(call, "ptx", "sm_100a", "vm"), *given.values(), *outputs.values())
    for name, tensor in outputs.items():
        assert torch.allclose(tensor.float(), expected[name].float(), atol=0.05), f"{name} was not computed"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ((), "nothing to export"),
        ((record(case="gone:x=1"),), "nothing to export"),
        ((timing(TIMES, run="other"),), "header"),
    ],
)
def test_what_cannot_be_exported_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: tuple[AnyLine, ...], says: str
) -> None:
    file = write(tmp_path / "records.jsonl", header(), *lines)
    assert main(["export", "flashinfer", str(file), "--out", str(tmp_path / "dataset")]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = exported(tmp_path, capsys, timing(TIMES))
    before = sorted(folder.rglob("*"))
    assert main(["export", "flashinfer", str(tmp_path / "records.jsonl"), "--out", str(folder)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def dataset(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(model name, object) for every object of a dataset."""
    for kind, model in (("definitions", "Definition"), ("solutions", "Solution")):
        for file in folder.glob(f"{kind}/**/*.json"):
            yield model, json.loads(file.read_text("utf-8"))
    for kind in ("workloads", "traces"):
        for file in folder.glob(f"{kind}/**/*.jsonl"):
            yield from (("Trace", json.loads(line)) for line in file.read_text("utf-8").splitlines())


def test_what_is_written_is_what_the_package_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checked against our models of the format, and against flashinfer-bench's where it is installed."""
    lines: list[AnyLine] = [gpu(), timing(TIMES), record("failed").model_copy(update={"metrics": METRICS})]
    lines += [record("timed_out", case=case_id) for _, case_id in every_case()]
    found = list(dataset(exported(tmp_path, capsys, *lines)))
    assert {model for model, _ in found} == {"Definition", "Solution", "Trace"}
    package = theirs()
    for model, value in found:
        MODELS[model].model_validate(value)
        if package:
            package[model].model_validate(value)


SOUND = call_of(SPECS["fmha"], SPECS["fmha"].parse_case(CASE))
DEFINITION = json.loads(definition_of(SOUND).model_dump_json())
EVALUATION = {
    "status": "PASSED",
    "environment": {"hardware": "NVIDIA_H200"},
    "timestamp": "2026-11-21",
    "correctness": {"max_relative_error": 0.1, "max_absolute_error": "NaN"},
    "performance": {"latency_ms": 1.0},
}
TRACE = {
    "definition": "fmha",
    "workload": json.loads(workload_of(SOUND).model_dump_json()),
    "solution": "s",
    "evaluation": EVALUATION,
}


def _in(value: dict[str, Any], *path: str, to: object) -> dict[str, Any]:
    """A copy with the value at `path` replaced."""
    copy: dict[str, Any] = json.loads(json.dumps(value))
    place: dict[str, Any] = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return copy


@pytest.mark.parametrize(
    ("model", "value"),
    [
        ("Definition", _in(DEFINITION, "inputs", "q", "shape", to=["batch", "nothing"])),
        ("Definition", _in(DEFINITION, "inputs", "q", "dtype", to="uint8")),
        ("Definition", _in(DEFINITION, "outputs", "q", to=DEFINITION["inputs"]["q"])),
        ("Definition", _in(DEFINITION, "reference", to="def walk(): pass")),
        ("Definition", _in(DEFINITION, "reference", to="def run(")),
        ("Definition", _in(DEFINITION, "name", to="")),
        ("Definition", _in(DEFINITION, "axes", "t", to={"type": "const"})),
        ("Trace", _in(TRACE, "evaluation", "performance", to=None)),
        ("Trace", _in(TRACE, "evaluation", "correctness", to=None)),
        ("Trace", _in(TRACE, "evaluation", "status", to="INCORRECT_NUMERICAL")),
        ("Trace", _in(TRACE, "evaluation", "status", to="TIMEOUT")),
        ("Trace", _in(TRACE, "evaluation", "status", to="passed")),
        ("Trace", _in(TRACE, "evaluation", "correctness", "max_relative_error", to=-1.0)),
        ("Trace", _in(TRACE, "evaluation", "performance", "latency_ms", to=-1.0)),
        ("Trace", _in(TRACE, "workload", "axes", "t", to=-1)),
        ("Trace", _in(TRACE, "workload", "uuid", to="")),
        ("Trace", _in(TRACE, "workload", "inputs", "q", to={"type": "dice"})),
    ],
)
def test_a_planted_fault_is_refused_by_both(model: str, value: dict[str, Any]) -> None:
    checks: list[Callable[[object], object]] = [MODELS[model].model_validate]
    checks += [package[model].model_validate] if (package := theirs()) else []
    MODELS[model].model_validate(DEFINITION if model == "Definition" else TRACE)
    for check in checks:
        with pytest.raises(ValidationError):
            check(value)
