# ruff: noqa: N815
# pyright: reportMissingImports=false
"""The epilogue of L1: gate and up from tensor memory, SwiGLU and requantisation in registers, a thread a row."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.pipeline import PipelineConsumer

from backends.cutedsl.device import LOG2_E
from backends.cutedsl.sm100_moe.nvfp4 import Nvfp4, quantise, store_quantised
from backends.cutedsl.sm100_moe.operands import GroupedGemm, load_half
from backends.cutedsl.sm100_moe.plan import (
    H_COLUMNS,
    HALF_N,
    TILE_M,
    Sm100MoePlan,
    half_of_tile,
    swiglu_registers,
)
from backends.cutedsl.sm100_moe.routing import walk, work_item
from backends.cutedsl.tcgen05 import fence_after_sync, fence_before_sync


class SwigluTensors(NamedTuple):
    """What the epilogue reads and writes: global scales of tokens and experts, weights, and a2 by expert row.

    `topk`: routes a token. `weighted`: not 0 if h is multiplied by the top-k weight. `clamp`: +inf for none.
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
    """The epilogue's work loop. A warp whose rows are all padding only gives the accumulator back."""
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
