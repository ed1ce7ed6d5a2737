"""The online softmax in registers. A thread has two rows of the tile, 8 apart, and a quarter of their columns.

Accumulators of wgmma.m64nNk16 (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"): register 4 b + 2 r + c of a
thread is column 8 b + 2 (lane % 4) + c of row 16 warp + lane / 4 + 8 r. Four neighbouring lanes share a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.attention import MINUS_INFINITY, RowKeys, shift_of
from backends.ptx.builder import FULL_WARP, Builder
from backends.ptx.operands import Register, Vector
from backends.ptx.sm90_fmha.frame import Sm90FmhaFrame

ROWS_APART = 8
QUAD = (1, 2)
"""Lane distances by which four lanes exchange all their values."""
FULL_CLAMP = 31
"""The last operand of shfl.bfly: no segments, all 32 lanes (PTX ISA, shfl.sync)."""


@dataclass(frozen=True, slots=True)
class QueryRow:
    """One of a thread's two rows. `number`: the folded row. `reference`: the scaled maximum, in units of log2, that P
    is relative to. `total`: this thread's share of the row sum, in fp32."""

    number: Register
    keys: RowKeys
    reference: Register
    total: Register

    @classmethod
    def open(cls, frame: Sm90FmhaFrame, number: Register) -> QueryRow:
        """A row that has seen no key yet."""
        x = frame.x
        keys = RowKeys.of(frame, number)
        x.comment("A row beyond the last never asks for a mask; nobody reads what it computes.")
        keys.unmask_beyond(x)
        reference = x.let("reference", "mov.f32", MINUS_INFINITY)
        return cls(number, keys, reference, x.let("row_sum", "mov.f32", 0.0))


@dataclass(frozen=True, slots=True)
class Accumulators:
    """A thread's two rows and its share of O: `outputs`, f32, as wgmma accumulates them."""

    rows: tuple[QueryRow, QueryRow]
    outputs: Vector

    @classmethod
    def open(cls, frame: Sm90FmhaFrame) -> Accumulators:
        """Declares the registers and sets O = 0."""
        x = frame.x
        x.section("this thread's two rows")
        quad = x.let("quad", "shr.u32", x.let("lane", "and.b32", frame.thread, 31), 2)
        warp = x.let("warp", "shr.u32", frame.thread, 5)
        upper = x.let("upper_row", "mad.lo.u32", warp, 16, quad)
        x.emit("add.u32", upper, upper, frame.row_origin)
        upper_row = QueryRow.open(frame, upper)
        rows = upper_row, QueryRow.open(frame, x.let("lower_row", "add.u32", upper, ROWS_APART))
        outputs = x.regs("o_acc", "f32", frame.tiling.o_columns // 2)
        for register in outputs:
            x.emit("mov.f32", register, 0.0)
        return cls(rows, outputs)

    def pair(self, row: int, block: int) -> Vector:
        """Two neighbouring columns, in block `block` of 8 columns, of one of the two rows."""
        first = 4 * block + 2 * row
        return self.outputs[first : first + 2]


def probabilities(frame: Sm90FmhaFrame, sums: Accumulators, scores: Vector, key: Register) -> Vector:
    """P of the tile at `key`, computed from its scores S, as the bf16 pairs that wgmma takes as A. O is rescaled."""
    x = frame.x
    mask(frame, sums.rows, scores, key)
    for index in range(2):
        exponentials(frame, sums, scores, index, tile_maximum(x, of_row(scores, index)))
    return packed(x, scores)


def exponentials(frame: Sm90FmhaFrame, sums: Accumulators, scores: Vector, index: int, most: Register) -> None:
    """Replaces the scores of row `index` by exponentials after `most`, the tile's maximum, raised the reference."""
    x, row = frame.x, sums.rows[index]
    rescale, shift = _raise_reference(frame, row, most)
    for register in of_row(sums.outputs, index):
        x.emit("mul.rn.f32", register, register, rescale)
    for score in of_row(scores, index):
        x.emit("fma.rn.f32", score, score, frame.axes.scale_log2, shift)
        x.emit("ex2.approx.ftz.f32", score, score)
        x.emit("add.rn.f32", row.total, row.total, score)


def packed(x: Builder, scores: Vector) -> Vector:
    """Packs neighbours as pairs of bf16."""
    return tuple(
        x.let("p", "cvt.rn.bf16x2.f32", odd, even) for even, odd in zip(scores[::2], scores[1::2], strict=True)
    )


def of_row(registers: Vector, row: int) -> list[Register]:
    return [register for index, register in enumerate(registers) if index // 2 % 2 == row]


def mask(frame: Sm90FmhaFrame, rows: tuple[QueryRow, QueryRow], scores: Vector, key: Register) -> None:
    """Masks the keys outside [first, end); a warp whose rows see the whole tile skips this."""
    x, tile_n = frame.x, 2 * len(scores)
    column = x.let("my_column", "and.b32", frame.thread, 3)
    x.emit("shl.b32", column, column, 1)
    x.emit("add.u32", column, column, key)
    bounds: list[tuple[Register, Register]] = []
    whole = x.reg("sees_all", "pred")
    x.emit("setp.ge.s32", whole, key, rows[0].keys.first)
    x.emit("setp.ge.and.s32", whole, key, rows[1].keys.first, whole)
    tile_end = x.let("tile_end", "add.s32", key, tile_n)
    for row in rows:
        x.emit("setp.le.and.s32", whole, tile_end, row.keys.end, whole)
        first = x.let("first_column", "sub.s32", row.keys.first, column)
        bounds.append((first, x.let("end_column", "sub.s32", row.keys.end, column)))
    x.emit("vote.sync.all.pred", whole, whole, FULL_WARP)
    visible = x.reg("visible", "pred")
    with x.unless(whole, "mask"):
        for index, score in enumerate(scores):
            first, end = bounds[index // 2 % 2]
            offset = 8 * (index // 4) + index % 2
            x.emit("setp.le.s32", visible, first, offset)
            x.emit("setp.gt.and.s32", visible, end, offset, visible)
            x.emit("selp.f32", score, score, MINUS_INFINITY, visible)


def tile_maximum(x: Builder, scores: list[Register]) -> Register:
    """The greatest score of a row."""
    most = x.let("tile_max", "max.f32", scores[0], scores[1])
    for score in scores[2:]:
        x.emit("max.f32", most, most, score)
    for distance in QUAD:
        x.emit("max.f32", most, most, from_lane(x, most, distance))
    return most


def _raise_reference(frame: Sm90FmhaFrame, row: QueryRow, most: Register) -> tuple[Register, Register]:
    """Raises the row's reference to the tile's maximum; returns 2^(old - new) and what to add to a scaled score."""
    x = frame.x
    raised = x.let("raised", "mul.rn.f32", most, frame.axes.scale_log2)
    x.emit("max.f32", raised, raised, row.reference)
    shift = shift_of(x, raised)
    drop = x.let("drop", "add.rn.f32", row.reference, shift)
    rescale = x.let("rescale", "ex2.approx.ftz.f32", drop, note="0 at first sight, 1 where the maximum stays")
    x.emit("mul.rn.f32", row.total, row.total, rescale)
    x.emit("mov.f32", row.reference, raised)
    return rescale, shift


def quad_sum(x: Builder, value: Register) -> None:
    """Sums over the four lanes of a row; all of them get the sum."""
    for distance in QUAD:
        x.emit("add.rn.f32", value, value, from_lane(x, value, distance))


def from_lane(x: Builder, value: Register, distance: int) -> Register:
    """The value of the lane at `distance`."""
    return x.let("other", "shfl.sync.bfly.b32", value, distance, FULL_CLAMP, FULL_WARP)
