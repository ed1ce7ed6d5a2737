"""The kernel before the first GEMM puts the tokens' scale factors in the order of the expert rows, as atoms.

A row has 128 bytes of codes per stage, which TMA can gather by itself. Its scale factors are 4 bytes per atom, and TMA
moves at least 16. So only they are copied, an eighth of the bytes of the codes. Lane l of a warp takes the words of
rows l, l + 32, l + 64 and l + 96 of a tile: 16 bytes that are adjacent in the atom. Padding rows get zeros; the padding
of x_sf is never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from backends.ptx.builder import CTAID_X, CTAID_Y, TID_X, Builder
from backends.ptx.moe.layout import ATOM_BYTES, ATOM_ROWS, TILE_M
from backends.ptx.operands import Register, at
from backends.ptx.parameters import U32, Parameters, Pointer

GATHER_ENTRY = "moe_gather_scales"
GATHER_THREADS = 128
QUARTERS = 4
ATOMS_PER_WARP = 4
ATOMS_PER_CTA = ATOMS_PER_WARP * GATHER_THREADS // 32


@dataclass(frozen=True, slots=True)
class GatherParams(Parameters):
    """`k_atoms`: scale factor atoms along K."""

    x_sf: Pointer
    sfa: Pointer
    row_tiles: Pointer
    token_of_row: Pointer
    tokens: U32
    k_atoms: U32


@cache
def gather_scales_kernel(version: tuple[int, int]) -> Builder:
    """Grid: (maximum number of row tiles, groups of ATOMS_PER_CTA atoms along K)."""
    x = Builder(GATHER_ENTRY, target="sm_100a", version=version, block=GATHER_THREADS)
    x.header(["Scale factors of the tokens, gathered into atoms of expert rows."])
    params = GatherParams.declare(x)
    x.section("which atoms")
    tile = x.let("tile", "mov.u32", CTAID_X)
    exists = x.let("tile_exists", "setp.lt.u32", tile, x.let("tile_count", "ld.global.u32", at(params.row_tiles)))
    with x.when(exists, "tile"):
        thread = x.let("thread", "mov.u32", TID_X)
        lane = x.let("lane", "and.b32", thread, 31)
        group = x.let("group", "mov.u32", CTAID_Y)
        atom = x.let("atom", "mul.lo.u32", group, ATOMS_PER_CTA)
        x.emit("mad.lo.u32", atom, x.let("warp", "shr.u32", thread, 5), ATOMS_PER_WARP, atom)
        row = x.let("row", "mad.lo.u32", tile, TILE_M, lane)
        sources = [_source(x, params, row, quarter) for quarter in range(QUARTERS)]
        first_atom = x.let("first_atom", "mul.lo.u32", tile, params.k_atoms)
        target = x.indexed_wide("target", params.sfa, first_atom, ATOM_BYTES)
        x.emit("mad.wide.u32", target, lane, 4 * QUARTERS, target)
        words = x.regs("word", "b32", QUARTERS)
        for _ in range(ATOMS_PER_WARP):
            inside = x.let("inside", "setp.lt.u32", atom, params.k_atoms)
            for word, source in zip(words, sources, strict=True):
                wanted = x.let("wanted", "and.pred", inside, source.is_token)
                x.emit("mov.b32", word, 0)
                x.emit("ld.global.b32", word, at(x.indexed_wide("from", source.base, atom, ATOM_BYTES)), guard=wanted)
            x.emit("st.global.v4.b32", at(x.indexed_wide("to", target, atom, ATOM_BYTES)), words, guard=inside)
            x.emit("add.u32", atom, atom, 1)
    x.emit("ret")
    return x


@dataclass(frozen=True, slots=True)
class _Source:
    """The address of a row's word in its token's first atom, and whether the row has a token."""

    base: Register
    is_token: Register


def _source(x: Builder, params: GatherParams, row: Register, quarter: int) -> _Source:
    """The source of row `row` + 32 * quarter."""
    entry = x.indexed_wide("token_at", params.token_of_row, row, 4)
    token = x.let("token", "ld.global.u32", at(entry, 4 * 32 * quarter))
    is_token = x.let("is_token", "setp.lt.u32", token, params.tokens)
    atom_row = x.let("atom_row", "div.u32", token, ATOM_ROWS)
    first_atom = x.let("token_atom", "mul.lo.u32", atom_row, params.k_atoms)
    base = x.indexed_wide("token_base", params.x_sf, first_atom, ATOM_BYTES)
    lane = x.let("token_lane", "and.b32", token, 31)
    part = x.let("token_quarter", "shr.u32", token, 5)
    x.emit("and.b32", part, part, QUARTERS - 1)
    x.emit("mad.wide.u32", base, lane, 4 * QUARTERS, base)
    x.emit("mad.wide.u32", base, part, 4, base)
    return _Source(base, is_token)
