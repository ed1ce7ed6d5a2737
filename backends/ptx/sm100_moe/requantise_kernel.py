"""The requantisation by itself, from activations in memory: what the first GEMM does in its epilogue."""

from __future__ import annotations

from backends.ptx.builder import TID_X, Builder
from backends.ptx.operands import Register, Special, at
from backends.ptx.sm100_moe.geometry import ATOM_BYTES, TILE_M
from backends.ptx.sm100_moe.requantise import WIDTH, GlobalScale, emit_requantise
from backends.ptx.sm100_moe.rows import load_of_row
from backends.ptx.sm100_moe.swiglu import word_in_atom

ENTRY = "moe_requantise"
THREADS = TILE_M
PER_VECTOR = 4


def requantise_kernel(version: tuple[int, int]) -> Builder:
    """Grid: row tiles at most, and groups of WIDTH activations. Rows that fill up a tile are left alone."""
    x = Builder(ENTRY, target="sm_100a", version=version, block=THREADS)
    x.header(["Requantisation of f32 activations to NVFP4, one row a thread."])
    names = ("h", "a2_gs", "row_tiles", "expert_of_tile", "token_of_row", "a2_codes", "a2_sf")
    h, a2_gs, row_tiles, expert_of_tile, token_of_row, a2_codes, a2_sf = (x.param(name, "u64") for name in names)
    tokens, intermediate = x.param("tokens", "u32"), x.param("intermediate", "u32")
    x.section("which row, which activations")
    tile = x.let("tile", "mov.u32", Special("%ctaid.x", "u32"))
    exists = x.let("tile_exists", "setp.lt.u32", tile, x.let("tile_count", "ld.global.u32", at(row_tiles)))
    with x.when(exists, "tile"):
        thread = x.let("thread", "mov.u32", TID_X)
        row = x.let("row", "mad.lo.u32", tile, TILE_M, thread)
        is_token = x.let("is_token", "setp.lt.u32", load_of_row(x, "token", token_of_row, row), tokens)
        with x.when(is_token, "row"):
            _requantise_row(x, row, tile, thread, (h, a2_gs, expert_of_tile, a2_codes, a2_sf), intermediate)
    x.emit("ret")
    return x


def _requantise_row(
    x: Builder,
    row: Register,
    tile: Register,
    thread: Register,
    addresses: tuple[Register, Register, Register, Register, Register],
    intermediate: Register,
) -> None:
    h, a2_gs, expert_of_tile, a2_codes, a2_sf = addresses
    scale = GlobalScale(x)
    expert = load_of_row(x, "expert", expert_of_tile, tile)
    x.emit("ld.global.f32", scale.gs, at(x.let("a2_gs_at", "mad.wide.u32", expert, 4, a2_gs)))
    scale.invert()
    group = x.let("group", "mov.u32", Special("%ctaid.y", "u32"))
    element = x.let("element", "mul.wide.u32", row, intermediate)
    x.emit("add.s64", element, element, x.let("first", "mul.wide.u32", group, WIDTH))
    values = x.regs("value", "f32", WIDTH)
    source = x.let("source_at", "shl.b64", element, 2)
    x.emit("add.s64", source, source, h)
    for start in range(0, WIDTH, PER_VECTOR):
        x.emit("ld.global.v4.f32", values[start : start + PER_VECTOR], at(source, start * 4))
    words, scales = emit_requantise(x, values, scale)
    codes = x.let("codes_at", "shr.u64", element, 1)
    x.emit("add.s64", codes, codes, a2_codes)
    for start in range(0, len(words), PER_VECTOR):
        x.emit("st.global.v4.b32", at(codes, start * 4), words[start : start + PER_VECTOR])
    atoms = x.let("atoms_of_row", "shr.u32", intermediate, WIDTH.bit_length() - 1)
    atom = x.let("atom", "mad.lo.u32", tile, atoms, group)
    target = x.let("scales_at", "mad.wide.u32", atom, ATOM_BYTES, a2_sf)
    x.emit("add.s64", target, target, word_in_atom(x, thread))
    x.emit("st.global.b32", at(target), scales)
