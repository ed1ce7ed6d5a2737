"""The FMHA forward kernel of one head dimension for sm_90a, as PTX text: one warpgroup a tile of 64 query rows.

Q K^T takes both operands from shared memory. P stays in registers: the accumulator of the first wgmma, two neighbours
packed into a bf16 pair, is the A operand of the second one as it lies. V is read as it was stored, keys outermost, by
the transposing (MN-major) form of B. At hd = 512 the accumulator of O would take 256 registers a thread, so two CTAs
share a row tile, each with 256 columns of V and O; both compute all of S, as on sm_100a.

With few queries (decoding) the keys are split over CTAs, whose partial results a second kernel combines.

The tiles in flight and two or three CTAs an SM hide what a single warpgroup cannot overlap. Float arithmetic says `.rn`
throughout, which forbids ptxas to contract: every rounding is the same on a GPU and on the virtual machine.
"""

from __future__ import annotations

import math
from functools import cache

from backends.ptx.attention import PANEL_COLUMNS
from backends.ptx.builder import Builder, module_text
from backends.ptx.operands import Register, at
from backends.ptx.sm90_fmha.combine import combine_kernel
from backends.ptx.sm90_fmha.frame import Frame, open_frame
from backends.ptx.sm90_fmha.geometry import (
    MMA_K,
    ROW_BYTES,
    THREADS,
    TILE_M,
    Geometry,
    descriptor_bits,
)
from backends.ptx.sm90_fmha.loads import Stage, load_first, load_next
from backends.ptx.sm90_fmha.softmax import Row, emit_softmax, open_rows, quad_sum

PTX_VERSION = (8, 0)
"""wgmma appeared in PTX ISA 8.0."""
_MMA = "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
_PLUS_A, _PLUS_B, _K_MAJOR, _MN_MAJOR = 1, 1, 0, 1


def entry_name(hd: int) -> str:
    """The entry of the kernel for one hd."""
    return f"fmha_forward_hd{hd}"


@cache
def kernel_text(hd: int, split: bool = False) -> str:
    """PTX for sm_90a that serves every t, s_k, mask, batch and grouping of one hd.

    `split`: with partial results, and the kernel that combines them.
    """
    attention = _attention(hd, split)
    return module_text([attention, combine_kernel(hd, PTX_VERSION)]) if split else attention.text()


def _attention(hd: int, split: bool) -> Builder:
    geometry = Geometry(hd)
    x = Builder(entry_name(hd), target="sm_90a", version=PTX_VERSION, block=THREADS)
    x.header(_description(geometry))
    frame = open_frame(x, geometry, split)
    load_first(frame)
    rows = open_rows(frame)
    outputs = x.regs("o_acc", "f32", geometry.o_columns // 2)
    for register in outputs:
        x.emit("mov.f32", register, 0.0)
    _tiles(frame, rows, outputs)
    (_partial_epilogue if split else _epilogue)(frame, rows, outputs)
    x.emit("ret")
    return x


def _tiles(frame: Frame, rows: tuple[Row, Row], outputs: tuple[Register, ...]) -> None:
    x, geometry = frame.x, frame.geometry
    x.section("tiles of keys")
    scores = x.regs("s", "f32", geometry.tile_n // 2)
    q = _descriptor(frame, x.let("q_data", "add.u32", frame.smem, geometry.smem["q"]), "q", 0)
    always = x.let("always", "setp.eq.u32", frame.tiles, frame.tiles)
    never = x.let("never", "setp.ne.u32", frame.tiles, frame.tiles)
    stage = Stage.first(frame)
    tile = x.let("tile", "mov.b32", 0)
    key = x.let("key", "mov.b32", frame.first_key)
    finished = x.let("finished", "setp.eq.u32", frame.tiles, 0)
    with x.unless(finished, "all_tiles"):
        x.wait(frame.place("q_full"), 0, "q_full")
        with x.loop("tiles") as loop:
            _scores(frame, stage, q, scores, always, never)
            p = emit_softmax(frame, rows, scores, outputs, key)
            _outputs(frame, stage, p, outputs, always)
            load_next(frame, stage, tile, key)
            stage.advance(frame)
            x.emit("add.u32", key, key, geometry.tile_n)
            x.emit("add.u32", tile, tile, 1)
            x.emit("setp.ge.u32", finished, tile, frame.tiles)
            x.emit("bra", loop.done, guard=finished)


def _scores(
    frame: Frame, stage: Stage, q: Register, scores: tuple[Register, ...], always: Register, never: Register
) -> None:
    """S = Q K^T of the stage's tile, once K has come."""
    x, geometry = frame.x, frame.geometry
    x.comment("S = Q K^T")
    x.wait(at(stage.k_full), stage.parity, "k_full")
    k = _descriptor(frame, stage.data, "k", 0)
    x.emit("wgmma.fence.sync.aligned")
    for step in range(geometry.hd // MMA_K):
        panel, inside = divmod(step * MMA_K, PANEL_COLUMNS)
        a = _advanced(x, q, panel * TILE_M * ROW_BYTES + 2 * inside)
        b = _advanced(x, k, panel * geometry.panel_bytes + 2 * inside)
        accumulates = always if step else never
        kinds = (_PLUS_A, _PLUS_B, _K_MAJOR, _K_MAJOR)
        x.emit(_MMA.format(n=geometry.tile_n), scores, a, b, accumulates, *kinds)
    _finish(x)


def _outputs(
    frame: Frame, stage: Stage, p: tuple[Register, ...], outputs: tuple[Register, ...], always: Register
) -> None:
    """O += P V of the stage's tile, once V has come."""
    x, geometry = frame.x, frame.geometry
    x.comment("O += P V")
    x.wait(at(stage.v_full), stage.parity, "v_full")
    v_data = x.let("v_data", "add.u32", stage.data, geometry.k_bytes)
    v = _descriptor(frame, v_data, "v", geometry.panel_bytes)
    x.emit("wgmma.fence.sync.aligned")
    for step in range(geometry.tile_n // MMA_K):
        b = _advanced(x, v, step * MMA_K * ROW_BYTES)
        a = p[4 * step : 4 * step + 4]
        x.emit(_MMA.format(n=geometry.o_columns), outputs, a, b, always, _PLUS_A, _PLUS_B, _MN_MAJOR)
    _finish(x)


def _finish(x: Builder) -> None:
    x.emit("wgmma.commit_group.sync.aligned")
    x.emit("wgmma.wait_group.sync.aligned", 0)


def _descriptor(frame: Frame, address: Register, name: str, leading_bytes: int) -> Register:
    x = frame.x
    start = x.let(f"{name}_start", "shr.u32", address, 4)
    descriptor = x.let(f"{name}_descriptor", "cvt.u64.u32", start)
    x.emit("or.b64", descriptor, descriptor, descriptor_bits(leading_bytes))
    return descriptor


def _advanced(x: Builder, descriptor: Register, offset: int) -> Register:
    return descriptor if offset == 0 else x.let("descriptor", "add.u64", descriptor, offset // 16)


def _epilogue(frame: Frame, rows: tuple[Row, Row], outputs: tuple[Register, ...]) -> None:
    x, params, geometry = frame.x, frame.params, frame.geometry
    x.section("epilogue: O / sum, and lse")
    wanted = x.let("lse_wanted", "setp.ne.u64", params.lse, 0)
    quad_lane = x.let("quad_lane", "and.b32", frame.thread, 3)
    x.emit("setp.eq.and.u32", wanted, quad_lane, 0, wanted, note="one lane of the four that share a row")
    x.emit("setp.eq.and.u32", wanted, frame.o_origin, 0, wanted, note="one of the CTAs that share it")
    first_row = x.let("first_row", "mul.wide.u32", frame.batch_head, params.rows)
    for index, row in enumerate(rows):
        quad_sum(x, row.total)
        number = x.let("row_wide", "cvt.u64.u32", row.number)
        x.emit("add.s64", number, number, first_row)
        _store_lse(frame, row, number, wanted)
        inverse = x.let("inverse", "rcp.approx.ftz.f32", row.total)
        empty = x.let("empty", "setp.eq.f32", row.total, 0.0)
        x.emit("selp.f32", inverse, 0.0, inverse, empty, note="a row that sees no key is 0")
        address = x.let("o_at", "mul.lo.u64", number, 2 * geometry.hd)
        x.emit("add.s64", address, address, params.o)
        column = x.let("o_column", "mad.lo.u32", quad_lane, 2, frame.o_origin)
        x.emit("add.s64", address, address, x.let("o_column_bytes", "mul.wide.u32", column, 2))
        with x.when(row.is_row, "store_row"):
            for block in range(geometry.o_columns // 8):
                even, odd = outputs[4 * block + 2 * index : 4 * block + 2 * index + 2]
                for value in (even, odd):
                    x.emit("mul.rn.f32", value, value, inverse)
                pair = x.let("pair", "cvt.rn.bf16x2.f32", odd, even)
                x.emit("st.global.b32", at(address, 16 * block), pair)


def _partial_epilogue(frame: Frame, rows: tuple[Row, Row], outputs: tuple[Register, ...]) -> None:
    """O as it stands, in fp32, and what it is relative to: combine.py makes one of all splits."""
    x, params, geometry = frame.x, frame.params, frame.geometry
    x.section("epilogue: partial results")
    quad_lane = x.let("quad_lane", "and.b32", frame.thread, 3)
    wanted = x.let("statistics_wanted", "setp.eq.u32", quad_lane, 0)
    x.emit("setp.eq.and.u32", wanted, frame.o_origin, 0, wanted, note="one thread a row, of one CTA")
    first_row = x.let("first_row", "mul.wide.u32", frame.batch_head, params.rows)
    x.emit("add.s64", first_row, first_row, frame.part)
    for index, row in enumerate(rows):
        quad_sum(x, row.total)
        number = x.let("row_wide", "cvt.u64.u32", row.number)
        x.emit("add.s64", number, number, first_row)
        stored = x.let("statistics_stored", "and.pred", wanted, row.is_row)
        place = x.let("statistics_at", "shl.b64", number, 3)
        x.emit("add.s64", place, place, params.lse)
        x.emit("st.global.v2.f32", at(place), (row.reference, row.total), guard=stored)
        address = x.let("o_at", "mul.lo.u64", number, 4 * geometry.hd)
        x.emit("add.s64", address, address, params.o)
        column = x.let("o_column", "mad.lo.u32", quad_lane, 2, frame.o_origin)
        x.emit("add.s64", address, address, x.let("o_column_bytes", "mul.wide.u32", column, 4))
        with x.when(row.is_row, "store_row"):
            for block in range(geometry.o_columns // 8):
                pair = outputs[4 * block + 2 * index : 4 * block + 2 * index + 2]
                x.emit("st.global.v2.f32", at(address, 32 * block), pair)


def _store_lse(frame: Frame, row: Row, number: Register, wanted: Register) -> None:
    """lse = ln 2 (reference + log2 sum); -inf for a row that sees no key, where both are -inf."""
    x = frame.x
    stored = x.let("lse_stored", "and.pred", wanted, row.is_row)
    log2_sum = x.let("log2_sum", "lg2.approx.ftz.f32", row.total)
    lse = x.let("lse_value", "add.rn.f32", row.reference, log2_sum)
    x.emit("mul.rn.f32", lse, lse, math.log(2.0))
    address = x.let("lse_at", "shl.b64", number, 2)
    x.emit("add.s64", address, address, frame.params.lse)
    x.emit("st.global.f32", at(address), lse, guard=stored)


def _description(geometry: Geometry) -> list[str]:
    lines = [
        f"FMHA forward, hd = {geometry.hd}: O = softmax(scale Q K^T) V, bf16 in and out, fp32 softmax.",
        f"A CTA: {TILE_M} folded query rows of a (batch, kv_head), tiles of {geometry.tile_n} keys, "
        f"{geometry.o_columns} columns of O.",
        "One warpgroup; thread 0 loads. Dynamic shared memory, in bytes:",
    ]
    return lines + [f"  {offset:6d} +{size:<6d} {name}" for name, (offset, size) in geometry.smem.places.items()]
