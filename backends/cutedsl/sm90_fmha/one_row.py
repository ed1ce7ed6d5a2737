# pyright: reportMissingImports=false
"""Attention of one query token on few keys, without tensor cores: one CTA per row of O, and all loads at once.

Such a call takes as long as its longest chain of waits. So there are no tensor maps, no mbarriers and no ring. A thread
issues all its loads of Q, K and V before it uses any, the warps synchronise once, and some threads add up the results
of all warps. On an H200 one head of hd 64 with 128 keys took 5.4 us like this in a sketch in CUDA C++, and 6.7 by tiles
and by cuDNN (results/records/h200-fmha-turns.json).

A key has hd / 8 lanes of a warp, eight columns each. In turn i, warp w has the keys from (32 i + w) * keys_of_warp on.
"""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, memory

from backends.cutedsl.device import LN2, LOG2_E
from backends.cutedsl.sm90_fmha.epilogue import elements_at
from backends.cutedsl.sm90_fmha.plan import OneRowPlan
from backends.cutedsl.sm90_fmha.softmax import fma

VECTOR = 8
"""Columns of a lane: 16 bytes."""
LANES = 32


class OneRowFmha:
    """The host function: one launch."""

    def __init__(self, plan: OneRowPlan) -> None:
        self.plan = plan

    @cute.jit
    def __call__(self, **arguments):
        """Queue attention on `stream`. `arguments`: what attention.parameters_of lists, by name; t is 1."""
        call = SimpleNamespace(**arguments)
        name = f"sm90_fmha_row_hd{self.plan.hd}_{self.plan.keys}"
        self.kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(call.mQ, call.mK, call.mV, call.mO, call.mLSE, call.left, call.scale * LOG2_E).launch(
            grid=[call.mQ.shape[0] * call.mQ.shape[1], 1, 1], block=[self.plan.threads, 1, 1], stream=call.stream
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        left: Int32,
        scale_log2: Float32,
    ):
        """Row blockIdx.x of O. The query is at the position of the last key and sees the last `left` keys."""
        plan = self.plan
        hd, turns = cutlass.const_expr(plan.hd), cutlass.const_expr(plan.turns)
        lanes = cutlass.const_expr(hd // VECTOR)
        smem = memory.SmemAllocator()
        sO = smem.allocate_tensor(Float32, cute.make_layout((hd + 4, plan.warps)), byte_alignment=16)
        sMax = smem.allocate_tensor(Float32, cute.make_layout(plan.warps), byte_alignment=16)
        sSum = smem.allocate_tensor(Float32, cute.make_layout(plan.warps), byte_alignment=16)
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        warp, lane = thread // LANES, thread % LANES
        s_k = mK.shape[1]
        first_seen = cutlass.max(s_k - left, Int32(0))
        own_key = warp * plan.keys_of_warp + lane // lanes
        column = (lane % lanes) * VECTOR
        base = Int64(row // mQ.shape[1]) * s_k

        rQ = cute.make_rmem_tensor(VECTOR, BFloat16)
        rK = cute.make_rmem_tensor((VECTOR, turns), BFloat16)
        rV = cute.make_rmem_tensor((VECTOR, turns), BFloat16)
        # Where a row does not see a key, load one that it sees, so that the loads need no branch.
        keys = [
            cutlass.min(cutlass.max(own_key + turn * plan.keys_of_turn, first_seen), s_k - 1) for turn in range(turns)
        ]
        cute.autovec_copy(elements_at(mQ, Int64(row) * hd + column, VECTOR), rQ)
        for turn in cutlass.range_constexpr(turns):
            cute.autovec_copy(elements_at(mK, (base + keys[turn]) * hd + column, VECTOR), rK[None, turn])
        for turn in cutlass.range_constexpr(turns):
            cute.autovec_copy(elements_at(mV, (base + keys[turn]) * hd + column, VECTOR), rV[None, turn])

        rQuery = cute.make_rmem_tensor(VECTOR, Float32)
        rQuery.store(rQ.load().to(Float32))
        rP = cute.make_rmem_tensor(turns, Float32)
        top = -Float32.inf
        for turn in cutlass.range_constexpr(turns):
            rKey = rK[None, turn].load().to(Float32)
            score = Float32(0.0)
            for i in cutlass.range_constexpr(VECTOR):
                score = fma(rQuery[i], rKey[i], score)
            for step in cutlass.range_constexpr(lanes.bit_length() - 1):
                score = score + cute.arch.shuffle_sync_bfly(score, offset=1 << step)
            key = own_key + turn * plan.keys_of_turn
            rP[turn] = cutlass.select_((key >= first_seen) & (key < s_k), score * scale_log2, -Float32.inf)
            top = cute.arch.fmax(top, rP[turn])
        for step in cutlass.range_constexpr(plan.keys_of_warp.bit_length() - 1):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=lanes << step))
        base_score = cutlass.select_(top == -Float32.inf, Float32(0.0), top)

        total = Float32(0.0)
        rO = cute.make_rmem_tensor(VECTOR, Float32)
        rO.fill(0.0)
        for turn in cutlass.range_constexpr(turns):
            p = cute.math.exp2(rP[turn] - base_score, fastmath=True)
            total = total + p
            short = Float32(BFloat16(p))
            rValue = rV[None, turn].load().to(Float32)
            for i in cutlass.range_constexpr(VECTOR):
                rO[i] = fma(short, rValue[i], rO[i])
        for step in cutlass.range_constexpr(plan.keys_of_warp.bit_length() - 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=lanes << step)
            for i in cutlass.range_constexpr(VECTOR):
                rO[i] = rO[i] + cute.arch.shuffle_sync_bfly(rO[i], offset=lanes << step)
        if lane < lanes:
            for half in cutlass.range_constexpr(2):
                rHalf = cute.make_tensor(rO.iterator + 4 * half, cute.make_layout(4))
                place = cute.make_tensor(
                    sO.iterator + cute.assume(warp * (hd + 4) + column + 4 * half, divby=4), cute.make_layout(4)
                )
                cute.autovec_copy(rHalf, place)
            if lane == 0:
                sMax[warp] = top
                sSum[warp] = total
        cute.arch.sync_threads()
        if thread < hd // 2:
            self._add_up(sO, sMax, sSum, mO, mLSE, row, thread)

    @cute.jit
    def _add_up(
        self,
        sO: cute.Tensor,
        sMax: cute.Tensor,
        sSum: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        row: Int32,
        thread: Int32,
    ):
        """Two columns of O, summed over all warps. The row sees at least its own key, so its sum is above zero."""
        hd, warps = cutlass.const_expr(self.plan.hd), cutlass.const_expr(self.plan.warps)
        top = sMax[0]
        for warp in cutlass.range_constexpr(1, warps):
            top = cute.arch.fmax(top, sMax[warp])
        total = Float32(0.0)
        rO = cute.make_rmem_tensor(2, Float32)
        rO.fill(0.0)
        for warp in cutlass.range_constexpr(warps):
            weight = cute.math.exp2(sMax[warp] - top, fastmath=True)
            total = fma(weight, sSum[warp], total)
            for i in cutlass.range_constexpr(2):
                rO[i] = fma(weight, sO[2 * thread + i, warp], rO[i])
        inverse = Float32(1.0) / total
        rShort = cute.make_rmem_tensor(2, BFloat16)
        for i in cutlass.range_constexpr(2):
            rShort[i] = BFloat16(rO[i] * inverse)
        cute.autovec_copy(rShort, elements_at(mO, Int64(row) * hd + 2 * thread, 2))
        if thread == 0:
            mLSE[row] = fma(cute.math.log2(total, fastmath=True), LN2, top * LN2)
