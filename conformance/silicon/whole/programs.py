"""A whole program: the frame that all programs share, and the arrays that they read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
import numpy.typing as npt

from conformance.silicon.whole.drawn import input_words
from conformance.silicon.whole.on_device import WHOLE_BYTES

CODES, PAIRS, SINGLES, ADDENDS = 0, 8192, 9216, 10240
"""Offsets in inputs of matrices: codes of A and B (8 KiB), metadata of 2:4 and of 1:2, and C (4 KiB)."""
KINDS = ("exact", "rounded", "special")
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TiledMap:
    """A tensor map over the input: the arguments of encode_tensor_map from the dtype on."""

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "none"
    element_strides: tuple[int, ...] | None = None
    fill: str = "zero"
    corners: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    over_output: bool = False


@dataclass(frozen=True)
class Whole:
    """`body` runs in `grid` CTAs of `threads`. It finds %tx, %lane, %warp and %cta, its input at %in, the output at
    %out, the thread's own part of it at %own, a tensor map at %map, `tile` and `gate` in shared memory."""

    name: str
    body: str
    threads: int = 32
    grid: int = 1
    cluster: int = 1
    given: str = "bits"
    tensor_map: TiledMap | None = None
    directives: str = ""
    module: str = ""

    @property
    def entry(self) -> str:
        """The kernel's name."""
        return "w_" + "".join(c if c.isalnum() else "_" for c in self.name)

    @property
    def text(self) -> str:
        """The text of the entry."""
        own = WHOLE_BYTES // (self.threads * self.grid)
        return "\n".join(
            (
                self.module,
                f".visible .entry {self.entry}(.param .u64 pin, .param .u64 pout, .param .align 64 .b8 pmap[128]) "
                + self.directives
                + (f" .explicitcluster .reqnctapercluster {self.cluster}" if self.cluster > 1 else ""),
                "{",
                ".reg .b32 %r<48>, %x<128>, %tx, %lane, %warp, %cta, %t; .reg .b64 %d<24>, %in, %out, %own, %map, %u;",
                ".reg .b16 %h<8>; .reg .pred %p<8>, %first; .reg .b128 %q<4>;",
                ".shared .align 1024 .b8 tile[16384]; .shared .align 8 .b64 gate[8];",
                "mov.u32 %tx, %tid.x; and.b32 %lane, %tx, 31; shr.u32 %warp, %tx, 5; mov.u32 %cta, %ctaid.x;",
                "ld.param.u64 %in, [pin]; ld.param.u64 %out, [pout]; mov.b64 %map, pmap; cvta.param.u64 %map, %map;",
                f"mad.lo.u32 %t, %cta, {self.threads}, %tx; mad.wide.u32 %own, %t, {own}, %out;",
                "setp.eq.u32 %first, %tx, 0;",
                self.body,
                "ret;",
                "}",
            )
        )


_FLOATS = {
    "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "tf32": np.dtype(np.float32),
    "f32": np.dtype(np.float32), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "f64": np.dtype(np.float64),
}  # fmt: skip


def _codes(dtype: str, kind: str, size: int, draw: np.random.Generator) -> Bytes:
    """`exact`: small integers; `rounded`: exponents -4 to 4, rounded to the type; `special`: any bits."""
    if dtype not in _FLOATS or kind == "special":
        return draw.integers(0, 256, size, np.uint8)
    count = size // _FLOATS[dtype].itemsize
    if kind == "exact":
        values = draw.integers(-4, 5, count).astype(np.float64)
    else:
        values = draw.normal(0, 1, count) * 2.0 ** draw.integers(-4, 5, count)
    return values.astype(np.float32).astype(_FLOATS[dtype]).view(np.uint8)


_TWO_OF_FOUR = np.array([4, 8, 9, 12, 13, 14])
_ONE_OF_TWO = np.array([4, 14])


@cache
def given(name: str) -> Bytes:
    """Returns input `name`: "bits", or "A-B-C-KIND" with the operand types of matrices."""
    if name == "bits":
        return np.array(input_words(), np.uint32).view(np.uint8)
    a, b, c, kind = name.split("-")
    draw = np.random.default_rng([5, *name.encode()])
    data = np.zeros(ADDENDS + 4096, np.uint8)
    data[:2048], data[2048:PAIRS] = _codes(a, kind, 2048, draw), _codes(b, kind, 6144, draw)
    for at, nibbles in ((PAIRS, _TWO_OF_FOUR), (SINGLES, _ONE_OF_TWO)):
        low, high = draw.choice(nibbles, (2, 1024))
        data[at : at + 1024] = low | high << 4
    data[ADDENDS:] = _codes(c, kind, 4096, draw)
    return data


def vector(name: str, count: int, start: int = 0) -> str:
    """{%name0, %name1, ..}."""
    return "{" + ", ".join(f"%{name}{start + i}" for i in range(count)) + "}"


def kept(*registers: str, at: int = 0) -> str:
    """Stores registers, eight bytes each, one after the other from byte `at` of the thread's own output on."""
    lines = []
    for i, name in enumerate(registers):
        kind = {"r": "b32", "x": "b32", "d": "b64", "h": "b16", "q": "b128"}[name[1]]
        lines.append(f"st.global.{kind} [%own+{at + 8 * i}], {name};")
    return " ".join(lines)


FILL = """shl.b32 %t, %tx, 4;
FILLING: cvt.u64.u32 %u, %t; add.u64 %u, %u, %in; ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%u]; mov.u32 %r4, tile;
add.u32 %r4, %r4, %t; st.shared.v4.b32 [%r4], {%r0, %r1, %r2, %r3}; mov.u32 %r5, %ntid.x; shl.b32 %r5, %r5, 4;
add.u32 %t, %t, %r5; setp.lt.u32 %p0, %t, 8192; @%p0 bra FILLING; fence.proxy.async.shared::cta; bar.sync 0;"""
"""Copies the first 8 KiB of the input to `tile`, for all proxies."""


SLOT = "shl.b32 %r40, %tx, 4; mov.u32 %r41, tile; add.u32 %r40, %r40, %r41;"
"""%r40: the thread's own 16 bytes of `tile`."""
ANOTHER = "xor.b32 %r9, %tx, 77; mad.lo.u32 %r9, %r9, 16, %r41;"
"""%r9: the 16 bytes of another of 128 threads; needs SLOT."""
WORDS = "mul.wide.u32 %d20, %tx, 16; add.u64 %d20, %d20, %in; ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d20];"
LONGS = "ld.global.v2.b64 {%d0, %d1}, [%d20];"


def show(first: int, bytes_: int, threads: int) -> str:
    """Copies bytes of `tile` from `first` on to the start of the output, 16 bytes a thread and iteration."""
    return f"""bar.sync 0; shl.b32 %t, %tx, 4;
SHOWING: mov.u32 %r0, tile; add.u32 %r0, %r0, %t; ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r0+{first}];
cvt.u64.u32 %u, %t; add.u64 %u, %u, %out; st.global.v4.b32 [%u], {{%r1, %r2, %r3, %r4}};
add.u32 %t, %t, {16 * threads}; setp.lt.u32 %p0, %t, {bytes_}; @%p0 bra SHOWING;"""
