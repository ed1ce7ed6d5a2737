"""Warps 4-7: rescaling O when a reference rose, and at the end O / row sum to global memory."""

from __future__ import annotations

from backends.ptx.attention import PANEL_COLUMNS
from backends.ptx.builder import Builder
from backends.ptx.operands import Address, Elected, Register, at
from backends.ptx.sm100_fmha.frame import FULL_WARP, Frame
from backends.ptx.sm100_fmha.geometry import CORRECTION_REGISTERS, CORRECTION_WARPS, PANEL_BYTES, TILE_M
from backends.ptx.sm100_fmha.tmem import LANE_QUARTER_SHIFT, buffer_of

CHUNK = 32
"""O columns a thread holds at a time."""
ROW_BYTES = PANEL_COLUMNS * 2
VECTOR_BYTES = 16
TMA_STORE = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"


class CorrectionRow:
    """The registers of one thread, which owns one row of O."""

    def __init__(self, frame: Frame) -> None:
        x, geometry = frame.x, frame.geometry
        self.frame = frame
        self.row = x.let("o_row", "sub.u32", frame.thread, CORRECTION_WARPS.start * 32)
        self.warp = x.let("correction_warp", "sub.u32", frame.warp, CORRECTION_WARPS.start)
        quarter = x.let("correction_quarter", "shl.b32", self.warp, LANE_QUARTER_SHIFT)
        self.o_tmem = x.let("correction_tmem", "add.u32", frame.tmem, quarter)
        x.emit("add.u32", self.o_tmem, self.o_tmem, geometry.o_column)
        self.exchange = x.indexed("correction_exchange", frame.smem, self.row, 4)
        self.values = x.regs("o", "f32", CHUNK)


def emit_correction(frame: Frame) -> None:
    """Follows the tiles, then writes the output."""
    x = frame.x
    x.section("warps 4-7: correction and epilogue")
    is_correction = x.let("is_correction", "setp.ge.u32", frame.warp, CORRECTION_WARPS.start)
    x.emit("setp.lt.and.u32", is_correction, frame.warp, CORRECTION_WARPS.stop, is_correction)
    with x.when(is_correction, "correction"):
        x.emit("setmaxnreg.dec.sync.aligned.u32", CORRECTION_REGISTERS)
        thread = CorrectionRow(frame)
        tile = x.let("correction_tile", "mov.b32", 0)
        finished = x.reg("correction_finished", "pred")
        with x.loop("correction_tiles") as loop:
            x.emit("setp.ge.u32", finished, tile, frame.tiles)
            x.emit("bra", loop.done, guard=finished)
            _correct_tile(frame, thread, tile)
            x.emit("add.u32", tile, tile, 1)
        _write_output(frame, thread, tile)


def _wait_for_sum(frame: Frame, tile: Register, name: str) -> None:
    """Until P V of the tile before `tile` is in O. Before tile 0 this passes: the parity is that of lap -1."""
    x = frame.x
    previous = x.let(f"{name}_previous", "sub.u32", tile, 1)
    index, parity = buffer_of(x, previous, name)
    x.wait(frame.buffered("pv_done", index, f"{name}_at"), parity, name)
    x.emit("tcgen05.fence::after_thread_sync")


def _correct_tile(frame: Frame, thread: CorrectionRow, tile: Register) -> None:
    """The last reader of `rescale` arrives on pv_ready before the MMA warp can free the S buffer that the softmax of
    tile + 2 needs, so the two exchange buffers need no "empty" barrier of their own."""
    x, geometry = frame.x, frame.geometry
    index, parity = buffer_of(x, tile, "correction")
    x.wait(frame.buffered("rescale_full", index, "rescale_full_at"), parity, "rescale_full")
    exchange = x.indexed("rescale_at", thread.exchange, index, TILE_M * 4)
    rescale = x.let("o_rescale", "ld.shared.f32", at(exchange, geometry.smem["rescale"]))
    changes = x.let("rescale_changes", "setp.ne.f32", rescale, 1.0)
    x.emit("vote.sync.any.pred", changes, changes, FULL_WARP)
    x.comment("O *= 2^(old reference - new reference), unless that is 1 for the whole warp.")
    with x.when(changes, "rescale"):
        _wait_for_sum(frame, tile, "o_summed")
        for column in range(0, geometry.o_columns, CHUNK):
            _load(x, thread, column)
            for value in thread.values:
                x.emit("mul.rn.f32", value, value, rescale)
            x.emit(f"tcgen05.st.sync.aligned.32x32b.x{CHUNK}.b32", at(thread.o_tmem, column), thread.values)
        x.emit("tcgen05.wait::st.sync.aligned")
        x.emit("tcgen05.fence::before_thread_sync")
    x.arrive(frame.buffered("pv_ready", index, "pv_ready_at"), note="O is rescaled")


def _load(x: Builder, thread: CorrectionRow, column: int) -> None:
    x.emit(f"tcgen05.ld.sync.aligned.32x32b.x{CHUNK}.b32", thread.values, at(thread.o_tmem, column))
    x.emit("tcgen05.wait::ld.sync.aligned")


def _write_output(frame: Frame, thread: CorrectionRow, tile: Register) -> None:
    """O passes through Q's shared memory, which nobody reads once the last P V is done, panel by panel to TMA; the
    copy drops the rows beyond the last. Without a tile there is no O in tensor memory, only zeros to write."""
    x, geometry = frame.x, frame.geometry
    x.section("warps 4-7: epilogue, O / sum through shared memory to global memory")
    leader = x.reg("epilogue_leader", "pred")
    x.emit("elect.sync", Elected(leader), FULL_WARP)
    x.wait(frame.place("row_sum_full"), 0, "row_sum_full")
    total = x.let("o_row_sum", "ld.shared.f32", at(thread.exchange, geometry.smem["row_sum"]))
    saw_nothing = x.let("saw_nothing", "setp.eq.f32", total, 0.0)
    inverse = x.let("inverse_sum", "rcp.approx.ftz.f32", total)
    x.emit("selp.f32", inverse, 0.0, inverse, saw_nothing)
    _wait_for_sum(frame, tile, "o_final")
    no_tiles = x.let("o_is_empty", "setp.eq.u32", tile, 0)
    row_at = x.indexed("o_row_at", frame.smem, thread.row, ROW_BYTES)
    swizzle = x.let("swizzle", "and.b32", thread.row, 7)
    x.emit("shl.b32", swizzle, swizzle, 4)
    source = x.indexed("o_warp_at", frame.smem, thread.warp, 32 * ROW_BYTES)
    row = x.let("o_first_row", "mad.lo.u32", thread.warp, 32, frame.row_origin)
    for value in thread.values:
        x.emit("mov.f32", value, 0.0)
    for panel in range(geometry.o_columns // PANEL_COLUMNS):
        for part in range(0, PANEL_COLUMNS, CHUNK):
            column = panel * PANEL_COLUMNS + part
            with x.unless(no_tiles, "o_load"):
                _load(x, thread, column)
            packed = _normalised(x, thread, inverse)
            _stage(x, packed, row_at, swizzle, geometry.smem["q"] + panel * PANEL_BYTES, part)
        x.emit("fence.proxy.async.shared::cta")
        x.emit("bar.warp.sync", FULL_WARP)
        o_column = x.let("o_column", "add.u32", frame.o_origin, panel * PANEL_COLUMNS)
        target = Address(frame.params.maps.o, 0, (o_column, row, frame.batch_head))
        smem_panel = at(source, geometry.smem["q"] + panel * PANEL_BYTES)
        x.emit(TMA_STORE, target, smem_panel, guard=leader)
    x.emit("cp.async.bulk.commit_group", guard=leader)
    x.emit("cp.async.bulk.wait_group.read", 0, guard=leader, note="shared memory must outlive the copies")
    x.emit("bar.warp.sync", FULL_WARP)


def _normalised(x: Builder, thread: CorrectionRow, inverse: Register) -> tuple[Register, ...]:
    packed = x.regs("o_bf16", "b32", CHUNK // 2)
    for pair, register in enumerate(packed):
        even, odd = thread.values[2 * pair : 2 * pair + 2]
        x.emit("mul.rn.f32", even, even, inverse)
        x.emit("mul.rn.f32", odd, odd, inverse)
        x.emit("cvt.rn.bf16x2.f32", register, odd, even)
    return packed


def _stage(
    x: Builder, packed: tuple[Register, ...], row_at: Register, swizzle: Register, panel_offset: int, part: int
) -> None:
    """16-byte vectors, each where the 128-byte swizzle wants it: vector v of row r at v ^ (r mod 8)."""
    for vector in range(len(packed) // 4):
        plain = (part * 2) + vector * VECTOR_BYTES
        swizzled = x.let("swizzled", "xor.b32", swizzle, plain)
        address = x.let("vector_at", "add.u32", row_at, swizzled)
        x.emit("st.shared.v4.b32", at(address, panel_offset), packed[4 * vector : 4 * vector + 4])
