# pyright: reportMissingImports=false
"""The way out of O: the correction warpgroup, and the kernel that combines the parts of split keys.

The warpgroup rescales O in tensor memory when a row maximum moves, normalises it and stores it. The combine kernel
computes O = sum_i w_i O_i with w_i = exp(lse_i - lse), one warp per row.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.pipeline import PipelineConsumer

from backends.cutedsl.attention_tiles import AttentionItem, Outputs, Problem, attention_item
from backends.cutedsl.device import LN2, LOG2_E, WARPGROUP
from backends.cutedsl.sm100_fmha.operands import FmhaSmem
from backends.cutedsl.sm100_fmha.plan import TILE_M, Sm100FmhaPlan
from backends.cutedsl.tcgen05 import CHUNK, fence_after_sync, fence_before_sync, load_row, store_row


@dataclass
class CorrectionRings:
    """The correction's ends of the rings. `o` passes O between the MMA warp, which adds P V, and the correction."""

    stat: PipelineConsumer
    o: PipelineConsumer


@cute.jit
def rescale_o(plan: Sm100FmhaPlan, tmem_ptr: cute.Pointer, factor: Float32, thread: Int32):
    """Multiply O of this row by `factor`, in tensor memory.

    There is no tcgen05.wait::ld: a use of a loaded register waits for its tcgen05.ld, as production kernels assume.
    """
    rO = cute.make_rmem_tensor(CHUNK, Float32)
    for chunk in cutlass.range_constexpr(plan.o_columns // CHUNK):
        load_row(tmem_ptr, rO, thread, chunk * CHUNK)
        for j in cutlass.range_constexpr(0, CHUNK, 2):
            rO[j], rO[j + 1] = cute.arch.mul_packed_f32x2((rO[j], rO[j + 1]), (factor, factor))
        store_row(rO, tmem_ptr, thread, chunk * CHUNK)
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def gmem_row(mTensor: cute.Tensor, offset: Int64, count: cutlass.Constexpr) -> cute.Tensor:
    """`count` elements from `offset` on, which is a multiple of 32, so that 16-byte vectors are legal."""
    pointer = mTensor.iterator + cute.assume(offset, divby=CHUNK)
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def store_chunk(rO: cute.Tensor, outputs: Outputs, problem: Problem, offset: Int64, part_offset: Int64):
    """Store 32 consecutive columns of one row: 64 bytes of o, or 128 of a partial.

    A thread writes its row itself, in 16-byte vectors; two fill a 32-byte sector. Staging through shared memory for a
    TMA store would coalesce better, but O is written once per item, and the 32 KiB would cost two ring slabs.
    """
    if problem.splits == 1:
        rounded = cute.make_rmem_tensor(CHUNK, BFloat16)
        rounded.store(rO.load().to(BFloat16))
        cute.autovec_copy(rounded, gmem_row(outputs.mO, offset, CHUNK))
    else:
        cute.autovec_copy(rO, gmem_row(outputs.mO_part, part_offset, CHUNK))


@cute.jit
def store_lse(outputs: Outputs, problem: Problem, flat_row: Int64, part_row: Int64, lse: Float32):
    """Store the log-sum-exp of one row, or of its part."""
    if problem.splits == 1:
        cute.make_tensor(outputs.mLSE.iterator + flat_row, cute.make_layout(1))[0] = lse
    else:
        cute.make_tensor(outputs.mLSE_part.iterator + part_row, cute.make_layout(1))[0] = lse


@cute.jit
def store_o(
    plan: Sm100FmhaPlan,
    problem: Problem,
    outputs: Outputs,
    item: AttentionItem,
    tmem_ptr: cute.Pointer,
    row_sum: Float32,
    lse: Float32,
    thread: Int32,
):
    """Store normalised O and the log-sum-exp of this row; write nothing for rows past the end of the problem.

    For a part that saw no key, write only the log-sum-exp, -inf; the combine kernel does not read the rest.
    """
    row = item.row_tile * TILE_M + thread
    flat_row = Int64(item.kv_batch) * problem.rows + row
    kv_batches = outputs.mO.shape[0]
    part_row = (Int64(item.split) * kv_batches) * problem.rows + flat_row
    column = item.o_half * plan.o_columns
    seen = row_sum > Float32(0.0)
    stored = row < problem.rows and (seen or problem.splits == 1)
    inverse = Float32(0.0)
    if seen:
        inverse = Float32(1.0) / row_sum
    rO = cute.make_rmem_tensor(CHUNK, Float32)
    for chunk in cutlass.range_constexpr(plan.o_columns // CHUNK):
        if item.tiles > 0:
            load_row(tmem_ptr, rO, thread, chunk * CHUNK)
            cute.arch.fence_view_async_tmem_load()
            for j in cutlass.range_constexpr(0, CHUNK, 2):
                rO[j], rO[j + 1] = cute.arch.mul_packed_f32x2((rO[j], rO[j + 1]), (inverse, inverse))
        else:
            rO.fill(0.0)
        if stored:
            first = column + chunk * CHUNK
            store_chunk(rO, outputs, problem, flat_row * plan.hd + first, part_row * plan.hd + first)
    if row < problem.rows and item.o_half == 0:
        store_lse(outputs, problem, flat_row, part_row, lse)


@cute.jit
def rescale_item(
    plan: Sm100FmhaPlan,
    item: AttentionItem,
    tmem_o: cute.Pointer,
    sStat: cute.Tensor,
    thread: Int32,
    rings: CorrectionRings,
):
    """Rescale O before each P V of an item but the first, if a row of the warp needs it."""
    if item.tiles > 0:
        first = rings.stat.wait_and_advance()
        first.release()
    for _ in cutlass.range(1, item.tiles, unroll=1):
        stat_tile = rings.stat.wait_and_advance()
        factor = sStat[thread, stat_tile.index]
        stat_tile.release()
        o_turn = rings.o.wait_and_advance()
        fence_after_sync()
        if cute.arch.vote_any_sync(factor != Float32(1.0)):
            rescale_o(plan, tmem_o, factor, thread)
        fence_before_sync()
        o_turn.release()
    return rings


@cute.jit
def row_statistics(plan: Sm100FmhaPlan, smem: FmhaSmem, thread: Int32, rings: CorrectionRings):
    """(row sum, row maximum) at the end of an item. Each softmax warpgroup sends a sum, the first also the maximum."""
    row_sum, row_max = Float32(0.0), -Float32.inf
    for group in cutlass.range_constexpr(plan.softmax_groups):
        final = rings.stat.wait_and_advance()
        row_sum += smem.sStat[thread, final.index]
        if cutlass.const_expr(group == 0):
            row_max = smem.sMax[thread, final.index % plan.max_stages]
        final.release()
    return row_sum, row_max, rings


@cute.jit
def correction_warpgroup(
    plan: Sm100FmhaPlan,
    problem: Problem,
    tmem_ptr: cute.Pointer,
    smem: FmhaSmem,
    outputs: Outputs,
    rings: CorrectionRings,
):
    """The correction work loop."""
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % WARPGROUP
    start, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    tmem_o = tmem_ptr + plan.tmem_o
    for index in cutlass.range(start, problem.work_items, step, unroll=1):
        item = attention_item(plan, problem, index)
        rings = rescale_item(plan, item, tmem_o, smem.sStat, thread, rings)
        row_sum, row_max, rings = row_statistics(plan, smem, thread, rings)
        lse = -Float32.inf
        if row_sum > Float32(0.0):
            lse = (row_max * problem.scale_log2 + cute.math.log2(row_sum, fastmath=True)) * LN2
        if item.tiles > 0:
            o_last = rings.o.wait_and_advance()
            fence_after_sync()
            store_o(plan, problem, outputs, item, tmem_o, row_sum, lse, thread)
            fence_before_sync()
            o_last.release()
        else:
            store_o(plan, problem, outputs, item, tmem_o, row_sum, lse, thread)


COMBINE_WARPS = 4


@cute.kernel
def combine_kernel(hd: cutlass.Constexpr, outputs: Outputs, rows: Int32, splits: Int32):
    """mO (row, hd) bf16 and mLSE (row) f32 from mO_part (split, row, hd) f32 and mLSE_part (split, row) f32.

    Lane i holds the weight of split i; there are at most MAX_SPLITS, 32. A part that saw no key has lse = -inf, so
    weight 0, and its O may not be written.
    """
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = thread % 32
    row = block * COMBINE_WARPS + thread // 32
    vector = min(4, hd // 32)
    if row < rows:
        part_lse = -Float32.inf
        if lane < splits:
            part_lse = outputs.mLSE_part[Int64(lane) * rows + row]
        top = cute.arch.warp_reduction(part_lse, cute.arch.fmax)
        base = top
        if top == -Float32.inf:
            base = Float32(0.0)
        weight = cute.math.exp2((part_lse - base) * LOG2_E, fastmath=True)
        total = cute.arch.warp_reduction(weight, lambda a, b: a + b)
        inverse = Float32(0.0)
        lse = -Float32.inf
        if total > Float32(0.0):
            inverse = Float32(1.0) / total
            lse = base + cute.math.log2(total, fastmath=True) * LN2
        weight = weight * inverse

        rSum = cute.make_rmem_tensor((vector, hd // 32 // vector), Float32)
        rPart = cute.make_rmem_tensor((vector, hd // 32 // vector), Float32)
        rSum.fill(0.0)
        for split in cutlass.range(splits, unroll=2):
            split_weight = cute.arch.shuffle_sync(weight, split)
            if split_weight > Float32(0.0):
                offset = cute.assume((Int64(split) * rows + row) * hd, divby=hd)
                gPart = cute.make_tensor(
                    outputs.mO_part.iterator + offset, cute.make_layout((vector, 32, hd // 32 // vector))
                )
                cute.autovec_copy(gPart[None, lane, None], rPart)
                rSum.store(rSum.load() + rPart.load() * split_weight)
        rO = cute.make_rmem_tensor((vector, hd // 32 // vector), BFloat16)
        rO.store(rSum.load().to(BFloat16))
        offset = cute.assume(Int64(row) * hd, divby=hd)
        gO = cute.make_tensor(outputs.mO.iterator + offset, cute.make_layout((vector, 32, hd // 32 // vector)))
        cute.autovec_copy(rO, gO[None, lane, None])
        if lane == 0:
            outputs.mLSE[row] = lse


@cute.jit
def launch_combine(hd: cutlass.Constexpr, outputs: Outputs, rows: Int32, splits: Int32, stream):
    """Queue the combine kernel."""
    combine_kernel.set_name_prefix(f"sm100_fmha_combine_hd{hd}", remove_cutlass_symbol=True, keep_mangled_name=False)
    combine_kernel(hd, outputs, rows, splits).launch(
        grid=[(rows + COMBINE_WARPS - 1) // COMBINE_WARPS, 1, 1], block=[32 * COMBINE_WARPS, 1, 1], stream=stream
    )
