# ruff: noqa: N815
# pyright: reportMissingImports=false
"""Tiled MMAs of the attention kernel, the shared-memory layouts of their operands, the views for TMA and MMA.

All of it is known at compile time. But a CuTeDSL value belongs to the region that makes it, and setting ACCUMULATE on
an MMA rebinds it. So every user makes its own, which costs nothing in the kernel.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from backends.cutedsl.attention_tiles import AttentionItem, Problem
from backends.cutedsl.device import WARPGROUP
from backends.cutedsl.sm90_fmha.plan import GROUP_M, PANEL_COLUMNS, Sm90FmhaPlan
from backends.cutedsl.sm90_fmha.softmax import ROWS, RowState, make_row_state
from backends.cutedsl.tma import TmaTensor


class Sm90Smem(NamedTuple):
    """Tensors in shared memory. sK and sV are the same slabs, unless the warpgroups share columns.

    sQ (rows, columns, stage and half), sK (keys, columns, stage), sV (columns, keys, stage). Where the warpgroups share
    keys, sMerge (4, thread, vector) f32 and sStat (thread, statistic) f32 carry the second warpgroup's O, row maxima
    and row sums to the first. Where they share columns, sP (rows, keys, stage) and sFactor (row, stage) f32 carry P and
    the factors of O from the warpgroup that computes S to the others.
    """

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sMerge: cute.Tensor | None = None
    sStat: cute.Tensor | None = None
    sP: cute.Tensor | None = None
    sFactor: cute.Tensor | None = None


class Operands(NamedTuple):
    """wgmma descriptors of Q, K and V in shared memory: (MMA, MMA_M or N, MMA_K, stage)."""

    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor


class Registers(NamedTuple):
    """S (64, tile_n) and O (64, o_columns) f32 as flat accumulators, P bf16, and the state of this thread's rows."""

    rS: cute.Tensor
    rP: cute.Tensor
    rO: cute.Tensor
    rows: RowState


class Consumer(NamedTuple):
    """A consumer thread: its warpgroup, counted from 0, and its number in it, 0 to 127."""

    group: Int32
    thread: Int32


def first_row(plan: Sm90FmhaPlan, item: AttentionItem, consumer: Consumer) -> Int32:
    """The row of register row 0 of this thread, as softmax.py counts them."""
    row = item.row_tile * plan.tile_m + (consumer.thread // 32) * 16 + (consumer.thread % 32) // 4
    return row + consumer.group * GROUP_M if plan.share == "rows" else row


@cute.jit
def visible_keys(plan: Sm90FmhaPlan, problem: Problem, item: AttentionItem, consumer: Consumer) -> cute.Tensor:
    """The first key that each of this thread's rows sees, and one past the last: (row, begin or end)."""
    rKeys = cute.make_rmem_tensor((ROWS, 2), Int32)
    row = first_row(plan, item, consumer)
    for i in cutlass.range_constexpr(ROWS):
        token = (row + 8 * i) % problem.t if plan.groups == 3 else problem.head_and_token(row + 8 * i, same=False)[1]
        position = token + problem.s_k - problem.t
        rKeys[i, 0] = cutlass.max(position - problem.left + 1, Int32(0))
        rKeys[i, 1] = cutlass.min(position + problem.right + 1, problem.s_k)
    return rKeys


def make_qk_mma(plan: Sm90FmhaPlan) -> cute.TiledMma:
    """S (64, tile_n) = Q K^T, both from shared memory, K-major."""
    k_major = OperandMajorMode.K
    return hopper_helpers.make_trivial_tiled_mma(
        BFloat16, BFloat16, k_major, k_major, Float32, (1, 1, 1), (GROUP_M, plan.tile_n)
    )


def make_pv_mma(plan: Sm90FmhaPlan) -> cute.TiledMma:
    """O (64, pv_columns) += P V, with V in memory order, MN-major.

    P comes from registers or, if another warpgroup computed it, from shared memory.
    """
    return hopper_helpers.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        Float32,
        (1, 1, 1),
        (GROUP_M, plan.pv_columns),
        warpgroup.OperandSource.SMEM if plan.share == "columns" else warpgroup.OperandSource.RMEM,
    )


def layout_q(plan: Sm90FmhaPlan) -> cute.ComposedLayout:
    """sQ: the 64 rows of one warpgroup after those of another."""
    tiler = (GROUP_M, plan.tile_n, plan.hd)
    stages = plan.q_stages * (plan.tile_m // GROUP_M)
    return hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tiler, BFloat16, stages)


def layout_k(plan: Sm90FmhaPlan) -> cute.ComposedLayout:
    """All rings as K slabs."""
    tiler = (GROUP_M, plan.tile_n, plan.slab_columns)
    stages = plan.k_stages if plan.share == "columns" else plan.ring_stages * plan.rings
    return hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tiler, BFloat16, stages)


def layout_v(plan: Sm90FmhaPlan) -> cute.ComposedLayout:
    """All rings as V slabs."""
    tiler = (GROUP_M, plan.v_columns, plan.v_keys)
    stages = plan.v_stages if plan.share == "columns" else plan.ring_stages * plan.rings
    return hopper_helpers.make_smem_layout_b(LayoutEnum.COL_MAJOR, tiler, BFloat16, stages)


def layout_k_box(plan: Sm90FmhaPlan) -> cute.ComposedLayout:
    """One TMA box of a slab of K: `k_box` keys."""
    return hopper_helpers.make_smem_layout_b(
        LayoutEnum.ROW_MAJOR, (GROUP_M, plan.k_box, plan.slab_columns), BFloat16, 1
    )


def layout_v_box(plan: Sm90FmhaPlan) -> cute.ComposedLayout:
    """One TMA box of a slab of V: `v_box` keys."""
    return hopper_helpers.make_smem_layout_b(LayoutEnum.COL_MAJOR, (GROUP_M, plan.v_columns, plan.v_box), BFloat16, 1)


def layout_p(plan: Sm90FmhaPlan) -> cute.ComposedLayout:
    """Tiles of P in shared memory."""
    tiler = (GROUP_M, GROUP_M, plan.tile_n)
    return hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tiler, BFloat16, plan.p_stages)


def make_tma(mTensor: cute.Tensor, layout: cute.ComposedLayout, tiler: tuple[int, int]) -> TmaTensor:
    """A TMA load of one stage of `layout`, and the coordinates of mTensor (two modes of a tile, batch)."""
    load, stage = cpasync.CopyBulkTensorTileG2SOp(), cute.select(layout, [0, 1])
    return TmaTensor(*cpasync.make_tiled_tma_atom(load, mTensor, stage, tiler, num_multicast=1))


def make_operands(plan: Sm90FmhaPlan, smem: Sm90Smem) -> Operands:
    """The descriptors of all stages."""
    qk_thread, pv_thread = make_qk_mma(plan).get_slice(0), make_pv_mma(plan).get_slice(0)
    return Operands(
        qk_thread.make_fragment_A(qk_thread.partition_A(smem.sQ)),
        qk_thread.make_fragment_B(qk_thread.partition_B(smem.sK)),
        pv_thread.make_fragment_B(pv_thread.partition_B(smem.sV)),
    )


def make_p_operand(plan: Sm90FmhaPlan, sP: cute.Tensor) -> cute.Tensor:
    """The descriptors of tiles of P in shared memory: (MMA, MMA_M, MMA_K, stage)."""
    pv_thread = make_pv_mma(plan).get_slice(0)
    return pv_thread.make_fragment_A(pv_thread.partition_A(sP))


def make_registers(plan: Sm90FmhaPlan) -> Registers:
    """The registers of a consumer thread."""
    return Registers(
        cute.make_rmem_tensor(GROUP_M * plan.tile_n // WARPGROUP, Float32),
        cute.make_rmem_tensor(GROUP_M * plan.tile_n // WARPGROUP, BFloat16),
        cute.make_rmem_tensor(GROUP_M * plan.o_columns // WARPGROUP, Float32),
        make_row_state(),
    )


assert PANEL_COLUMNS * 2 == 128
