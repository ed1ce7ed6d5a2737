"""Requantisation to NVFP4: 64 activations of a row, four blocks of 16, in the registers of one thread.

`emit_requantise` is part of the first GEMM's epilogue; `requantise_kernel` does the same from activations in memory.

Rounding contract: block scale = e4m3(max|block| * (1/6) * (1/gs)), code = e2m1(value * 1/(scale * gs)). Products and
1/gs round to nearest even in fp32, 1/(scale * gs) uses rcp.approx.ftz (within 1 ulp), and conversions round to nearest
even and saturate. A block whose scale is 0 has codes 0. Close to a rounding boundary the result may be the neighbour of
what true divisions give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from backends.ptx.builder import CTAID_X, CTAID_Y, TID_X, Builder
from backends.ptx.moe.layout import ATOM_BYTES, SF_VEC_SIZE, TILE_M
from backends.ptx.operands import Register, Vector, at
from backends.ptx.parameters import U32, Parameters, Pointer
from megamoe.contract import Target

ENTRY = "moe_requantise"
THREADS = TILE_M
PER_VECTOR = 4
E2M1_MAX = 6.0
BLOCKS = 4
"""The scales of this many blocks fill a 32-bit word of a scale factor atom."""
WIDTH = BLOCKS * SF_VEC_SIZE
CODES_PER_WORD = 8
TO_CODE = 2.0**-126
CODE_BIT = 22
SIGN_TO_CODE = 28
SIGN_OF_CODE = 0x8


class GlobalScale:
    """A global scale of activations with its reciprocal, in registers."""

    def __init__(self, x: Builder) -> None:
        self._x = x
        self.gs, self.inverse = x.reg("a2_scale", "f32"), x.reg("a2_inverse", "f32")

    def load(self, table: Register, expert: Register) -> None:
        """Loads entry `expert` of an f32 table in global memory and computes its reciprocal."""
        x = self._x
        x.emit("ld.global.f32", self.gs, at(x.indexed_wide("a2_gs_at", table, expert, 4)))
        x.emit("rcp.rn.f32", self.inverse, self.gs)


def code_word(x: Builder, values: Vector) -> Register:
    """The e2m1 codes of eight f32 `values`, the first in the lowest bits, rounded to nearest even and saturated. Uses
    cvt, which sm_100a has for e2m1."""
    pairs = x.regs("code_pair", "b8", CODES_PER_WORD // 2)
    for index, pair in enumerate(pairs):
        even, odd = values[2 * index : 2 * index + 2]
        x.emit("cvt.rn.satfinite.e2m1x2.f32", pair, odd, even)
    word = x.reg("code_word", "b32")
    x.emit("mov.b32", word, pairs)
    return word


def integer_code_word(x: Builder, values: Vector) -> Register:
    """Like code_word, but with integer arithmetic: sm_90a has no cvt to e2m1.

    |v| * 2^-126 is a float whose bits 24 to 22 are the code of v; for codes below 1 the exponent is 0 (a subnormal).
    Rounding these bits to nearest even rounds v, except for a v within 2^-24 of a midpoint below 1.
    """
    word = x.let("code_word", "mov.b32", 0)
    for index, value in enumerate(values):
        code = x.let("code", "abs.f32", value)
        x.emit("min.f32", code, code, E2M1_MAX)
        x.emit("mul.rn.f32", code, code, TO_CODE)
        bits = x.let("code_bits", "mov.b32", code)
        odd = x.let("odd", "shr.u32", bits, CODE_BIT)
        x.emit("and.b32", odd, odd, 1)
        x.emit("add.u32", bits, bits, odd)
        x.emit("add.u32", bits, bits, (1 << CODE_BIT - 1) - 1)
        x.emit("shr.u32", bits, bits, CODE_BIT)
        sign = x.let("sign", "mov.b32", value)
        x.emit("shr.u32", sign, sign, SIGN_TO_CODE)
        x.emit("and.b32", sign, sign, SIGN_OF_CODE)
        x.emit("or.b32", bits, bits, sign)
        x.emit("shl.b32", bits, bits, 4 * index)
        x.emit("or.b32", word, word, bits)
    return word


EncodeWord = Callable[[Builder, Vector], Register]
"""`code_word`, or `integer_code_word` on a target without cvt to e2m1."""


def emit_requantise(
    x: Builder, values: Vector, scale: GlobalScale, encode: EncodeWord = code_word
) -> tuple[Vector, Register]:
    """Eight words of codes and one word of four block scales, from WIDTH f32 `values`. The values are overwritten."""
    blocks = [values[first : first + SF_VEC_SIZE] for first in range(0, WIDTH, SF_VEC_SIZE)]
    raw = [raw_scale(x, block, scale) for block in blocks]
    words: list[Register] = []
    pairs: list[Register] = []
    for low in range(0, BLOCKS, 2):
        pair = x.let("sf_pair", "cvt.rn.satfinite.e4m3x2.f32", raw[low + 1], raw[low])
        pairs.append(pair)
        decoded = x.let("sf_decoded", "cvt.rn.f16x2.e4m3x2", pair)
        halves = x.regs("sf_half", "b16", 2)
        x.emit("mov.b32", halves, decoded)
        for half, block in zip(halves, blocks[low : low + 2], strict=True):
            words += block_codes(x, block, half, scale, encode)
    scales = x.reg("sf_word", "b32")
    x.emit("mov.b32", scales, tuple(pairs))
    return tuple(words), scales


def raw_scale(x: Builder, block: Vector, scale: GlobalScale) -> Register:
    """max|block| / 6 / gs, in f32."""
    largest = x.let("largest", "abs.f32", block[0])
    size = x.reg("size", "f32")
    for value in block[1:]:
        x.emit("abs.f32", size, value)
        x.emit("max.f32", largest, largest, size)
    x.emit("mul.rn.f32", largest, largest, 1.0 / E2M1_MAX)
    x.emit("mul.rn.f32", largest, largest, scale.inverse)
    return largest


def block_codes(
    x: Builder, block: Vector, sf: Register, scale: GlobalScale, encode: EncodeWord = code_word
) -> list[Register]:
    """Two words of codes for the block scale `sf`, an f16. The `block` is overwritten."""
    step = x.let("step", "cvt.f32.f16", sf)
    is_zero = x.let("sf_is_zero", "setp.eq.f32", step, 0.0)
    x.emit("mul.rn.f32", step, step, scale.gs)
    inverse = x.let("inverse_step", "rcp.approx.ftz.f32", step)
    for value in block:
        x.emit("mul.rn.f32", value, value, inverse)
    words: list[Register] = []
    for first in range(0, SF_VEC_SIZE, CODES_PER_WORD):
        word = encode(x, block[first : first + CODES_PER_WORD])
        x.emit("selp.b32", word, 0, word, is_zero, note="0 times 1/0 is no number")
        words.append(word)
    return words


def word_in_atom(x: Builder, row: Register) -> Register:
    """u64 byte offset of the word of row `row` (below 128) in a scale factor atom: (row % 32) * 16 + (row / 32) * 4."""
    lane = x.let("atom_lane", "and.b32", row, 31)
    quarter = x.let("atom_quarter", "shr.u32", row, 5)
    x.emit("shl.b32", lane, lane, 4)
    x.emit("mad.lo.u32", lane, quarter, 4, lane)
    return x.let("word_offset", "cvt.u64.u32", lane)


@dataclass(frozen=True, slots=True)
class RequantiseParams(Parameters):
    """`h`: f32 [rows][intermediate]. bf16 activations go to `a2_codes` and have no scales."""

    h: Pointer
    a2_gs: Pointer
    row_tiles: Pointer
    expert_of_tile: Pointer
    token_of_row: Pointer
    a2_codes: Pointer
    a2_sf: Pointer
    tokens: U32
    intermediate: U32


@cache
def requantise_kernel(
    version: tuple[int, int], target: Target = "sm_100a", encode: EncodeWord | None = code_word
) -> Builder:
    """Grid: (maximum number of row tiles, groups of WIDTH activations). Rows that only pad a tile are left alone.

    Without `encode` the activations become bf16.
    """
    x = Builder(ENTRY if encode else f"{ENTRY}_bf16", target=target, version=version, block=THREADS)
    x.header([f"Requantisation of f32 activations to {'NVFP4' if encode else 'bf16'}, one row a thread."])
    params = RequantiseParams.declare(x)
    x.section("which row, which activations")
    tile = x.let("tile", "mov.u32", CTAID_X)
    exists = x.let("tile_exists", "setp.lt.u32", tile, x.let("tile_count", "ld.global.u32", at(params.row_tiles)))
    with x.when(exists, "tile"):
        thread = x.let("thread", "mov.u32", TID_X)
        row = x.let("row", "mad.lo.u32", tile, TILE_M, thread)
        is_token = x.let("is_token", "setp.lt.u32", x.entry_of("token", params.token_of_row, row), params.tokens)
        with x.when(is_token, "row"):
            _requantise_row(x, params, tile, thread, row, encode)
    x.emit("ret")
    return x


def _requantise_row(
    x: Builder, params: RequantiseParams, tile: Register, thread: Register, row: Register, encode: EncodeWord | None
) -> None:
    scale = GlobalScale(x)
    if encode:
        scale.load(params.a2_gs, x.entry_of("expert", params.expert_of_tile, tile))
    group = x.let("group", "mov.u32", CTAID_Y)
    element = x.let("element", "mul.wide.u32", row, params.intermediate)
    x.emit("add.s64", element, element, x.let("first", "mul.wide.u32", group, WIDTH))
    values = x.regs("value", "f32", WIDTH)
    source = x.let("source_at", "shl.b64", element, 2)
    x.emit("add.s64", source, source, params.h)
    for start in range(0, WIDTH, PER_VECTOR):
        x.emit("ld.global.v4.f32", values[start : start + PER_VECTOR], at(source, start * 4))
    if not encode:
        target = x.let("rounded_at", "shl.b64", element, 1)
        x.emit("add.s64", target, target, params.a2_codes)
        packed = x.packed_bf16("rounded", values)
        for start in range(0, len(packed), PER_VECTOR):
            x.emit("st.global.v4.b32", at(target, start * 4), packed[start : start + PER_VECTOR])
        return
    words, scales = emit_requantise(x, values, scale, encode)
    codes = x.let("codes_at", "shr.u64", element, 1)
    x.emit("add.s64", codes, codes, params.a2_codes)
    for start in range(0, len(words), PER_VECTOR):
        x.emit("st.global.v4.b32", at(codes, start * 4), words[start : start + PER_VECTOR])
    atoms = x.let("atoms_of_row", "shr.u32", params.intermediate, WIDTH.bit_length() - 1)
    atom = x.let("atom", "mad.lo.u32", tile, atoms, group)
    target = x.indexed_wide("scales_at", params.a2_sf, atom, ATOM_BYTES)
    x.emit("add.s64", target, target, word_in_atom(x, thread))
    x.emit("st.global.b32", at(target), scales)
