"""Attention of one query on few keys for sm_90a, as PTX text: one CTA per row of O, no tensor cores, all loads at once.

Such a call is as long as its longest chain of waits. So there are no tensor maps and no mbarriers: a thread issues its
loads of Q, K and V before it uses any of them, the warps synchronise once, and some threads add up the warps' results.

A key has hd / 8 lanes of a warp, eight columns each. In turn i, warp w has the keys from (32 i + w) * keys_of_warp on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from backends.ptx.attention import (
    BF16_BYTES,
    MINUS_INFINITY,
    FmhaAxes,
    FmhaShape,
    first_visible,
    inverse_of,
    log_sum_exp,
    shift_of,
)
from backends.ptx.builder import CTAID_X, TID_X, Builder
from backends.ptx.operands import Register, Vector, at
from backends.ptx.parameters import Parameters, Pointer
from backends.ptx.shared_memory import Smem, SmemLayout
from backends.ptx.sm90_fmha.geometry import SM_COUNT
from backends.ptx.sm90_fmha.kernel import PTX_VERSION
from backends.ptx.sm90_fmha.softmax import from_lane
from megamoe.contract import Launch, Program

MIN_KEYS, MAX_KEYS = 129, 512
"""The kernel reads all keys of a row of O for that row alone, so longer caches and several tokens do better in tiles
that rows share. Up to 128 keys, two tiles that are loaded at once are as fast: 5.6 and 6.1 us at hd 64 and 128
(results/records/h200-fmha-turns.json)."""
MAX_ROWS = SM_COUNT
"""The most rows of O (query heads of all sequences) for which each row gets a CTA, and so an SM. 256 rows of hd 128 on
256 keys take 12.7 us this way and 8.2 us in tiles (results/records/h200-fmha-short.json)."""
WARPS, LANES = 32, 32
VECTOR = 8
"""Columns per lane: 16 bytes."""
F32_BYTES = 4
UPPER_HALF = 0xFFFF0000
"""The upper bf16 of a pair is an f32 whose lower half is zero."""


@dataclass(frozen=True, slots=True)
class RowTiling:
    """How the keys are assigned to warps and lanes."""

    hd: int

    @property
    def lanes(self) -> int:
        """Lanes per key."""
        return self.hd // VECTOR

    @property
    def keys_of_warp(self) -> int:
        """Keys of a warp per turn."""
        return LANES // self.lanes

    @property
    def keys_of_turn(self) -> int:
        """Keys of the CTA per turn."""
        return WARPS * self.keys_of_warp

    @property
    def turns(self) -> int:
        """Turns, which is the number of keys of a lane."""
        return MAX_KEYS // self.keys_of_turn

    @property
    def o_pitch(self) -> int:
        """Bytes from one warp's O to the next."""
        return (self.hd + 4) * F32_BYTES

    @property
    def smem(self) -> SmemLayout:
        """O, maximum and sum of each warp."""
        layout = SmemLayout().with_place("o", WARPS * self.o_pitch, 16)
        return layout.with_place("max", WARPS * F32_BYTES, 16).with_place("sum", WARPS * F32_BYTES, 16)


@dataclass(frozen=True, slots=True)
class RowParams(Parameters):
    """The parameters, in order. `lse` is null when it is not wanted."""

    q: Pointer
    k: Pointer
    v: Pointer
    o: Pointer
    lse: Pointer
    axes: FmhaAxes


def row_tiling(shape: FmhaShape) -> RowTiling | None:
    """The kernel for a case of one query on few keys; None for others. Depends on hd, t, s_k and the number of rows."""
    fits = shape.t == 1 and shape.hd in (64, 128) and MIN_KEYS <= shape.s_k <= MAX_KEYS
    return RowTiling(shape.hd) if fits and shape.batch * shape.kv_heads * shape.rows <= MAX_ROWS else None


def row_program(shape: FmhaShape, tiling: RowTiling) -> Program:
    """One launch with one CTA per row."""
    launch = Launch(
        entry=row_name(tiling),
        grid=(shape.batch * shape.kv_heads * shape.rows, 1, 1),
        block=(WARPS * LANES, 1, 1),
        args=RowParams.arguments(v=shape.values, lse="lse" if shape.lse else None, axes=shape.axes()),
        dynamic_smem=tiling.smem.size,
    )
    return Program(target="sm_90a", ptx=row_text(tiling), launches=(launch,))


def row_name(tiling: RowTiling) -> str:
    """The entry name of the kernel."""
    return f"fmha_forward_row_hd{tiling.hd}"


@cache
def row_text(tiling: RowTiling) -> str:
    """PTX that serves every s_k up to MAX_KEYS, window, batch and grouping of one hd."""
    x = Builder(row_name(tiling), target="sm_90a", version=PTX_VERSION, block=WARPS * LANES)
    x.header(
        [
            f"FMHA forward, hd = {tiling.hd}, one query a sequence, up to {MAX_KEYS} keys: a CTA a row of O.",
            "Dynamic shared memory, in bytes:",
            *tiling.smem.described(),
        ]
    )
    params = RowParams.declare(x)
    smem = Smem.declare(x, "dynamic_smem", tiling.smem)
    place = _Place.open(x, params, tiling)
    q, k, v = _loads(x, params, tiling, place)
    _own_keys(x, smem, params, tiling, place, q, k, v)
    x.sync_cta(note="all warps have stored theirs")
    _all_keys(x, smem, params, tiling, place)
    x.emit("ret")
    return x.text()


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a thread. `keys`: its key in each turn. `first`: the first key that the row sees. `column`: the
    thread's first column."""

    thread: Register
    warp: Register
    lane: Register
    row: Register
    column: Register
    keys: Vector
    first: Register

    @classmethod
    def open(cls, x: Builder, params: RowParams, tiling: RowTiling) -> _Place:
        """Computes the position from the indices of CTA and thread."""
        x.section("which keys, which columns")
        thread = x.let("thread", "mov.u32", TID_X)
        row = x.let("row", "mov.u32", CTAID_X)
        warp = x.let("warp", "shr.u32", thread, 5)
        lane = x.let("lane", "and.b32", thread, LANES - 1)
        own = x.let("own_key", "shr.u32", lane, tiling.lanes.bit_length() - 1)
        x.emit("mad.lo.u32", own, warp, tiling.keys_of_warp, own)
        column = x.let("column", "and.b32", lane, tiling.lanes - 1)
        x.emit("mul.lo.u32", column, column, VECTOR)
        last = x.let("last_key", "sub.s32", params.axes.s_k, 1)
        first = first_visible(x, params.axes, last, "row")
        keys = tuple(x.let("key", "add.u32", own, turn * tiling.keys_of_turn) for turn in range(tiling.turns))
        return cls(thread, warp, lane, row, column, keys, first)


def _loads(
    x: Builder, params: RowParams, tiling: RowTiling, place: _Place
) -> tuple[Vector, list[Vector], list[Vector]]:
    """This lane's columns of Q, and of K and V for its keys, as pairs of bf16."""
    x.section("all loads")
    x.comment("A key that the row does not see is one that it sees to the loads: they need no branch.")
    row_bytes = tiling.hd * BF16_BYTES
    last = x.let("last_load", "sub.s32", params.axes.s_k, 1)
    loaded: list[Register] = []
    for key in place.keys:
        clipped = x.let("load_key", "max.s32", key, place.first)
        x.emit("min.s32", clipped, clipped, last)
        loaded.append(clipped)
    head = x.let("batch_head", "div.u32", place.row, params.axes.rows)
    base = x.let("head_key", "mul.wide.u32", head, params.axes.s_k)
    x.emit("mul.lo.u64", base, base, row_bytes)
    columns = x.let("column_bytes", "mul.wide.u32", place.column, BF16_BYTES)
    x.emit("add.s64", base, base, columns)

    def load(name: str, address: Register) -> Vector:
        words = x.regs(name, "b32", VECTOR // 2)
        x.emit("ld.global.v4.b32", words, at(address))
        return words

    def rows_of(name: str, tensor: Register) -> list[Vector]:
        start = x.let(f"{name}_start", "add.s64", tensor, base)
        return [load(f"{name}_words", x.indexed_wide(f"{name}_at", start, key, row_bytes)) for key in loaded]

    k = rows_of("k", params.k)
    q_start = x.let("q_start", "add.s64", params.q, columns)
    q = load("q_words", x.indexed_wide("q_at", q_start, place.row, row_bytes))
    return q, k, rows_of("v", params.v)


def _halves(x: Builder, words: Vector) -> list[Register]:
    """The bf16 values of the pairs, as f32."""
    values: list[Register] = []
    for word in words:
        values += [x.let("low", "shl.b32", word, 16), x.let("high", "and.b32", word, UPPER_HALF)]
    return values


def _own_keys(
    x: Builder,
    smem: Smem,
    params: RowParams,
    tiling: RowTiling,
    place: _Place,
    q: Vector,
    k: list[Vector],
    v: list[Vector],
) -> None:
    """Softmax and P V over the keys of each warp; the lanes of its first key store the result."""
    x.section("the keys of a warp")
    query = _halves(x, q)
    within = [1 << step for step in range(tiling.lanes.bit_length() - 1)]
    across = [tiling.lanes << step for step in range(tiling.keys_of_warp.bit_length() - 1)]
    scores: list[Register] = []
    for words, key in zip(k, place.keys, strict=True):
        score = x.let("score", "mov.f32", 0.0)
        for mine, theirs in zip(query, _halves(x, words), strict=True):
            x.emit("fma.rn.f32", score, mine, theirs, score)
        for distance in within:
            x.emit("add.rn.f32", score, score, from_lane(x, score, distance))
        x.emit("mul.rn.f32", score, score, params.axes.scale_log2)
        seen = x.let("seen", "setp.ge.s32", key, place.first)
        x.emit("setp.lt.and.s32", seen, key, params.axes.s_k, seen)
        x.emit("selp.f32", score, score, MINUS_INFINITY, seen)
        scores.append(score)
    most = x.let("most", "mov.f32", scores[0])
    for score in scores[1:]:
        x.emit("max.f32", most, most, score)
    for distance in across:
        x.emit("max.f32", most, most, from_lane(x, most, distance))
    shift = shift_of(x, most)
    total = x.let("total", "mov.f32", 0.0)
    outputs = x.regs("o_acc", "f32", VECTOR)
    for register in outputs:
        x.emit("mov.f32", register, 0.0)
    for words, score in zip(v, scores, strict=True):
        x.emit("add.rn.f32", score, score, shift)
        x.emit("ex2.approx.ftz.f32", score, score)
        x.emit("add.rn.f32", total, total, score)
        short = x.let("p", "cvt.rn.bf16x2.f32", score, score)
        x.emit("and.b32", short, short, UPPER_HALF)
        for register, value in zip(outputs, _halves(x, words), strict=True):
            x.emit("fma.rn.f32", register, short, value, register)
    for distance in across:
        for register in (total, *outputs):
            x.emit("add.rn.f32", register, register, from_lane(x, register, distance))
    stores = x.let("stores", "setp.lt.u32", place.lane, tiling.lanes)
    with x.when(stores, "store_warp"):
        own = x.indexed("own_o", smem.base, place.warp, tiling.o_pitch)
        x.emit("mad.lo.u32", own, place.column, F32_BYTES, own)
        for half in range(2):
            quarter = outputs[4 * half : 4 * half + 4]
            x.emit("st.shared.v4.f32", at(own, smem.layout["o"] + 16 * half), quarter)
        leads = x.let("leads", "setp.eq.u32", place.lane, 0)
        statistics = x.indexed("own_statistics", smem.base, place.warp, F32_BYTES)
        x.emit("st.shared.f32", at(statistics, smem.layout["max"]), most, guard=leads)
        x.emit("st.shared.f32", at(statistics, smem.layout["sum"]), total, guard=leads)


def _all_keys(x: Builder, smem: Smem, params: RowParams, tiling: RowTiling, place: _Place) -> None:
    """Two columns of O per thread, combined from all warps; one thread stores lse."""
    x.section("all keys")
    adds = x.let("adds", "setp.lt.u32", place.thread, tiling.hd // 2)
    with x.when(adds, "add_up"):
        maxima = [x.let("warp_max", "ld.shared.f32", smem["max"].plus(F32_BYTES * warp)) for warp in range(WARPS)]
        top = x.let("top", "max.f32", maxima[0], maxima[1])
        for most in maxima[2:]:
            x.emit("max.f32", top, top, most)
        shift = shift_of(x, top)
        total = x.let("row_total", "mov.f32", 0.0)
        sums = x.let("o_even", "mov.f32", 0.0), x.let("o_odd", "mov.f32", 0.0)
        pair = x.indexed("pair_at", smem.base, place.thread, 2 * F32_BYTES)
        for warp, most in enumerate(maxima):
            x.emit("add.rn.f32", most, most, shift)
            x.emit("ex2.approx.ftz.f32", most, most)
            own = x.let("warp_sum", "ld.shared.f32", smem["sum"].plus(F32_BYTES * warp))
            x.emit("fma.rn.f32", total, most, own, total)
            values = x.reg("warp_even", "f32"), x.reg("warp_odd", "f32")
            x.emit("ld.shared.v2.f32", values, at(pair, smem.layout["o"] + warp * tiling.o_pitch))
            for register, value in zip(sums, values, strict=True):
                x.emit("fma.rn.f32", register, most, value, register)
        inverse = inverse_of(x, total)
        for register in sums:
            x.emit("mul.rn.f32", register, register, inverse)
        rounded = x.let("rounded", "cvt.rn.bf16x2.f32", sums[1], sums[0])
        address = x.indexed_wide("o_row", params.o, place.row, tiling.hd * BF16_BYTES)
        x.emit("mad.wide.u32", address, place.thread, 2 * BF16_BYTES, address)
        x.emit("st.global.b32", at(address), rounded)
        wanted = x.let("lse_wanted", "setp.ne.u64", params.lse, 0)
        x.emit("setp.eq.and.u32", wanted, place.thread, 0, wanted)
        lse = log_sum_exp(x, top, total)
        x.emit("st.global.f32", at(x.indexed_wide("lse_at", params.lse, place.row, F32_BYTES)), lse, guard=wanted)
