"""Shared by the attention kernels of all targets: the axes of a case, tensor maps, a CTA's tile, the keys of a row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from backends.ptx.builder import CTAID_X, CTAID_Y, CTAID_Z, Builder
from backends.ptx.operands import Register
from backends.ptx.parameters import F32, S32, U32, Map, Parameters, Pointer
from backends.ptx.shared_memory import Smem
from megamoe.contract import Case, KernelArg, Target, TensorMapArg, UnsupportedError

BF16_BYTES = 2
LOG2_E = math.log2(math.e)
MINUS_INFINITY = -math.inf
NO_WINDOW = 1 << 30
"""Stands for "no limit" in `window` and `ahead`; far above any s_k and any t."""
NEVER_ENDS = (1 << 31) - 1
PANEL_COLUMNS = 64
"""bf16 columns in a 128-byte swizzle span."""
SUPPORTED_HD = (64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class FmhaShape:
    """The axes of one case. The query heads of a kv_head are folded into `rows` = group * t rows, head after head,
    because q, o and lse have that layout in memory."""

    hd: int
    t: int
    s_k: int
    batch: int
    kv_heads: int
    group: int
    ahead: int
    window: int
    scale: float
    lse: bool
    values: str
    """The tensor that holds the values: v, or k if both are one. The second load of a tile then hits the L2."""
    sms: int | None
    """The SMs to launch for; None: all of the device."""

    @property
    def rows(self) -> int:
        """Folded query rows of one (batch, kv_head)."""
        return self.group * self.t

    @classmethod
    def of(cls, case: Case, target: Target) -> FmhaShape:
        """Reads the case. Raises UnsupportedError for a case that the kernel of `target` does not support."""
        hd, t, s_k = case.int("hd"), case.int("t"), case.int("s_k")
        heads, kv_heads, batch = case.int("heads"), case.int("kv_heads"), case.int("batch")
        if hd not in SUPPORTED_HD:
            raise UnsupportedError(
                f"{case.id}: hd is {hd}; the {target} kernel has hd {', '.join(map(str, SUPPORTED_HD))}"
            )
        if heads % kv_heads:
            raise UnsupportedError(f"{case.id}: {heads} heads do not share {kv_heads} kv_heads evenly")
        if max(t, s_k) >= NO_WINDOW // 2:
            raise UnsupportedError(f"{case.id}: t and s_k must stay below {NO_WINDOW // 2}; t is {t}, s_k is {s_k}")
        if case["sinks"]:
            raise UnsupportedError(f"{case.id}: the {target} kernel of the ptx backend has no attention sinks")
        if case["ragged"]:
            raise UnsupportedError(
                f"{case.id}: the {target} kernel of the ptx backend has no sequences of their own lengths and no pages"
            )
        scale, window = case["scale"], case["window"]
        scale = 1.0 / math.sqrt(hd) if scale is None else float(scale)
        if not 0.0 < scale < math.inf:
            raise UnsupportedError(f"{case.id}: scale is {scale}; the online softmax needs a positive, finite one")
        return cls(
            hd=hd,
            t=t,
            s_k=s_k,
            batch=batch,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            ahead=0 if case["causal"] else NO_WINDOW,
            window=NO_WINDOW if window is None else min(int(window), NO_WINDOW),
            scale=scale,
            lse=bool(case["lse"]),
            values="k" if case["kv"] == "latent" else "v",
            sms=None if case["sms"] is None else case.int("sms"),
        )

    def axes(self) -> tuple[KernelArg, ...]:
        """The launch arguments for FmhaAxes."""
        return FmhaAxes.arguments(
            t=self.t,
            s_k=self.s_k,
            rows=self.rows,
            kv_heads=self.kv_heads,
            window=self.window,
            ahead=self.ahead,
            scale_log2=self.scale * LOG2_E,
        )


@dataclass(frozen=True, slots=True)
class FmhaAxes(Parameters):
    """Scalars of an attention kernel. `rows`: group * t folded query rows of a (batch, kv_head). `window`: keys that a
    row sees up to and including its own position. `ahead`: keys that it sees past its own position, 0 when causal."""

    t: U32
    s_k: U32
    rows: U32
    kv_heads: U32
    window: S32
    ahead: S32
    scale_log2: F32


@dataclass(frozen=True, slots=True)
class FmhaParams(Parameters):
    """The parameters, in order, of a kernel that stores O through a pointer. `lse` is null when it is not wanted."""

    q: Map
    k: Map
    v: Map
    o: Pointer
    lse: Pointer
    axes: FmhaAxes


def tensor_map(shape: FmhaShape, tensor: str, rows: int, box_rows: int) -> TensorMapArg:
    """[batch * kv_heads][rows][hd] in boxes of 64 columns. The third dimension keeps heads apart: rows past the last
    one read as zeros and are not written."""
    row_bytes = shape.hd * BF16_BYTES
    return TensorMapArg(
        tensor=tensor,
        dtype="bf16",
        dims=(shape.hd, rows, shape.batch * shape.kv_heads),
        strides=(row_bytes, rows * row_bytes),
        box=(PANEL_COLUMNS, box_rows, 1),
        swizzle="128B",
    )


class OutputSplit(Protocol):
    """How the columns of O are split over CTAs."""

    @property
    def halves(self) -> int:
        """Number of CTAs that share a row tile."""
        ...

    @property
    def o_columns(self) -> int:
        """Columns of O (and V) that one CTA owns."""
        ...


@dataclass(frozen=True, slots=True)
class CtaTile:
    """The tile of a CTA. `row_origin`: its first folded row. `o_origin`: its first column of O and V."""

    row_origin: Register
    o_origin: Register
    kv_head: Register
    batch: Register

    @classmethod
    def read(cls, x: Builder, split: OutputSplit, tile_m: int) -> CtaTile:
        """Reads the tile from the CTA's index: (row tile and columns of O, kv_head, batch)."""
        x.comment(f"{split.halves} CTA(s) a row tile, each with {split.o_columns} columns of O.")
        x_index = x.let("x_index", "mov.u32", CTAID_X)
        row_tile = x.let("row_tile", "div.u32", x_index, split.halves)
        half = x.let("half", "rem.u32", x_index, split.halves)
        o_origin = x.let("o_origin", "mul.lo.u32", half, split.o_columns)
        row_origin = x.let("row_origin", "mul.lo.u32", row_tile, tile_m)
        return cls(row_origin, o_origin, x.let("kv_head", "mov.u32", CTAID_Y), x.let("batch", "mov.u32", CTAID_Z))

    def batch_head(self, x: Builder, axes: FmhaAxes) -> Register:
        """batch * kv_heads + kv_head, the outermost coordinate of every tensor map."""
        return x.let("batch_head", "mad.lo.u32", self.batch, axes.kv_heads, self.kv_head)


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """The key tiles of a CTA. `first_key`: start of the first tile that any row sees, a multiple of the tile size.
    `count`: 0 when no row sees a key."""

    first_key: Register
    count: Register

    @classmethod
    def between(cls, x: Builder, first: Register, end: Register, tile_n: int) -> KeyTiles:
        """The tiles of `tile_n` keys that cover the keys [first, end). `end` may be below `first`."""
        first_key = x.let("first_key", "and.b32", first, -tile_n)
        reach = x.let("reach", "sub.s32", end, first_key)
        x.emit("max.s32", reach, reach, 0)
        x.emit("add.s32", reach, reach, tile_n - 1)
        return cls(first_key, x.let("tiles", "shr.u32", reach, tile_n.bit_length() - 1))


@dataclass(frozen=True, slots=True)
class FmhaFrame:
    """Registers that all parts of an attention kernel read."""

    x: Builder
    axes: FmhaAxes
    smem: Smem
    thread: Register
    row_origin: Register
    """First folded row of this CTA's tile."""
    o_origin: Register
    """First column of O and V that this CTA owns."""
    batch_head: Register
    """batch * kv_heads + kv_head, the outermost coordinate of every tensor map."""
    position_offset: Register
    """s_k - t: a query's index plus this is its position among the keys."""
    keys: KeyTiles


def position_offset(x: Builder, axes: FmhaAxes) -> Register:
    """s_k - t."""
    return x.let("position_offset", "sub.s32", axes.s_k, axes.t)


def first_visible(x: Builder, axes: FmhaAxes, position: Register, name: str) -> Register:
    """The first key that the row at `position` sees, at least 0."""
    first = x.let(f"{name}_first_key", "sub.s32", position, axes.window)
    x.emit("add.s32", first, first, 1)
    x.emit("max.s32", first, first, 0)
    return first


def end_visible(x: Builder, axes: FmhaAxes, position: Register, name: str) -> Register:
    """One past the last key that the row at `position` sees: at most s_k, possibly below 0."""
    end = x.let(f"{name}_end_key", "add.s32", position, axes.ahead)
    x.emit("add.s32", end, end, 1)
    x.emit("min.s32", end, end, axes.s_k)
    return end


@dataclass(frozen=True, slots=True)
class RowKeys:
    """The keys [first, end) of one folded row. `is_row`: whether the row exists."""

    is_row: Register
    first: Register
    end: Register

    @classmethod
    def of(cls, frame: FmhaFrame, row: Register) -> RowKeys:
        """The keys of the folded row `row`."""
        x, axes = frame.x, frame.axes
        is_row = x.let("is_row", "setp.lt.u32", row, axes.rows)
        query = x.let("query", "rem.u32", row, axes.t)
        position = x.let("position", "add.s32", query, frame.position_offset)
        return cls(is_row, first_visible(x, axes, position, "row"), end_visible(x, axes, position, "row"))

    def unmask_beyond(self, x: Builder) -> None:
        """Lets a row past the last see every key, so that it never needs a mask."""
        x.emit("selp.s32", self.first, self.first, 0, self.is_row)
        x.emit("selp.s32", self.end, self.end, NEVER_ENDS, self.is_row)


def log_sum_exp(x: Builder, reference: Register, total: Register) -> Register:
    """lse = ln 2 * (reference + log2 total); -inf for a row that sees no key, where both terms are -inf."""
    log2_sum = x.let("log2_sum", "lg2.approx.ftz.f32", total)
    lse = x.let("lse_value", "add.rn.f32", reference, log2_sum)
    x.emit("mul.rn.f32", lse, lse, math.log(2.0))
    return lse


def shift_of(x: Builder, reference: Register) -> Register:
    """What to add to a scaled score: minus the reference, or 0 if no key has been seen."""
    unseen = x.let("unseen", "setp.eq.f32", reference, MINUS_INFINITY)
    shift = x.let("shift", "neg.f32", reference)
    x.emit("selp.f32", shift, 0.0, shift, unseen, note="-inf - -inf would be NaN")
    return shift


def inverse_of(x: Builder, total: Register) -> Register:
    """1 / row sum; 0 for a row that sees no key."""
    inverse = x.let("inverse", "rcp.approx.ftz.f32", total)
    empty = x.let("empty", "setp.eq.f32", total, 0.0)
    x.emit("selp.f32", inverse, 0.0, inverse, empty, note="a row that sees no key is 0")
    return inverse
