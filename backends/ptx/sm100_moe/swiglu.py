"""The epilogue of the first GEMM: SwiGLU of gate and up, straight from tensor memory, requantised to NVFP4.

Rows of W1 alternate between `interleave` gates and as many ups: the up of gate column c is in column c + interleave of
the same thread. Rounding contract: g and u are the accumulators times (x_gs * w1_gs); silu(g) =
g * 1/(1 + 2^(-g log2 e)) with ex2.approx.ftz and rcp.approx.ftz, every other operation to nearest even in fp32; then
times u, then times the top-k weight if it comes before the requantisation.

A thread writes its own results: 32 bytes of codes, a whole sector, and a word of scales for half a row. That is at most
a fifth of what the second GEMM writes, too little to take the way through shared memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from backends.ptx.operands import Register, Vector, at
from backends.ptx.parameters import F32, U32, Parameters, Pointer
from backends.ptx.sm100_moe.frame import GemmFrame, Tile
from backends.ptx.sm100_moe.geometry import ATOM_BYTES, HALF_N, TILE_N
from backends.ptx.sm100_moe.requantise import WIDTH, GlobalScale, emit_requantise, word_in_atom

LOG2_E = math.log2(math.e)
HALF_CODE_BYTES = WIDTH // 2


@dataclass(frozen=True, slots=True)
class SwigluVariant:
    """Compiled into the kernel. `interleave`: granularity of gate and up rows. `clamped`: gates are limited from above,
    ups from both sides. `weighted`: the top-k weight comes before the requantisation."""

    interleave: int
    clamped: bool
    weighted: bool

    def gate_column(self, element: int) -> int:
        """The accumulator column of the gate of activation `element`; the up is `interleave` further on."""
        group, inside = divmod(element, self.interleave)
        return 2 * self.interleave * group + inside


@dataclass(frozen=True, slots=True)
class SwigluParams(Parameters):
    """Parameters behind GemmParams."""

    token_of_row: Pointer
    route_of_row: Pointer
    x_gs: Pointer
    w1_gs: Pointer
    a2_gs: Pointer
    topk_weights: Pointer
    a2_codes: Pointer
    a2_sf: Pointer
    tokens: U32
    intermediate: U32
    clamp: F32


class SwigluRow:
    """The registers of one thread, which owns one row."""

    def __init__(self, frame: GemmFrame, params: SwigluParams, variant: SwigluVariant) -> None:
        x = frame.x
        self.frame, self.params, self.variant = frame, params, variant
        self.scale, self.weight = x.reg("scale", "f32"), x.reg("weight", "f32")
        self.a2 = GlobalScale(x)
        self.codes, self.scales = x.reg("codes_at", "u64"), x.reg("scales_at", "u64")
        self.negated_clamp = x.reg("negated_clamp", "f32")

    def begin(self) -> None:
        """Makes the lower limit of the ups."""
        if self.variant.clamped:
            self.frame.x.emit("neg.f32", self.negated_clamp, self.params.clamp)

    def end(self) -> None:
        """Nothing to wait for: each thread stored by itself."""

    def begin_tile(self, tile: Tile, row: Register) -> None:
        """Loads the scales of this row; 0 for a row that fills up a tile, so that its activations are zeros."""
        x, params = self.frame.x, self.params
        token = x.entry_of("token", params.token_of_row, row)
        is_token = x.let("is_token", "setp.lt.u32", token, params.tokens)
        x.emit("mov.f32", self.scale, 0.0)
        x.emit("ld.global.f32", self.scale, at(x.indexed_wide("x_gs_at", params.x_gs, token, 4)), guard=is_token)
        if self.variant.weighted:
            route = x.entry_of("route", params.route_of_row, row)
            x.emit("mov.f32", self.weight, 0.0)
            weight_at = at(x.indexed_wide("weight_at", params.topk_weights, route, 4))
            x.emit("ld.global.f32", self.weight, weight_at, guard=is_token)
        w1_scale = x.let("w1_scale", "ld.global.f32", at(x.indexed_wide("w1_gs_at", params.w1_gs, tile.expert, 4)))
        x.emit("mul.rn.f32", self.scale, self.scale, w1_scale)
        x.emit("ld.global.f32", self.a2.gs, at(x.indexed_wide("a2_gs_at", params.a2_gs, tile.expert, 4)))
        self.a2.invert()
        self._place_outputs(tile, row)

    def _place_outputs(self, tile: Tile, row: Register) -> None:
        """a2_codes [rows, intermediate / 2]; a2_sf [row tiles, intermediate / 64] atoms, one word a row and WIDTH."""
        x, params = self.frame.x, self.params
        first = x.let("first_activation", "mul.lo.u32", tile.n_tile, TILE_N // 2)
        element = x.let("first_code", "mul.wide.u32", row, params.intermediate)
        wide = x.let("first_wide", "cvt.u64.u32", first)
        x.emit("add.s64", element, element, wide)
        x.emit("shr.u64", element, element, 1)
        x.emit("add.s64", self.codes, params.a2_codes, element)
        atoms = x.let("atoms_of_row", "shr.u32", params.intermediate, WIDTH.bit_length() - 1)
        atom = x.let("first_atom", "shr.u32", first, WIDTH.bit_length() - 1)
        x.emit("mad.lo.u32", atom, tile.row_tile, atoms, atom)
        x.emit("mad.wide.u32", self.scales, atom, ATOM_BYTES, params.a2_sf)
        x.emit("add.s64", self.scales, self.scales, word_in_atom(x, self.frame.thread))

    def finish_half(self, half: Register, accumulator: Vector) -> None:
        """WIDTH activations from HALF_N columns."""
        x = self.frame.x
        values = [self._activation(accumulator, element) for element in range(HALF_N // 2)]
        words, scales = emit_requantise(x, tuple(values), self.a2)
        codes = x.indexed_wide("half_codes_at", self.codes, half, HALF_CODE_BYTES)
        for first in range(0, len(words), 4):
            x.emit("st.global.v4.b32", at(codes, first * 4), words[first : first + 4])
        x.emit("st.global.b32", at(x.indexed_wide("half_scales_at", self.scales, half, ATOM_BYTES)), scales)

    def _activation(self, accumulator: Vector, element: int) -> Register:
        """The activation, in the register of its gate."""
        x, variant = self.frame.x, self.variant
        column = variant.gate_column(element)
        gate, up = accumulator[column], accumulator[column + variant.interleave]
        x.emit("mul.rn.f32", gate, gate, self.scale)
        x.emit("mul.rn.f32", up, up, self.scale)
        if variant.clamped:
            x.emit("min.f32", gate, gate, self.params.clamp)
            x.emit("min.f32", up, up, self.params.clamp)
            x.emit("max.f32", up, up, self.negated_clamp)
        sigmoid = x.let("sigmoid", "mul.rn.f32", gate, -LOG2_E)
        x.emit("ex2.approx.ftz.f32", sigmoid, sigmoid)
        x.emit("add.rn.f32", sigmoid, sigmoid, 1.0)
        x.emit("rcp.approx.ftz.f32", sigmoid, sigmoid)
        x.emit("mul.rn.f32", gate, gate, sigmoid)
        x.emit("mul.rn.f32", gate, gate, up)
        if variant.weighted:
            x.emit("mul.rn.f32", gate, gate, self.weight)
        return gate
