"""From a case to a Program: tensor maps, scalars and the grid."""

from __future__ import annotations

from backends.ptx.attention import LOG2_E, FmhaShape, tensor_map
from backends.ptx.sm90_fmha.combine import combine_name
from backends.ptx.sm90_fmha.geometry import SUPPORTED_HD, THREADS, TILE_M, Geometry, splits_of
from backends.ptx.sm90_fmha.kernel import entry_name, kernel_text
from megamoe.contract import BufferArg, Case, KernelArg, Launch, Program, ScalarArg

PARTIAL_O, PARTIAL_STATISTICS = "partial_o", "partial_statistics"
F32_BYTES = 4


def fmha_program(case: Case) -> Program:
    """The program of an fmha case on sm_90a: one launch, or two and workspaces where the keys are split."""
    shape = FmhaShape.of(case, "sm_90a", SUPPORTED_HD)
    geometry = Geometry(shape.hd)
    splits = splits_of(shape.t, shape.s_k)
    attention = Launch(
        entry=entry_name(shape.hd),
        grid=(-(-shape.rows // TILE_M) * geometry.halves, shape.kv_heads, shape.batch * splits),
        block=(THREADS, 1, 1),
        args=_arguments(shape, geometry, splits),
        dynamic_smem=geometry.smem.size,
    )
    if splits == 1:
        return Program(target="sm_90a", ptx=kernel_text(shape.hd), launches=(attention,))
    rows = shape.batch * shape.kv_heads * shape.rows
    combine = Launch(combine_name(shape.hd), (rows, 1, 1), (shape.hd, 1, 1), _combine_arguments(shape, splits))
    scratch = {PARTIAL_O: splits * rows * shape.hd * F32_BYTES, PARTIAL_STATISTICS: splits * rows * 2 * F32_BYTES}
    return Program("sm_90a", kernel_text(shape.hd, split=True), (attention, combine), scratch)


def _combine_arguments(shape: FmhaShape, splits: int) -> tuple[KernelArg, ...]:
    """In the order of combine.combine_kernel."""
    return (
        BufferArg(PARTIAL_O),
        BufferArg(PARTIAL_STATISTICS),
        BufferArg("o"),
        _lse(shape),
        ScalarArg("u32", splits),
    )


def _lse(shape: FmhaShape) -> KernelArg:
    return BufferArg("lse") if shape.lse else ScalarArg("u64", 0)


def _arguments(shape: FmhaShape, geometry: Geometry, splits: int) -> tuple[KernelArg, ...]:
    """In the order of frame.Params."""
    outputs: tuple[KernelArg, ...] = (BufferArg("o"), _lse(shape))
    if splits > 1:
        outputs = (BufferArg(PARTIAL_O), BufferArg(PARTIAL_STATISTICS))
    return (
        tensor_map(shape, "q", shape.rows, TILE_M),
        tensor_map(shape, "k", shape.s_k, geometry.tile_n),
        tensor_map(shape, "v", shape.s_k, geometry.tile_n),
        *outputs,
        ScalarArg("u32", shape.t),
        ScalarArg("u32", shape.s_k),
        ScalarArg("u32", shape.rows),
        ScalarArg("u32", shape.kv_heads),
        ScalarArg("s32", shape.window),
        ScalarArg("s32", shape.ahead),
        ScalarArg("f32", shape.scale * LOG2_E),
        *((ScalarArg("u32", splits),) if splits > 1 else ()),
    )
