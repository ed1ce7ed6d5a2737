"""From the shape of a case to a Program, for any target: the stages of a layer in order, with their workspaces.

A target provides the steps for routing and for each stage. Requantisation and combine launch the same way everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from backends.ptx.builder import Builder
from backends.ptx.emitter import module_text
from backends.ptx.moe import combine, requantise
from backends.ptx.moe.layout import ATOM_BLOCKS, SF_VEC_SIZE, TILE_M, tiles
from backends.ptx.moe.shape import MoeShape
from megamoe.contract import Launch, Program, Target

BF16_BYTES: Final = 2
WORD_BYTES: Final = 4
LAYER: Final = ("l1", "l2", "combine")
"""The stages of a whole layer. The epilogue of l1 does the requantisation."""


@dataclass(frozen=True, slots=True)
class Step:
    """An entry, its launch and its workspaces. `prepares`: it depends on weights only, so it runs once."""

    entry: Builder
    launch: Launch
    scratch: dict[str, int] = field(default_factory=dict[str, int])
    prepares: bool = False


Maker = Callable[[MoeShape], Step]


def layer_program(shape: MoeShape, target: Target, route: Maker, stages: Mapping[str, tuple[Maker, ...]]) -> Program:
    """The routing, then the stage of the case or the whole layer. `stages`: the steps of each stage, in order."""
    chosen = LAYER if shape.stage == "layer" else (shape.stage,)
    steps = [make(shape) for make in (route, *(maker for stage in chosen for maker in stages[stage]))]
    scratch: dict[str, int] = {}
    if shape.stage == "layer":
        elements = shape.held_rows * shape.intermediate
        if shape.bf16:
            scratch["a2"] = elements * BF16_BYTES
        else:
            scratch |= {"a2_codes": elements // 2, "a2_sf": elements // SF_VEC_SIZE}
        scratch["rows"] = shape.held_rows * shape.hidden * BF16_BYTES
    for step in steps:
        scratch |= step.scratch
    return Program(
        target=target,
        ptx=module_text(list({step.entry.entry: step.entry for step in steps}.values())),
        launches=tuple(step.launch for step in steps if not step.prepares),
        scratch=scratch,
        prepare=tuple(step.launch for step in steps if step.prepares),
    )


def routing_tables(shape: MoeShape) -> dict[str, int]:
    """Bytes of the tables that every routing kernel writes."""
    rows = shape.row_tiles * TILE_M
    entries = {
        "row_tiles": 1,
        "expert_of_tile": shape.row_tiles,
        "token_of_row": rows,
        "route_of_row": rows,
        "row_of_route": shape.routes,
    }
    return {name: count * WORD_BYTES for name, count in entries.items()}


def a2_arguments(shape: MoeShape) -> dict[str, str | None]:
    """Arguments that differ in a launch that stores bf16 activations: they go to `a2_codes` and have no scales."""
    return {"a2_codes": "a2", "a2_sf": None, "a2_gs": None} if shape.bf16 else {}


def requantise_step(shape: MoeShape, kernel: Builder) -> Step:
    """The launch of a `requantise_kernel`."""
    blocks = shape.intermediate // SF_VEC_SIZE
    launch = Launch(
        entry=kernel.entry,
        grid=(shape.row_tiles, blocks // ATOM_BLOCKS, 1),
        block=(requantise.THREADS, 1, 1),
        args=requantise.RequantiseParams.arguments(
            tokens=shape.tokens, intermediate=shape.intermediate, **a2_arguments(shape)
        ),
    )
    return Step(kernel, launch)


def combine_step(shape: MoeShape, kernel: Builder) -> Step:
    """The launch of a `combine_kernel`."""
    weights = None if shape.variant.weighted else "topk_weights"
    launch = Launch(
        entry=combine.ENTRY,
        grid=(shape.tokens, tiles(shape.hidden, combine.COLUMNS), 1),
        block=(combine.THREADS, 1, 1),
        args=combine.LayerCombineParams.arguments(topk_weights=weights, hidden=shape.hidden, topk=shape.topk),
    )
    return Step(kernel, launch)
