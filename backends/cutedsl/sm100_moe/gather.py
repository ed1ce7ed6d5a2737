# pyright: reportMissingImports=false
"""The gather kernel: tokens to expert rows, codes and block scales, a warp a route.

The GEMM can then load A in plain tiles. TMA could gather codes itself (tile::gather4), 32 instructions a ring stage in
place of one, but not scales: those of a row lie in 4-byte pieces. What is written here is read back from L2, a few per
cent of what a layer reads of weights where experts have few rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from backends.cutedsl.sm100_moe.plan import TILE_M

WARPS = 8
VECTOR = 16
"""Bytes of codes a lane copies at once."""
ATOM_BYTES = 512


def scale_offset(row: Int32, atoms: Int32, atom: Int32) -> Int64:
    """Bytes from the first scale of a swizzled tensor to the four scales of `row` in its atom `atom` of `atoms`."""
    inside = row % 32 * 16 + row % TILE_M // 32 * 4
    return (Int64(row // TILE_M) * atoms + atom) * ATOM_BYTES + inside


def scale_word(mSF: cute.Tensor, row: Int32, atoms: Int32, atom: Int32) -> cute.Tensor:
    """The four scales of `row` in an atom, as one word."""
    pointer = mSF.iterator + cute.assume(scale_offset(row, atoms, atom), divby=4)
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), cute.make_layout(1))


def code_vector(mCodes: cute.Tensor, row: Int32, row_bytes: Int32, vector: Int32) -> cute.Tensor:
    """16 bytes of the codes of `row`."""
    pointer = mCodes.iterator + cute.assume(Int64(row) * row_bytes + vector * VECTOR, divby=VECTOR)
    return cute.make_tensor(pointer, cute.make_layout(VECTOR))


@cute.kernel
def gather_kernel(
    mTopkIds: cute.Tensor,
    mRowOfRoute: cute.Tensor,
    mX_codes: cute.Tensor,
    mX_sf: cute.Tensor,
    mA1_codes: cute.Tensor,
    mA1_sf: cute.Tensor,
    topk: Int32,
):
    """mX_codes (tokens, hidden / 2) and mX_sf (swizzled, by token) to mA1_codes and mA1_sf, by expert row."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    lane = thread % 32
    row_bytes, atoms = mX_codes.shape[1], mX_sf.shape[1]
    for route in cutlass.range(block * WARPS + thread // 32, cute.size(mTopkIds), blocks * WARPS, unroll=1):
        if mTopkIds[route] >= 0:
            row, token = mRowOfRoute[route], route // topk
            for vector in cutlass.range(lane, row_bytes // VECTOR, 32, unroll=4):
                source = code_vector(mX_codes, token, row_bytes, vector)
                cute.autovec_copy(source, code_vector(mA1_codes, row, row_bytes, vector))
            for atom in cutlass.range(lane, atoms, 32, unroll=4):
                scale_word(mA1_sf, row, atoms, atom)[0] = scale_word(mX_sf, token, atoms, atom)[0]
