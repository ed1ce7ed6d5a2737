"""From a case to a Program: tensor maps, scalars and the grid."""

from __future__ import annotations

from backends.ptx.sm90_fmha.geometry import PANEL_COLUMNS, THREADS, TILE_M, Geometry
from backends.ptx.sm90_fmha.kernel import entry_name, kernel_text
from backends.ptx.sm100_fmha.launch import BF16_BYTES, LOG2_E, FmhaShape
from megamoe.backend import BufferArg, KernelArg, Launch, Program, ScalarArg, TensorMapArg
from megamoe.case import Case


def fmha_program(case: Case) -> Program:
    """The program of an fmha case on sm_90a: one launch."""
    shape = FmhaShape.of(case)
    geometry = Geometry(shape.hd)
    launch = Launch(
        entry=entry_name(shape.hd),
        grid=(-(-shape.rows // TILE_M) * geometry.halves, shape.kv_heads, shape.batch),
        block=(THREADS, 1, 1),
        args=_arguments(shape, geometry),
        dynamic_smem=geometry.smem.size,
    )
    return Program(target="sm_90a", ptx=kernel_text(shape.hd), launches=(launch,))


def _arguments(shape: FmhaShape, geometry: Geometry) -> tuple[KernelArg, ...]:
    """In the order of frame.Params."""
    return (
        _tensor_map(shape, "q", shape.rows, TILE_M),
        _tensor_map(shape, "k", shape.s_k, geometry.tile_n),
        _tensor_map(shape, "v", shape.s_k, geometry.tile_n),
        BufferArg("o"),
        BufferArg("lse") if shape.lse else ScalarArg("u64", 0),
        ScalarArg("u32", shape.t),
        ScalarArg("u32", shape.s_k),
        ScalarArg("u32", shape.rows),
        ScalarArg("u32", shape.kv_heads),
        ScalarArg("s32", shape.window),
        ScalarArg("s32", shape.ahead),
        ScalarArg("f32", shape.scale * LOG2_E),
    )


def _tensor_map(shape: FmhaShape, tensor: str, rows: int, box_rows: int) -> TensorMapArg:
    """[batch * kv_heads][rows][hd] in boxes of 64 columns: a row beyond the last reads as zeros, never as the next
    head's."""
    row_bytes = shape.hd * BF16_BYTES
    return TensorMapArg(
        tensor=tensor,
        dtype="bf16",
        dims=(shape.hd, rows, shape.batch * shape.kv_heads),
        strides=(row_bytes, rows * row_bytes),
        box=(PANEL_COLUMNS, box_rows, 1),
        swizzle="128B",
    )
