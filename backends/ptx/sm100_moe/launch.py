"""From a case to a Program: workspaces, tensor maps, scalars and grids of the launches of its stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from backends.ptx.builder import Builder, module_text
from backends.ptx.sm100_moe import combine, gather_scales, requantise_kernel, routing
from backends.ptx.sm100_moe.geometry import (
    ATOM_BLOCKS,
    MMA_K,
    SF_VEC_SIZE,
    SM_COUNT,
    STAGE_K,
    THREADS,
    TILE_M,
    TILE_N,
    tiles,
)
from backends.ptx.sm100_moe.kernel import PTX_VERSION, GemmKernel, l1_kernel, l2_kernel
from backends.ptx.sm100_moe.shape import MoeShape
from backends.ptx.sm100_moe.tensor_maps import (
    expert_rows,
    row_codes,
    row_scales,
    token_codes,
    weight_codes,
    weight_scales,
)
from megamoe.contract import (
    BufferArg,
    Case,
    KernelArg,
    Launch,
    Program,
    ScalarArg,
    TensorMapArg,
)

BF16_BYTES = 2
WORD_BYTES = 4


def moe_program(case: Case) -> Program:
    """The program of an nvfp4_moe case on sm_100a: the whole layer, or one stage behind the routing."""
    shape = MoeShape.of(case)
    scratch = _routing_tables(shape)
    stages = _LAYER if shape.stage == "layer" else (shape.stage,)
    steps = [_route, *(step for stage in stages for step in _STAGES[stage])]
    if shape.stage == "layer":
        scratch |= {
            "a2_codes": shape.held_rows * shape.intermediate // 2,
            "a2_sf": shape.held_rows * shape.intermediate // SF_VEC_SIZE,
            "rows": shape.held_rows * shape.hidden * BF16_BYTES,
        }
    if "l1" in stages:
        scratch["sfa"] = shape.row_tiles * TILE_M * shape.hidden // SF_VEC_SIZE
    made = [step(shape) for step in steps]
    return Program(
        target="sm_100a",
        ptx=module_text([builder for builder, _ in made]),
        launches=tuple(launch for _, launch in made),
        scratch=scratch,
    )


def _routing_tables(shape: MoeShape) -> dict[str, int]:
    rows = shape.row_tiles * TILE_M
    entries = {
        "row_tiles": 1,
        "expert_of_tile": shape.row_tiles,
        "token_of_row": rows,
        "route_of_row": rows,
        "row_of_route": shape.routes,
    }
    return {name: count * WORD_BYTES for name, count in entries.items()}


Step = tuple[Builder, Launch]


def _buffers(*names: str) -> tuple[KernelArg, ...]:
    return tuple(BufferArg(name) for name in names)


def _u32(*values: int) -> tuple[KernelArg, ...]:
    return tuple(ScalarArg("u32", value) for value in values)


def _route(shape: MoeShape) -> Step:
    tables = ("topk_ids", "row_tiles", "expert_of_tile", "token_of_row", "route_of_row", "row_of_route")
    return routing.routing_kernel(PTX_VERSION), Launch(
        entry=routing.ENTRY,
        grid=(shape.num_experts, 1, 1),
        block=(routing.THREADS, 1, 1),
        args=(*_buffers(*tables), *_u32(shape.tokens, shape.topk, shape.num_experts)),
        dynamic_smem=routing.smem_bytes(shape.num_experts),
    )


def _gather_scales(shape: MoeShape) -> Step:
    k_atoms = shape.hidden // MMA_K
    return gather_scales.gather_scales_kernel(PTX_VERSION), Launch(
        entry=gather_scales.ENTRY,
        grid=(shape.row_tiles, tiles(k_atoms, gather_scales.ATOMS_PER_CTA), 1),
        block=(gather_scales.THREADS, 1, 1),
        args=(*_buffers("x_sf", "sfa", "row_tiles", "token_of_row"), *_u32(shape.tokens, k_atoms)),
    )


def _l1(shape: MoeShape) -> Step:
    """w1 has 2 * intermediate rows, whole tiles of them; the tokens are gathered row by row."""
    kernel = l1_kernel(shape.variant)
    tokens = token_codes(shape.tokens, shape.hidden)
    sfa = row_scales("sfa", shape.row_tiles, shape.hidden)
    own = ("token_of_row", "route_of_row", "x_gs", "w1_gs", "a2_gs", "topk_weights", "a2_codes", "a2_sf")
    scalars = (*_u32(shape.tokens, shape.intermediate), ScalarArg("f32", shape.clamp))
    return kernel.builder, _gemm(
        shape, kernel, tokens, sfa, ("w1", 2 * shape.intermediate, shape.hidden), (*_buffers(*own), *scalars)
    )


def _l2(shape: MoeShape) -> Step:
    kernel = l2_kernel()
    activations = row_codes(shape.held_rows, shape.intermediate)
    sfa = row_scales("a2_sf", shape.held_rows // TILE_M, shape.intermediate)
    tables = _buffers("token_of_row", "a2_gs", "w2_gs")
    own = (expert_rows(shape.held_rows, shape.hidden), *tables, *_u32(shape.tokens, shape.hidden))
    return kernel.builder, _gemm(shape, kernel, activations, sfa, ("w2", shape.hidden, shape.intermediate), own)


def _gemm(
    shape: MoeShape,
    kernel: GemmKernel,
    a: TensorMapArg,
    sfa: TensorMapArg,
    weights: tuple[str, int, int],
    own: tuple[KernelArg, ...],
) -> Launch:
    """In the order of GemmParams, then the arguments of the epilogue. `weights`: name, rows, K."""
    _, rows, k = weights
    n_tiles = tiles(rows, TILE_N)
    common = (a, weight_codes(shape.num_experts, *weights), sfa, weight_scales(shape.num_experts, *weights))
    tables = _buffers("row_tiles", "expert_of_tile")
    return Launch(
        entry=kernel.builder.entry,
        grid=(min(SM_COUNT, shape.row_tiles * n_tiles), 1, 1),
        block=(THREADS, 1, 1),
        args=(*common, *tables, *_u32(n_tiles, tiles(k, STAGE_K)), *own),
        dynamic_smem=kernel.smem,
    )


def _requantise(shape: MoeShape) -> Step:
    blocks = shape.intermediate // SF_VEC_SIZE
    return requantise_kernel.requantise_kernel(PTX_VERSION), Launch(
        entry=requantise_kernel.ENTRY,
        grid=(shape.row_tiles, blocks // ATOM_BLOCKS, 1),
        block=(requantise_kernel.THREADS, 1, 1),
        args=(
            *_buffers("h", "a2_gs", "row_tiles", "expert_of_tile", "token_of_row", "a2_codes", "a2_sf"),
            *_u32(shape.tokens, shape.intermediate),
        ),
    )


def _combine(shape: MoeShape) -> Step:
    weights = ScalarArg("u64", 0) if shape.variant.weighted else BufferArg("topk_weights")
    return combine.combine_kernel(PTX_VERSION), Launch(
        entry=combine.ENTRY,
        grid=(shape.tokens, tiles(shape.hidden, combine.COLUMNS), 1),
        block=(combine.THREADS, 1, 1),
        args=(*_buffers("rows", "row_of_route"), weights, *_buffers("y"), *_u32(shape.hidden, shape.topk)),
    )


_LAYER: Final = ("l1", "l2", "combine")
_STAGES: Final[dict[str, tuple[Callable[[MoeShape], Step], ...]]] = {
    "l1": (_gather_scales, _l1),
    "requantise": (_requantise,),
    "l2": (_l2,),
    "combine": (_combine,),
}
