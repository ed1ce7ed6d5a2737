"""NVFP4 MoE on sm_100a as a program of the harness: compiled once for a stage, a CTA group and an interleave."""

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
from backends.cutedsl.device import B200_SM_COUNT
from backends.cutedsl.moe.parameters import CONSTANTS as TENSOR_CONSTANTS
from backends.cutedsl.moe.parameters import DIVISORS, OPERANDS, RESULTS, experts_of, sizes_of
from backends.cutedsl.sm100_moe.plan import UNIT_FIELDS, pays_as_pair
from megamoe.contract import HostProgram, UnsupportedError

if TYPE_CHECKING:
    from megamoe.contract import Case

PARAMETERS: Final[Mapping[str, Parameter]] = {
    **OPERANDS,
    "units": TensorParameter("s32", ("unit_entries", "unit_fields")),
    "a1_codes": TensorParameter("u8", ("rows", "hidden_bytes")),
    "a1_sf": TensorParameter("u8", ("row_tiles", "hidden_atoms", "atom_bytes")),
    **RESULTS,
    **dict.fromkeys(("num_experts", "weight_before", "max_ctas"), ScalarParameter("s32")),
    "clamp": ScalarParameter("f32"),
    "stream": StreamParameter(),
}
"""Parameters of the host functions, each with those of its stage: tensors of the op, and workspaces."""

CONSTANTS: Final = {**TENSOR_CONSTANTS, "unit_fields": UNIT_FIELDS}

_ROUTING: Final = ("topk_ids", "row_of_route", "route_of_row", "units", "stream")
_L1: Final = (
    *("x_codes", "x_sf", "x_gs", "w1_codes", "w1_sf", "w1_gs", "a2_gs", "topk_weights"),
    *("a1_codes", "a1_sf", "a2_codes", "a2_sf", "weight_before", "clamp", "max_ctas"),
)
_L2: Final = ("a2_codes", "a2_sf", "a2_gs", "w2_codes", "w2_sf", "w2_gs", "rows", "max_ctas")
_COMBINE: Final = ("rows", "topk_weights", "y", "weight_before")
STAGES: Final[Mapping[str, frozenset[str]]] = {
    "layer": frozenset((*_ROUTING, *_L1, *_L2, *_COMBINE)),
    "l1": frozenset((*_ROUTING, *_L1)),
    "requantise": frozenset((*_ROUTING, "h", "a2_gs", "a2_codes", "a2_sf", "max_ctas")),
    "l2": frozenset((*_ROUTING, *_L2)),
    "combine": frozenset((*_ROUTING, *_COMBINE, "num_experts")),
}
"""Names of the parameters of each stage's host function."""
_WORKSPACES: Final = frozenset(("row_of_route", "route_of_row", "units", "a1_codes", "a1_sf"))
_LAYER_WORKSPACES: Final = _WORKSPACES | {"a2_codes", "a2_sf", "rows"}


def moe_program(case: Case, cta_group: int | None = None, max_ctas: int = B200_SM_COUNT) -> HostProgram:
    """The call that performs `case`. `cta_group` (1 or 2) replaces the rule of `pays_as_pair`.

    If there are more than `max_ctas` tiles, CTAs take several in turn. There is at least one pair. UnsupportedError for
    more experts than the routing kernel counts, and for bf16 activations.
    """
    if case["activations"] == "bf16":
        raise UnsupportedError(f"{case.id}: the sm_100a kernels of the cutedsl backend have no bf16 activations")
    stage, experts = str(case["stage"]), experts_of(case)
    if cta_group is None:
        cta_group = 2 if pays_as_pair(case.int("tokens") * case.int("topk"), experts) else 1
    sizes, parameters = _sizes(case), _parameters_of(stage)
    scalars = {
        "num_experts": experts,
        "weight_before": int(case["weight"] == "before"),
        "clamp": math.inf if case["clamp"] is None else float(case["clamp"]),
        "max_ctas": max(max_ctas, cta_group),
    }
    workspaces = _LAYER_WORKSPACES if stage == "layer" else _WORKSPACES
    scratch = {
        name: workspace_bytes(parameter, sizes)
        for name, parameter in parameters.items()
        if isinstance(parameter, TensorParameter) and name in workspaces
    }
    artifact = compiled(stage, *_compiled_for(stage, cta_group, case.int("interleave")))
    return artifact.program(call_arguments(parameters, sizes, scalars), scratch)


def _parameters_of(stage: str) -> dict[str, Parameter]:
    return {name: parameter for name, parameter in PARAMETERS.items() if name in STAGES[stage]}


def _compiled_for(stage: str, cta_group: int, interleave: int) -> tuple[int, int]:
    """CTA group and interleave as far as the code of `stage` depends on them."""
    return cta_group if stage in ("layer", "l1", "l2") else 1, interleave if stage in ("layer", "l1") else 8


def _sizes(case: Case) -> dict[str, int]:
    """All dimensions of PARAMETERS for one case."""
    sizes = sizes_of(case)
    return {**sizes, "unit_entries": 1 + sizes["row_tiles"], "unit_fields": UNIT_FIELDS}


@functools.cache
def compiled(stage: str, cta_group: int, interleave: int) -> Artifact:
    """The compiled host function of one stage. UnsupportedError if CuTeDSL is not installed."""

    def build() -> Artifact:
        from backends.cutedsl.sm100_moe.kernel import Sm100Moe

        values = fake_values(_parameters_of(stage), CONSTANTS, DIVISORS)
        return compile_host_function(Sm100Moe(cta_group, interleave), stage, target="sm_100a", **values)

    options = {"cta_group": cta_group, "interleave": interleave}
    return compiled_kernel("sm100_moe", "sm_100a", options, build, f"sm100_moe_{stage}")
