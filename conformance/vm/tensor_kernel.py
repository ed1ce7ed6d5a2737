"""A kernel of 128 threads a CTA that runs given tcgen05 instructions on given shared memory and hands back all of D.

Every CTA of a cluster loads its own image to the beginning of its shared memory. Thread 0 of the first CTA executes
`issue`; then every CTA stores `columns` columns of all 128 lanes of its tensor memory.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from backends.vm.load import load
from backends.vm.machine.machine import Machine

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
BASE = 0x400
"""Where dynamic shared memory begins (facts.md 0.1)."""
SCHEDULES = ("eager", "lazy", "random:5")

_STAGES = {
    "head": """.version 9.2
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .u64 images, .param .u64 out)
{
.reg .b32 %t, %rank, %warp, %x, %load, %done, %slot, %tm, %at, %w<32>;
.reg .b64 %p, %mine, %token;
.reg .b16 %both;
.reg .pred %one, %leader, %ok, %warp0, %yes, %no;
mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; shr.u32 %warp, %t, 5; mov.b16 %both, 3;
setp.eq.s32 %one, %t, 0; setp.eq.s32 %warp0, %warp, 0; setp.eq.s32 %leader, %rank, 0; and.pred %leader, %leader, %one;
setp.eq.s32 %yes, 0, 0; setp.ne.s32 %no, 0, 0;
mov.u32 %x, smem; add.s32 %load, %x, BYTES; add.s32 %done, %x, BYTES+8; add.s32 %slot, %x, BYTES+16;""",
    "init": """@%one mbarrier.init.shared.b64 [%load], 1;
@%one mbarrier.init.shared.b64 [%done], 1;""",
    "meet": "barrier.cluster.arrive; barrier.cluster.wait;",
    "alloc": """@!%warp0 bra ALLOCATED;
tcgen05.alloc.cta_group::G.sync.aligned.shared::cta.b32 [%slot], COLUMNS;
tcgen05.relinquish_alloc_permit.cta_group::G.sync.aligned;
ALLOCATED: bar.sync 0;
ld.shared.b32 %tm, [%slot];""",
    "load": """ld.param.u64 %p, [images]; mul.wide.u32 %mine, %rank, BYTES; add.s64 %p, %p, %mine;
@%one mbarrier.arrive.expect_tx.shared.b64 %token, [%load], BYTES;
@%one cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%x], [%p], BYTES, [%load];
LOADING: mbarrier.try_wait.parity.shared.b64 %ok, [%load], 0; @!%ok bra LOADING;""",
    "meet again": "barrier.cluster.arrive; barrier.cluster.wait;",
    "before": "",
    "issue": "@!%leader bra DONE;\nISSUE\nCOMMIT\nDONE:",
    "wait": "WAITING: mbarrier.try_wait.parity.shared.b64 %ok, [%done], 0; @!%ok bra WAITING;",
    "read": """ld.param.u64 %p, [out]; mad.lo.s32 %x, %rank, 128, %t;
mul.wide.u32 %mine, %x, READ; add.s64 %p, %p, %mine;""",
    "free": """tcgen05.wait::ld.sync.aligned;
barrier.cluster.arrive; barrier.cluster.wait;
@!%warp0 bra FREED;
tcgen05.dealloc.cta_group::G.sync.aligned.b32 %tm, COLUMNS;
FREED: ret;
}""",
}
_COMMIT = {
    1: "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%done];",
    2: "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%done], %both;",
}


def _reading(columns: int) -> str:
    lines = [_STAGES["read"], "shl.b32 %at, %warp, 21; add.s32 %at, %at, %tm;"]
    for first in range(0, columns, 32):
        words = ", ".join(f"%w{i}" for i in range(32))
        lines.append(f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{words}}}, [%at+{first}];")
        lines += [f"st.global.b32 [%p+{4 * (first + i)}], %w{i};" for i in range(32)]
    return "\n".join(lines)


def run_tensor(
    issue: str,
    images: Sequence[Bytes],
    columns: int,
    *,
    group: int = 1,
    changes: Mapping[str, str] | None = None,
    schedule: str = "eager",
    accumulate: str = "exact",
    allocated: int = 512,
    cluster: int | None = None,
) -> Words:
    """uint32 [CTAs, 128, columns] after `issue`, in one CTA per image. `changes` replaces stages of the kernel."""
    size = -(-max(image.size for image in images) // 16) * 16
    memory = np.zeros((len(images), size), np.uint8)
    for row, image in zip(memory, images, strict=True):
        row[: image.size] = image
    out = np.zeros((len(images), 128, columns), np.uint32)
    machine = Machine(schedule, accumulate=accumulate)
    arrays = (memory.reshape(-1), out.reshape(-1).view(np.uint8))
    params = [struct.pack("<Q", machine.memory.add(f"a{i}", array).base) for i, array in enumerate(arrays)]
    stages = {**_STAGES, "read": _reading(columns), **(changes or {})}
    ptx = "\n".join(stages.values())
    named = {"ISSUE": issue, "COMMIT": _COMMIT[group], "READ": str(4 * columns), "COLUMNS": str(allocated),
             "cta_group::G": f"cta_group::{group}", "BYTES+16": str(size + 16), "BYTES+8": str(size + 8),
             "BYTES": str(size)}  # fmt: skip
    for name, value in named.items():
        ptx = ptx.replace(name, value)
    ctas = len(images)
    shape = (ctas if cluster is None else cluster, 1, 1)
    machine.launch(load(ptx).entry("k"), (ctas, 1, 1), (128, 1, 1), params, cluster=shape, dynamic_smem=size + 64)
    return out


def core_matrices(rows: Bytes) -> Bytes:
    """Operand rows uint8 [n, bytes] without swizzle, K-major: 8 x 16-byte core matrices, those along k side by side."""
    n, width = rows.shape
    return np.ascontiguousarray(rows.reshape(n // 8, 8, width // 16, 16).transpose(0, 2, 1, 3)).reshape(-1)


def descriptor(offset: int, width: int = 32) -> str:
    """The matrix descriptor of core matrices at `offset`, rows of `width` bytes: LBO 128, SBO 8 rows further."""
    return hex((BASE + offset) >> 4 | (128 >> 4) << 16 | (8 * width >> 4) << 32 | 1 << 46)


class Image:
    """Shared memory put together piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[Bytes] = []
        self.size = 0

    def add(self, data: npt.NDArray[np.generic]) -> int:
        """Append; the offset where it begins, a multiple of 128."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        padded = np.zeros(-(-raw.size // 128) * 128, np.uint8)
        padded[: raw.size] = raw
        self._pieces.append(padded)
        self.size += padded.size
        return self.size - padded.size

    @property
    def data(self) -> Bytes:
        """All of it."""
        return np.concatenate(self._pieces)
