"""Warps 0-3: the online softmax, one folded query row per thread, everything in units of log2.

A row keeps `reference`, the scaled maximum that its P is relative to. It rises only when a tile's maximum exceeds it by
more than RESCALE_ABOVE: below that, 2^(s - reference) stays far inside the range of bf16 and fp32, and O needs no
rescaling. Each row decides for itself, so that its bits do not depend on its neighbours.
"""

from __future__ import annotations

from backends.ptx.attention import MINUS_INFINITY, RowKeys, log_sum_exp, shift_of
from backends.ptx.builder import FULL_WARP, Builder
from backends.ptx.operands import Register, at
from backends.ptx.sm100_fmha.frame import Sm100FmhaFrame, buffer_of
from backends.ptx.sm100_fmha.geometry import SOFTMAX_REGISTERS, SOFTMAX_WARPS, TILE_M, TILE_N
from backends.ptx.split_keys import KeyPart
from backends.ptx.tcgen05 import lanes_of_warp

RESCALE_ABOVE = 8.0
S_CHUNK = 64
"""S columns per tcgen05.ld."""
P_CHUNK = 32
"""P columns per tcgen05.st; two to a register."""
PARTIAL_MAXIMA = 4


class SoftmaxRow:
    """The registers of one thread."""

    def __init__(self, frame: Sm100FmhaFrame) -> None:
        x = frame.x
        self.row = x.let("row", "add.u32", frame.row_origin, frame.thread)
        self.keys = RowKeys.of(frame, self.row)
        x.comment("Rows of the tile beyond the last one never ask for a mask; nobody reads what they compute.")
        self.keys.unmask_beyond(x)
        self.tmem = lanes_of_warp(x, "softmax_tmem", frame.tmem, frame.warp, "softmax_quarter")
        self.exchange = x.indexed("softmax_exchange", frame.smem.base, frame.thread, 4)
        self.key = x.let("tile_key", "mov.b32", frame.keys.first_key)
        self.reference = x.let("reference", "mov.f32", MINUS_INFINITY)
        self.row_sum = x.let("row_sum", "mov.f32", 0.0)
        self.scores = x.regs("s", "f32", TILE_N)


def emit_softmax(frame: Sm100FmhaFrame) -> None:
    """All tiles, then the row sums for the epilogue and the log-sum-exp, or the part's statistics."""
    x = frame.x
    x.section("warps 0-3: softmax")
    is_softmax = x.let("is_softmax", "setp.lt.u32", frame.warp, SOFTMAX_WARPS.stop)
    with x.when(is_softmax, "softmax"):
        x.setmaxnreg("inc", SOFTMAX_REGISTERS, note="a whole row of S")
        thread = SoftmaxRow(frame)
        tile = x.let("softmax_tile", "mov.b32", 0)
        steps = ((tile, 1), (thread.key, TILE_N))
        with x.while_below("softmax_tiles", tile, frame.keys.count, "softmax_finished", *steps):
            _softmax_tile(frame, thread, tile)
        if frame.part is None:
            x.emit("st.shared.f32", at(thread.exchange, frame.smem.layout["row_sum"]), thread.row_sum)
            x.arrive(frame.smem["row_sum_full"])
            _store_lse(frame, thread)
        else:
            _store_statistics(frame, thread, frame.part)


def _softmax_tile(frame: Sm100FmhaFrame, thread: SoftmaxRow, tile: Register) -> None:
    x, smem = frame.x, frame.smem
    index, parity = buffer_of(x, tile, "softmax")
    x.wait(smem.mbarrier("s_full", index), parity, "s_full")
    x.after_thread_sync()
    buffer_tmem = x.indexed("buffer_tmem", thread.tmem, index, TILE_N)
    for column in range(0, TILE_N, S_CHUNK):
        x.tmem_load(thread.scores[column : column + S_CHUNK], at(buffer_tmem, column))
    x.wait_tmem_loads()
    x.comment("Hide the keys outside [first, end); a warp whose rows see the whole tile skips this.")
    _mask(x, thread)
    x.comment("Raise the reference to the tile's maximum if that is more than 2^8 above it.")
    rescale = _raise_reference(x, frame, thread)
    exchange = x.indexed("rescale_at", thread.exchange, index, TILE_M * 4)
    x.emit("st.shared.f32", at(exchange, smem.layout["rescale"]), rescale)
    x.arrive(smem.mbarrier("rescale_full", index))
    x.comment("P = 2^(scale S - reference): fp32 into the sum, bf16 over S for the MMA.")
    _exponentiate(x, frame, thread, buffer_tmem)
    x.wait_tmem_stores()
    x.before_thread_sync()
    x.arrive(smem.mbarrier("pv_ready", index), note="P is written")


def _mask(x: Builder, thread: SoftmaxRow) -> None:
    first = x.let("first_column", "sub.s32", thread.keys.first, thread.key)
    end = x.let("end_column", "sub.s32", thread.keys.end, thread.key)
    whole = x.let("sees_all", "setp.le.s32", first, 0)
    x.emit("setp.ge.and.s32", whole, end, TILE_N, whole)
    x.emit("vote.sync.all.pred", whole, whole, FULL_WARP)
    visible = x.reg("visible", "pred")
    with x.unless(whole, "mask"):
        for column, score in enumerate(thread.scores):
            x.emit("setp.le.s32", visible, first, column)
            x.emit("setp.gt.and.s32", visible, end, column, visible)
            x.emit("selp.f32", score, score, MINUS_INFINITY, visible)


def _raise_reference(x: Builder, frame: Sm100FmhaFrame, thread: SoftmaxRow) -> Register:
    """Raises the reference if the tile's maximum requires it. Returns 2^(old - new), or 1 if nothing changed."""
    partial = x.regs("tile_max", "f32", PARTIAL_MAXIMA)
    for lane, register in enumerate(partial):
        x.emit("max.f32", register, thread.scores[lane], thread.scores[lane + PARTIAL_MAXIMA])
    for column in range(2 * PARTIAL_MAXIMA, TILE_N):
        register = partial[column % PARTIAL_MAXIMA]
        x.emit("max.f32", register, register, thread.scores[column])
    for lane in range(1, PARTIAL_MAXIMA):
        x.emit("max.f32", partial[0], partial[0], partial[lane])
    raised = x.let("raised", "mul.rn.f32", partial[0], frame.axes.scale_log2)
    excess = x.let("excess", "sub.rn.f32", raised, thread.reference, note="NaN, so no rescaling, while both are -inf")
    rescales = x.let("rescales", "setp.gt.f32", excess, RESCALE_ABOVE)
    first_sight = x.let("first_sight", "setp.eq.f32", thread.reference, MINUS_INFINITY)
    drop = x.let("drop", "sub.rn.f32", thread.reference, raised)
    rescale = x.let("rescale", "ex2.approx.ftz.f32", drop)
    x.emit("selp.f32", rescale, rescale, 1.0, rescales)
    x.emit("selp.f32", rescale, 1.0, rescale, first_sight, note="O is empty or all zeros")
    x.emit("selp.f32", thread.reference, raised, thread.reference, rescales)
    x.emit("mul.rn.f32", thread.row_sum, thread.row_sum, rescale)
    return rescale


def _exponentiate(x: Builder, frame: Sm100FmhaFrame, thread: SoftmaxRow, buffer_tmem: Register) -> None:
    """Writes P = 2^(s * scale - reference) as bf16 over the scores and adds its fp32 values to the row sum."""
    shift = shift_of(x, thread.reference)
    other_sum = x.let("other_sum", "mov.f32", 0.0)
    packed = x.regs("p", "b32", P_CHUNK // 2)
    for column in range(0, TILE_N, P_CHUNK):
        for pair, register in enumerate(packed):
            even, odd = thread.scores[column + 2 * pair : column + 2 * pair + 2]
            for score, total in ((even, thread.row_sum), (odd, other_sum)):
                x.emit("fma.rn.f32", score, score, frame.axes.scale_log2, shift)
                x.emit("ex2.approx.ftz.f32", score, score)
                x.emit("add.rn.f32", total, total, score)
            x.emit("cvt.rn.bf16x2.f32", register, odd, even)
        x.tmem_store(at(buffer_tmem, column // 2), packed)
    x.emit("add.rn.f32", thread.row_sum, thread.row_sum, other_sum)


def _store_lse(frame: Sm100FmhaFrame, thread: SoftmaxRow) -> None:
    x, lse_pointer = frame.x, frame.params.lse
    wanted = x.let("lse_wanted", "setp.ne.u64", lse_pointer, 0)
    x.emit("and.pred", wanted, wanted, thread.keys.is_row)
    if frame.tiling.halves > 1:
        x.emit("setp.eq.and.u32", wanted, frame.o_origin, 0, wanted, note="one of the CTAs that share the rows")
    x.comment("lse = ln 2 (reference + log2 sum)")
    lse = log_sum_exp(x, thread.reference, thread.row_sum)
    first_row = x.let("first_row", "mul.wide.u32", frame.batch_head, frame.axes.rows)
    row = x.let("row_wide", "cvt.u64.u32", thread.row)
    x.emit("add.s64", row, row, first_row)
    x.emit("shl.b64", row, row, 2)
    address = x.let("lse_at", "add.s64", lse_pointer, row)
    x.emit("st.global.f32", at(address), lse, guard=wanted)


def _store_statistics(frame: Sm100FmhaFrame, thread: SoftmaxRow, part: KeyPart) -> None:
    x = frame.x
    stored = thread.keys.is_row
    if frame.tiling.halves > 1:
        stored = x.let("statistics_stored", "setp.eq.and.u32", frame.o_origin, 0, stored, note="one CTA of a row")
    part.store_statistics(x, part.row(x, frame, thread.row), thread.reference, thread.row_sum, stored)
