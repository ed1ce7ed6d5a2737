"""The FMHA forward kernel of one head dimension for sm_90a, as PTX text: one warpgroup per tile of 64 query rows.

Q K^T takes both operands from shared memory. P stays in registers: the accumulator of the first wgmma, with neighbours
packed into bf16 pairs, already has the layout of the second one's A operand. V is read as it was stored, keys
outermost, through the transposing (MN-major) form of B. pair.py handles hd 512, where O would take 256 registers per
thread, and many rows.

With few queries (decode) the keys are split over CTAs, and a second kernel combines their partial results.

A single warpgroup cannot overlap loads, MMA and softmax; the tiles in flight and two or three CTAs per SM do. Float
arithmetic uses `.rn` throughout, so that ptxas must not contract: every rounding is the same on a GPU and in the
virtual machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from backends.ptx.attention import PANEL_COLUMNS, inverse_of, log_sum_exp
from backends.ptx.builder import Builder
from backends.ptx.emitter import module_text
from backends.ptx.operands import Register, Vector, at
from backends.ptx.sm90_fmha.frame import Sm90FmhaFrame, open_frame
from backends.ptx.sm90_fmha.geometry import (
    MMA_K,
    ROW_BYTES,
    THREADS,
    TILE_M,
    Sm90FmhaTiling,
    descriptor_bits,
)
from backends.ptx.sm90_fmha.loads import KvCursor, load_first, load_next
from backends.ptx.sm90_fmha.softmax import Accumulators, QueryRow, probabilities, quad_sum
from backends.ptx.split_keys import F32_BYTES, KeyPart, combine_kernel

PTX_VERSION = (8, 0)
"""wgmma appeared in PTX ISA 8.0."""
MMA = "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
PLUS_A, PLUS_B, K_MAJOR, MN_MAJOR = 1, 1, 0, 1


def entry_name(hd: int) -> str:
    """The entry name of the kernel for one hd."""
    return f"fmha_forward_hd{hd}"


@cache
def kernel_text(hd: int, part_keys: int | None = None) -> str:
    """PTX for sm_90a that serves every t, s_k, mask, batch and grouping of one hd.

    With `part_keys`, a multiple of the tile, the kernel writes results of parts of that many keys, and the module also
    has the kernel that combines them.
    """
    attention = _attention(hd, part_keys)
    return module_text([attention, combine_kernel(hd, "sm_90a", PTX_VERSION)]) if part_keys else attention.text()


def _attention(hd: int, part_keys: int | None) -> Builder:
    tiling = Sm90FmhaTiling(hd)
    x = Builder(entry_name(hd), target="sm_90a", version=PTX_VERSION, block=THREADS)
    x.header(_description(tiling))
    frame = open_frame(x, tiling, part_keys)
    load_first(frame)
    sums = Accumulators.open(frame)
    _tiles(frame, sums)
    if frame.part is None:
        epilogue(frame, sums)
    else:
        partial_epilogue(frame, sums, frame.part)
    x.emit("ret")
    return x


@dataclass(frozen=True, slots=True)
class Products:
    """Inputs of both products. `q`: descriptor of Q. `always`, `never`: predicates that make a wgmma add to its
    accumulator, or overwrite it."""

    q: Register
    always: Register
    never: Register

    @classmethod
    def open(cls, frame: Sm90FmhaFrame, q_data: Register | None = None) -> Products:
        """Declares the registers. `q_data`: the address of the first row of Q; None: the place q."""
        x, tiles = frame.x, frame.keys.count
        q_data = q_data or x.let("q_data", "add.u32", frame.smem.base, frame.smem.layout["q"])
        q = descriptor(x, "q", q_data)
        return cls(q, x.let("always", "setp.eq.u32", tiles, tiles), x.let("never", "setp.ne.u32", tiles, tiles))


def _tiles(frame: Sm90FmhaFrame, sums: Accumulators) -> None:
    x, tiling, tiles = frame.x, frame.tiling, frame.keys.count
    x.section("tiles of keys")
    scores = x.regs("s", "f32", tiling.tile_n // 2)
    products = Products.open(frame)
    cursor = KvCursor.first(frame)
    tile = x.let("tile", "mov.b32", 0)
    key = x.let("key", "mov.b32", frame.keys.first_key)
    finished = x.let("finished", "setp.eq.u32", tiles, 0)
    with x.unless(finished, "all_tiles"):
        x.wait(frame.smem["q_full"], 0, "q_full")
        with x.loop("tiles") as loop:
            _score(frame, cursor, products, scores)
            p = probabilities(frame, sums, scores, key)
            _accumulate(frame, cursor, products, p, sums.outputs)
            load_next(frame, cursor, tile, key)
            cursor.advance(frame)
            x.emit("add.u32", key, key, tiling.tile_n)
            x.emit("add.u32", tile, tile, 1)
            x.emit("setp.ge.u32", finished, tile, tiles)
            x.emit("bra", loop.done, guard=finished)


def _score(frame: Sm90FmhaFrame, cursor: KvCursor, products: Products, scores: Vector) -> None:
    """S = Q K^T of the stage's tile, once K has arrived."""
    x, tiling = frame.x, frame.tiling
    x.comment("S = Q K^T")
    x.wait(at(cursor.k_full), cursor.parity, "k_full")
    k = descriptor(x, "k", cursor.data)
    x.wgmma_fence()
    for step in range(tiling.hd // MMA_K):
        panel, inside = divmod(step * MMA_K, PANEL_COLUMNS)
        a = advanced(x, products.q, panel * TILE_M * ROW_BYTES + 2 * inside)
        b = advanced(x, k, panel * tiling.panel_bytes + 2 * inside)
        accumulates = products.always if step else products.never
        kinds = (PLUS_A, PLUS_B, K_MAJOR, K_MAJOR)
        x.emit(MMA.format(n=tiling.tile_n), scores, a, b, accumulates, *kinds)
    x.wgmma_finish()


def _accumulate(frame: Sm90FmhaFrame, cursor: KvCursor, products: Products, p: Vector, outputs: Vector) -> None:
    """O += P V of the stage's tile, once V has arrived."""
    x, tiling = frame.x, frame.tiling
    x.comment("O += P V")
    x.wait(at(cursor.v_full), cursor.parity, "v_full")
    v_data = x.let("v_data", "add.u32", cursor.data, tiling.k_bytes)
    v = descriptor(x, "v", v_data, tiling.panel_bytes)
    x.wgmma_fence()
    for step in range(tiling.tile_n // MMA_K):
        b = advanced(x, v, step * MMA_K * ROW_BYTES)
        a = p[4 * step : 4 * step + 4]
        x.emit(MMA.format(n=tiling.o_columns), outputs, a, b, products.always, PLUS_A, PLUS_B, MN_MAJOR)
    x.wgmma_finish()


def descriptor(x: Builder, name: str, data: Register, leading_bytes: int = 0) -> Register:
    """The descriptor of the operand at `data`."""
    return x.matrix_descriptor(f"{name}_descriptor", data, descriptor_bits(leading_bytes), start=f"{name}_start")


def advanced(x: Builder, operand: Register, offset: int) -> Register:
    """A descriptor `offset` bytes further on."""
    return operand if offset == 0 else x.let("descriptor", "add.u64", operand, offset // 16)


def epilogue(frame: Sm90FmhaFrame, sums: Accumulators) -> None:
    """Stores O / sum as bf16, and lse."""
    x, params = frame.x, frame.params
    x.section("epilogue: O / sum, and lse")
    wanted = x.let("lse_wanted", "setp.ne.u64", params.lse, 0)
    quad_lane = x.let("quad_lane", "and.b32", frame.thread, 3)
    x.emit("setp.eq.and.u32", wanted, quad_lane, 0, wanted, note="one lane of the four that share a row")
    x.emit("setp.eq.and.u32", wanted, frame.o_origin, 0, wanted, note="one of the CTAs that share it")
    first_row = x.let("first_row", "mul.wide.u32", frame.batch_head, frame.axes.rows)
    for index, row in enumerate(sums.rows):
        quad_sum(x, row.total)
        number = x.let("row_wide", "cvt.u64.u32", row.number)
        x.emit("add.s64", number, number, first_row)
        _store_lse(frame, row, number, wanted)
        inverse = inverse_of(x, row.total)
        address = _output_address(frame, number, quad_lane, element_bytes=2)
        with x.when(row.keys.is_row, "store_row"):
            for block in range(frame.tiling.o_columns // 8):
                even, odd = sums.pair(index, block)
                for value in (even, odd):
                    x.emit("mul.rn.f32", value, value, inverse)
                pair = x.let("pair", "cvt.rn.bf16x2.f32", odd, even)
                x.emit("st.global.b32", at(address, 16 * block), pair)


def partial_epilogue(frame: Sm90FmhaFrame, sums: Accumulators, part: KeyPart) -> None:
    """Stores O without normalisation, in fp32, with its reference and row sum; the combine kernel adds up the parts."""
    x = frame.x
    x.section("epilogue: partial results")
    quad_lane = x.let("quad_lane", "and.b32", frame.thread, 3)
    wanted = x.let("statistics_wanted", "setp.eq.u32", quad_lane, 0)
    x.emit("setp.eq.and.u32", wanted, frame.o_origin, 0, wanted, note="one thread a row, of one CTA")
    first_row = part.head_row(x, frame)
    for index, row in enumerate(sums.rows):
        quad_sum(x, row.total)
        number = x.let("row_wide", "cvt.u64.u32", row.number)
        x.emit("add.s64", number, number, first_row)
        stored = x.let("statistics_stored", "and.pred", wanted, row.keys.is_row)
        part.store_statistics(x, number, row.reference, row.total, stored)
        address = _output_address(frame, number, quad_lane, element_bytes=F32_BYTES)
        with x.when(row.keys.is_row, "store_row"):
            for block in range(frame.tiling.o_columns // 8):
                x.emit("st.global.v2.f32", at(address, 32 * block), sums.pair(index, block))


def _output_address(frame: Sm90FmhaFrame, row: Register, quad_lane: Register, element_bytes: int) -> Register:
    """The address of this lane's first two columns of `row`; its other pairs follow 8 columns apart."""
    x = frame.x
    address = x.let("o_at", "mul.lo.u64", row, element_bytes * frame.tiling.hd)
    x.emit("add.s64", address, address, frame.params.o)
    column = x.let("o_column", "mad.lo.u32", quad_lane, 2, frame.o_origin)
    x.emit("add.s64", address, address, x.let("o_column_bytes", "mul.wide.u32", column, element_bytes))
    return address


def _store_lse(frame: Sm90FmhaFrame, row: QueryRow, number: Register, wanted: Register) -> None:
    x = frame.x
    stored = x.let("lse_stored", "and.pred", wanted, row.keys.is_row)
    lse = log_sum_exp(x, row.reference, row.total)
    address = x.let("lse_at", "shl.b64", number, 2)
    x.emit("add.s64", address, address, frame.params.lse)
    x.emit("st.global.f32", at(address), lse, guard=stored)


def _description(tiling: Sm90FmhaTiling) -> list[str]:
    lines = [
        f"FMHA forward, hd = {tiling.hd}: O = softmax(scale Q K^T) V, bf16 in and out, fp32 softmax.",
        f"A CTA: {TILE_M} folded query rows of a (batch, kv_head), tiles of {tiling.tile_n} keys, "
        f"{tiling.o_columns} columns of O.",
        "One warpgroup; thread 0 loads. Dynamic shared memory, in bytes:",
    ]
    return lines + tiling.smem.described()
