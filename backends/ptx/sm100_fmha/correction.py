"""Warps 4-7: rescale O when a reference rises; at the end write O / row sum, or a part of O, to global memory."""

from __future__ import annotations

from backends.ptx.attention import PANEL_COLUMNS
from backends.ptx.builder import FULL_WARP, Builder
from backends.ptx.operands import Address, Register, Vector, at
from backends.ptx.sm100_fmha.frame import Sm100FmhaFrame, buffer_of
from backends.ptx.sm100_fmha.geometry import CORRECTION_REGISTERS, CORRECTION_WARPS, PANEL_BYTES, TILE_M
from backends.ptx.split_keys import F32_BYTES, KeyPart
from backends.ptx.tcgen05 import lanes_of_warp

CHUNK = 32
"""O columns that a thread holds at a time."""
ROW_BYTES = PANEL_COLUMNS * 2
VECTOR_BYTES = 16


class CorrectionRow:
    """The registers of one thread, which owns one row of O."""

    def __init__(self, frame: Sm100FmhaFrame) -> None:
        x = frame.x
        self.row = x.let("o_row", "sub.u32", frame.thread, CORRECTION_WARPS.start * 32)
        self.warp = x.let("correction_warp", "sub.u32", frame.warp, CORRECTION_WARPS.start)
        self.o_tmem = lanes_of_warp(x, "correction_tmem", frame.tmem, self.warp, "correction_quarter")
        x.emit("add.u32", self.o_tmem, self.o_tmem, frame.tiling.o_column)
        self.exchange = x.indexed("correction_exchange", frame.smem.base, self.row, 4)
        self.values = x.regs("o", "f32", CHUNK)


def emit_correction(frame: Sm100FmhaFrame) -> None:
    """Processes the tiles in order, then writes the output."""
    x = frame.x
    x.section("warps 4-7: correction and epilogue")
    is_correction = x.let("is_correction", "setp.ge.u32", frame.warp, CORRECTION_WARPS.start)
    x.emit("setp.lt.and.u32", is_correction, frame.warp, CORRECTION_WARPS.stop, is_correction)
    with x.when(is_correction, "correction"):
        x.setmaxnreg("dec", CORRECTION_REGISTERS)
        thread = CorrectionRow(frame)
        tile = x.let("correction_tile", "mov.b32", 0)
        with x.while_below("correction_tiles", tile, frame.keys.count, "correction_finished", (tile, 1)):
            _correct_tile(frame, thread, tile)
        if frame.part is None:
            _write_output(frame, thread, tile)
        else:
            _write_part(frame, thread, tile, frame.part)


def _wait_for_sum(frame: Sm100FmhaFrame, tile: Register, name: str) -> None:
    """Waits until P V of the tile before `tile` is in O. Passes before tile 0: the parity is that of lap -1."""
    x = frame.x
    previous = x.let(f"{name}_previous", "sub.u32", tile, 1)
    index, parity = buffer_of(x, previous, name)
    x.wait(frame.smem.mbarrier("pv_done", index, f"{name}_at"), parity, name)
    x.after_thread_sync()


def _correct_tile(frame: Sm100FmhaFrame, thread: CorrectionRow, tile: Register) -> None:
    """Rescales O where the softmax asks for it.

    The last reader of `rescale` arrives on pv_ready before the MMA warp can free the S buffer that the softmax of tile
    + 2 needs, so the two exchange buffers need no "empty" barrier.
    """
    x, smem = frame.x, frame.smem
    index, parity = buffer_of(x, tile, "correction")
    x.wait(smem.mbarrier("rescale_full", index), parity, "rescale_full")
    exchange = x.indexed("rescale_at", thread.exchange, index, TILE_M * 4)
    rescale = x.let("o_rescale", "ld.shared.f32", at(exchange, smem.layout["rescale"]))
    changes = x.let("rescale_changes", "setp.ne.f32", rescale, 1.0)
    x.emit("vote.sync.any.pred", changes, changes, FULL_WARP)
    x.comment("O *= 2^(old reference - new reference), unless that is 1 for the whole warp.")
    with x.when(changes, "rescale"):
        _wait_for_sum(frame, tile, "o_summed")
        for column in range(0, frame.tiling.o_columns, CHUNK):
            _load(x, thread, column)
            for value in thread.values:
                x.emit("mul.rn.f32", value, value, rescale)
            x.tmem_store(at(thread.o_tmem, column), thread.values)
        x.wait_tmem_stores()
        x.before_thread_sync()
    x.arrive(smem.mbarrier("pv_ready", index), note="O is rescaled")


def _load(x: Builder, thread: CorrectionRow, column: int) -> None:
    x.tmem_load(thread.values, at(thread.o_tmem, column))
    x.wait_tmem_loads()


class OutputPanel:
    """Where a thread stages its row of a panel of O, in Q's shared memory.

    `source` is the start of the warp's 32 rows, `row` their first folded row, `swizzle` the row's swizzle pattern.
    """

    def __init__(self, frame: Sm100FmhaFrame, thread: CorrectionRow) -> None:
        x = frame.x
        self.frame = frame
        self.row_at = x.indexed("o_row_at", frame.smem.base, thread.row, ROW_BYTES)
        self.swizzle = x.let("swizzle", "and.b32", thread.row, 7)
        x.emit("shl.b32", self.swizzle, self.swizzle, 4)
        self.source = x.indexed("o_warp_at", frame.smem.base, thread.warp, 32 * ROW_BYTES)
        self.row = x.let("o_first_row", "mad.lo.u32", thread.warp, 32, frame.row_origin)

    def stage(self, packed: Vector, panel: int, part: int) -> None:
        """Stores 16-byte vectors in the 128-byte swizzle: vector v of row r at v ^ (r mod 8)."""
        x = self.frame.x
        for vector in range(len(packed) // 4):
            swizzled = x.let("swizzled", "xor.b32", self.swizzle, part * 2 + vector * VECTOR_BYTES)
            address = x.let("vector_at", "add.u32", self.row_at, swizzled)
            x.emit("st.shared.v4.b32", at(address, self._offset(panel)), packed[4 * vector : 4 * vector + 4])

    def store(self, panel: int, leader: Register) -> None:
        """Copies the warp's rows of the panel to global memory."""
        frame, x = self.frame, self.frame.x
        x.fence_proxy_async()
        x.sync_warp()
        column = x.let("o_column", "add.u32", frame.o_origin, panel * PANEL_COLUMNS)
        target = Address(frame.params.o, 0, (column, self.row, frame.batch_head))
        x.tma_store(target, at(self.source, self._offset(panel)), guard=leader)

    def _offset(self, panel: int) -> int:
        return self.frame.smem.layout["q"] + panel * PANEL_BYTES


def _write_output(frame: Sm100FmhaFrame, thread: CorrectionRow, tile: Register) -> None:
    """Writes O through Q's shared memory, panel by panel, with TMA, which drops the rows past the last one.

    Q is no longer read once the last P V is done. If there was no tile, tensor memory has no O; zeros are written.
    """
    x, smem = frame.x, frame.smem
    x.section("warps 4-7: epilogue, O / sum through shared memory to global memory")
    leader = x.elect(x.reg("epilogue_leader", "pred"))
    x.wait(smem["row_sum_full"], 0, "row_sum_full")
    total = x.let("o_row_sum", "ld.shared.f32", at(thread.exchange, smem.layout["row_sum"]))
    saw_nothing = x.let("saw_nothing", "setp.eq.f32", total, 0.0)
    inverse = x.let("inverse_sum", "rcp.approx.ftz.f32", total)
    x.emit("selp.f32", inverse, 0.0, inverse, saw_nothing)
    _wait_for_sum(frame, tile, "o_final")
    no_tiles = x.let("o_is_empty", "setp.eq.u32", tile, 0)
    output = OutputPanel(frame, thread)
    for value in thread.values:
        x.emit("mov.f32", value, 0.0)
    for panel in range(frame.tiling.o_columns // PANEL_COLUMNS):
        for part in range(0, PANEL_COLUMNS, CHUNK):
            with x.unless(no_tiles, "o_load"):
                _load(x, thread, panel * PANEL_COLUMNS + part)
            output.stage(_normalised(x, thread, inverse), panel, part)
        output.store(panel, leader)
    x.commit_stores(guard=leader)
    x.wait_stores_read(guard=leader, note="shared memory must outlive the copies")
    x.sync_warp()


def _normalised(x: Builder, thread: CorrectionRow, inverse: Register) -> Vector:
    packed = x.regs("o_bf16", "b32", CHUNK // 2)
    for pair, register in enumerate(packed):
        even, odd = thread.values[2 * pair : 2 * pair + 2]
        x.emit("mul.rn.f32", even, even, inverse)
        x.emit("mul.rn.f32", odd, odd, inverse)
        x.emit("cvt.rn.bf16x2.f32", register, odd, even)
    return packed


def _write_part(frame: Sm100FmhaFrame, thread: CorrectionRow, tile: Register, part: KeyPart) -> None:
    """Writes O without normalisation, in fp32; the softmax stores the reference and row sum. A part without a tile is
    zeros.

    Each thread writes its own row, two 16-byte vectors per 32-byte sector: where keys are split, most rows of the tile
    do not exist, and most warps have nothing to write.
    """
    x = frame.x
    x.section("warps 4-7: epilogue, O of this part to global memory")
    row = x.let("part_row", "add.u32", thread.row, frame.row_origin)
    is_row = x.let("part_has_row", "setp.lt.u32", row, frame.axes.rows)
    with x.when(x.let("warp_has_row", "vote.sync.any.pred", is_row, FULL_WARP), "part_rows"):
        target = x.let("part_at", "mul.lo.u64", part.row(x, frame, row), F32_BYTES * frame.tiling.hd)
        x.emit("add.s64", target, target, frame.params.o)
        x.emit("add.s64", target, target, x.let("part_column_bytes", "mul.wide.u32", frame.o_origin, F32_BYTES))
        _wait_for_sum(frame, tile, "o_final")
        no_tiles = x.let("o_is_empty", "setp.eq.u32", tile, 0)
        for value in thread.values:
            x.emit("mov.f32", value, 0.0)
        for column in range(0, frame.tiling.o_columns, CHUNK):
            with x.unless(no_tiles, "o_load"):
                _load(x, thread, column)
            for index in range(0, CHUNK, VECTOR_BYTES // F32_BYTES):
                vector = thread.values[index : index + VECTOR_BYTES // F32_BYTES]
                x.emit("st.global.v4.f32", at(target, F32_BYTES * (column + index)), vector, guard=is_row)
