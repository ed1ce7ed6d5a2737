"""Warps 0-3: accumulators out of tensor memory, one row of the tile a thread.

A thread holds half of its row, HALF_N columns, at a time. The half that the next tile's accumulator shares goes first:
once it is in registers the MMA warp may go on, and the rest of the epilogue overlaps with the next tile.
"""

from __future__ import annotations

from typing import Protocol

from backends.ptx.operands import Register, Vector, at
from backends.ptx.sm100_moe.frame import GemmFrame, Tile
from backends.ptx.sm100_moe.geometry import ACCUMULATOR_STRIDE, EPILOGUE_WARPS, HALF_N
from backends.ptx.tcgen05 import lanes_of_warp

CHUNK = HALF_N
"""Columns a tcgen05.ld. ptxas would put off a second load, and the arrival behind it, to save registers."""
SHARED_COLUMN = ACCUMULATOR_STRIDE
"""Both accumulators have columns SHARED_COLUMN to SHARED_COLUMN + HALF_N - 1."""


class RowEpilogue(Protocol):
    """What one GEMM does with a row."""

    def begin(self) -> None:
        """Once, in the warps of the epilogue."""
        ...

    def begin_tile(self, tile: Tile, row: Register) -> None:
        """Loads what the padded row `row` needs, before anybody waits for the accumulator."""
        ...

    def finish_half(self, half: Register, accumulator: Vector) -> None:
        """Columns half * HALF_N and on of this tile are in `accumulator`, f32."""
        ...

    def end(self) -> None:
        """When there are no more tiles."""
        ...


def emit_epilogue(frame: GemmFrame, rows: RowEpilogue) -> None:
    """All tiles of this CTA."""
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
