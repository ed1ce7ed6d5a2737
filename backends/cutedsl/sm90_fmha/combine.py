# pyright: reportMissingImports=false
"""The combine kernel of split keys: O = sum_i w_i O_i with w_i = exp(lse_i - lse).

A team of warps combines 128 columns of a row, 64 for hd 64. For few splits a team is one warp, and its loads begin
before the weights are known. For many splits eight warps share the splits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, memory

from backends.cutedsl.attention_tiles import Outputs
from backends.cutedsl.device import LN2, LOG2_E
from backends.cutedsl.sm90_fmha.plan import LONE_KEYS, MAX_SPLITS, SHORT_KEYS
from backends.cutedsl.sm90_fmha.softmax import fma

WARPS = 8
"""Warps of a team for many splits. A CTA has one team. For few splits a team is one warp, so that the loads of few rows
spread over many SMs."""
LANES = 32
FEW_SPLITS = 32
"""The most splits that one warp combines. A short cache of lone.py has no more tiles."""
AHEAD = 16
"""Partials that a thread loads at once."""


def columns_of(hd: int) -> int:
    """Columns of a row that a team combines."""
    return min(hd, 128)


@cute.jit
def load_parts(rPart: cute.Tensor, mO_part: cute.Tensor, first: Int32, stride: int, splits: Int32, part: Int64, step):
    """Load rPart (vector, k): this thread's columns of split first + k * stride, zeros past the last split.

    `part`: the first of this thread's elements of split 0; `step`: elements per split.
    """
    vector = cutlass.const_expr(cute.size(rPart, mode=[0]))
    for k in cutlass.range(cute.size(rPart, mode=[1]), unroll_full=True):
        split = first + k * stride
        if split < splits:
            offset = cute.assume(part + split * step, divby=vector)
            gPart = cute.make_tensor(mO_part.iterator + offset, cute.make_layout(vector))
            if cutlass.const_expr(mO_part.element_type is BFloat16):
                rShort = cute.make_rmem_tensor(vector, BFloat16)
                cute.autovec_copy(gPart, rShort)
                rPart[None, k].store(rShort.load().to(Float32))
            else:
                cute.autovec_copy(gPart, rPart[None, k])
        else:
            rPart[None, k].fill(0.0)


@cute.kernel
def combine_kernel(hd: cutlass.Constexpr, team: cutlass.Constexpr, outputs: Outputs, rows: Int32, splits: Int32):
    """mO (row, hd) bf16 and mLSE (row) f32 from mO_part (split, row, hd) f32 and mLSE_part (split, row) f32.

    `team`: warps per team. Warp w takes the splits w, w + team, ... Each warp holds the weights of all splits, the
    weight of split i in lane i % 32, register i / 32. A part that saw no key has lse = -inf, so weight 0.
    """
    # Unpacked, because an assignment to outputs.mLSE in a branch would make all four tensors results of the branch.
    mO, mLSE, mO_part, mLSE_part = outputs
    columns = cutlass.const_expr(columns_of(hd))
    chunks = cutlass.const_expr(hd // columns)
    vector = cutlass.const_expr(columns // LANES)
    most = cutlass.const_expr(FEW_SPLITS if team == 1 else MAX_SPLITS)
    smem = memory.SmemAllocator()
    sSum = smem.allocate_tensor(Float32, cute.make_layout((vector, LANES, team)), byte_alignment=16)
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = thread % LANES
    member = cute.arch.make_warp_uniform(thread // LANES)
    row, chunk = block // chunks, block % chunks
    part = Int64(row) * hd + chunk * columns + lane * vector
    step = Int64(rows) * hd
    rPart = cute.make_rmem_tensor((vector, AHEAD), Float32)
    rWeight = cute.make_rmem_tensor(most // LANES, Float32)
    rSum = cute.make_rmem_tensor(vector, Float32)
    rSum.fill(0.0)
    lse = -Float32.inf
    cute.arch.griddepcontrol_wait()

    load_parts(rPart, mO_part, member, team, splits, part, step)
    for k in cutlass.range_constexpr(most // LANES):
        rWeight[k] = -Float32.inf
        if k * LANES + lane < splits:
            rWeight[k] = mLSE_part[Int64(k * LANES + lane) * rows + row]
    top = rWeight[0]
    for k in cutlass.range_constexpr(1, most // LANES):
        top = cute.arch.fmax(top, rWeight[k])
    top = cute.arch.warp_reduction(top, cute.arch.fmax)
    base = cutlass.select_(top == -Float32.inf, Float32(0.0), top)
    total = Float32(0.0)
    for k in cutlass.range_constexpr(most // LANES):
        rWeight[k] = cute.math.exp2((rWeight[k] - base) * LOG2_E, fastmath=True)
        total = total + rWeight[k]
    total = cute.arch.warp_reduction(total, lambda a, b: a + b)
    inverse = Float32(0.0)
    if total > Float32(0.0):
        inverse = Float32(1.0) / total
        lse = fma(cute.math.log2(total, fastmath=True), LN2, base)
    for block_of in cutlass.range_constexpr(most // (team * AHEAD)):
        first = member + block_of * team * AHEAD
        if first < splits:
            if cutlass.const_expr(block_of > 0):
                load_parts(rPart, mO_part, first, team, splits, part, step)
            for k in cutlass.range_constexpr(AHEAD):
                place = cutlass.const_expr((block_of * AHEAD + k) * team)
                weight = cute.arch.shuffle_sync(rWeight[place // LANES], (member + place) % LANES)
                for column in cutlass.range_constexpr(vector):
                    rSum[column] = fma(rPart[column, k], weight * inverse, rSum[column])
    if cutlass.const_expr(team > 1):
        cute.autovec_copy(rSum, sSum[None, lane, member])
        cute.arch.sync_threads()
        if member == 0:
            for other in cutlass.range_constexpr(1, team):
                rSum.store(rSum.load() + sSum[None, lane, other].load())
    if member == 0:
        rO = cute.make_rmem_tensor(vector, BFloat16)
        rO.store(rSum.load().to(BFloat16))
        offset = cute.assume(part, divby=vector)
        cute.autovec_copy(rO, cute.make_tensor(mO.iterator + offset, cute.make_layout(vector)))
        if Boolean(lane == 0) and Boolean(chunk == 0):
            mLSE[row] = lse


@cute.jit
def launch_combine(
    hd: cutlass.Constexpr, team: cutlass.Constexpr, outputs: Outputs, rows: Int32, splits: Int32, stream
):
    """Queue the combine kernel with teams of `team` warps, as a programmatic dependent launch."""
    combine_kernel(hd, team, outputs, rows, splits).launch(
        grid=[rows * (hd // columns_of(hd)), 1, 1], block=[LANES * team, 1, 1], stream=stream, use_pdl=True
    )


assert MAX_SPLITS % (WARPS * AHEAD) == 0
assert FEW_SPLITS % AHEAD == 0
assert SHORT_KEYS // LONE_KEYS <= FEW_SPLITS
assert LANES % WARPS == 0
