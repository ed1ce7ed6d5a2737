# ruff: noqa: N815
# pyright: reportMissingImports=false
"""The epilogue of L1: gate and up from tensor memory, SwiGLU and requantisation in registers, a thread a row."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.pipeline import PipelineConsumer

from backends.cutedsl.sm100_moe_plan import (
    H_COLUMNS,
    SF_VEC_SIZE,
    TILE_M,
    TILE_N,
    Sm100MoePlan,
    block_loads,
    block_registers,
)
from backends.cutedsl.sm100_moe_quantise import quantise, store_quantised
from backends.cutedsl.sm100_moe_tiles import walk, work_item
from backends.cutedsl.sm100_moe_tmem import fence_after_sync, fence_before_sync, load_columns

LOG2_E = 1.4426950408889634


class SwigluTensors(NamedTuple):
    """What the epilogue reads and writes: global scales of tokens and experts, weights, and a2 by expert row.

    `topk`: routes a token; `weighted`: not 0 if h is multiplied by the top-k weight; `clamp`: +inf for none.
    """

    mRouteOfRow: cute.Tensor
    mX_gs: cute.Tensor
    mW1_gs: cute.Tensor
    mA2_gs: cute.Tensor
    mTopkWeights: cute.Tensor
    mA2_codes: cute.Tensor
    mA2_sf: cute.Tensor
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
def swiglu_row(
    interleave: cutlass.Constexpr,
    tmem_ptr: cute.Pointer,
    thread: Int32,
    rH: cute.Tensor,
    alpha: Float32,
    weight: Float32,
    clamp: Float32,
):
    """rH (64) f32: this thread's row of the tile. `block_registers` says which registers are a column's gate and up."""
    rAcc = cute.make_rmem_tensor(2 * SF_VEC_SIZE, Float32)
    for block in cutlass.range_constexpr(H_COLUMNS // SF_VEC_SIZE):
        register = 0
        for column, count in block_loads(interleave, block):
            load_columns(
                tmem_ptr + column, count, cute.make_tensor(rAcc.iterator + register, cute.make_layout(count)), thread
            )
            register += count
        cute.arch.fence_view_async_tmem_load()
        where = block_registers(interleave)
        for j in cutlass.range_constexpr(0, SF_VEC_SIZE, 2):
            (gate_0, up_0), (gate_1, up_1) = where[j], where[j + 1]
            gate, up = (rAcc[gate_0], rAcc[gate_1]), (rAcc[up_0], rAcc[up_1])
            first = block * SF_VEC_SIZE + j
            rH[first], rH[first + 1] = swiglu_pair(gate, up, alpha, weight, clamp)


@cute.jit
def swiglu_warpgroup(
    plan: Sm100MoePlan,
    interleave: cutlass.Constexpr,
    tmem_ptr: cute.Pointer,
    mUnits: cute.Tensor,
    tensors: SwigluTensors,
    w_rows: Int32,
    rank: Int32,
    acc: PipelineConsumer,
):
    """The epilogue's work loop. Warps whose rows are all padding do nothing but give the accumulator back."""
    thread, _, _ = cute.arch.thread_idx()
    rH = cute.make_rmem_tensor(H_COLUMNS, Float32)
    rCodes = cute.make_rmem_tensor(H_COLUMNS // 8, Uint32)
    items = walk(plan, mUnits, w_rows)
    for index in cutlass.range(items.first, items.end, items.step, unroll=1):
        item = work_item(mUnits, items, index)
        row = (item.row_tile + rank) * TILE_M + thread
        route = Int32(-1)
        if rank < item.row_tiles:
            route = tensors.mRouteOfRow[row]
        alpha, weight, gs = Float32(0.0), Float32(1.0), Float32(1.0)
        if route >= 0:
            alpha = tensors.mX_gs[route // tensors.topk] * tensors.mW1_gs[item.expert]
            gs = tensors.mA2_gs[item.expert]
            weight = cutlass.select_(Boolean(tensors.weighted != 0), tensors.mTopkWeights[route], Float32(1.0))
        acc_tile = acc.wait_and_advance()
        fence_after_sync()
        if cute.arch.vote_any_sync(route >= 0):
            swiglu_row(interleave, tmem_ptr + acc_tile.index * TILE_N, thread, rH, alpha, weight, tensors.clamp)
            fence_before_sync()
            acc_tile.release()
            if route >= 0:
                scales = quantise(rH, gs, rCodes)
                store_quantised(tensors.mA2_codes, tensors.mA2_sf, row, item.w_tile, rCodes, scales)
        else:
            acc_tile.release()
