# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
"""Quantises tokens to NVFP4 in one Triton kernel, bit for bit like megamoe.codec.nvfp4 on a CPU.

It takes 14 us for 8 tokens of 7168; the codec's many kernels take 86 us, and a layer of 48 experts 451 us
(results/records/h200-torch-ops.json). Only this module needs Triton, which ships with CUDA builds of torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megamoe.codec.nvfp4 import swizzled_shape

SF_VEC_SIZE = 16
WIDE = 4096
"""Rows of at least this many elements are processed by eight warps."""


@triton.jit
def rounded(size, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr):
    """Code and value of nonnegative numbers in a small float of MANTISSA bits, whose least exponent has the bits
    SMALLEST.

    Rounds to nearest even: adding 2**(23 - MANTISSA) times the power of two at or below a number keeps only those bits.
    """
    power = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, SMALLEST << 23)
    anchor = power + ((23 - MANTISSA) << 23)
    moved = size + anchor.to(tl.float32, bitcast=True)
    code = moved.to(tl.int32, bitcast=True) - anchor + ((power - (SMALLEST << 23)) >> (23 - MANTISSA))
    return code, moved - anchor.to(tl.float32, bitcast=True)


@triton.jit
def quantise_rows(x, x_gs, codes, sf, gs, hidden, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """Each program quantises a row of `hidden` elements, padded to BLOCK."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row.to(tl.int64) * hidden + at, mask=at < hidden, other=0.0).to(tl.float32)
    blocks = tl.reshape(values, (BLOCK // 16, 16))
    largest = tl.max(tl.abs(blocks), axis=1)
    if PER_TOKEN:
        top = tl.max(largest, axis=0)
        scale = tl.where(top > 0.0, tl.div_rn(top, 2688.0), 1.0)
    else:
        scale = tl.load(x_gs)
    tl.store(gs + row, scale)
    wanted = tl.div_rn(tl.div_rn(largest, 6.0), scale)
    sf_code, block_scale = rounded(tl.minimum(wanted, 448.0), 3, 121)
    step = block_scale * scale
    none = step <= 0.0
    scaled = tl.div_rn(blocks, tl.where(none, float("inf"), step)[:, None])
    sign = (scaled.to(tl.int32, bitcast=True) >> 28) & 8
    code, _ = rounded(tl.minimum(tl.abs(scaled), 6.0), 1, 127)
    code = tl.where(none[:, None], 0, code | sign)
    low, high = tl.split(tl.reshape(code, (BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2)
    tl.store(codes + row.to(tl.int64) * (hidden // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=pair < hidden // 2)
    # Block scales are swizzled as in specs/nvfp4_moe.yaml.
    j = tl.arange(0, BLOCK // 16)
    in_atom = (row % 32) * 16 + (row % 128) // 32 * 4 + j % 4
    place = sf + ((row // 128) * (hidden // 64) + j // 4) * 512 + in_atom
    tl.store(place, sf_code.to(tl.uint8), mask=j < hidden // 16)


def quantised_tokens(x: torch.Tensor, x_gs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes u8 [tokens, hidden / 2], swizzled block scales u8 and global scales f32 [tokens] of x [tokens, hidden].

    `x_gs` f32 [1]: one global scale for all tokens; or [0]: each token has its own. hidden is a multiple of 64. Block
    scales of the rows that pad the last atom are not written.
    """
    tokens, hidden = x.shape
    x = x.contiguous()
    codes = torch.empty(tokens, hidden // 2, dtype=torch.uint8, device=x.device)
    sf = torch.empty(swizzled_shape(tokens, hidden // SF_VEC_SIZE), dtype=torch.uint8, device=x.device)
    gs = torch.empty(tokens, device=x.device)
    per_token = not len(x_gs)
    width = triton.next_power_of_2(hidden)
    quantise_rows[(tokens,)](
        x, x_gs if len(x_gs) else gs, codes, sf, gs, hidden, PER_TOKEN=per_token, BLOCK=width,
        num_warps=8 if width >= WIDE else 4,
    )  # fmt: skip
    return codes, sf, gs
