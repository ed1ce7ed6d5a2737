# ruff: noqa: N815
# pyright: reportMissingImports=false
"""The epilogues of the grouped GEMMs, one thread per row of an accumulator in tensor memory.

L1: gate and up, SwiGLU and requantisation in registers. L2: accumulators times global scales become bf16 expert rows;
each warp stores 32 rows by TMA.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineConsumer

from backends.cutedsl.device import LOG2_E
from backends.cutedsl.moe.layout import TILE_M
from backends.cutedsl.moe.nvfp4 import Nvfp4
from backends.cutedsl.sm100_moe.nvfp4 import quantise, store_quantised
from backends.cutedsl.sm100_moe.operands import GroupedGemm, load_half
from backends.cutedsl.sm100_moe.plan import (
    H_COLUMNS,
    HALF_N,
    STORE_COLUMNS,
    STORE_STAGES,
    Sm100MoePlan,
    half_of_tile,
    swiglu_registers,
)
from backends.cutedsl.sm100_moe.routing import walk, work_item
from backends.cutedsl.tcgen05 import fence_after_sync, fence_before_sync
from backends.cutedsl.tma import TmaTensor, tma_views


class SwigluTensors(NamedTuple):
    """Tensors of the L1 epilogue: global scales of tokens and experts, weights, and a2 by expert row.

    `topk`: routes per token. `weighted`: not 0 if h is multiplied by the top-k weight. `clamp`: +inf for none.
    """

    mRouteOfRow: cute.Tensor
    mX_gs: cute.Tensor
    mW1_gs: cute.Tensor
    mA2_gs: cute.Tensor
    mTopkWeights: cute.Tensor
    a2: Nvfp4
    topk: Int32
    weighted: Int32
    clamp: Float32


@cute.jit
def swiglu_pair(gate, up, alpha: Float32, weight: Float32, clamp: Float32):
    """silu(min(alpha gate, clamp)) * clip(alpha up, clamp) * weight of two columns, in packed fp32."""
    gate = cute.arch.mul_packed_f32x2(gate, (alpha, alpha))
    up = cute.arch.mul_packed_f32x2(up, (alpha, alpha))
    gate = (cute.arch.fmin(gate[0], clamp), cute.arch.fmin(gate[1], clamp))
    up = tuple(cute.arch.fmax(cute.arch.fmin(up[i], clamp), -clamp) for i in range(2))
    x, y = cute.arch.mul_packed_f32x2(gate, (Float32(-LOG2_E), Float32(-LOG2_E)))
    exponentials = (cute.math.exp2(x, fastmath=True), cute.math.exp2(y, fastmath=True))
    x, y = cute.arch.add_packed_f32x2(exponentials, (Float32(1.0), Float32(1.0)))
    silu = cute.arch.mul_packed_f32x2(gate, (cute.arch.rcp_approx(x), cute.arch.rcp_approx(y)))
    return cute.arch.mul_packed_f32x2(cute.arch.mul_packed_f32x2(silu, up), (weight, weight))


@cute.jit
def swiglu_half(
    interleave: cutlass.Constexpr, rAcc: cute.Tensor, rH: cute.Tensor, alpha: Float32, weight: Float32, clamp: Float32
):
    """rH (64) f32 from rAcc (128): 64 columns of this thread's row; `swiglu_registers` pairs the registers."""
    for h_column in cutlass.range_constexpr(0, H_COLUMNS, 2):
        (gate_0, up_0), (gate_1, up_1) = (swiglu_registers(interleave, h_column + i) for i in range(2))
        gate, up = (rAcc[gate_0], rAcc[gate_1]), (rAcc[up_0], rAcc[up_1])
        rH[h_column], rH[h_column + 1] = swiglu_pair(gate, up, alpha, weight, clamp)


@cute.jit
def swiglu_warpgroup(
    plan: Sm100MoePlan,
    interleave: cutlass.Constexpr,
    tmem_ptr: cute.Pointer,
    gemm: GroupedGemm,
    tensors: SwigluTensors,
    rank: Int32,
    acc: PipelineConsumer,
):
    """The epilogue's work loop. A warp whose rows are all padding only releases the accumulator."""
    thread, _, _ = cute.arch.thread_idx()
    rAcc = cute.make_rmem_tensor(HALF_N, Float32)
    rH = cute.make_rmem_tensor(H_COLUMNS, Float32)
    rCodes = cute.make_rmem_tensor(H_COLUMNS // 8, Uint32)
    rAcc.fill(0.0)
    items = walk(plan, gemm)
    turn = Int32(0)
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        item = work_item(gemm, items, index)
        row = (item.row_tile + rank) * TILE_M + thread
        route = Int32(-1)
        if rank < item.row_tiles:
            route = tensors.mRouteOfRow[row]
        alpha, weight, gs = Float32(0.0), Float32(1.0), Float32(1.0)
        if route >= 0:
            alpha = tensors.mX_gs[route // tensors.topk] * tensors.mW1_gs[item.expert]
            gs = tensors.mA2_gs[item.expert]
            weight = cutlass.select_(Boolean(tensors.weighted != 0), tensors.mTopkWeights[route], Float32(1.0))
        needed = cute.arch.vote_any_sync(route >= 0)
        acc_tile = acc.wait_and_advance()
        fence_after_sync()
        for step in cutlass.range_constexpr(plan.halves):
            column, half = half_of_tile(plan.cta_group, step, turn)
            if needed:
                load_half(tmem_ptr + column, rAcc, thread)
            if cutlass.const_expr(step == 0):
                fence_before_sync()
                acc_tile.release()
            if route >= 0:
                swiglu_half(interleave, rAcc, rH, alpha, weight, tensors.clamp)
                scales = quantise(rH, gs, rCodes)
                group = item.w_tile * plan.halves + half
                store_quantised(tensors.a2, row, group, rCodes, scales)
        turn ^= 1


VECTOR = 8
"""bf16 elements per 16-byte store to shared memory."""
STORE_BOX = (32, STORE_COLUMNS)
SWIZZLE = (3, 4, 3)


class RowsTensors(NamedTuple):
    """Tensors of the L2 epilogue: the TMA store of (rows, hidden), routes of rows, global scales of experts."""

    store: TmaTensor
    mRouteOfRow: cute.Tensor
    mA2_gs: cute.Tensor
    mW2_gs: cute.Tensor


def make_rows_store(mRows: cute.Tensor) -> TmaTensor:
    """The TMA store of 32 rows of 64 columns, a 128-byte swizzle row each."""
    layout = cute.make_composed_layout(
        cute.make_swizzle(*SWIZZLE), 0, cute.make_layout(STORE_BOX, stride=(STORE_COLUMNS, 1))
    )
    return TmaTensor(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mRows, layout, STORE_BOX))


def allocate_store(smem) -> cute.Tensor:
    """(32 rows, 64 columns, warp * stages + stage) bf16, swizzled."""
    layout = cute.make_layout((*STORE_BOX, 4 * STORE_STAGES), stride=(STORE_COLUMNS, 1, 32 * STORE_COLUMNS))
    return smem.allocate_tensor(BFloat16, layout, byte_alignment=1024, swizzle=cute.make_swizzle(*SWIZZLE))


@cute.jit
def round_columns(rAcc: cute.Tensor, scale: Float32, sBox: cute.Tensor, thread: Int32):
    """Store rAcc (64) f32, columns of this thread's row, times `scale` as bf16 in its warp's box."""
    rRow = cute.make_rmem_tensor(STORE_COLUMNS, BFloat16)
    for j in cutlass.range_constexpr(0, STORE_COLUMNS, 2):
        rAcc[j], rAcc[j + 1] = cute.arch.mul_packed_f32x2((rAcc[j], rAcc[j + 1]), (scale, scale))
    rRow.store(rAcc.load().to(BFloat16))
    vectors = cute.logical_divide(sBox[thread % 32, None], cute.make_layout(VECTOR))
    for vector in cutlass.range_constexpr(STORE_COLUMNS // VECTOR):
        cute.autovec_copy(cute.logical_divide(rRow, cute.make_layout(VECTOR))[None, vector], vectors[None, vector])


@cute.jit
def store_half(rAcc: cute.Tensor, scale: Float32, sStore: cute.Tensor, tensors: RowsTensors, box, thread: Int32):
    """Store 128 columns of a warp's 32 rows. `box`: the index of the 32-row box, and of the first 64 columns.

    One lane issues the store of all 32 rows. It waits until its stores have read a box before the box is overwritten.
    TMA leaves out columns past the end of the rows.
    """
    row_box, column_box = box
    store = tma_views(tensors.store.atom, cute.flat_divide(tensors.store.coordinates, STORE_BOX), sStore, 2)
    warp = cute.arch.make_warp_uniform(thread // 32)
    for box_step in cutlass.range_constexpr(HALF_N // STORE_COLUMNS):
        buffer = warp * STORE_STAGES + box_step % STORE_STAGES
        cute.arch.cp_async_bulk_wait_group(STORE_STAGES - 1, read=True)
        cute.arch.sync_warp()
        rBox = cute.make_tensor(rAcc.iterator + box_step * STORE_COLUMNS, cute.make_layout(STORE_COLUMNS))
        round_columns(rBox, scale, sStore[None, None, buffer], thread)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.copy(store.atom, store.sX[None, buffer], store.gX[None, row_box, column_box + box_step])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def rows_warpgroup(
    plan: Sm100MoePlan,
    tmem_ptr: cute.Pointer,
    gemm: GroupedGemm,
    sStore: cute.Tensor,
    tensors: RowsTensors,
    rank: Int32,
    acc: PipelineConsumer,
):
    """The epilogue's work loop. A warp whose rows are all padding stores nothing; others store their padding too."""
    thread, _, _ = cute.arch.thread_idx()
    rAcc = cute.make_rmem_tensor(HALF_N, Float32)
    rAcc.fill(0.0)
    items = walk(plan, gemm)
    turn = Int32(0)
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        item = work_item(gemm, items, index)
        row_tile = item.row_tile + rank
        route = Int32(-1)
        if rank < item.row_tiles:
            route = tensors.mRouteOfRow[row_tile * TILE_M + thread]
        scale = tensors.mA2_gs[item.expert] * tensors.mW2_gs[item.expert]
        needed = cute.arch.vote_any_sync(route >= 0)
        acc_tile = acc.wait_and_advance()
        fence_after_sync()
        for step in cutlass.range_constexpr(plan.halves):
            column, half = half_of_tile(plan.cta_group, step, turn)
            if needed:
                load_half(tmem_ptr + column, rAcc, thread)
            if cutlass.const_expr(step == 0):
                fence_before_sync()
                acc_tile.release()
            if needed:
                first = (item.w_tile * plan.halves + half) * (HALF_N // STORE_COLUMNS)
                box = (row_tile * (TILE_M // 32) + thread // 32, first)
                store_half(rAcc, scale, sStore, tensors, box, thread)
        turn ^= 1
    cute.arch.cp_async_bulk_wait_group(0, read=False)
