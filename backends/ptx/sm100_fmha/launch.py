"""From a case to a Program: tensor maps, scalars and the grid."""

from __future__ import annotations

from backends.ptx.attention import FmhaShape, tensor_map
from backends.ptx.sm100_fmha.frame import Sm100FmhaParams
from backends.ptx.sm100_fmha.geometry import THREADS, TILE_M, TILE_N, Sm100FmhaTiling
from backends.ptx.sm100_fmha.kernel import entry_name, kernel_text
from megamoe.contract import Case, Launch, Program

ROWS_PER_STORE = 32


def fmha_program(case: Case) -> Program:
    """The program of an fmha case on sm_100a: one launch."""
    shape = FmhaShape.of(case, "sm_100a")
    tiling = Sm100FmhaTiling(shape.hd)
    row_tiles = -(-shape.rows // TILE_M)
    launch = Launch(
        entry=entry_name(shape.hd),
        grid=(row_tiles * tiling.halves, shape.kv_heads, shape.batch),
        block=(THREADS, 1, 1),
        args=Sm100FmhaParams.arguments(
            q=tensor_map(shape, "q", shape.rows, TILE_M),
            k=tensor_map(shape, "k", shape.s_k, TILE_N),
            v=tensor_map(shape, "v", shape.s_k, TILE_N),
            o=tensor_map(shape, "o", shape.rows, ROWS_PER_STORE),
            lse="lse" if shape.lse else None,
            axes=shape.axes(),
        ),
        dynamic_smem=tiling.smem.size,
    )
    return Program(target="sm_100a", ptx=kernel_text(shape.hd), launches=(launch,))
