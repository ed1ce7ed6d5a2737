"""The objects of flashinfer-bench's trace format (flashinfer-ai/flashinfer-bench 0.1.2), checked.

These are our own models of the documented schema, for what megamoe writes: the package pulls in far more than these few
models. Where it is installed, a test compares its models with ours. A dataset is a folder:
definitions/OP_TYPE/NAME.json, solutions/OP_TYPE/DEFINITION/NAME.json, workloads/OP_TYPE/DEFINITION.jsonl and
traces/OP_TYPE/DEFINITION.jsonl.
"""

from __future__ import annotations

import ast
import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

Text = Annotated[str, StringConstraints(min_length=1)]
Dtype = Literal[
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1",
    "int64", "int32", "int16", "int8", "bool",
]  # fmt: skip
# The format has more statuses; megamoe's verdicts map only to these.
EvaluationStatus = Literal["PASSED", "INCORRECT_NUMERICAL", "RUNTIME_ERROR", "COMPILE_ERROR", "TIMEOUT"]


class _Object(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class AxisConst(_Object):
    """A dimension that is the same in every workload."""

    type: Literal["const"] = "const"
    value: int = Field(ge=0)
    description: str | None = None


class AxisVar(_Object):
    """A dimension whose value is in the workload."""

    type: Literal["var"] = "var"
    description: str | None = None


Axis = AxisConst | AxisVar


class Tensor(_Object):
    """An argument of the call. `shape`: names of axes, None for a Python scalar."""

    shape: tuple[Text, ...] | None
    dtype: Dtype
    description: str | None = None


class Definition(_Object):
    """What is computed. `reference`: Python with a function `run` that maps inputs to outputs, in this order."""

    name: Text
    op_type: Text
    axes: dict[Text, Axis]
    inputs: dict[Text, Tensor]
    outputs: dict[Text, Tensor]
    reference: Text
    tags: tuple[Text, ...] = ()
    description: str | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Definition:
        if shared := self.inputs.keys() & self.outputs.keys():
            raise ValueError(f"{sorted(shared)[0]} is an input and an output")
        for name, tensor in {**self.inputs, **self.outputs}.items():
            for axis in tensor.shape or ():
                if axis not in self.axes:
                    raise ValueError(f"the shape of {name} has the axis {axis}, which is not defined")
        if "run" not in _functions(self.reference):
            raise ValueError("reference has no function `run` at its top level")
        return self


def _functions(source: str) -> set[str]:
    try:
        return {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    except SyntaxError as error:
        raise ValueError(f"reference is not Python: {error}") from None


class RandomInput(_Object):
    """A tensor that the workload's runner draws."""

    type: Literal["random"] = "random"


class ScalarInput(_Object):
    """A Python scalar."""

    type: Literal["scalar"] = "scalar"
    value: bool | int | float


class Workload(_Object):
    """One point: a value for each variable axis, and the source of each input."""

    axes: dict[Text, Annotated[int, Field(ge=0)]]
    inputs: dict[Text, RandomInput | ScalarInput]
    uuid: Text


class SourceFile(_Object):
    """A file of a solution."""

    path: Text
    content: Text

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{path} leads out of the folder of the sources")
        return path


class BuildSpec(_Object):
    """How to build and call a solution. `entry_point`: FILE::FUNCTION."""

    language: Literal["python", "triton", "cpp", "cuda", "tilelang"]
    target_hardware: Annotated[tuple[str, ...], Field(min_length=1)]
    entry_point: Annotated[str, StringConstraints(pattern=r"^[^:]+::[^:]+$")]
    dependencies: tuple[Text, ...] = ()
    destination_passing_style: bool = True


class Solution(_Object):
    """An implementation of a definition."""

    name: Text
    definition: Text
    author: Text
    spec: BuildSpec
    sources: Annotated[tuple[SourceFile, ...], Field(min_length=1)]
    description: str | None = None

    @model_validator(mode="after")
    def _has_its_entry(self) -> Solution:
        if self.spec.entry_point.partition("::")[0] not in [source.path for source in self.sources]:
            raise ValueError(f"the file of the entry point {self.spec.entry_point} is not among the sources")
        return self


class Correctness(_Object):
    """The largest errors of all outputs, NaN if not measured. `extra` may hold anything."""

    max_relative_error: float
    max_absolute_error: float
    extra: dict[str, object] | None = None

    @field_validator("max_relative_error", "max_absolute_error")
    @classmethod
    def _is_no_negative(cls, error: float) -> float:
        if not math.isnan(error) and error < 0:
            raise ValueError(f"an error of {error}")
        return error


class Performance(_Object):
    """Milliseconds per call. The reference is not timed, so its latency and the speed-up over it are left out."""

    latency_ms: float = Field(gt=0, allow_inf_nan=False)


class Environment(_Object):
    """Where it was measured. `libs`: name -> version."""

    hardware: Text
    libs: dict[str, str] = {}


class Evaluation(_Object):
    """The result of a solution on a workload: errors if outputs were compared, a time if they were right."""

    status: EvaluationStatus
    environment: Environment
    timestamp: Text
    log: str = ""
    correctness: Correctness | None = None
    performance: Performance | None = None

    @model_validator(mode="after")
    def _has_the_numbers_of_its_status(self) -> Evaluation:
        if (self.correctness is not None) != (self.status in ("PASSED", "INCORRECT_NUMERICAL")):
            raise ValueError(f"{self.status} with correctness {self.correctness}")
        if (self.performance is not None) != (self.status == "PASSED"):
            raise ValueError(f"{self.status} with performance {self.performance}")
        return self


class TraceLine(_Object):
    """A line of workloads/ or traces/ (the format's `Trace`): a workload, in traces/ with a solution's result on it."""

    definition: Text
    workload: Workload
    solution: str | None = None
    evaluation: Evaluation | None = None

    @model_validator(mode="after")
    def _is_one_or_the_other(self) -> TraceLine:
        if (self.solution is None) != (self.evaluation is None):
            raise ValueError("a solution without an evaluation, or the other way round")
        return self
