# pyright: reportMissingImports=false
"""The combine kernel of split keys: O = sum_i w_i O_i with w_i = exp(lse_i - lse), one warp a row."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from backends.cutedsl.attention_tiles import Outputs
from backends.cutedsl.device import LN2, LOG2_E

WARPS = 4


@cute.kernel
def combine_kernel(hd: cutlass.Constexpr, outputs: Outputs, rows: Int32, splits: Int32):
    """mO (row, hd) bf16 and mLSE (row) f32 from mO_part (split, row, hd) f32 and mLSE_part (split, row) f32.

    Lane i holds the weight of split i; there are at most MAX_SPLITS, 32. A part that saw no key has lse = -inf, so
    weight 0, and may have no O at all.
    """
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = thread % 32
    row = block * WARPS + thread // 32
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
        grid=[(rows + WARPS - 1) // WARPS, 1, 1], block=[32 * WARPS, 1, 1], stream=stream
    )
