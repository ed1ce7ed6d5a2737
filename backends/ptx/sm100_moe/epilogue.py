"""Warps 0-3: what happens to an accumulator on its way from tensor memory, one row of the tile a thread.

A thread holds half of its row, HALF_N columns, at a time. The half whose columns the next tile's accumulator shares
goes first: as soon as it is in registers the MMA warp may go on, and the rest of the epilogue overlaps with the next
tile.
"""

from __future__ import annotations

from typing import Protocol

from backends.ptx.operands import SINK, Register, at
from backends.ptx.sm100_moe.frame import Frame, Tile
from backends.ptx.sm100_moe.geometry import ACCUMULATOR_STRIDE, EPILOGUE_WARPS, HALF_N

LANE_QUARTER_SHIFT = 21
"""Warp w reaches TMEM lanes 32 w to 32 w + 31; the lane is in bits 31..16 of an address (facts.md 1)."""
CHUNK = HALF_N
"""Columns a tcgen05.ld: all at once, as ptxas would put off a second one, and the arrival behind it, to save registers.
"""
SHARED_COLUMN = ACCUMULATOR_STRIDE
"""The columns that both accumulators have are at SHARED_COLUMN to SHARED_COLUMN + HALF_N - 1."""


class RowEpilogue(Protocol):
    """What one GEMM does with a row."""

    def begin(self) -> None:
        """Once, in the warps of the epilogue."""
        ...

    def begin_tile(self, tile: Tile, row: Register) -> None:
        """Before the accumulator is waited for: loads what belongs to the padded row `row`."""
        ...

    def finish_half(self, half: Register, accumulator: tuple[Register, ...]) -> None:
        """Columns half * HALF_N and on of this tile are in `accumulator`, f32."""
        ...

    def end(self) -> None:
        """When there are no more tiles."""
        ...


def emit_epilogue(frame: Frame, rows: RowEpilogue) -> None:
    """All tiles of this CTA."""
    x = frame.x
    x.section("warps 0-3: epilogue")
    is_epilogue = x.let("is_epilogue", "setp.lt.u32", frame.warp, EPILOGUE_WARPS.stop)
    with x.when(is_epilogue, "epilogue"):
        quarter = x.let("quarter", "shl.b32", frame.warp, LANE_QUARTER_SHIFT)
        lanes = x.let("lanes_tmem", "add.u32", frame.tmem, quarter)
        accumulator = x.regs("acc", "f32", HALF_N)
        rows.begin()
        with frame.walk("epilogue").tiles() as tile:
            row = x.let("row", "add.u32", tile.first_row, frame.thread)
            rows.begin_tile(tile, row)
            _finish_tile(frame, rows, tile, lanes, accumulator)
        rows.end()


def _finish_tile(
    frame: Frame, rows: RowEpilogue, tile: Tile, lanes: Register, accumulator: tuple[Register, ...]
) -> None:
    x = frame.x
    buffer = x.let("epilogue_buffer", "and.b32", tile.index, 1)
    x.wait(frame.place("tile_full"), buffer, "tile_full")
    x.emit("tcgen05.fence::after_thread_sync")
    x.comment("The half that is shared with the next accumulator first: the upper one of buffer 0, the lower of 1.")
    half = x.let("half", "xor.b32", buffer, 1)
    columns = x.let("columns", "add.u32", lanes, SHARED_COLUMN)
    other = x.indexed("other_columns", lanes, buffer, 2 * ACCUMULATOR_STRIDE)
    is_first = x.let("is_first", "setp.eq.u32", buffer, buffer)
    with x.loop("halves") as loop:
        for first in range(0, HALF_N, CHUNK):
            chunk = accumulator[first : first + CHUNK]
            x.emit(f"tcgen05.ld.sync.aligned.32x32b.x{CHUNK}.b32", chunk, at(columns, first))
        x.emit("tcgen05.wait::ld.sync.aligned")
        x.emit("tcgen05.fence::before_thread_sync")
        arrive = "mbarrier.arrive.shared::cta.b64"
        x.emit(arrive, SINK, frame.place("tile_free"), guard=is_first, note="the next tile may begin")
        rows.finish_half(half, accumulator)
        x.emit("bra", loop.done, guard=~is_first)
        x.emit("setp.ne.u32", is_first, buffer, buffer)
        x.emit("mov.u32", columns, other)
        x.emit("xor.b32", half, half, 1)
