"""What the attention kernels of all targets share: the axes of a case, its tensor maps, the keys that a row sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from backends.ptx.builder import Builder
from backends.ptx.operands import Register
from megamoe.contract import Case, Target, TensorMapArg, UnsupportedError

BF16_BYTES = 2
LOG2_E = math.log2(math.e)
NO_WINDOW = 1 << 30
"""Stands for "as far as you like" in `window` and `ahead`; far above any s_k and any t."""
PANEL_COLUMNS = 64
"""bf16 columns in a 128-byte swizzle span."""


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
    def of(cls, case: Case, target: Target, supported_hd: Sequence[int]) -> FmhaShape:
        """Reads the case. Raises UnsupportedError for what the kernel of `target` cannot do."""
        hd, t, s_k = case.int("hd"), case.int("t"), case.int("s_k")
        heads, kv_heads, batch = case.int("heads"), case.int("kv_heads"), case.int("batch")
        if hd not in supported_hd:
            raise UnsupportedError(
                f"{case.id}: hd is {hd}; the {target} kernel has hd {', '.join(map(str, supported_hd))}"
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


def tensor_map(shape: FmhaShape, tensor: str, rows: int, box_rows: int) -> TensorMapArg:
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


class Sight(Protocol):
    """Parameters of a kernel that say which keys the row at a position sees."""

    @property
    def window(self) -> Register:
        """How many keys up to its own position."""
        ...

    @property
    def ahead(self) -> Register:
        """How many past its own position; 0 when causal."""
        ...

    @property
    def s_k(self) -> Register:
        """How many there are."""
        ...


def first_visible(x: Builder, params: Sight, position: Register, name: str) -> Register:
    """The first key that the row at `position` sees; 0 at least."""
    first = x.let(f"{name}_first_key", "sub.s32", position, params.window)
    x.emit("add.s32", first, first, 1)
    x.emit("max.s32", first, first, 0)
    return first


def end_visible(x: Builder, params: Sight, position: Register, name: str) -> Register:
    """The key behind the last one that the row at `position` sees; no more than s_k, perhaps below 0."""
    end = x.let(f"{name}_end_key", "add.s32", position, params.ahead)
    x.emit("add.s32", end, end, 1)
    x.emit("min.s32", end, end, params.s_k)
    return end
