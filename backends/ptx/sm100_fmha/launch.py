"""From a case to a Program: tensor maps, scalars and the grid."""

from __future__ import annotations

import math
from dataclasses import dataclass

from backends.ptx.sm100_fmha.frame import NO_WINDOW
from backends.ptx.sm100_fmha.geometry import PANEL_COLUMNS, SUPPORTED_HD, THREADS, TILE_M, TILE_N, Geometry
from backends.ptx.sm100_fmha.kernel import entry_name, kernel_text
from megamoe.backend import BufferArg, KernelArg, Launch, Program, ScalarArg, TensorMapArg, UnsupportedError
from megamoe.case import Case

BF16_BYTES = 2
ROWS_PER_STORE = 32
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class FmhaShape:
    """The axes of one case. Query heads of a kv_head are folded into `rows` = group * t rows, head after head, which
    is how q, o and lse lie in memory."""

    hd: int
    t: int
    s_k: int
    batch: int
    kv_heads: int
    group: int
    ahead: int
    window: int
    scale: float
    lse: bool

    @property
    def rows(self) -> int:
        """Folded query rows of one (batch, kv_head)."""
        return self.group * self.t

    @classmethod
    def of(cls, case: Case) -> FmhaShape:
        """Reads the case. Raises UnsupportedError for what the kernel cannot do."""
        hd, t, s_k = case.int("hd"), case.int("t"), case.int("s_k")
        heads, kv_heads, batch = case.int("heads"), case.int("kv_heads"), case.int("batch")
        if hd not in SUPPORTED_HD:
            raise UnsupportedError(
                f"{case.id}: hd is {hd}; the sm_100a kernel has hd {', '.join(map(str, SUPPORTED_HD))}"
            )
        if heads % kv_heads:
            raise UnsupportedError(f"{case.id}: {heads} heads do not share {kv_heads} kv_heads evenly")
        if max(t, s_k) >= NO_WINDOW // 2:
            raise UnsupportedError(f"{case.id}: t and s_k must stay below {NO_WINDOW // 2}; t is {t}, s_k is {s_k}")
        scale, window = case["scale"], case["window"]
        scale = 1.0 / math.sqrt(hd) if scale is None else float(scale)
        if not 0.0 < scale < math.inf:
            raise UnsupportedError(f"{case.id}: scale is {scale}; the online softmax needs a positive, finite one")
        return cls(
            hd=hd,
            t=t,
            s_k=s_k,
            batch=batch,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            ahead=0 if case["causal"] else NO_WINDOW,
            window=NO_WINDOW if window is None else min(int(window), NO_WINDOW),
            scale=scale,
            lse=bool(case["lse"]),
        )


def fmha_program(case: Case) -> Program:
    """The program of an fmha case on sm_100a: one launch."""
    shape = FmhaShape.of(case)
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
        _tensor_map(shape, "q", shape.rows, TILE_M),
        _tensor_map(shape, "k", shape.s_k, TILE_N),
        _tensor_map(shape, "v", shape.s_k, TILE_N),
        _tensor_map(shape, "o", shape.rows, ROWS_PER_STORE),
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
    """[batch * kv_heads][rows][hd] in boxes of 64 columns: a row beyond the last reads as zeros and is not written,
    and never is the next head's."""
    row_bytes = shape.hd * BF16_BYTES
    return TensorMapArg(
        tensor=tensor,
        dtype="bf16",
        dims=(shape.hd, rows, shape.batch * shape.kv_heads),
        strides=(row_bytes, rows * row_bytes),
        box=(PANEL_COLUMNS, box_rows, 1),
        swizzle="128B",
    )
