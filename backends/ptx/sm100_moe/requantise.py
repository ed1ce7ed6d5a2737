"""From 64 activations of a row to NVFP4: four blocks of 16, in the registers of one thread.

Rounding contract: block scale = e4m3(max|block| * (1/6) * (1/gs)), code = e2m1(value * 1/(scale * gs)), products and
1/gs to nearest even in fp32, 1/(scale * gs) by rcp.approx.ftz (within 1 ulp), conversions to nearest even and
saturating. A block whose scale is 0 has codes 0. Next to a rounding step this may be the neighbour of what divisions
give.
"""

from __future__ import annotations

from backends.ptx.builder import Builder
from backends.ptx.operands import Register
from backends.ptx.sm100_moe.geometry import SF_VEC_SIZE

E2M1_MAX = 6.0
BLOCKS = 4
"""Blocks whose scales fill a 32-bit word of a scale factor atom."""
WIDTH = BLOCKS * SF_VEC_SIZE
CODES_PER_WORD = 8


class GlobalScale:
    """A global scale of activations with its reciprocal, in registers."""

    def __init__(self, x: Builder) -> None:
        self._x = x
        self.gs, self.inverse = x.reg("a2_scale", "f32"), x.reg("a2_inverse", "f32")

    def invert(self) -> None:
        """To be emitted when `gs` has been loaded."""
        self._x.emit("rcp.rn.f32", self.inverse, self.gs)


def emit_requantise(
    x: Builder, values: tuple[Register, ...], scale: GlobalScale
) -> tuple[tuple[Register, ...], Register]:
    """Eight words of codes and one of four block scales, from WIDTH f32 `values`, which are overwritten."""
    blocks = [values[first : first + SF_VEC_SIZE] for first in range(0, WIDTH, SF_VEC_SIZE)]
    raw = [_raw_scale(x, block, scale) for block in blocks]
    words: list[Register] = []
    pairs: list[Register] = []
    for low in range(0, BLOCKS, 2):
        pair = x.let("sf_pair", "cvt.rn.satfinite.e4m3x2.f32", raw[low + 1], raw[low])
        pairs.append(pair)
        decoded = x.let("sf_decoded", "cvt.rn.f16x2.e4m3x2", pair)
        halves = x.regs("sf_half", "b16", 2)
        x.emit("mov.b32", halves, decoded)
        for half, block in zip(halves, blocks[low : low + 2], strict=True):
            words += _codes(x, block, half, scale)
    scales = x.reg("sf_word", "b32")
    x.emit("mov.b32", scales, tuple(pairs))
    return tuple(words), scales


def _raw_scale(x: Builder, block: tuple[Register, ...], scale: GlobalScale) -> Register:
    largest = x.let("largest", "abs.f32", block[0])
    size = x.reg("size", "f32")
    for value in block[1:]:
        x.emit("abs.f32", size, value)
        x.emit("max.f32", largest, largest, size)
    x.emit("mul.rn.f32", largest, largest, 1.0 / E2M1_MAX)
    x.emit("mul.rn.f32", largest, largest, scale.inverse)
    return largest


def _codes(x: Builder, block: tuple[Register, ...], sf: Register, scale: GlobalScale) -> list[Register]:
    step = x.let("step", "cvt.f32.f16", sf)
    is_zero = x.let("sf_is_zero", "setp.eq.f32", step, 0.0)
    x.emit("mul.rn.f32", step, step, scale.gs)
    inverse = x.let("inverse_step", "rcp.approx.ftz.f32", step)
    for value in block:
        x.emit("mul.rn.f32", value, value, inverse)
    words: list[Register] = []
    for first in range(0, SF_VEC_SIZE, CODES_PER_WORD):
        pairs = x.regs("code_pair", "b8", CODES_PER_WORD // 2)
        for index, pair in enumerate(pairs):
            even, odd = block[first + 2 * index : first + 2 * index + 2]
            x.emit("cvt.rn.satfinite.e2m1x2.f32", pair, odd, even)
        word = x.reg("code_word", "b32")
        x.emit("mov.b32", word, pairs)
        x.emit("selp.b32", word, 0, word, is_zero, note="0 times 1/0 is no number")
        words.append(word)
    return words
