"""From a case to a Program: tensor maps, scalars and the grid."""

from __future__ import annotations

from backends.ptx.attention import LOG2_E, FmhaShape, tensor_map
from backends.ptx.sm100_fmha.geometry import SUPPORTED_HD, THREADS, TILE_M, TILE_N, Geometry
from backends.ptx.sm100_fmha.kernel import entry_name, kernel_text
from megamoe.contract import BufferArg, Case, KernelArg, Launch, Program, ScalarArg

ROWS_PER_STORE = 32


def fmha_program(case: Case) -> Program:
    """The program of an fmha case on sm_100a: one launch."""
    shape = FmhaShape.of(case, "sm_100a", SUPPORTED_HD)
    geometry = Geometry(shape.hd)
    row_tiles = -(-shape.rows // TILE_M)
    launch = Launch(
        entry=entry_name(shape.hd),
        grid=(row_tiles * geometry.halves, shape.kv_heads, shape.batch),
        block=(THREADS, 1, 1),
        args=_arguments(shape),
        dynamic_smem=geometry.smem.size,
    )
    return Program(target="sm_100a", ptx=kernel_text(shape.hd), launches=(launch,))


def _arguments(shape: FmhaShape) -> tuple[KernelArg, ...]:
    """In the order of frame.Params."""
    return (
        tensor_map(shape, "q", shape.rows, TILE_M),
        tensor_map(shape, "k", shape.s_k, TILE_N),
        tensor_map(shape, "v", shape.s_k, TILE_N),
        tensor_map(shape, "o", shape.rows, ROWS_PER_STORE),
        BufferArg("lse") if shape.lse else ScalarArg("u64", 0),
        ScalarArg("u32", shape.t),
        ScalarArg("u32", shape.s_k),
        ScalarArg("u32", shape.rows),
        ScalarArg("u32", shape.kv_heads),
        ScalarArg("s32", shape.window),
        ScalarArg("s32", shape.ahead),
        ScalarArg("f32", shape.scale * LOG2_E),
    )
