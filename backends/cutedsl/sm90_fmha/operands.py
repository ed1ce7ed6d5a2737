# ruff: noqa: N815
# pyright: reportMissingImports=false
"""Tiled MMAs of the attention kernel, the shared-memory layouts of their operands, the views that TMA and MMA take.

All of it is known at compile time, but a CuTeDSL value belongs to the region that makes it, and setting ACCUMULATE on
an MMA rebinds it: so every user makes its own, at no cost in the kernel.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from backends.cutedsl.sm90_fmha.plan import GROUP_M, PANEL_COLUMNS, Sm90FmhaPlan


class Shared(NamedTuple):
    """Tensors in shared memory. sQ (rows, columns, stage and half); sK (keys, columns, stage) and sV (columns, keys,
    stage) are the same slabs. sMerge (4, thread, vector) f32 and sStat (thread, statistic) f32 carry the second
    warpgroup's O, row maxima and row sums to the first, where the two share keys."""

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sMerge: cute.Tensor | None
    sStat: cute.Tensor | None


def make_qk_mma(plan: Sm90FmhaPlan) -> cute.TiledMma:
    """S (64, tile_n) = Q K^T, both from shared memory, K-major."""
    k_major = OperandMajorMode.K
    return hopper_helpers.make_trivial_tiled_mma(
        BFloat16, BFloat16, k_major, k_major, Float32, (1, 1, 1), (GROUP_M, plan.tile_n)
    )


def make_pv_mma(plan: Sm90FmhaPlan) -> cute.TiledMma:
    """O (64, N) += P V, P from registers, V as it lies in memory, MN-major."""
    return hopper_helpers.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        Float32,
        (1, 1, 1),
        (GROUP_M, min(plan.o_columns, plan.slab_columns)),
        warpgroup.OperandSource.RMEM,
    )


def layout_q(plan: Sm90FmhaPlan) -> cute.ComposedLayout:
    """Q: 64 rows of a warpgroup after those of the other."""
    tiler = (GROUP_M, plan.tile_n, plan.hd)
    stages = plan.q_stages * (plan.tile_m // GROUP_M)
    return hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tiler, BFloat16, stages)


def layout_k(plan: Sm90FmhaPlan) -> cute.ComposedLayout:
    """All rings as K slabs."""
    tiler = (GROUP_M, plan.tile_n, plan.slab_columns)
    return hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tiler, BFloat16, plan.ring_stages * plan.rings)


def layout_v(plan: Sm90FmhaPlan) -> cute.ComposedLayout:
    """All rings as V slabs."""
    tiler = (GROUP_M, plan.slab_columns, plan.tile_n)
    return hopper_helpers.make_smem_layout_b(LayoutEnum.COL_MAJOR, tiler, BFloat16, plan.ring_stages * plan.rings)


def make_tma(mTensor: cute.Tensor, layout: cute.ComposedLayout, tiler: tuple[int, int]):
    """A TMA load of one stage of `layout`, and its coordinates. mTensor (row or column, column or row, batch)."""
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), mTensor, cute.select(layout, [0, 1]), tiler, num_multicast=1
    )


def partition_tma(tma_atom: cute.CopyAtom, mTensor: cute.Tensor, tiler: tuple[int, int], sTensor: cute.Tensor):
    """(global, shared) views of one operand for its TMA copies: (copy, tile of each mode) and (copy, stage)."""
    shared, tXgX = cpasync.tma_partition(
        tma_atom,
        0,
        cute.make_layout(1),
        cute.group_modes(sTensor, 0, 2),
        cute.group_modes(cute.flat_divide(mTensor, tiler), 0, 2),
    )
    return tXgX, shared


assert PANEL_COLUMNS * 2 == 128
