"""From a case to a Program: tensor maps, scalars and grids."""

from __future__ import annotations

from backends.ptx.attention import FmhaShape, tensor_map
from backends.ptx.sm90_fmha.combine import CombineParams, combine_name
from backends.ptx.sm90_fmha.frame import Sm90FmhaParams, SplitFmhaParams
from backends.ptx.sm90_fmha.geometry import THREADS, TILE_M, Sm90FmhaTiling, splits_of
from backends.ptx.sm90_fmha.kernel import entry_name, kernel_text
from megamoe.contract import Case, KernelArg, Launch, Program

F32_BYTES = 4


def fmha_program(case: Case) -> Program:
    """The program of an fmha case on sm_90a: one launch, or two and workspaces where the keys are split."""
    shape = FmhaShape.of(case, "sm_90a")
    tiling = Sm90FmhaTiling(shape.hd)
    splits = splits_of(shape.t, shape.s_k)
    attention = Launch(
        entry=entry_name(shape.hd),
        grid=(-(-shape.rows // TILE_M) * tiling.halves, shape.kv_heads, shape.batch * splits),
        block=(THREADS, 1, 1),
        args=_arguments(shape, tiling, splits),
        dynamic_smem=tiling.smem.size,
    )
    if splits == 1:
        return Program(target="sm_90a", ptx=kernel_text(shape.hd), launches=(attention,))
    rows = shape.batch * shape.kv_heads * shape.rows
    combine = Launch(
        entry=combine_name(shape.hd),
        grid=(rows, 1, 1),
        block=(shape.hd, 1, 1),
        args=CombineParams.arguments(lse=_lse(shape), splits=splits),
    )
    scratch = {"partial_o": splits * rows * shape.hd * F32_BYTES, "partial_statistics": splits * rows * 2 * F32_BYTES}
    return Program("sm_90a", kernel_text(shape.hd, split=True), (attention, combine), scratch)


def _lse(shape: FmhaShape) -> str | None:
    return "lse" if shape.lse else None


def _arguments(shape: FmhaShape, tiling: Sm90FmhaTiling, splits: int) -> tuple[KernelArg, ...]:
    maps = {
        "q": tensor_map(shape, "q", shape.rows, TILE_M),
        "k": tensor_map(shape, "k", shape.s_k, tiling.tile_n),
        "v": tensor_map(shape, "v", shape.s_k, tiling.tile_n),
    }
    if splits == 1:
        return Sm90FmhaParams.arguments(**maps, lse=_lse(shape), axes=shape.axes())
    return SplitFmhaParams.arguments(**maps, o="partial_o", lse="partial_statistics", axes=shape.axes(), splits=splits)
