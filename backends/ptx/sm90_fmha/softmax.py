"""The online softmax in registers. A thread has two rows of the tile, 8 apart, and a quarter of the columns of each.

Accumulators of wgmma.m64nNk16 (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"): register 4 b + 2 r + c of a
thread is column 8 b + 2 (lane % 4) + c of row 16 warp + lane / 4 + 8 r. Four neighbouring lanes have a row together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from backends.ptx.attention import end_visible, first_visible
from backends.ptx.builder import Builder
from backends.ptx.operands import Register
from backends.ptx.sm90_fmha.frame import FULL_WARP, Frame

MINUS_INFINITY = -math.inf
NEVER_ENDS = (1 << 31) - 1
ROWS_APART = 8
QUAD = (1, 2)
"""Lane distances by which four lanes exchange all they have."""
FULL_CLAMP = 31
"""The last operand of shfl.bfly: no segments, all 32 lanes (PTX ISA, shfl.sync)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One of a thread's two rows. `reference`: the scaled maximum, in units of log2, that P is relative to; `total`:
    this thread's share of the row sum, in fp32."""

    number: Register
    is_row: Register
    first_key: Register
    end_key: Register
    reference: Register
    total: Register


def open_rows(frame: Frame) -> tuple[Row, Row]:
    """The rows of a thread, which have seen nothing yet."""
    x = frame.x
    x.section("this thread's two rows")
    quad = x.let("quad", "shr.u32", x.let("lane", "and.b32", frame.thread, 31), 2)
    warp = x.let("warp", "shr.u32", frame.thread, 5)
    upper = x.let("upper_row", "mad.lo.u32", warp, 16, quad)
    x.emit("add.u32", upper, upper, frame.row_origin)
    return _row(frame, upper), _row(frame, x.let("lower_row", "add.u32", upper, ROWS_APART))


def _row(frame: Frame, number: Register) -> Row:
    x, params = frame.x, frame.params
    is_row = x.let("is_row", "setp.lt.u32", number, params.rows)
    query = x.let("query", "rem.u32", number, params.t)
    position = x.let("position", "add.s32", query, frame.position_offset)
    first, end = first_visible(x, params, position, "row"), end_visible(x, params, position, "row")
    x.comment("A row beyond the last never asks for a mask; nobody reads what it computes.")
    x.emit("selp.s32", first, first, 0, is_row)
    x.emit("selp.s32", end, end, NEVER_ENDS, is_row)
    reference = x.let("reference", "mov.f32", MINUS_INFINITY)
    return Row(number, is_row, first, end, reference, x.let("row_sum", "mov.f32", 0.0))


def emit_softmax(
    frame: Frame, rows: tuple[Row, Row], scores: tuple[Register, ...], outputs: tuple[Register, ...], key: Register
) -> tuple[Register, ...]:
    """S of the tile at `key` becomes P, whose bf16 pairs are returned as wgmma takes A; `outputs` are rescaled."""
    x = frame.x
    _mask(frame, rows, scores, key)
    for index, row in enumerate(rows):
        mine = _of_row(scores, index)
        rescale, shift = _raise_reference(x, frame, row, mine)
        for register in _of_row(outputs, index):
            x.emit("mul.rn.f32", register, register, rescale)
        for score in mine:
            x.emit("fma.rn.f32", score, score, frame.params.scale_log2, shift)
            x.emit("ex2.approx.ftz.f32", score, score)
            x.emit("add.rn.f32", row.total, row.total, score)
    return tuple(
        x.let("p", "cvt.rn.bf16x2.f32", odd, even) for even, odd in zip(scores[::2], scores[1::2], strict=True)
    )


def _of_row(registers: tuple[Register, ...], row: int) -> list[Register]:
    return [register for index, register in enumerate(registers) if index // 2 % 2 == row]


def _mask(frame: Frame, rows: tuple[Row, Row], scores: tuple[Register, ...], key: Register) -> None:
    """Hides the keys outside of [first, end); a warp whose rows see the whole tile skips this."""
    x, tile_n = frame.x, frame.geometry.tile_n
    column = x.let("my_column", "and.b32", frame.thread, 3)
    x.emit("shl.b32", column, column, 1)
    x.emit("add.u32", column, column, key)
    bounds: list[tuple[Register, Register]] = []
    whole = x.reg("sees_all", "pred")
    x.emit("setp.ge.s32", whole, key, rows[0].first_key)
    x.emit("setp.ge.and.s32", whole, key, rows[1].first_key, whole)
    tile_end = x.let("tile_end", "add.s32", key, tile_n)
    for row in rows:
        x.emit("setp.le.and.s32", whole, tile_end, row.end_key, whole)
        first = x.let("first_column", "sub.s32", row.first_key, column)
        bounds.append((first, x.let("end_column", "sub.s32", row.end_key, column)))
    x.emit("vote.sync.all.pred", whole, whole, FULL_WARP)
    visible = x.reg("visible", "pred")
    with x.unless(whole, "mask"):
        for index, score in enumerate(scores):
            first, end = bounds[index // 2 % 2]
            offset = 8 * (index // 4) + index % 2
            x.emit("setp.le.s32", visible, first, offset)
            x.emit("setp.gt.and.s32", visible, end, offset, visible)
            x.emit("selp.f32", score, score, MINUS_INFINITY, visible)


def _raise_reference(x: Builder, frame: Frame, row: Row, scores: list[Register]) -> tuple[Register, Register]:
    """Raises the row's reference to the tile's maximum; returns 2^(old - new) and what to add to a scaled score."""
    most = x.let("tile_max", "max.f32", scores[0], scores[1])
    for score in scores[2:]:
        x.emit("max.f32", most, most, score)
    for distance in QUAD:
        x.emit("max.f32", most, most, _from_lane(x, most, distance))
    raised = x.let("raised", "mul.rn.f32", most, frame.params.scale_log2)
    x.emit("max.f32", raised, raised, row.reference)
    unseen = x.let("unseen", "setp.eq.f32", raised, MINUS_INFINITY)
    shift = x.let("shift", "neg.f32", raised)
    x.emit("selp.f32", shift, 0.0, shift, unseen, note="-inf - -inf would be NaN")
    drop = x.let("drop", "add.rn.f32", row.reference, shift)
    rescale = x.let("rescale", "ex2.approx.ftz.f32", drop, note="0 at first sight, 1 where the maximum stays")
    x.emit("mul.rn.f32", row.total, row.total, rescale)
    x.emit("mov.f32", row.reference, raised)
    return rescale, shift


def quad_sum(x: Builder, value: Register) -> None:
    """The sum over the four lanes of a row, in all of them."""
    for distance in QUAD:
        x.emit("add.rn.f32", value, value, _from_lane(x, value, distance))


def _from_lane(x: Builder, value: Register, distance: int) -> Register:
    return x.let("other", "shfl.sync.bfly.b32", value, distance, FULL_CLAMP, FULL_WARP)
