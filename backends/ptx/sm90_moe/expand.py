"""Activations expanded to 16 bits once, in the order of the column tiles and swizzled as wgmma reads them.

Two blocks of 16 codes and their block scales become 64 bytes of alternating elements, one of the first block, one of
the second: code * scale * 2^-7 in f16, exact. bf16 elements keep their value and alternate in the same way. For the
first GEMM this kernel gathers rows from the tokens and writes a table of factors: row r of its accumulators must be
multiplied by x_gs * w1_gs * 2^14, or w1_gs * 2^7 if tokens are bf16. Padding rows of a column tile are not written:
they are columns of the product that no thread reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from backends.ptx.builder import CTAID_X, CTAID_Y, TID_X, Builder
from backends.ptx.moe.layout import ATOM_BYTES, ATOM_ROWS, SF_VEC_SIZE
from backends.ptx.moe.requantise import word_in_atom
from backends.ptx.moe.routing import COLUMN_WORDS
from backends.ptx.operands import Register, Special, Vector, at
from backends.ptx.parameters import U32, Parameters, Pointer
from backends.ptx.sm90_moe.geometry import ROW_BYTES, UNIT_K, result_factor

NCTAID_Y = Special("%nctaid.y", "u32")
THREADS = 128
AT_ONCE = 4
CHUNKS = ROW_BYTES // 16
TWO_TO_7 = 0x5800_5800
"""2^7 as an f16 pair."""
HALVES = (0x5410, 0x7632)
"""Selectors of prmt: the low halves of two words, and their high halves."""
BLOCK_BYTES = 2 * SF_VEC_SIZE
"""Bytes of 16 elements of bf16."""
CHUNK_BYTES = 16
CHUNK_ELEMENTS = 4
"""Elements of each of two blocks in the 16 bytes that the swizzle moves together."""


@dataclass(frozen=True, slots=True)
class ExpandParams(Parameters):
    """`codes`, `sf`: NVFP4 rows, or bf16 rows and null; `expanded`: see geometry.py. `units` along K; `pitch`: bytes of
    a column tile."""

    codes: Pointer
    sf: Pointer
    expanded: Pointer
    columns: Pointer
    column_count: Pointer
    units: U32
    pitch: U32


@dataclass(frozen=True, slots=True)
class ExpandGatherParams(ExpandParams):
    """Parameters if rows are gathered from tokens; bf16 tokens have no `x_gs`. `row_factor`: an f32 for each row of
    each column tile."""

    token_of_row: Pointer
    x_gs: Pointer
    w1_gs: Pointer
    row_factor: Pointer


@dataclass(frozen=True, slots=True)
class ExpandWeightedParams(ExpandGatherParams):
    """Parameters if the top-k weight comes before the requantisation. `row_weight` is a table like `row_factor`."""

    route_of_row: Pointer
    topk_weights: Pointer
    row_weight: Pointer


@dataclass(frozen=True, slots=True)
class _Column:
    """A CTA's entry of the table of column tiles, and its row in that tile."""

    expert: Register
    first_row: Register
    width: Register
    row: Register


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The chunks of a thread. `chunk`: the first one left, of `count` in the row. The thread takes the same chunk of
    each unit: part `part` of both blocks of pair `pair`. It goes to `row_at`, plus `unit_bytes` for each unit."""

    chunk: Register
    count: Register
    pair: Register
    part: Register
    row_at: Register
    unit_bytes: Register

    @classmethod
    def read(cls, x: Builder, params: ExpandParams, place: _Column, tile: Register, layout: str) -> _Chunks:
        """Computes the chunks. `tile`: where the column tile begins. `layout`: a comment that describes the chunks."""
        row_at = x.indexed_wide("row_at", tile, place.row, ROW_BYTES)
        unit_bytes = x.let("unit_bytes", "mul.lo.u32", place.width, ROW_BYTES)
        x.comment(layout)
        chunk, count = x.let("chunk", "mov.u32", TID_X), x.let("chunks", "shl.b32", params.units, 3)
        inside = x.let("inside", "and.b32", chunk, CHUNKS - 1)
        pair, part = x.let("block_pair", "shr.u32", inside, 2), x.let("part", "and.b32", inside, 3)
        swizzled = x.let("swizzled", "and.b32", place.row, CHUNKS - 1)
        x.emit("xor.b32", swizzled, swizzled, inside)
        x.emit("mad.wide.u32", row_at, swizzled, CHUNK_BYTES, row_at)
        return cls(chunk, count, pair, part, row_at, unit_bytes)


def expand_entry(gathered: bool, weighted: bool = False, bf16: bool = False) -> str:
    """The entry name of a variant."""
    return "moe_expand" + "_gathered" * gathered + "_weighted" * weighted + "_bf16" * bf16


@cache
def expand_kernel(version: tuple[int, int], *, gathered: bool, weighted: bool = False, bf16: bool = False) -> Builder:
    """Grid: (maximum number of column tiles, rows of the widest)."""
    x = Builder(expand_entry(gathered, weighted, bf16), target="sm_90a", version=version, block=THREADS)
    rows = "Rows of bf16" if bf16 else "Rows of NVFP4 as f16"
    x.header([f"{rows}, swizzled, in the order of the column tiles; one CTA a row."])
    params = (ExpandWeightedParams if weighted else ExpandGatherParams if gathered else ExpandParams).declare(x)
    x.section("which row")
    column = x.let("column", "mov.u32", CTAID_X)
    row = x.let("row", "mov.u32", CTAID_Y)
    exists = x.let("column_exists", "setp.lt.u32", column, x.let("count", "ld.global.u32", at(params.column_count)))
    with x.when(exists, "column"):
        entry = x.regs("entry", "b32", COLUMN_WORDS)
        x.emit("ld.global.v4.b32", entry, at(x.indexed_wide("entry_at", params.columns, column, 4 * COLUMN_WORDS)))
        has_row = x.let("has_row", "setp.lt.u32", row, entry[2])
        thread = x.let("thread", "mov.u32", TID_X)
        slot = x.let("slot", "mad.lo.u32", column, x.let("widest", "mov.u32", NCTAID_Y), row)
        _fill(x, params, slot, has_row, thread)
        with x.when(has_row, "row"):
            x.emit("add.u32", entry[1], entry[1], row)
            place = _Column(entry[0], entry[1], entry[3], row)
            source = _source(x, params, place, slot, thread, bf16)
            tile = x.let("tile_at", "mad.wide.u32", column, params.pitch, params.expanded)
            (_turn if bf16 else _expand)(x, params, source, place, tile)
    x.emit("ret")
    return x


def _fill(x: Builder, params: ExpandParams, slot: Register, has_row: Register, thread: Register) -> None:
    """Sets the factors of padding rows to 0."""
    if not isinstance(params, ExpandGatherParams):
        return
    fills = x.let("fills", "setp.eq.and.u32", thread, 0, ~has_row)
    x.emit("st.global.f32", at(x.indexed_wide("filled_at", params.row_factor, slot, 4)), 0.0, guard=fills)
    if isinstance(params, ExpandWeightedParams):
        x.emit("st.global.f32", at(x.indexed_wide("weightless_at", params.row_weight, slot, 4)), 0.0, guard=fills)


def _source(x: Builder, params: ExpandParams, place: _Column, slot: Register, thread: Register, bf16: bool) -> Register:
    """The row to expand. Also writes the row's factors."""
    row = place.first_row
    if not isinstance(params, ExpandGatherParams):
        return row
    token = x.entry_of("token", params.token_of_row, row)
    is_first = x.let("is_first", "setp.eq.u32", thread, 0)
    with x.when(is_first, "factors"):
        if bf16:
            factor = x.let("factor", "ld.global.f32", at(x.indexed_wide("w1_gs_at", params.w1_gs, place.expert, 4)))
        else:
            factor = x.let("x_scale", "ld.global.f32", at(x.indexed_wide("x_gs_at", params.x_gs, token, 4)))
            w1_scale = x.let("w1_scale", "ld.global.f32", at(x.indexed_wide("w1_gs_at", params.w1_gs, place.expert, 4)))
            x.emit("mul.rn.f32", factor, factor, w1_scale)
        x.emit("mul.rn.f32", factor, factor, result_factor(bf16))
        x.emit("st.global.f32", at(x.indexed_wide("factor_at", params.row_factor, slot, 4)), factor)
        if isinstance(params, ExpandWeightedParams):
            route = x.entry_of("route", params.route_of_row, row)
            weight_at = at(x.indexed_wide("weight_at", params.topk_weights, route, 4))
            weight = x.let("weight", "ld.global.f32", weight_at)
            x.emit("st.global.f32", at(x.indexed_wide("row_weight_at", params.row_weight, slot, 4)), weight)
    return token


def _expand(x: Builder, params: ExpandParams, source: Register, place: _Column, tile: Register) -> None:
    """Expands a whole row, 16 bytes per thread at a time, so that a warp writes whole rows of a unit."""
    row_bytes = x.let("row_bytes", "shl.b32", params.units, 5)
    codes = x.let("codes_row", "mad.wide.u32", source, row_bytes, params.codes)
    first_atom = x.let("first_atom", "shr.u32", source, ATOM_ROWS.bit_length() - 1)
    x.emit("mul.lo.u32", first_atom, first_atom, params.units)
    atoms = x.indexed_wide("atoms", params.sf, first_atom, ATOM_BYTES)
    x.emit("add.s64", atoms, atoms, word_in_atom(x, x.let("row_in_atom", "and.b32", source, ATOM_ROWS - 1)))
    content = "elements 4 (c % 4) and on of blocks 2 (c / 4) and its next"
    layout = f"Chunk c of a unit: {content}; it is stored at c ^ row % 8."
    own = _Chunks.read(x, params, place, tile, layout)
    x.emit("mad.wide.u32", codes, own.pair, SF_VEC_SIZE, codes)
    x.emit("mad.wide.u32", codes, own.part, CHUNK_ELEMENTS // 2, codes)
    x.emit("mad.wide.u32", atoms, own.pair, 2, atoms)
    x.comment(f"{AT_ONCE} chunks are asked for before the first is used.")
    with x.while_below("chunks_loop", own.chunk, own.count, "finished", (own.chunk, THREADS * AT_ONCE)):
        loaded = [_load_chunk(x, codes, atoms, own, turn) for turn in range(AT_ONCE)]
        for one in loaded:
            target = x.let("unit_at", "mad.wide.u32", one.unit, own.unit_bytes, own.row_at)
            values = _values(x, one.blocks, _block_scales(x, one.scales))
            x.emit("st.global.v4.b32", at(target), values, guard=one.there)


def _turn(x: Builder, params: ExpandParams, source: Register, place: _Column, tile: Register) -> None:
    """Like _expand, for bf16: two blocks of 16 elements are interleaved."""
    row_bytes = x.let("row_bytes", "mul.lo.u32", params.units, 2 * UNIT_K)
    elements = x.let("elements_row", "mad.wide.u32", source, row_bytes, params.codes)
    own = _Chunks.read(x, params, place, tile, "Chunks of a unit lie as those of NVFP4 do.")
    x.emit("mad.wide.u32", elements, own.pair, 2 * BLOCK_BYTES, elements)
    x.emit("mad.wide.u32", elements, own.part, 2 * CHUNK_ELEMENTS, elements)
    with x.while_below("chunks_loop", own.chunk, own.count, "finished", (own.chunk, THREADS)):
        unit = x.let("unit", "shr.u32", own.chunk, CHUNKS.bit_length() - 1)
        source_at = x.indexed_wide("elements_at", elements, unit, 2 * UNIT_K)
        blocks = [x.regs("four_elements", "b32", 2) for _ in range(2)]
        for index, block in enumerate(blocks):
            x.emit("ld.global.v2.b32", block, at(source_at, BLOCK_BYTES * index))
        values = x.regs("value", "b32", CHUNK_ELEMENTS)
        for index, value in enumerate(values):
            x.emit("prmt.b32", value, blocks[0][index // 2], blocks[1][index // 2], HALVES[index % 2])
        x.emit("st.global.v4.b32", at(x.let("unit_at", "mad.wide.u32", unit, own.unit_bytes, own.row_at)), values)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Four codes of each of two blocks, b16, and their block scales. `there`: whether the row has this chunk."""

    unit: Register
    blocks: list[Register]
    scales: Register
    there: Register


def _load_chunk(x: Builder, codes: Register, atoms: Register, own: _Chunks, turn: int) -> _Chunk:
    """The chunk `turn` * THREADS after the first one left; past the end, unit 0's."""
    later = x.let("later", "add.u32", own.chunk, turn * THREADS)
    there = x.let("there", "setp.lt.u32", later, own.count)
    unit = x.let("unit", "shr.u32", later, CHUNKS.bit_length() - 1)
    x.emit("selp.u32", unit, unit, 0, there)
    source_at = x.indexed_wide("codes_at", codes, unit, UNIT_K // 2)
    blocks = [x.let("four_codes", "ld.global.b16", at(source_at, SF_VEC_SIZE // 2 * block)) for block in range(2)]
    scales = x.let("scale_pair", "ld.global.b16", at(x.indexed_wide("scale_at", atoms, unit, ATOM_BYTES)))
    return _Chunk(unit, blocks, scales, there)


def _block_scales(x: Builder, pair: Register) -> Register:
    """Two block scales times 2^7 as an f16 pair."""
    scales = x.let("scales", "cvt.rn.f16x2.e4m3x2", pair)
    x.emit("mul.rn.f16x2", scales, scales, x.let("two_to_7", "mov.b32", TWO_TO_7))
    return scales


def _values(x: Builder, blocks: list[Register], scales: Register) -> Vector:
    """Four codes of each block, interleaved as f16 pairs, times the block scales."""
    word, values = x.reg("codes_of_both", "b32"), x.regs("value", "b32", CHUNK_ELEMENTS)
    x.emit("mov.b32", word, tuple(blocks))
    part = x.reg("bits", "b32")
    for index, value in enumerate(values):
        x.emit("mov.b32", value, 0)
        for bit, bits, place in ((3, 1, 15), (0, 7, 9)):
            shift = place - 4 * index - bit
            x.emit("shl.b32" if shift >= 0 else "shr.u32", part, word, abs(shift))
            x.emit("and.b32", part, part, bits << place + 16 | bits << place)
            x.emit("or.b32", value, value, part)
        x.emit("mul.rn.f16x2", value, value, scales)
    return values
