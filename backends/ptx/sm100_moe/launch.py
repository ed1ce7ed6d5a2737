"""From a case to a Program: workspaces, tensor maps, scalars and grids for the launches of its stage.

Tensor maps read codes in boxes of one stage along K, and whole scale factor atoms. Past K and past the rows of one
expert they read zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.moe import routing
from backends.ptx.moe.combine import combine_kernel
from backends.ptx.moe.layer import Step, combine_step, layer_program, requantise_step, routing_tables
from backends.ptx.moe.layout import ATOM_BYTES, SF_VEC_SIZE, TILE_M, tiles
from backends.ptx.moe.requantise import requantise_kernel
from backends.ptx.moe.shape import MoeShape
from backends.ptx.sm100_moe import row_kernels
from backends.ptx.sm100_moe.epilogue import RowsParams, SwigluParams
from backends.ptx.sm100_moe.frame import GemmParams
from backends.ptx.sm100_moe.geometry import (
    B_ATOMS,
    MMA_K,
    SM_COUNT,
    STAGE_K,
    STAGE_ROW_BYTES,
    STAGE_STEPS,
    STAGED_COLUMNS,
    THREADS,
    TILE_N,
)
from backends.ptx.sm100_moe.kernel import PTX_VERSION, GemmKernel, l1_kernel, l2_kernel
from megamoe.contract import Case, KernelArg, Launch, Program, TensorMapArg

ATOM_WORDS = ATOM_BYTES // 4


@dataclass(frozen=True, slots=True)
class Weights:
    """One of the weight tensors. `name` is w1 or w2; each expert is `rows` by `k`."""

    name: str
    num_experts: int
    rows: int
    k: int

    def codes(self) -> TensorMapArg:
        """[num_experts][rows][k / 2]."""
        return TensorMapArg(
            tensor=f"{self.name}_codes",
            dtype="u8",
            dims=(self.k // 2, self.rows, self.num_experts),
            strides=(self.k // 2, self.rows * self.k // 2),
            box=(STAGE_ROW_BYTES, TILE_N, 1),
            swizzle="128B",
        )

    def scales(self) -> TensorMapArg:
        """[num_experts][rows / 128][k / 64] atoms."""
        row_atoms, k_atoms = self.rows // TILE_M, self.k // MMA_K
        return TensorMapArg(
            tensor=f"{self.name}_sf",
            dtype="u32",
            dims=(ATOM_WORDS, k_atoms, row_atoms, self.num_experts),
            strides=(ATOM_BYTES, k_atoms * ATOM_BYTES, row_atoms * k_atoms * ATOM_BYTES),
            box=(ATOM_WORDS, STAGE_STEPS, B_ATOMS, 1),
        )


def row_scales(tensor: str, row_tiles: int, k: int) -> TensorMapArg:
    """[row tiles][k / 64] atoms."""
    k_atoms = k // MMA_K
    return TensorMapArg(
        tensor=tensor,
        dtype="u32",
        dims=(ATOM_WORDS, k_atoms, row_tiles),
        strides=(ATOM_BYTES, k_atoms * ATOM_BYTES),
        box=(ATOM_WORDS, STAGE_STEPS, 1),
    )


def token_codes(tokens: int, hidden: int) -> TensorMapArg:
    """x_codes [tokens][hidden / 2], gathered row by row."""
    return _matrix("x_codes", tokens, hidden, 1)


def row_codes(rows: int, intermediate: int) -> TensorMapArg:
    """a2_codes [rows][intermediate / 2]."""
    return _matrix("a2_codes", rows, intermediate, TILE_M)


def expert_rows(rows: int, hidden: int) -> TensorMapArg:
    """rows [rows][hidden] bf16, in the boxes that a warp writes."""
    return TensorMapArg(
        tensor="rows", dtype="bf16", dims=(hidden, rows), strides=(hidden * 2,), box=(STAGED_COLUMNS, 32), swizzle="64B"
    )


def _matrix(tensor: str, rows: int, k: int, box_rows: int) -> TensorMapArg:
    return TensorMapArg(
        tensor=tensor,
        dtype="u8",
        dims=(k // 2, rows),
        strides=(k // 2,),
        box=(STAGE_ROW_BYTES, box_rows),
        swizzle="128B",
    )


def moe_program(case: Case) -> Program:
    """The program of an nvfp4_moe case on sm_100a: the routing, then one stage or the whole layer."""
    stages = {
        "l1": (_gather_scales, _l1),
        "requantise": (_requantise,),
        "l2": (_l2,),
        "combine": (_combine,),
    }
    return layer_program(MoeShape.of(case, "sm_100a"), "sm_100a", _route, stages)


def _route(shape: MoeShape) -> Step:
    launch = Launch(
        entry=routing.ENTRY,
        grid=(shape.num_experts, 1, 1),
        block=(routing.THREADS, 1, 1),
        args=routing.RoutingParams.arguments(tokens=shape.tokens, topk=shape.topk, num_experts=shape.num_experts),
        dynamic_smem=routing.smem_bytes(shape.num_experts),
    )
    return Step(routing.routing_kernel(PTX_VERSION), launch, routing_tables(shape))


def _gather_scales(shape: MoeShape) -> Step:
    k_atoms = shape.hidden // MMA_K
    launch = Launch(
        entry=row_kernels.GATHER_ENTRY,
        grid=(shape.row_tiles, tiles(k_atoms, row_kernels.ATOMS_PER_CTA), 1),
        block=(row_kernels.GATHER_THREADS, 1, 1),
        args=row_kernels.GatherParams.arguments(tokens=shape.tokens, k_atoms=k_atoms),
    )
    scratch = {"sfa": shape.row_tiles * TILE_M * shape.hidden // SF_VEC_SIZE}
    return Step(row_kernels.gather_scales_kernel(PTX_VERSION), launch, scratch)


def _l1(shape: MoeShape) -> Step:
    """w1 has 2 * intermediate rows, a whole number of tiles; the tokens are gathered row by row."""
    operands = _Operands(
        a=token_codes(shape.tokens, shape.hidden),
        sfa=row_scales("sfa", shape.row_tiles, shape.hidden),
        weights=Weights("w1", shape.num_experts, 2 * shape.intermediate, shape.hidden),
    )
    own = SwigluParams.arguments(tokens=shape.tokens, intermediate=shape.intermediate, clamp=shape.clamp)
    return _gemm(shape, l1_kernel(shape.variant), operands, own)


def _l2(shape: MoeShape) -> Step:
    operands = _Operands(
        a=row_codes(shape.held_rows, shape.intermediate),
        sfa=row_scales("a2_sf", shape.held_rows // TILE_M, shape.intermediate),
        weights=Weights("w2", shape.num_experts, shape.hidden, shape.intermediate),
    )
    rows = expert_rows(shape.held_rows, shape.hidden)
    own = RowsParams.arguments(rows=rows, tokens=shape.tokens, hidden=shape.hidden)
    return _gemm(shape, l2_kernel(), operands, own)


@dataclass(frozen=True, slots=True)
class _Operands:
    """The operands of a grouped GEMM."""

    a: TensorMapArg
    sfa: TensorMapArg
    weights: Weights


def _gemm(shape: MoeShape, kernel: GemmKernel, operands: _Operands, own: tuple[KernelArg, ...]) -> Step:
    """The launch of `kernel`. `own`: the epilogue's arguments."""
    weights = operands.weights
    n_tiles = tiles(weights.rows, TILE_N)
    common = GemmParams.arguments(
        a=operands.a,
        b=weights.codes(),
        sfa=operands.sfa,
        sfb=weights.scales(),
        n_tiles=n_tiles,
        k_stages=tiles(weights.k, STAGE_K),
    )
    launch = Launch(
        entry=kernel.builder.entry,
        grid=(min(shape.sms or SM_COUNT, shape.row_tiles * n_tiles), 1, 1),
        block=(THREADS, 1, 1),
        args=(*common, *own),
        dynamic_smem=kernel.smem,
    )
    return Step(kernel.builder, launch)


def _requantise(shape: MoeShape) -> Step:
    return requantise_step(shape, requantise_kernel(PTX_VERSION))


def _combine(shape: MoeShape) -> Step:
    return combine_step(shape, combine_kernel(PTX_VERSION))
