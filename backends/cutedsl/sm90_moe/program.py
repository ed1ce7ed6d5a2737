"""NVFP4 MoE on sm_90a as a program of the harness: compiled once for a stage and a plan of its GEMMs."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.compile.compile import compile_host_function, compiled_kernel
from backends.cutedsl.compile.parameters import (
    Parameter,
    ScalarParameter,
    StreamParameter,
    TensorParameter,
    call_arguments,
    fake_values,
    workspace_bytes,
)
from backends.cutedsl.device import H200_SM_COUNT
from backends.cutedsl.moe.parameters import CONSTANTS as TENSOR_CONSTANTS
from backends.cutedsl.moe.parameters import DIVISORS, OPERANDS, RESULTS, experts_of, sizes_of
from backends.cutedsl.sm90_moe.plan import (
    COLUMN_FIELDS,
    PANEL_ROWS,
    ROW_BYTES,
    UNIT_BYTES,
    UNIT_K,
    WIDTHS,
    Sm90MoePlan,
    max_columns,
    width_for,
)
from megamoe.contract import HostProgram

if TYPE_CHECKING:
    from megamoe.contract import Case

_SCALARS: Final = ("num_experts", "weight_before", "interleave_log2", "max_ctas", "prepares")
PARAMETERS: Final[Mapping[str, Parameter]] = {
    **OPERANDS,
    "columns": TensorParameter("s32", ("column_entries", "column_fields")),
    "w1_packed": TensorParameter("u8", ("w1_panels", "w1_panel_bytes"), 128),
    "w2_packed": TensorParameter("u8", ("w2_panels", "w2_panel_bytes"), 128),
    "w1_tokens": TensorParameter("u8", ("column_tiles", "w1_column_bytes"), 128),
    "w2_tokens": TensorParameter("u8", ("column_tiles", "w2_column_bytes"), 128),
    "row_factor": TensorParameter("f32", ("column_tiles", "tile_columns")),
    "row_weight": TensorParameter("f32", ("column_tiles", "tile_columns")),
    "partials": TensorParameter("f32", ("ctas", "partial_sums")),
    "flags": TensorParameter("s32", ("gemms", "flag_count")),
    **RESULTS,
    **dict.fromkeys(_SCALARS, ScalarParameter("s32")),
    "clamp": ScalarParameter("f32"),
    "stream": StreamParameter(),
}
"""Parameters of the host functions, each with those of its stage: tensors of the op, and workspaces."""

CONSTANTS: Final = {**TENSOR_CONSTANTS, "column_fields": COLUMN_FIELDS, "gemms": 2}

_ROUTING: Final = ("topk_ids", "row_of_route", "route_of_row", "columns", "flags", *_SCALARS, "stream")
_L1: Final = (
    *("x_codes", "x_sf", "x_gs", "w1_codes", "w1_sf", "w1_gs", "a2_gs", "topk_weights", "a2_codes", "a2_sf"),
    *("w1_packed", "w1_tokens", "row_factor", "row_weight", "partials", "clamp"),
)
_L2: Final = ("a2_codes", "a2_sf", "a2_gs", "w2_codes", "w2_sf", "w2_gs", "rows", "w2_packed", "w2_tokens", "partials")
_COMBINE: Final = ("rows", "topk_weights", "y")
STAGES: Final[Mapping[str, frozenset[str]]] = {
    "layer": frozenset((*_ROUTING, *_L1, *_L2, *_COMBINE)),
    "l1": frozenset((*_ROUTING, *_L1)),
    "requantise": frozenset((*_ROUTING, "h", "a2_gs", "a2_codes", "a2_sf")),
    "l2": frozenset((*_ROUTING, *_L2)),
    "combine": frozenset((*_ROUTING, *_COMBINE)),
}
"""Names of the parameters of each stage's host function, for NVFP4 activations."""
_OF_ACTIVATIONS: Final = {"x_codes": "x", "a2_codes": "a2"}
"""The names of NVFP4 activations, and of bf16 ones, which have no scales."""
_SCALES_OF_ACTIVATIONS: Final = frozenset(("x_sf", "x_gs", "a2_sf", "a2_gs"))
_WORKSPACES: Final = frozenset(
    (
        *("row_of_route", "route_of_row", "columns", "flags", "w1_packed", "w2_packed", "w1_tokens", "w2_tokens"),
        *("row_factor", "row_weight", "partials"),
    )
)
_LAYER_WORKSPACES: Final = _WORKSPACES | {"a2_codes", "a2_sf", "a2", "rows"}
_PACKED: Final = ("w1_packed", "w2_packed")
_PREPARED: Final = ("layer", "l1", "l2")
"""Stages whose weights are repacked."""
SLICES: Final = 8
ANY_WIDTH: Final = WIDTHS[0]
"""The width in the plan of stages that have no GEMM."""


def moe_program(case: Case, max_ctas: int = H200_SM_COUNT, width: int | None = None) -> HostProgram:
    """The call that performs `case`. `width`: columns of a tile, in place of the choice of `width_for`.

    If there are more than `max_ctas` tiles, CTAs take several in turn and share the last ones. UnsupportedError for
    more experts than the routing kernel counts.
    """
    stage, experts = str(case["stage"]), experts_of(case)
    # Rows are combined alike for all activations.
    bf16 = case["activations"] == "bf16" and stage != "combine"
    if stage not in _PREPARED:
        width = ANY_WIDTH
    elif width is None:
        width = width_for(expected_routes(case), experts, case["load"] == "balanced", bf16)
    plan = Sm90MoePlan(width, swiglu=False)
    sizes, parameters = _sizes(case, plan, max_ctas), _parameters_of(stage, bf16)
    scalars = {
        "num_experts": experts,
        "weight_before": int(case["weight"] == "before"),
        "interleave_log2": case.int("interleave").bit_length() - 1,
        "clamp": math.inf if case["clamp"] is None else float(case["clamp"]),
        "max_ctas": max_ctas,
        "prepares": 0,
    }
    workspaces = _LAYER_WORKSPACES if stage == "layer" else _WORKSPACES
    scratch = {
        name: workspace_bytes(parameter, sizes)
        for name, parameter in parameters.items()
        if isinstance(parameter, TensorParameter) and name in workspaces
    }
    artifact = compiled(stage, width, bf16)
    prepare = call_arguments(parameters, sizes, {**scalars, "prepares": 1}) if stage in _PREPARED else {}
    prepared = tuple(name for name in scratch if name in _PACKED)
    return artifact.program(call_arguments(parameters, sizes, scalars), scratch, prepare=prepare, prepared=prepared)


def _parameters_of(stage: str, bf16: bool) -> dict[str, Parameter]:
    """The parameters of a stage's host function."""
    names = STAGES[stage]
    if bf16:
        names = {_OF_ACTIVATIONS.get(name, name) for name in names - _SCALES_OF_ACTIVATIONS}
    return {name: parameter for name, parameter in PARAMETERS.items() if name in names}


def expected_routes(case: Case) -> int:
    """As in megamoe.codec.routing, which a kernel may not import: the key of a compiled artifact does not cover it."""
    tokens, shared = case.int("tokens"), case.int("shared")
    routes = tokens * (case.int("topk") - shared)
    return tokens * shared + (-(-routes // SLICES) if case["load"] == "slice" else routes)


def _sizes(case: Case, plan: Sm90MoePlan, max_ctas: int) -> dict[str, int]:
    """All dimensions of PARAMETERS for one case."""
    sizes = sizes_of(case)
    columns = max_columns(sizes["routes"], sizes["experts"], plan.width)
    hidden_units, intermediate_units = sizes["hidden"] // UNIT_K, sizes["intermediate"] // UNIT_K
    return {
        **sizes,
        **CONSTANTS,
        "column_entries": 1 + columns,
        "column_tiles": columns,
        "tile_columns": plan.width,
        "w1_panels": sizes["experts"] * sizes["w1_rows"] // PANEL_ROWS,
        "w1_panel_bytes": hidden_units * UNIT_BYTES,
        "w2_panels": sizes["experts"] * sizes["hidden"] // PANEL_ROWS,
        "w2_panel_bytes": intermediate_units * UNIT_BYTES,
        "w1_column_bytes": hidden_units * plan.width * ROW_BYTES,
        "w2_column_bytes": intermediate_units * plan.width * ROW_BYTES,
        "ctas": max_ctas,
        "partial_sums": plan.sums * plan.consumers,
        "flag_count": max_ctas * plan.consumers // 32,
    }


@functools.cache
def compiled(stage: str, width: int, bf16: bool = False) -> Artifact:
    """The compiled host function of one stage. UnsupportedError if CuTeDSL is not installed."""

    def build() -> Artifact:
        from backends.cutedsl.sm90_moe.kernel import Sm90Moe

        parameters = _parameters_of(stage, bf16)
        divisors = {**DIVISORS, **dict.fromkeys(("w1_column_bytes", "w2_column_bytes"), 128)}
        values = fake_values(parameters, CONSTANTS, divisors)
        return compile_host_function(Sm90Moe(width, bf16), stage, target="sm_90a", **values)

    options = {"width": width} | ({"activations": "bf16"} if bf16 else {})
    return compiled_kernel("sm90_moe", "sm_90a", options, build, f"sm90_moe_{stage}")
