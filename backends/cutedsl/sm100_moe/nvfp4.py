# pyright: reportMissingImports=false
"""Requantisation to NVFP4 rows, one thread per 64 columns of a row.

64 columns are four blocks of 16: 32 bytes of codes, and the four scales of the row in one atom.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float4E2M1FN, Float8E4M3FN, Float32, Int32, Int64, Uint32

from backends.cutedsl.moe.layout import SF_VEC_SIZE
from backends.cutedsl.moe.nvfp4 import Nvfp4, scale_word
from backends.cutedsl.sm100_moe.plan import H_COLUMNS

BLOCKS = H_COLUMNS // SF_VEC_SIZE
CODE_BYTES = H_COLUMNS // 2


@cute.jit
def largest(rH: cute.Tensor, first: cutlass.Constexpr) -> Float32:
    """max |rH[first : first + 16]|, in two chains."""
    chains = [Float32(0.0), Float32(0.0)]
    for column in cutlass.range_constexpr(SF_VEC_SIZE):
        chains[column % 2] = cute.arch.fmax(chains[column % 2], cute.math.absf(rH[first + column]))
    return cute.arch.fmax(chains[0], chains[1])


@cute.jit
def quantise(rH: cute.Tensor, gs: Float32, rCodes: cute.Tensor) -> Uint32:
    """rH (64) f32, which is overwritten, to rCodes (8) u32, eight codes each; returns the four block scales as bytes.

    sf = e4m3(max / (6 gs)) and code = e2m1(h / (sf gs)), to nearest even and saturating; where sf is 0, codes are 0.
    Reciprocals are correctly rounded, so a quotient is off by at most 1.5 ulp; the contract allows 4.
    """
    rScales = cute.make_rmem_tensor(BLOCKS, Float32)
    rSF = cute.make_rmem_tensor(BLOCKS, Float8E4M3FN)
    to_scale = Float32(1.0) / (gs * 6.0)
    for block in cutlass.range_constexpr(BLOCKS):
        rScales[block] = largest(rH, block * SF_VEC_SIZE) * to_scale
    rSF.store(rScales.load().to(Float8E4M3FN))
    rScales.store(rSF.load().to(Float32))
    for block in cutlass.range_constexpr(BLOCKS):
        step = rScales[block] * gs
        inverse = Float32(1.0) / step
        for column in cutlass.range_constexpr(block * SF_VEC_SIZE, (block + 1) * SF_VEC_SIZE, 2):
            pair = (rH[column], rH[column + 1])
            rH[column], rH[column + 1] = cute.arch.mul_packed_f32x2(pair, (inverse, inverse))
        rBlock = cute.make_tensor(rH.iterator + block * SF_VEC_SIZE, cute.make_layout(SF_VEC_SIZE))
        rBlockCodes = cute.make_rmem_tensor(SF_VEC_SIZE, Float4E2M1FN)
        rBlockCodes.store(rBlock.load().to(Float4E2M1FN))
        words = cute.make_tensor(cute.recast_ptr(rBlockCodes.iterator, dtype=Uint32), cute.make_layout(2))
        for word in cutlass.range_constexpr(2):
            rCodes[2 * block + word] = cutlass.select_(step > 0.0, words[word], Uint32(0))
    return cute.make_tensor(cute.recast_ptr(rSF.iterator, dtype=Uint32), cute.make_layout(1))[0]


@cute.jit
def store_quantised(target: Nvfp4, row: Int32, group: Int32, rCodes: cute.Tensor, scales: Uint32):
    """Store codes and scales of columns 64 group .. 64 group + 63 of `row`: a 32-byte sector, and a word of an atom.

    The 128 words of a tile's scales fill one atom and 32 bytes of codes fill a sector, so a TMA store through shared
    memory would save no traffic.
    """
    offset = Int64(row) * target.codes.shape[1] + group * CODE_BYTES
    pointer = cute.recast_ptr(target.codes.iterator + cute.assume(offset, divby=CODE_BYTES), dtype=Uint32)
    cute.autovec_copy(rCodes, cute.make_tensor(pointer, cute.make_layout(CODE_BYTES // 4)))
    scale_word(target.sf, row, target.sf.shape[1], group)[0] = scales
