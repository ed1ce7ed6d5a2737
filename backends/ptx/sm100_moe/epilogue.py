"""Warps 0-3: accumulators out of tensor memory, one row of the tile per thread.

A thread holds half of its row, HALF_N columns, at a time. The half shared with the next tile's accumulator goes first:
once it is in registers the MMA warp may go on, and the rest of the epilogue overlaps with the next tile.

The first GEMM's epilogue is SwiGLU of gate and up, straight from tensor memory, requantised to NVFP4. Rows of W1
alternate between `interleave` gates and as many ups: the up of gate column c is in column c + interleave of the same
thread. Rounding contract: as in moe/swiglu.py, with the factor x_gs * w1_gs; then times the top-k weight if it comes
before the requantisation. Each thread writes its own results: 32 bytes of codes, a whole sector, and a word of scales
for half a row. That is at most a fifth of what the second GEMM writes, too little to be worth staging in shared memory.

The second GEMM's epilogue writes bf16 expert rows through shared memory with TMA. Rounding contract: accumulator times
(a2_gs * w2_gs), rounded to nearest even in fp32, then to bf16. Each warp hands over its own 32 rows, STAGED_COLUMNS
columns at a time, so that no warp waits for another. A thread alone would write scattered 16-byte pieces; TMA writes
whole sectors. Padding rows are written along with the others of their warp and mean nothing; a warp without a token
writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from backends.ptx.builder import FULL_WARP
from backends.ptx.moe.layout import ATOM_BYTES
from backends.ptx.moe.requantise import WIDTH, GlobalScale, emit_requantise, word_in_atom
from backends.ptx.moe.shape import SwigluVariant
from backends.ptx.moe.swiglu import Swiglu
from backends.ptx.operands import Address, Register, Vector, at
from backends.ptx.parameters import F32, U32, Map, Parameters, Pointer
from backends.ptx.sm100_moe.frame import GemmFrame, Tile
from backends.ptx.sm100_moe.geometry import (
    ACCUMULATOR_STRIDE,
    EPILOGUE_WARPS,
    HALF_N,
    STAGED_COLUMNS,
    STAGED_ROW_BYTES,
    STAGED_WARP_BYTES,
    TILE_N,
)
from backends.ptx.tcgen05 import lanes_of_warp

CHUNK = HALF_N
"""Columns per tcgen05.ld. ptxas would delay a second load, and the arrival after it, to save registers."""
SHARED_COLUMN = ACCUMULATOR_STRIDE
"""Both accumulators contain columns SHARED_COLUMN to SHARED_COLUMN + HALF_N - 1."""


class RowEpilogue(Protocol):
    """How one GEMM handles a row."""

    def begin(self) -> None:
        """Runs once, in the warps of the epilogue."""
        ...

    def begin_tile(self, tile: Tile, row: Register) -> None:
        """Loads what the padded row `row` needs, before the wait for the accumulator."""
        ...

    def finish_half(self, half: Register, accumulator: Vector) -> None:
        """Handles columns half * HALF_N onwards of this tile, given in `accumulator` as f32."""
        ...

    def end(self) -> None:
        """Runs after the last tile."""
        ...


def emit_epilogue(frame: GemmFrame, rows: RowEpilogue) -> None:
    """Runs the epilogue over all tiles of this CTA."""
    x = frame.x
    x.section("warps 0-3: epilogue")
    is_epilogue = x.let("is_epilogue", "setp.lt.u32", frame.warp, EPILOGUE_WARPS.stop)
    with x.when(is_epilogue, "epilogue"):
        lanes = lanes_of_warp(x, "lanes_tmem", frame.tmem, frame.warp, "quarter")
        accumulator = x.regs("acc", "f32", HALF_N)
        rows.begin()
        with frame.tiles("epilogue") as tile:
            rows.begin_tile(tile, x.let("row", "add.u32", tile.first_row, frame.thread))
            _finish_tile(frame, rows, tile, lanes, accumulator)
        rows.end()


def _finish_tile(frame: GemmFrame, rows: RowEpilogue, tile: Tile, lanes: Register, accumulator: Vector) -> None:
    x, smem = frame.x, frame.smem
    buffer = x.let("epilogue_buffer", "and.b32", tile.index, 1)
    x.wait(smem["tile_full"], buffer, "tile_full")
    x.after_thread_sync()
    x.comment("The half that is shared with the next accumulator first: the upper one of buffer 0, the lower of 1.")
    half = x.let("half", "xor.b32", buffer, 1)
    columns = x.let("columns", "add.u32", lanes, SHARED_COLUMN)
    other = x.indexed("other_columns", lanes, buffer, 2 * ACCUMULATOR_STRIDE)
    is_first = x.let("is_first", "setp.eq.u32", buffer, buffer)
    with x.loop("halves") as loop:
        for first in range(0, HALF_N, CHUNK):
            x.tmem_load(accumulator[first : first + CHUNK], at(columns, first))
        x.wait_tmem_loads()
        x.before_thread_sync()
        x.arrive(smem["tile_free"], guard=is_first, note="the next tile may begin")
        rows.finish_half(half, accumulator)
        x.emit("bra", loop.done, guard=~is_first)
        x.emit("setp.ne.u32", is_first, buffer, buffer)
        x.emit("mov.u32", columns, other)
        x.emit("xor.b32", half, half, 1)


PER_VECTOR = 8
VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class RowsParams(Parameters):
    """Parameters after GemmParams. `rows`: [rows][hidden] bf16."""

    rows: Map
    token_of_row: Pointer
    a2_gs: Pointer
    w2_gs: Pointer
    tokens: U32
    hidden: U32


class ExpertRow:
    """The registers of one thread, which owns one row."""

    def __init__(self, frame: GemmFrame, params: RowsParams) -> None:
        x = frame.x
        self.frame, self.params = frame, params
        self.leader, self.is_wanted = x.reg("leader", "pred"), x.reg("is_wanted", "pred")
        self.staged, self.staged_row = x.reg("staged_at", "u32"), x.reg("staged_row_at", "u32")
        self.swizzle, self.scale = x.reg("swizzle", "b32"), x.reg("scale", "f32")
        self.first_column, self.warp_row = x.reg("first_column", "u32"), x.reg("warp_row", "u32")

    def begin(self) -> None:
        """Computes where the warp and the row stage: vector v of row r at v ^ (r / 2 mod 4) (64-byte swizzle)."""
        x, frame = self.frame.x, self.frame
        x.elect(self.leader)
        x.emit("mad.lo.u32", self.staged, frame.warp, STAGED_WARP_BYTES, frame.smem.base)
        x.emit("add.u32", self.staged, self.staged, frame.smem.layout["staged"])
        lane = x.let("lane", "and.b32", frame.thread, 31)
        x.emit("mad.lo.u32", self.staged_row, lane, STAGED_ROW_BYTES, self.staged)
        x.emit("shr.u32", self.swizzle, lane, 1)
        x.emit("and.b32", self.swizzle, self.swizzle, 3)
        x.emit("shl.b32", self.swizzle, self.swizzle, VECTOR_BYTES.bit_length() - 1)

    def begin_tile(self, tile: Tile, row: Register) -> None:
        """Determines whether the warp has a token, the scale of its expert, and where its rows go."""
        x, params = self.frame.x, self.params
        token = x.entry_of("token", params.token_of_row, row)
        is_token = x.let("is_token", "setp.lt.u32", token, params.tokens)
        x.emit("vote.sync.any.pred", self.is_wanted, is_token, FULL_WARP)
        factors = [
            x.let(f"{name}_value", "ld.global.f32", at(x.indexed_wide(f"{name}_at", base, tile.expert, 4)))
            for name, base in (("a2_gs", params.a2_gs), ("w2_gs", params.w2_gs))
        ]
        x.emit("mul.rn.f32", self.scale, *factors)
        x.emit("mul.lo.u32", self.first_column, tile.n_tile, TILE_N)
        x.emit("mad.lo.u32", self.warp_row, self.frame.warp, 32, tile.first_row)

    def finish_half(self, half: Register, accumulator: Vector) -> None:
        """Stores HALF_N columns, unless they lie beyond hidden."""
        x = self.frame.x
        column = x.let("column", "mad.lo.u32", half, HALF_N, self.first_column)
        is_written = x.let("is_written", "setp.lt.and.u32", column, self.params.hidden, self.is_wanted)
        with x.when(is_written, "rows"):
            for first in range(0, HALF_N, STAGED_COLUMNS):
                self._free_staging()
                self._stage(accumulator[first : first + STAGED_COLUMNS])
                x.fence_proxy_async()
                x.sync_warp()
                target = Address(self.params.rows, 0, (column, self.warp_row))
                x.tma_store(target, at(self.staged), guard=self.leader)
                x.commit_stores(guard=self.leader)
                x.emit("add.u32", column, column, STAGED_COLUMNS)

    def end(self) -> None:
        """Waits for the copies to read shared memory, which must outlive them."""
        self._free_staging()

    def _free_staging(self) -> None:
        x = self.frame.x
        x.wait_stores_read(guard=self.leader)
        x.sync_warp()

    def _stage(self, values: Vector) -> None:
        x = self.frame.x
        for value in values:
            x.emit("mul.rn.f32", value, value, self.scale)
        for vector in range(STAGED_COLUMNS // PER_VECTOR):
            packed = x.packed_bf16("packed", values[PER_VECTOR * vector : PER_VECTOR * (vector + 1)])
            offset = x.let("vector_offset", "xor.b32", self.swizzle, vector * VECTOR_BYTES)
            x.emit("st.shared.v4.b32", at(x.let("vector_at", "add.u32", self.staged_row, offset)), packed)


HALF_CODE_BYTES = WIDTH // 2


@dataclass(frozen=True, slots=True)
class SwigluParams(Parameters):
    """Parameters after GemmParams."""

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
        self.swiglu = Swiglu(x, params.clamp if variant.clamped else None)

    def begin(self) -> None:
        """Computes the lower limit of the ups."""
        self.swiglu.begin()

    def end(self) -> None:
        """Does nothing: each thread stored its own results."""

    def begin_tile(self, tile: Tile, row: Register) -> None:
        """Loads the scales of this row. A padding row gets 0, so that its activations are zeros."""
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
        self.a2.load(params.a2_gs, tile.expert)
        self._place_outputs(tile, row)

    def _place_outputs(self, tile: Tile, row: Register) -> None:
        """a2_codes [rows, intermediate / 2]; a2_sf [row tiles, intermediate / 64] atoms, one word per row and WIDTH."""
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
        """Makes WIDTH activations from HALF_N columns."""
        x = self.frame.x
        values = [self._activation(accumulator, element) for element in range(HALF_N // 2)]
        words, scales = emit_requantise(x, tuple(values), self.a2)
        codes = x.indexed_wide("half_codes_at", self.codes, half, HALF_CODE_BYTES)
        for first in range(0, len(words), 4):
            x.emit("st.global.v4.b32", at(codes, first * 4), words[first : first + 4])
        x.emit("st.global.b32", at(x.indexed_wide("half_scales_at", self.scales, half, ATOM_BYTES)), scales)

    def _activation(self, accumulator: Vector, element: int) -> Register:
        """The activation, in the register of its gate."""
        variant = self.variant
        column = variant.gate_column(element)
        gate = self.swiglu.activation(accumulator[column], accumulator[column + variant.interleave], self.scale)
        if variant.weighted:
            self.frame.x.emit("mul.rn.f32", gate, gate, self.weight)
        return gate
