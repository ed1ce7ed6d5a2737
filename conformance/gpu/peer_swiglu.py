# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false, reportUnknownVariableType=false
# pyright: reportOperatorIssue=false, reportCallIssue=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false
"""The rest of stage l1 after a peer's first GEMM: SwiGLU and requantisation to NVFP4, as a Triton kernel of ours.

No peer has this epilogue on Hopper. A program takes one route and BLOCKS blocks of 16 activations, reads gate and up as
bf16, and writes codes and swizzled scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCKS = 64
"""Blocks of 16 activations for each program."""
WARPS = 4


@triton.jit
def _code(magnitude):
    """Rounds numbers from 0 to 6 to e2m1, to nearest even."""
    code = tl.where(magnitude > 0.25, 1, 0) + tl.where(magnitude >= 0.75, 1, 0) + tl.where(magnitude > 1.25, 1, 0)
    code += tl.where(magnitude >= 1.75, 1, 0) + tl.where(magnitude > 2.5, 1, 0)
    return code + tl.where(magnitude >= 3.5, 1, 0) + tl.where(magnitude > 5.0, 1, 0)


@triton.jit
def _kernel(
    gate_up, token_gs, a2_gs, routes, codes, sf, clamp,
    INTER: tl.constexpr, INTERLEAVE: tl.constexpr, BLOCKS_HERE: tl.constexpr,
):  # fmt: skip
    route, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(routes + route)
    factor = tl.load(token_gs + tl.load(routes + tl.num_programs(0) + route))
    gs = tl.load(a2_gs + tl.load(routes + 2 * tl.num_programs(0) + route))
    block = part * BLOCKS_HERE + tl.arange(0, BLOCKS_HERE)[:, None, None]
    output = block * 16 + tl.arange(0, 8)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    inside = output < INTER
    at = gate_up + route.to(tl.int64) * (2 * INTER) + output // INTERLEAVE * (2 * INTERLEAVE) + output % INTERLEAVE
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32) * factor
    up = tl.load(at + INTERLEAVE, mask=inside, other=0.0).to(tl.float32) * factor
    gate = tl.minimum(gate, clamp)
    up = tl.maximum(tl.minimum(up, clamp), -clamp)
    h = gate * tl.sigmoid(gate) * up
    largest = tl.max(tl.max(tl.abs(h), axis=2), axis=1)
    scale = tl.minimum(largest / 6.0 / gs, 448.0).to(tl.float8e4nv)
    step = scale.to(tl.float32) * gs
    inverse = tl.where(step > 0, 1.0 / step, 0.0)[:, None, None]
    scaled = h * inverse
    code = _code(tl.minimum(tl.abs(scaled), 6.0)) | tl.where(scaled < 0, 8, 0)
    low, high = tl.split(code)
    flat_block = part * BLOCKS_HERE + tl.arange(0, BLOCKS_HERE)
    byte = flat_block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(codes + row * (INTER // 2) + byte, (low | (high << 4)).to(tl.uint8), mask=byte < INTER // 2)
    atom = (row // 128) * (INTER // 64) + flat_block // 4
    offset = atom * 512 + row % 32 * 16 + row % 128 // 32 * 4 + flat_block % 4
    tl.store(sf + offset, scale.to(tl.uint8, bitcast=True), mask=flat_block < INTER // 16)


class SwigluRequantise:
    """The kernel, bound to the routes of a case and to its outputs.

    `routes`: row, token and expert of each, int64 [routes]; `token_gs` f32 [tokens]; `a2_gs` f32 [experts]. It writes
    `codes`, u8 [rows, intermediate / 2], and `sf`, u8, swizzled.
    """

    def __init__(
        self,
        routes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scales: tuple[torch.Tensor, torch.Tensor],
        outputs: tuple[torch.Tensor, torch.Tensor],
        interleave: int,
        clamp: float,
    ) -> None:
        self._routes, self._scales, self._outputs = torch.stack(routes), scales, outputs
        self._interleave, self._clamp = interleave, clamp

    def __call__(self, gate_up: torch.Tensor) -> None:
        """`gate_up`: bf16 [routes, 2 * intermediate], sorted by expert, without the tokens' global scales."""
        codes, sf = self._outputs
        inter = codes.shape[1] * 2
        grid = (self._routes.shape[1], -(-inter // (16 * BLOCKS)))
        _kernel[grid](
            gate_up, self._scales[0], self._scales[1], self._routes, codes, sf, self._clamp,
            inter, self._interleave, BLOCKS, num_warps=WARPS,
        )  # fmt: skip
