"""The epilogue of the second GEMM: bf16 expert rows; stmatrix transposes them to make a token's part contiguous.

Rounding contract: accumulator times (a2_gs * w2_gs * 2^14), or w2_gs * 2^7 if activations are bf16, rounded to nearest
even in fp32, then to bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.operands import Vector, at
from backends.ptx.parameters import U32, Parameters, Pointer
from backends.ptx.sm90_moe.frame import WARPGROUP_THREADS, ColumnFrame, ColumnTile
from backends.ptx.sm90_moe.geometry import STAGED_PITCH, WARPGROUP_ROWS, result_factor

BF16_BYTES = 2
VECTOR_BYTES = 16
VECTORS = WARPGROUP_ROWS * BF16_BYTES // VECTOR_BYTES
ROWS_AT_ONCE = WARPGROUP_THREADS // VECTORS
"""Tokens that the threads of a warpgroup copy together."""


@dataclass(frozen=True, slots=True)
class ExpertRowsParams(Parameters):
    """Parameters after ColumnGemmParams. `rows`: bf16 [rows][hidden]. bf16 activations have no `a2_gs`."""

    rows: Pointer
    a2_gs: Pointer
    w2_gs: Pointer
    hidden: U32


class RowsEpilogue:
    """The registers of one thread."""

    def __init__(self, frame: ColumnFrame, params: ExpertRowsParams) -> None:
        x = frame.x
        self.frame, self.params = frame, params
        self.scale = x.reg("scale", "f32")
        self.matrix_at, self.staged_at = x.reg("matrix_at", "u32"), x.reg("staged_at", "u32")
        self.copied_row = x.reg("copied_row", "u32")
        self.column, self.target = x.reg("copied_column", "u32"), x.reg("target", "u64")

    def begin(self) -> None:
        """Computes which row of which 8x8 matrix a lane addresses, and which 16 bytes of a staged token it copies."""
        x, frame = self.frame.x, self.frame
        staged = x.let("staged", "mad.lo.u32", frame.warpgroup, frame.tiling.staged_bytes, frame.smem.base)
        x.emit("add.u32", staged, staged, frame.smem.layout["staged"])
        x.comment("Matrices 0 and 1: weight rows 0-7 and 8-15 of the warp, eight tokens; 2 and 3: the next eight.")
        matrix = x.let("matrix", "shr.u32", frame.lane, 3)
        token = x.let("matrix_token", "and.b32", frame.lane, 7)
        x.emit("mad.lo.u32", token, x.let("matrix_pair", "shr.u32", matrix, 1), 8, token)
        element = x.let("matrix_row", "and.b32", frame.warp, 3)
        x.emit("shl.b32", element, element, 4)
        x.emit("mad.lo.u32", element, x.let("matrix_half", "and.b32", matrix, 1), 8, element)
        x.emit("mad.lo.u32", self.matrix_at, token, STAGED_PITCH, staged)
        x.emit("mad.lo.u32", self.matrix_at, element, BF16_BYTES, self.matrix_at)
        inside = x.let("thread_in_group", "and.b32", frame.thread, WARPGROUP_THREADS - 1)
        x.emit("shr.u32", self.copied_row, inside, VECTORS.bit_length() - 1)
        vector = x.let("vector", "and.b32", inside, VECTORS - 1)
        x.emit("mad.lo.u32", self.staged_at, self.copied_row, STAGED_PITCH, staged)
        x.emit("mad.lo.u32", self.staged_at, vector, VECTOR_BYTES, self.staged_at)
        x.emit("shl.b32", self.column, vector, 3)
        x.emit("mad.lo.u32", self.column, frame.warpgroup, WARPGROUP_ROWS, self.column)

    def begin_tile(self, tile: ColumnTile) -> None:
        """Loads the scale of the expert and computes where its rows go."""
        x, params = self.frame.x, self.params
        bf16 = self.frame.tiling.bf16
        factors = [
            x.let(f"{name}_value", "ld.global.f32", at(x.indexed_wide(f"{name}_at", base, tile.expert, 4)))
            for name, base in (("a2_gs", params.a2_gs), ("w2_gs", params.w2_gs))[bf16:]
        ]
        if not bf16:
            x.emit("mul.rn.f32", self.scale, *factors)
        x.emit("mul.rn.f32", self.scale, factors[0] if bf16 else self.scale, result_factor(bf16))
        row = x.let("first_copied", "add.u32", tile.first_row, self.copied_row)
        element = x.let("element", "mul.wide.u32", row, params.hidden)
        column = x.let("tile_column", "mad.lo.u32", tile.tile_m, self.frame.tiling.tile_m, self.column)
        x.emit("add.s64", element, element, x.let("column_wide", "cvt.u64.u32", column))
        x.emit("shl.b64", element, element, BF16_BYTES.bit_length() - 1)
        x.emit("add.s64", self.target, params.rows, element)

    def finish(self, tile: ColumnTile, width: int, accumulator: Vector) -> None:
        """Stores the tile through shared memory, some tokens at a time."""
        frame = self.frame
        at_once = min(width, frame.tiling.staged_rows)
        for first in range(0, width, at_once):
            frame.sync_warpgroup("the staging is free")
            self._stage(accumulator[first // 2 : (first + at_once) // 2])
            frame.sync_warpgroup("the staging is full")
            for part in range(0, at_once, ROWS_AT_ONCE):
                self._copy(tile, first, part)

    def _stage(self, values: Vector) -> None:
        x = self.frame.x
        for value in values:
            x.emit("mul.rn.f32", value, value, self.scale)
        matrices = x.packed_bf16("packed", values)
        for first in range(0, len(matrices), 4):
            some = matrices[first : first + 4]
            target = at(self.matrix_at, first // 4 * 16 * STAGED_PITCH)
            x.emit(f"stmatrix.sync.aligned.m8n8.x{len(some)}.trans.shared.b16", target, some)

    def _copy(self, tile: ColumnTile, first: int, part: int) -> None:
        """Copies 16 bytes of each row from first + part on, as far as the rows exist."""
        x = self.frame.x
        row = x.let("row", "add.u32", self.copied_row, first + part)
        is_row = x.let("is_row", "setp.lt.u32", row, tile.rows)
        with x.when(is_row, "copy"):
            vector = x.regs("vector_data", "b32", 4)
            x.emit("ld.shared.v4.b32", vector, at(self.staged_at, part * STAGED_PITCH))
            offset = x.let("row_bytes", "mul.wide.u32", self.params.hidden, BF16_BYTES * (first + part))
            x.emit("add.s64", offset, offset, self.target)
            x.emit("st.global.v4.b32", at(offset), vector)
