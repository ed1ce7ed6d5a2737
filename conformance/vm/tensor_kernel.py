"""Three tcgen05 kernels with 128 threads per CTA.

- `mma_kernel`: one f16 MMA in stages (allocate, fill, publish, issue, wait, read, free). A test replaces stages.
- `tmem_kernel`: fills tensor memory cell by cell, performs one action on it and writes all of it out.
- `run_tensor`: runs given instructions on given shared memory, in one CTA or a pair, and returns all of D.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from conformance.vm.kernel import FENCE, SYNC, Array, Kernel, f16_idesc, init, replaced, tmem_alloc, tmem_free, wait

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

DESCRIPTORS = """shr.u32 %r46, %r41, 4; cvt.u64.u32 %rd10, %r46; or.b64 %rd10, %rd10, 0x0000400800800000;
shr.u32 %r46, %r42, 4; cvt.u64.u32 %rd11, %r46; or.b64 %rd11, %rd11, 0x0000400800100000;"""
"""A: SBO 128, LBO 2048. B: SBO 128, LBO 256. Bits 48..46 hold the constant 1 (PTX ISA 9.7.16.4.1)."""

MMA = "tcgen05.mma.cta_group::1.kind::f16 [%r40], %rd10, %rd11, %r43, %p1;"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [mbar];"
_REGISTERS = "{" + ",".join(f"%r{index}" for index in range(16)) + "}"
LOAD = f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {_REGISTERS}, [%r44];"
STORE = f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r44], {_REGISTERS};"
"""The inverse of LOAD: registers 0..15 to the same 16 columns."""

STAGES: dict[str, str] = {
    "declare": """.shared .align 1024 .b8 a[4096]; .shared .align 1024 .b8 b[512];
.shared .align 8 .b64 mbar; .shared .align 8 .b64 other; .shared .align 4 .b32 taddr;""",
    "setup": init("mbar") + "\n" + tmem_alloc(32),
    "addresses": f"""mov.u32 %r41, a; mov.u32 %r42, b; shl.b32 %r45, %tx, 4;
{DESCRIPTORS}
mov.b32 %r43, {f16_idesc(128, 16)};
shl.b32 %r44, %warp, 21; add.u32 %r44, %r44, %r40; mov.b32 %r16, 0x3c003c00;""",
    "fill": """add.u32 %r17, %r41, %r45; st.shared.v4.b32 [%r17], {%r16,%r16,%r16,%r16};
st.shared.v4.b32 [%r17+2048], {%r16,%r16,%r16,%r16};
setp.lt.u32 %p2, %tx, 32; add.u32 %r17, %r42, %r45;
@%p2 st.shared.v4.b32 [%r17], {%r16,%r16,%r16,%r16};""",
    "publish": f"{FENCE}\n{SYNC}",
    "before": "setp.ne.u32 %p3, %tx, 0; setp.ne.u32 %p1, 0, 0;\n@%p3 bra ISSUED;",
    "issue": f"{MMA}\n{COMMIT}",
    "after": "ISSUED:",
    "wait": wait("mbar", 0),
    "read": f"{LOAD}\ntcgen05.wait::ld.sync.aligned;",
    "out": "mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %rd1, %out; st.global.b32 [%rd1], %r0;",
    "free": tmem_free(32),
    "end": "ret;",
}
EXPECTED = np.full(128, 16, np.float32)


def mma_kernel(
    changes: Mapping[str, str] | None = None, buffers: Mapping[str, Array] | None = None, **options: object
) -> Kernel:
    """The kernel with some stages replaced.

    A is f16 [128, 16] and B f16 [16, 16], both all ones, K-major without swizzle. D, f32 [128, 16], is therefore 16
    everywhere. Thread t stores D[t, 0] to out[t].
    """
    body = "\n".join(replaced(STAGES, changes).values())
    given = {"out": np.zeros(128, np.float32), **(buffers or {})}
    return Kernel(body, given, block=(128, 1, 1), **options)  # type: ignore[arg-type]


COLUMNS = 512
CELLS = np.arange(128, dtype=np.uint32)[:, None] * 1000 + np.arange(COLUMNS, dtype=np.uint32)
"""The value that tmem_kernel first writes to lane l, column c: uint32 [128, 512]."""

_NAMES = [f"%w{index}" for index in range(32)]
_LIST = "{" + ", ".join(_NAMES) + "}"
_NEXT = f"add.u32 %r45, %r45, 32; setp.lt.u32 %p14, %r45, {COLUMNS};"
_FILL = f"""shl.b32 %r44, %warp, 21; add.u32 %r44, %r44, %r40; mov.u32 %r45, 0; mul.lo.u32 %r46, %tx, 1000;
FILLING: {" ".join(f"add.u32 {name}, %r46, {index};" for index, name in enumerate(_NAMES))}
tcgen05.st.sync.aligned.32x32b.x32.b32 [%r44], {_LIST}; add.u32 %r44, %r44, 32; add.u32 %r46, %r46, 32;
{_NEXT} @%p14 bra FILLING;
tcgen05.wait::st.sync.aligned;
{SYNC}
shl.b32 %r44, %warp, 21; add.u32 %r44, %r44, %r40;"""
_DUMP = f"""shl.b32 %r44, %warp, 21; add.u32 %r44, %r44, %r40; mov.u32 %r45, 0; mul.wide.u32 %rd20, %tx, {4 * COLUMNS};
add.u64 %rd20, %rd20, %cells;
DUMPING: tcgen05.ld.sync.aligned.32x32b.x32.b32 {_LIST}, [%r44]; add.u32 %r44, %r44, 32;
{" ".join(f"st.global.v8.b32 [%rd20+{4 * i}], {{{', '.join(_NAMES[i : i + 8])}}};" for i in range(0, 32, 8))}
add.u64 %rd20, %rd20, 128; {_NEXT} @%p14 bra DUMPING;
tcgen05.wait::ld.sync.aligned;"""


def tmem_kernel(action: str, buffers: dict[str, Array], declare: str = "", *, dump: bool = True) -> Kernel:
    """`%r44` is the address of each warp's first lane when `action` begins; `cells` gets all cells afterwards."""
    body = "\n".join(
        [
            declare,
            ".reg .b32 %w<32>; .shared .align 4 .b32 taddr;",
            tmem_alloc(COLUMNS),
            _FILL,
            action,
            SYNC,
            _DUMP if dump else "",
            tmem_free(COLUMNS),
            "ret;",
        ]
    )
    cells = {"cells": np.zeros((128, COLUMNS), np.uint32)} if dump else {}
    return Kernel(body, {**buffers, **cells}, block=(128, 1, 1), inputs=("x",) if "x" in buffers else ())


BASE = 0x400
"""Where dynamic shared memory begins (facts.md 0.1)."""
SCHEDULES = ("eager", "lazy", "random:5")

_IMAGE_STAGES = {
    "head": """.reg .b32 %rank, %x, %load, %done, %slot, %tm, %at, %w<32>;
.reg .b64 %p, %mine, %token;
.reg .b16 %both;
.reg .pred %one, %leader, %ok, %warp0, %yes, %no;
mov.u32 %rank, %cluster_ctarank; mov.b16 %both, 3;
setp.eq.s32 %one, %tx, 0; setp.eq.s32 %warp0, %warp, 0; setp.eq.s32 %leader, %rank, 0; and.pred %leader, %leader, %one;
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
    "load": """mul.wide.u32 %mine, %rank, BYTES; add.s64 %p, %images, %mine;
@%one mbarrier.arrive.expect_tx.shared.b64 %token, [%load], BYTES;
@%one cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%x], [%p], BYTES, [%load];
LOADING: mbarrier.try_wait.parity.shared.b64 %ok, [%load], 0; @!%ok bra LOADING;""",
    "meet again": "barrier.cluster.arrive; barrier.cluster.wait;",
    "before": "",
    "issue": "@!%leader bra DONE;\nISSUE\nCOMMIT\nDONE:",
    "wait": "WAITING: mbarrier.try_wait.parity.shared.b64 %ok, [%done], 0; @!%ok bra WAITING;",
    "read": "mad.lo.s32 %x, %rank, 128, %tx; mul.wide.u32 %mine, %x, READ; add.s64 %p, %out, %mine;",
    "free": """tcgen05.wait::ld.sync.aligned;
barrier.cluster.arrive; barrier.cluster.wait;
@!%warp0 bra FREED;
tcgen05.dealloc.cta_group::G.sync.aligned.b32 %tm, COLUMNS;
FREED: ret;""",
}
_COMMIT = {
    1: "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%done];",
    2: "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%done], %both;",
}


def _reading(columns: int) -> str:
    lines = [_IMAGE_STAGES["read"], "shl.b32 %at, %warp, 21; add.s32 %at, %at, %tm;"]
    for first in range(0, columns, 32):
        lines.append(f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {_LIST}, [%at+{first}];")
        lines += [f"st.global.b32 [%p+{4 * (first + i)}], {name};" for i, name in enumerate(_NAMES)]
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
    """The first `columns` columns of D in each CTA after `issue`: uint32 [CTAs, 128, columns].

    Each image is the shared memory of one CTA, from its beginning. Thread 0 of the first CTA executes `issue`.
    `changes` replaces stages of the kernel.
    """
    size = -(-max(image.size for image in images) // 16) * 16
    memory = np.zeros((len(images), size), np.uint8)
    for row, image in zip(memory, images, strict=True):
        row[: image.size] = image
    body = "\n".join(replaced(_IMAGE_STAGES, {"read": _reading(columns), **(changes or {})}).values())
    named = {"ISSUE": issue, "COMMIT": _COMMIT[group], "READ": str(4 * columns), "COLUMNS": str(allocated),
             "cta_group::G": f"cta_group::{group}", "BYTES+16": str(size + 16), "BYTES+8": str(size + 8),
             "BYTES": str(size)}  # fmt: skip
    for name, value in named.items():
        body = body.replace(name, value)
    ctas = len(images)
    kernel = Kernel(
        body,
        {"images": memory, "out": np.zeros((ctas, 128, columns), np.uint32)},
        grid=(ctas, 1, 1),
        block=(128, 1, 1),
        cluster=(ctas if cluster is None else cluster, 1, 1),
        dynamic_smem=size + 64,
        module=".extern .shared .align 1024 .b8 smem[];",
    )
    return kernel.run(schedule, accumulate)[0]["out"]


def core_matrices(rows: Bytes) -> Bytes:
    """Operand rows uint8 [n, bytes] without swizzle, K-major: 8 x 16-byte core matrices, contiguous along k."""
    n, width = rows.shape
    return np.ascontiguousarray(rows.reshape(n // 8, 8, width // 16, 16).transpose(0, 2, 1, 3)).reshape(-1)


def descriptor(offset: int, width: int = 32) -> str:
    """The matrix descriptor of core matrices at `offset`, rows of `width` bytes: LBO 128, SBO the size of 8 rows."""
    return hex((BASE + offset) >> 4 | (128 >> 4) << 16 | (8 * width >> 4) << 32 | 1 << 46)


class Image:
    """Shared memory assembled piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[Bytes] = []
        self.size = 0

    def add(self, data: npt.NDArray[np.generic]) -> int:
        """Appends `data`; returns the offset of its first byte, a multiple of 128."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        padded = np.zeros(-(-raw.size // 128) * 128, np.uint8)
        padded[: raw.size] = raw
        self._pieces.append(padded)
        self.size += padded.size
        return self.size - padded.size

    @property
    def data(self) -> Bytes:
        """All pieces, uint8 [size]."""
        return np.concatenate(self._pieces)
