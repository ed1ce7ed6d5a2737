"""The epilogue of the first GEMM: SwiGLU of gate and up, which are in one thread, and requantisation to NVFP4.

repack.py puts the gate of output j in row g of a warp's 16 and its up in row g + 8, so the accumulator gives both to
one thread. A block of 16 outputs spans two warps, so activations go through shared memory, some tokens at a time; then
a thread has a whole block. Rounding contract: as in moe/swiglu.py and moe/requantise.py, with the factor x_gs * w1_gs *
2^14 (expand.py, exact in 2^14), or w1_gs * 2^7 if tokens are bf16; then times the top-k weight if it comes before the
requantisation, which just rounds if activations are bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from backends.ptx.builder import Builder
from backends.ptx.moe.layout import ATOM_BLOCKS, ATOM_BYTES, ATOM_ROWS, SF_VEC_SIZE
from backends.ptx.moe.requantise import GlobalScale, block_codes, integer_code_word, raw_scale, word_in_atom
from backends.ptx.moe.swiglu import Swiglu
from backends.ptx.operands import Register, Vector, at
from backends.ptx.parameters import F32, U32, Parameters, Pointer
from backends.ptx.sm90_moe.frame import WARPGROUP_THREADS, ColumnFrame, ColumnTile
from backends.ptx.sm90_moe.geometry import STAGED_PITCH, WARPGROUP_ROWS

BLOCKS = WARPGROUP_ROWS // 2 // SF_VEC_SIZE
"""Blocks in the outputs of a warpgroup."""
ATOM_OUTPUTS = ATOM_BLOCKS * SF_VEC_SIZE
F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class SwigluForm:
    """Compiled into the kernel. `clamped`: gates are limited from above, ups from both sides. `weighted`: the top-k
    weight is applied before the requantisation."""

    clamped: bool
    weighted: bool


@dataclass(frozen=True, slots=True)
class SwigluColumnsParams(Parameters):
    """Parameters after ColumnGemmParams. bf16 activations go to `a2_codes` and have no scales. `row_factor`,
    `row_weight`: f32 for each row of each column tile (expand.py)."""

    row_factor: Pointer
    row_weight: Pointer
    a2_gs: Pointer
    a2_codes: Pointer
    a2_sf: Pointer
    intermediate: U32
    clamp: F32


class SwigluColumns:
    """The registers of one thread."""

    def __init__(self, frame: ColumnFrame, params: SwigluColumnsParams, variant: SwigluForm) -> None:
        x = frame.x
        self.frame, self.params, self.variant = frame, params, variant
        self.a2 = GlobalScale(x)
        self.swiglu = Swiglu(x, params.clamp if variant.clamped else None)
        self.stored_at, self.block_at = x.reg("stored_at", "u32"), x.reg("block_at", "u32")
        self.token, self.block = x.reg("staged_token", "u32"), x.reg("staged_block", "u32")
        self.pair = x.reg("token_pair", "u32")

    def begin(self) -> None:
        """Computes where a thread stages its activations, and which block of which staged token it requantises."""
        x, frame = self.frame.x, self.frame
        self.swiglu.begin()
        staged = x.let("staged", "mad.lo.u32", frame.warpgroup, frame.tiling.staged_bytes, frame.smem.base)
        x.emit("add.u32", staged, staged, frame.smem.layout["staged"])
        quad, quad_lane = x.let("out_quad", "shr.u32", frame.lane, 2), x.let("quad_lane", "and.b32", frame.lane, 3)
        x.emit("shl.b32", self.pair, quad_lane, 1)
        output = x.let("output", "mad.lo.u32", x.let("warp_in_four", "and.b32", frame.warp, 3), 8, quad)
        x.emit("mad.lo.u32", self.stored_at, self.pair, STAGED_PITCH, staged)
        x.emit("mad.lo.u32", self.stored_at, output, F32_BYTES, self.stored_at)
        inside = x.let("thread_in_group", "and.b32", frame.thread, WARPGROUP_THREADS - 1)
        x.emit("div.u32", self.token, inside, BLOCKS)
        x.emit("and.b32", self.block, inside, BLOCKS - 1)
        x.emit("mad.lo.u32", self.block_at, self.token, STAGED_PITCH, staged)
        x.emit("mad.lo.u32", self.block_at, self.block, SF_VEC_SIZE * F32_BYTES, self.block_at)

    def begin_tile(self, tile: ColumnTile) -> None:
        """Loads the global scale of the expert's activations."""
        if not self.frame.tiling.bf16:
            self.a2.load(self.params.a2_gs, tile.expert)

    def finish(self, tile: ColumnTile, width: int, accumulator: Vector) -> None:
        """Stores the tile through shared memory, some tokens at a time."""
        x, frame, params = self.frame.x, self.frame, self.params
        row = x.let("first_pair", "mad.lo.u32", tile.column, frame.tiling.widest, self.pair)
        factors = x.indexed_wide("factors_at", params.row_factor, row, F32_BYTES)
        weights = x.indexed_wide("weights_at", params.row_weight, row, F32_BYTES) if self.variant.weighted else None
        at_once = min(width, frame.tiling.staged_rows)
        for first in range(0, width, at_once):
            frame.sync_warpgroup("the staging is free")
            for group in range(first // 8, min(first + at_once, width) // 8):
                mine = accumulator[4 * group : 4 * group + 4]
                self._stage(mine, _pair(x, factors, group), weights and _pair(x, weights, group), 8 * group - first)
            frame.sync_warpgroup("the staging is full")
            busy = x.let("has_block", "setp.lt.u32", self.token, at_once)
            with x.when(busy, "requantise"):
                (self._round if frame.tiling.bf16 else self._requantise)(tile, first)

    def _stage(self, mine: Vector, factors: Vector, weights: Vector | None, token: int) -> None:
        """Stages two activations, for the thread's two tokens of the eight that begin at staged token `token`."""
        x = self.frame.x
        for index in range(2):
            value = self.swiglu.activation(mine[index], mine[2 + index], factors[index])
            if weights is not None:
                x.emit("mul.rn.f32", value, value, weights[index])
            x.emit("st.shared.f32", at(self.stored_at, (token + index) * STAGED_PITCH), value)

    def _requantise(self, tile: ColumnTile, first: int) -> None:
        """Requantises one block of staged token `self.token`, row `first` + token of the tile."""
        x, params = self.frame.x, self.params
        values = self._staged_block()
        raw = raw_scale(x, values, self.a2)
        scale = x.let("sf", "cvt.rn.satfinite.e4m3x2.f32", 0.0, raw)
        halves = x.regs("sf_half", "b16", 2)
        x.emit("mov.b32", halves, x.let("sf_decoded", "cvt.rn.f16x2.e4m3x2", scale))
        words = block_codes(x, values, halves[0], self.a2, integer_code_word)
        with self._expert_row(tile, first) as row:
            element = x.let("code_at", "mul.wide.u32", row, params.intermediate)
            x.emit("shr.u64", element, element, 1)
            x.emit("add.s64", element, element, params.a2_codes)
            block = self._block_of_row(tile)
            place = x.indexed_wide("block_codes_at", element, block, SF_VEC_SIZE // 2)
            x.emit("st.global.v2.b32", at(place), tuple(words))
            self._store_scale(block, row, scale)

    def _round(self, tile: ColumnTile, first: int) -> None:
        """Like _requantise, but to bf16."""
        x, params = self.frame.x, self.params
        words = x.packed_bf16("rounded", self._staged_block())
        with self._expert_row(tile, first) as row:
            element = x.let("element", "mul.wide.u32", row, params.intermediate)
            x.emit("shl.b64", element, element, 1)
            x.emit("add.s64", element, element, params.a2_codes)
            place = x.indexed_wide("block_at", element, self._block_of_row(tile), 2 * SF_VEC_SIZE)
            for half in range(2):
                x.emit("st.global.v4.b32", at(place, 16 * half), words[4 * half : 4 * half + 4])

    def _staged_block(self) -> Vector:
        """The activations of the thread's block."""
        x, values = self.frame.x, self.frame.x.regs("value", "f32", SF_VEC_SIZE)
        for start in range(0, SF_VEC_SIZE, 4):
            x.emit("ld.shared.v4.f32", values[start : start + 4], at(self.block_at, start * F32_BYTES))
        return values

    @contextmanager
    def _expert_row(self, tile: ColumnTile, first: int) -> Iterator[Register]:
        """The index of the expert row of staged token `self.token`. The body runs only if the tile has that row."""
        x = self.frame.x
        row = x.let("staged_row", "add.u32", self.token, first)
        is_row = x.let("is_row", "setp.lt.u32", row, tile.rows)
        with x.when(is_row, "store"):
            x.emit("add.u32", row, row, tile.first_row)
            yield row

    def _block_of_row(self, tile: ColumnTile) -> Register:
        """The index of the thread's block in its row of a2."""
        x, frame = self.frame.x, self.frame
        block = x.let("block_of_row", "mad.lo.u32", tile.tile_m, frame.tiling.warpgroups, frame.warpgroup)
        x.emit("mad.lo.u32", block, block, BLOCKS, self.block)
        return block

    def _store_scale(self, block: Register, row: Register, scale: Register) -> None:
        """Stores the byte of a block in its atom."""
        x, params = self.frame.x, self.params
        atoms = x.let("atoms_of_row", "div.u32", params.intermediate, ATOM_OUTPUTS)
        atom = x.let("atom", "div.u32", row, ATOM_ROWS)
        x.emit("mul.lo.u32", atom, atom, atoms)
        x.emit("add.u32", atom, atom, x.let("own_atom", "shr.u32", block, ATOM_BLOCKS.bit_length() - 1))
        target = x.indexed_wide("scale_at", params.a2_sf, atom, ATOM_BYTES)
        x.emit("add.s64", target, target, word_in_atom(x, x.let("atom_row", "and.b32", row, ATOM_ROWS - 1)))
        x.emit("mad.wide.u32", target, x.let("block_in_atom", "and.b32", block, ATOM_BLOCKS - 1), 1, target)
        x.emit("st.global.u8", at(target), scale)


def _pair(x: Builder, table: Register, group: int) -> Vector:
    """The table entries of this thread's two tokens in group `group` of eight."""
    values = x.regs("of_pair", "f32", 2)
    x.emit("ld.global.v2.f32", values, at(table, 8 * group * F32_BYTES))
    return values
