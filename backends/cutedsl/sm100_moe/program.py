"""NVFP4 MoE on sm_100a as a program of the harness: compiled once for a stage, a CTA group and an interleave."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.compile.artifact_cache import ArtifactKey, cached_artifact, default_folder, imported
from backends.cutedsl.compile.compile import compile_host_function, compiler_version
from backends.cutedsl.sm100_moe.plan import MAX_EXPERTS, SM_COUNT, TILE_M, UNIT_FIELDS, pays_as_pair
from megamoe.contract import (
    HostArg,
    HostProgram,
    ScalarArg,
    StreamArg,
    TensorArg,
    UnsupportedError,
)

if TYPE_CHECKING:
    from megamoe.contract import Case

ATOM_BYTES = 512
_BYTES = {"u8": 1, "bf16": 2, "f32": 4, "s32": 4}
_WORKSPACES = {
    "layer": ("row_of_route", "route_of_row", "units", "a1_codes", "a1_sf", "a2_codes", "a2_sf", "rows"),
    "l1": ("row_of_route", "route_of_row", "units", "a1_codes", "a1_sf"),
    "requantise": ("row_of_route", "route_of_row", "units"),
    "l2": ("row_of_route", "route_of_row", "units"),
    "combine": ("row_of_route", "route_of_row", "units"),
}


def moe_program(case: Case, cta_group: int | None = None, max_ctas: int = SM_COUNT) -> HostProgram:
    """The call that performs `case`. `cta_group` (1 or 2) replaces the rule of `pays_as_pair`; a CTA walks over several
    tiles when there are more than `max_ctas` of them, a pair at least. UnsupportedError for more experts than the
    routing kernel counts.
    """
    stage, experts = str(case["stage"]), case.int("num_experts")
    if experts > MAX_EXPERTS:
        raise UnsupportedError(
            f"{case.id}: {experts} experts; the routing kernel of cutedsl counts {MAX_EXPERTS} at most"
        )
    if cta_group is None:
        cta_group = 2 if pays_as_pair(case.int("tokens") * case.int("topk"), experts) else 1
    tensors = _tensors(case)
    arguments: dict[str, HostArg] = {
        **tensors,
        "num_experts": ScalarArg("s32", experts),
        "weight_before": ScalarArg("s32", int(case["weight"] == "before")),
        "clamp": ScalarArg("f32", math.inf if case["clamp"] is None else float(case["clamp"])),
        "max_ctas": ScalarArg("s32", max(max_ctas, cta_group)),
        "stream": StreamArg(),
    }
    artifact = compiled(stage, *_compiled_for(stage, cta_group, case.int("interleave")))
    scratch = {name: math.prod(tensors[name].shape) * _BYTES[tensors[name].dtype] for name in _WORKSPACES[stage]}
    return artifact.program({name: arguments[name] for name in artifact.parameters}, scratch)


def _compiled_for(stage: str, cta_group: int, interleave: int) -> tuple[int, int]:
    """CTA group and interleave as far as the code of `stage` depends on them."""
    return cta_group if stage in ("layer", "l1", "l2") else 1, interleave if stage in ("layer", "l1") else 8


def _tensors(case: Case) -> dict[str, TensorArg]:
    tokens, topk, experts = case.int("tokens"), case.int("topk"), case.int("num_experts")
    hidden, intermediate = case.int("hidden"), case.int("intermediate")
    tiles = (tokens * topk + (TILE_M - 1) * experts) // TILE_M
    rows = tiles * TILE_M
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "x_codes": ("u8", (tokens, hidden // 2)),
        "x_sf": ("u8", (-(-tokens // TILE_M), hidden // 64, ATOM_BYTES)),
        "x_gs": ("f32", (tokens,)),
        "w1_codes": ("u8", (experts, 2 * intermediate, hidden // 2)),
        "w1_sf": ("u8", (experts, 2 * intermediate // TILE_M, hidden // 64, ATOM_BYTES)),
        "w1_gs": ("f32", (experts,)),
        "w2_codes": ("u8", (experts, hidden, intermediate // 2)),
        "w2_sf": ("u8", (experts, hidden // TILE_M, intermediate // 64, ATOM_BYTES)),
        "w2_gs": ("f32", (experts,)),
        "h": ("f32", (rows, intermediate)),
        "a2_gs": ("f32", (experts,)),
        "topk_ids": ("s32", (tokens, topk)),
        "topk_weights": ("f32", (tokens, topk)),
        "row_of_route": ("s32", (tokens * topk,)),
        "route_of_row": ("s32", (rows,)),
        "units": ("s32", (1 + tiles, UNIT_FIELDS)),
        "a1_codes": ("u8", (rows, hidden // 2)),
        "a1_sf": ("u8", (tiles, hidden // 64, ATOM_BYTES)),
        "a2_codes": ("u8", (rows, intermediate // 2)),
        "a2_sf": ("u8", (tiles, intermediate // 64, ATOM_BYTES)),
        "rows": ("bf16", (rows, hidden)),
        "y": ("bf16", (tokens, hidden)),
    }
    return {name: TensorArg(name, dtype, shape) for name, (dtype, shape) in shapes.items()}


@functools.cache
def compiled(stage: str, cta_group: int, interleave: int) -> Artifact:
    """The compiled host function of one stage, from the user's cache if it is there.

    UnsupportedError if CuTeDSL is not installed.
    """
    key = ArtifactKey(
        name=f"sm100_moe_{stage}",
        sources=imported("sm100_moe"),
        options={"cta_group": cta_group, "interleave": interleave},
        target="sm_100a",
        compiler=compiler_version(),
    )
    return cached_artifact(key, lambda: _compile(stage, cta_group, interleave), default_folder(Path.home()))


def _compile(stage: str, cta_group: int, interleave: int) -> Artifact:
    from backends.cutedsl.sm100_moe.signature import moe_signature

    function, args = moe_signature(stage, cta_group, interleave)
    return compile_host_function(function, *args, target="sm_100a")
