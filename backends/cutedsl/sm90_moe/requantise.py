# pyright: reportMissingImports=false
"""Requantisation on sm_90a, one thread per block of 16: to NVFP4, for which the target has no cvt, or to bf16.

|v| * 2^-126 is a float whose bits 24 to 22 are the code of v; below 1 the exponent is 0, a subnormal. Rounding these
bits to nearest even rounds v, except for a v within 2^-24 of the halves below 1.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint16, Uint32

from backends.cutedsl.moe.layout import SF_VEC_SIZE
from backends.cutedsl.moe.nvfp4 import Nvfp4, scale_offset
from backends.cutedsl.sm90_moe.expand import RowsOf, scale_pair

THREADS = 128
E2M1_MAX = 6.0
TO_CODE = 2.0**-126
CODE_BIT = 22
SIGN_TO_CODE = 28
CODE_WORDS = SF_VEC_SIZE // 8


def code_of(value: Float32) -> Uint32:
    """The e2m1 code of `value`, to nearest even and saturating."""
    size = cute.arch.fmin(cute.math.absf(value), Float32(E2M1_MAX)) * Float32(TO_CODE)
    bits = size.bitcast(Uint32)
    rounded = bits + (bits >> CODE_BIT & Uint32(1)) + Uint32((1 << CODE_BIT - 1) - 1)
    return rounded >> CODE_BIT | value.bitcast(Uint32) >> SIGN_TO_CODE & Uint32(8)


@cute.jit
def quantise_block(rH: cute.Tensor, gs: Float32, rCodes: cute.Tensor) -> Uint32:
    """rH (16) f32 to rCodes (2) u32, eight codes each; returns the block scale as a byte.

    sf = e4m3(max / (6 gs)) and code = e2m1(h / (sf gs)), to nearest even and saturating; where sf is 0, codes are 0.
    Reciprocals are correctly rounded, so a quotient is off by at most 1.5 ulp; the contract allows 4.
    """
    chains = [Float32(0.0), Float32(0.0)]
    for column in cutlass.range_constexpr(SF_VEC_SIZE):
        chains[column % 2] = cute.arch.fmax(chains[column % 2], cute.math.absf(rH[column]))
    raw = cute.arch.fmax(chains[0], chains[1]) * (Float32(1.0) / (gs * E2M1_MAX))
    sf = Uint32(
        cute.arch.inline_ptx(
            "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};",
            write_only_types=[Uint16],
            read_only_args=[Float32(0.0), raw],
        )
    )
    step = cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; }",
        write_only_types=[Float32],
        read_only_args=[scale_pair(sf)],
    )
    inverse = Float32(1.0) / (step * gs)
    for word in cutlass.range_constexpr(CODE_WORDS):
        codes = Uint32(0)
        for place in cutlass.range_constexpr(8):
            codes = codes | code_of(rH[8 * word + place] * inverse) << 4 * place
        rCodes[word] = cutlass.select_(step > 0.0, codes, Uint32(0))
    return sf


@cute.jit
def store_block(target: Nvfp4, row: Int32, block: Int32, rCodes: cute.Tensor, sf: Uint32):
    """Store the codes and the scale of columns 16 block .. 16 block + 15 of `row`."""
    offset = Int64(row) * target.codes.shape[1] + block * (SF_VEC_SIZE // 2)
    pointer = cute.recast_ptr(target.codes.iterator + cute.assume(offset, divby=SF_VEC_SIZE // 2), dtype=Uint32)
    cute.autovec_copy(rCodes, cute.make_tensor(pointer, cute.make_layout(CODE_WORDS)))
    place = scale_offset(row, target.sf.shape[1], block // 4) + block % 4
    cute.make_tensor(target.sf.iterator + place, cute.make_layout(1))[0] = cutlass.Uint8(sf)


@cute.jit
def round_block(mTarget: cute.Tensor, row: Int32, block: Int32, rH: cute.Tensor):
    """Store rH (16) f32 as bf16 in columns 16 block .. 16 block + 15 of `row`."""
    rRounded = cute.make_rmem_tensor(SF_VEC_SIZE, BFloat16)
    rRounded.store(rH.load().to(BFloat16))
    offset = cute.assume(Int64(row) * mTarget.shape[1] + block * SF_VEC_SIZE, divby=SF_VEC_SIZE)
    cute.autovec_copy(rRounded, cute.make_tensor(mTarget.iterator + offset, cute.make_layout(SF_VEC_SIZE)))


@cute.kernel
def requantise_kernel(
    mTopkIds: cute.Tensor, mRowOfRoute: cute.Tensor, mH: cute.Tensor, mA2_gs: cute.Tensor | None, a2: RowsOf
):
    """Convert mH (rows, intermediate) f32 to a2, NVFP4 under mA2_gs (experts) or bf16; only rows with a route."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    index, _, _ = cute.arch.block_idx()
    blocks = mH.shape[1] // SF_VEC_SIZE
    route, block = (index * THREADS + thread) // blocks, (index * THREADS + thread) % blocks
    rH = cute.make_rmem_tensor(SF_VEC_SIZE, Float32)
    rCodes = cute.make_rmem_tensor(CODE_WORDS, Uint32)
    if route < cute.size(mTopkIds):
        expert = mTopkIds[route]
        if expert >= 0:
            row = mRowOfRoute[route]
            offset = cute.assume(Int64(row) * mH.shape[1] + block * SF_VEC_SIZE, divby=SF_VEC_SIZE)
            cute.autovec_copy(cute.make_tensor(mH.iterator + offset, cute.make_layout(SF_VEC_SIZE)), rH)
            if cutlass.const_expr(isinstance(a2, Nvfp4)):
                gs = mA2_gs[expert]  # pyright: ignore[reportOptionalSubscript] (const_expr narrows nothing)
                store_block(a2, row, block, rCodes, quantise_block(rH, gs, rCodes))
            else:
                round_block(a2, row, block, rH)
