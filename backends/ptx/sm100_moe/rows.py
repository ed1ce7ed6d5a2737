"""The epilogue of the second GEMM: bf16 expert rows, through shared memory to TMA.

Rounding contract: accumulator times (a2_gs * w2_gs), to nearest even in fp32, then to bf16.

Each warp hands over its own 32 rows, STAGED_COLUMNS columns at a time, so that no warp waits for another. A single
thread would write 16 bytes here and there; TMA writes whole sectors. Rows that fill up a tile are written along with
the others of their warp and mean nothing; a warp without a token writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.builder import FULL_WARP
from backends.ptx.operands import Address, Register, Vector, at
from backends.ptx.parameters import U32, Map, Parameters, Pointer
from backends.ptx.sm100_moe.frame import GemmFrame, Tile
from backends.ptx.sm100_moe.geometry import HALF_N, STAGED_COLUMNS, STAGED_ROW_BYTES, STAGED_WARP_BYTES, TILE_N

PER_VECTOR = 8
VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class RowsParams(Parameters):
    """Parameters behind GemmParams. `rows`: [rows][hidden] bf16."""

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
        """Finds where warp and row stage: vector v of row r at v ^ (r / 2 mod 4) (64-byte swizzle)."""
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
        """Finds out whether the warp has a token, the scale of its expert, and where its rows go."""
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
        """Shared memory must outlive the copies."""
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
