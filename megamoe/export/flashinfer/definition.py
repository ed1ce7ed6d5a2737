"""From a spec to definitions and workloads for flashinfer-bench.

An integer axis that is a dimension of an input becomes a variable axis. Other numbers and flags (window, scale, causal)
become scalar inputs. The format has no text and no null, and a flag may decide which tensors exist; such values lead to
separate definitions: `fmha` and `fmha_with_window`, `nvfp4_moe` and `nvfp4_moe_stage_l1`. The `uuid` of a workload is
the case id. megamoe makes the inputs from the id; the format can only call them "random".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megamoe.contract import Case, spell
from megamoe.export.flashinfer.format import (
    Axis,
    AxisConst,
    AxisVar,
    Definition,
    Dtype,
    RandomInput,
    ScalarInput,
    Tensor,
    Workload,
)
from megamoe.spec.spec import Spec, TensorSpec

# The format has no unsigned types, so their bits travel in the signed type of the same width.
_DTYPES: Mapping[str, Dtype] = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e2m1": "float4_e2m1",
    "ue8m0": "int8",
    "u8": "int8",
    "s8": "int8",
    "s32": "int32",
    "u32": "int32",
    "s64": "int64",
}
_BITS_ONLY = ("u8", "u32", "ue8m0")
_WORDS = {"//": "over", "%": "mod", "*": "times", "+": "plus", "-": "minus"}


class ExportError(Exception):
    """Something cannot be exported; the text says why and what would be right."""


@dataclass(frozen=True, slots=True)
class Call:
    """How tensors and scalars of the format become the axes and tensors of an op.

    `name`: the definition's name. `dims`: tensor -> its axes in the format. `axes`: axis of the op -> the Python
    expression for its value inside `run`. `scalars`: name in the format -> axis of the op.
    """

    name: str
    spec: Spec
    case: Case
    tensors: Mapping[str, TensorSpec]
    dims: Mapping[str, tuple[str, ...]]
    axes: Mapping[str, str]
    scalars: Mapping[str, str]

    @property
    def inputs(self) -> list[str]:
        """Tensors that are read, in the order of the spec."""
        return [name for name, tensor in self.tensors.items() if tensor.role == "input"]

    @property
    def outputs(self) -> list[str]:
        """Tensors that are written, in the order of the spec."""
        return [name for name, tensor in self.tensors.items() if tensor.role == "output"]


def call_of(spec: Spec, case: Case) -> Call:
    """The call of `case`. All cases whose calls have the same name share a definition."""
    tensors = spec.tensors_of(case)
    dims = {name: tuple(_slug(dim) for dim in tensor.shape) for name, tensor in tensors.items()}
    found: dict[str, str] = {}
    scalars: dict[str, str] = {}
    where = dict(_sources(tensors))
    fixed = {name for tensor in spec.tensors.values() for name in (*tensor.conditions, *tensor.other_lengths)}
    for axis, value in case.axes:
        if axis in where:
            found[axis] = where[axis]
        elif value is None or isinstance(value, str) or axis in fixed:
            found[axis] = repr(value)
        else:
            name = f"{axis}_value" if axis in tensors else axis
            scalars[name], found[axis] = axis, name
    return Call("_".join([spec.op, *_features(spec, case, found)]), spec, case, tensors, dims, found, scalars)


def _sources(tensors: Mapping[str, TensorSpec]) -> Iterator[tuple[str, str]]:
    """(axis of the op, dimension of an input) pairs. The first input comes last, so its dimension wins."""
    for name, tensor in reversed(list(tensors.items())):
        for i, dim in enumerate(tensor.shape):
            if tensor.role == "input" and dim.isidentifier():
                yield dim, f"{name}.shape[{i}]"


def _features(spec: Spec, case: Case, found: Mapping[str, str]) -> Iterator[str]:
    """Words for the name: how this definition differs from the one for the defaults."""
    for axis, value in case.axes:
        default = spec.axes[axis].default
        if found[axis] == repr(value) and value != default:
            yield f"{axis}_{spell(value)}"
        elif spec.axes[axis].optional and default is None and value is not None:
            yield f"with_{axis}"


def _slug(dim: str) -> str:
    """The name of an axis from its extent: hidden // 2 -> hidden_over_2, 512 -> size_512."""
    if dim.isdecimal():
        return f"size_{dim}"
    parts: list[str] = re.findall(r"[A-Za-z0-9_]+|//|[%*+-]", dim)
    return "_".join(_WORDS.get(part) or part for part in parts)


def definition_of(call: Call) -> Definition:
    """The definition. ExportError for a dtype that the format lacks, and if two extents get the same name."""
    axes: dict[str, Axis] = {}
    extents: dict[str, str] = {}
    for name, tensor in call.tensors.items():
        for axis, dim in zip(call.dims[name], tensor.shape, strict=True):
            if extents.setdefault(axis, dim) != dim:
                raise ExportError(f"the extents {extents[axis]!r} and {dim!r} of {call.spec.op} have one name: {axis}")
            axes[axis] = _axis(call.spec, dim)
    scalars = {name: Tensor(shape=None, dtype=_scalar_dtype(call, axis)) for name, axis in call.scalars.items()}
    return Definition(
        name=call.name,
        op_type=call.spec.op,
        axes=axes,
        inputs={**{name: _tensor(call, name) for name in call.inputs}, **scalars},
        outputs={name: _tensor(call, name) for name in call.outputs},
        reference=reference_source(call),
        tags=("megamoe",),
        description=call.spec.doc,
    )


def _axis(spec: Spec, dim: str) -> Axis:
    if dim.isdecimal():
        return AxisConst(value=int(dim))
    return AxisVar(description=spec.axes[dim].doc if dim in spec.axes else dim)


def _tensor(call: Call, name: str) -> Tensor:
    tensor = call.tensors[name]
    if tensor.dtype not in _DTYPES:
        raise ExportError(f"tensor {name} of {call.spec.op} is {tensor.dtype}, which the trace format does not have")
    bits = f"the bits of {tensor.dtype}" if tensor.dtype in _BITS_ONLY else ""
    doc = ": ".join(part for part in (tensor.doc, bits) if part)
    return Tensor(shape=call.dims[name], dtype=_DTYPES[tensor.dtype], description=doc or None)


def _scalar_dtype(call: Call, axis: str) -> Dtype:
    kinds: Mapping[str, Dtype] = {"int": "int32", "float": "float32", "bool": "bool"}
    return kinds[call.spec.axes[axis].kind]


def reference_source(call: Call) -> str:
    """Python with a `run` that calls megamoe's reference, which rounds as the contract prescribes."""
    parameters = ", ".join([*call.inputs, *call.scalars])
    return (
        f"from megamoe.export.flashinfer.call import reference_outputs\n\n\n"
        f"def run({parameters}):\n"
        f"    axes = {_mapping(call.axes)}\n"
        f"    inputs = {_mapping({name: name for name in call.inputs})}\n"
        f"    return reference_outputs({call.spec.op!r}, axes, inputs)\n"
    )


def solution_source(call: Call, backend: str, target: str, executor: str) -> str:
    """Python with a `run` that calls the kernel of a backend. It writes the outputs, its last arguments."""
    parameters = ", ".join([*call.inputs, *call.scalars, *call.outputs])
    return (
        f"from megamoe.export.flashinfer.call import solve\n\n\n"
        f"def run({parameters}):\n"
        f"    axes = {_mapping(call.axes)}\n"
        f"    tensors = {_mapping({name: name for name in [*call.inputs, *call.outputs]})}\n"
        f"    solve({call.spec.op!r}, {backend!r}, {target!r}, {executor!r}, axes, tensors)\n"
    )


def _mapping(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key!r}: {value}" for key, value in values.items()) + "}"


def workload_of(call: Call) -> Workload:
    """The workload of the call's case."""
    axes: dict[str, int] = {}
    for name, tensor in call.tensors.items():
        extents = call.spec.shape(name, call.case)
        for axis, dim, extent in zip(call.dims[name], tensor.shape, extents, strict=True):
            if not dim.isdecimal():
                axes[axis] = extent
    inputs: dict[str, RandomInput | ScalarInput] = {name: RandomInput() for name in call.inputs}
    for name, axis in call.scalars.items():
        value = call.case[axis]
        assert isinstance(value, bool | int | float)
        inputs[name] = ScalarInput(value=value)
    return Workload(axes=axes, inputs=inputs, uuid=call.case.id)
