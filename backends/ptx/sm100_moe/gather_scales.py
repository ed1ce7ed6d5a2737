"""The scale factors of the tokens in the order of the expert rows, as atoms.

The codes of a row are 128 bytes a stage, which TMA gathers by itself; its scale factors are 4 bytes an atom, a
sixteenth of what TMA moves. So they alone are copied, an eighth of the bytes of the codes: lane l of a warp takes the
words of rows l, l + 32, l + 64 and l + 96 of a tile, which are 16 bytes in a row of the atom. Rows that fill up a tile
get zeros; what lies in the padding of x_sf is never read.
"""

from __future__ import annotations

from backends.ptx.builder import TID_X, Builder
from backends.ptx.operands import Register, Special, at
from backends.ptx.sm100_moe.geometry import ATOM_BYTES, ATOM_ROWS, TILE_M

ENTRY = "moe_gather_scales"
THREADS = 128
QUARTERS = 4
ATOMS_PER_WARP = 4
ATOMS_PER_CTA = ATOMS_PER_WARP * THREADS // 32


def gather_scales_kernel(version: tuple[int, int]) -> Builder:
    """Grid: row tiles at most, and groups of ATOMS_PER_CTA atoms along K."""
    x = Builder(ENTRY, target="sm_100a", version=version, block=THREADS)
    x.header(["Scale factors of the tokens, gathered into atoms of expert rows."])
    x_sf, sfa, row_tiles, token_of_row = (x.param(n, "u64") for n in ("x_sf", "sfa", "row_tiles", "token_of_row"))
    tokens, k_atoms = x.param("tokens", "u32"), x.param("k_atoms", "u32")
    x.section("which atoms")
    tile = x.let("tile", "mov.u32", Special("%ctaid.x", "u32"))
    exists = x.let("tile_exists", "setp.lt.u32", tile, x.let("tile_count", "ld.global.u32", at(row_tiles)))
    with x.when(exists, "tile"):
        thread = x.let("thread", "mov.u32", TID_X)
        lane = x.let("lane", "and.b32", thread, 31)
        group = x.let("group", "mov.u32", Special("%ctaid.y", "u32"))
        atom = x.let("atom", "mul.lo.u32", group, ATOMS_PER_CTA)
        x.emit("mad.lo.u32", atom, x.let("warp", "shr.u32", thread, 5), ATOMS_PER_WARP, atom)
        row = x.let("row", "mad.lo.u32", tile, TILE_M, lane)
        sources = [_source(x, quarter, (x_sf, token_of_row, tokens, k_atoms), row) for quarter in range(QUARTERS)]
        first_atom = x.let("first_atom", "mul.lo.u32", tile, k_atoms)
        target = x.let("target", "mad.wide.u32", first_atom, ATOM_BYTES, sfa)
        x.emit("mad.wide.u32", target, lane, 4 * QUARTERS, target)
        words = x.regs("word", "b32", QUARTERS)
        for _ in range(ATOMS_PER_WARP):
            inside = x.let("inside", "setp.lt.u32", atom, k_atoms)
            for word, (base, is_token) in zip(words, sources, strict=True):
                wanted = x.let("wanted", "and.pred", inside, is_token)
                x.emit("mov.b32", word, 0)
                x.emit("ld.global.b32", word, at(x.let("from", "mad.wide.u32", atom, ATOM_BYTES, base)), guard=wanted)
            x.emit("st.global.v4.b32", at(x.let("to", "mad.wide.u32", atom, ATOM_BYTES, target)), words, guard=inside)
            x.emit("add.u32", atom, atom, 1)
    x.emit("ret")
    return x


def _source(
    x: Builder, quarter: int, params: tuple[Register, Register, Register, Register], row: Register
) -> tuple[Register, Register]:
    """The address of the word of row `row` + 32 * quarter in its token's first atom, and whether it has a token."""
    x_sf, token_of_row, tokens, k_atoms = params
    entry = x.let("token_at", "mad.wide.u32", row, 4, token_of_row)
    token = x.let("token", "ld.global.u32", at(entry, 4 * 32 * quarter))
    is_token = x.let("is_token", "setp.lt.u32", token, tokens)
    atom_row = x.let("atom_row", "div.u32", token, ATOM_ROWS)
    first_atom = x.let("token_atom", "mul.lo.u32", atom_row, k_atoms)
    base = x.let("token_base", "mad.wide.u32", first_atom, ATOM_BYTES, x_sf)
    lane = x.let("token_lane", "and.b32", token, 31)
    part = x.let("token_quarter", "shr.u32", token, 5)
    x.emit("and.b32", part, part, QUARTERS - 1)
    x.emit("mad.wide.u32", base, lane, 4 * QUARTERS, base)
    x.emit("mad.wide.u32", base, part, 4, base)
    return base, is_token
