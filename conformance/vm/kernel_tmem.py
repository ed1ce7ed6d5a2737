"""Kernels that fill tensor memory cell by cell, do one thing to it and write all of it out again."""

from __future__ import annotations

import numpy as np

from conformance.vm.kernel import Array, Kernel
from conformance.vm.kernel_blocks import SYNC, tmem_alloc, tmem_free

COLUMNS = 512
CELLS = np.arange(128, dtype=np.uint32)[:, None] * 1000 + np.arange(COLUMNS, dtype=np.uint32)
"""What the kernels put into lane l, column c before anything else."""

_NAMES = [f"%w{index}" for index in range(32)]
_LIST = "{" + ", ".join(_NAMES) + "}"
_NEXT = f"add.u32 %r45, %r45, 32; setp.lt.u32 %p14, %r45, {COLUMNS};"
FILL = f"""shl.b32 %r44, %warp, 21; add.u32 %r44, %r44, %r40; mov.u32 %r45, 0; mul.lo.u32 %r46, %tx, 1000;
FILLING: {" ".join(f"add.u32 {name}, %r46, {index};" for index, name in enumerate(_NAMES))}
tcgen05.st.sync.aligned.32x32b.x32.b32 [%r44], {_LIST}; add.u32 %r44, %r44, 32; add.u32 %r46, %r46, 32;
{_NEXT} @%p14 bra FILLING;
tcgen05.wait::st.sync.aligned;
{SYNC}
shl.b32 %r44, %warp, 21; add.u32 %r44, %r44, %r40;"""
DUMP = f"""shl.b32 %r44, %warp, 21; add.u32 %r44, %r44, %r40; mov.u32 %r45, 0; mul.wide.u32 %rd20, %tx, {4 * COLUMNS};
add.u64 %rd20, %rd20, %cells;
DUMPING: tcgen05.ld.sync.aligned.32x32b.x32.b32 {_LIST}, [%r44]; add.u32 %r44, %r44, 32;
{" ".join(f"st.global.v8.b32 [%rd20+{4 * i}], {{{', '.join(_NAMES[i : i + 8])}}};" for i in range(0, 32, 8))}
add.u64 %rd20, %rd20, 128; {_NEXT} @%p14 bra DUMPING;
tcgen05.wait::ld.sync.aligned;"""


def tmem_kernel(action: str, buffers: dict[str, Array], declare: str = "", *, dump: bool = True) -> Kernel:
    """128 threads; `%r44` is the address of each warp's first lane when `action` begins. `cells` is the dump."""
    body = "\n".join(
        [
            declare,
            ".reg .b32 %w<32>; .shared .align 4 .b32 taddr;",
            tmem_alloc(COLUMNS),
            FILL,
            action,
            SYNC,
            DUMP if dump else "",
            tmem_free(COLUMNS),
            "ret;",
        ]
    )
    cells = {"cells": np.zeros((128, COLUMNS), np.uint32)} if dump else {}
    return Kernel(body, {**buffers, **cells}, block=(128, 1, 1), inputs=("x",) if "x" in buffers else ())
