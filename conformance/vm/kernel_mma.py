"""One small tcgen05 kernel in stages: allocate, fill, publish, issue, wait, read, free. Tests replace single stages.

128 threads. A is f16 [128, 16] and B is f16 [16, 16], both all ones, K-major without swizzle; D is f32 [128, 16] and
therefore 16 everywhere. Thread t stores D[t, 0] to out[t].
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conformance.vm.kernel import Array, Kernel
from conformance.vm.kernel_blocks import (
    FENCE,
    SYNC,
    f16_idesc,
    init,
    tmem_alloc,
    tmem_free,
    wait,
)

DESCRIPTORS = """shr.u32 %r46, %r41, 4; cvt.u64.u32 %rd10, %r46; or.b64 %rd10, %rd10, 0x0000400800800000;
shr.u32 %r46, %r42, 4; cvt.u64.u32 %rd11, %r46; or.b64 %rd11, %rd11, 0x0000400800100000;"""
"""A: SBO 128, LBO 2048. B: SBO 128, LBO 256. Bits 48..46 hold the constant 1 (PTX ISA 9.7.16.4.1)."""

MMA = "tcgen05.mma.cta_group::1.kind::f16 [%r40], %rd10, %rd11, %r43, %p1;"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [mbar];"
_REGISTERS = "{" + ",".join(f"%r{index}" for index in range(16)) + "}"
LOAD = f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {_REGISTERS}, [%r44];"
STORE = f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r44], {_REGISTERS};"
"""The mirror image of LOAD: registers 0..15 to the same 16 columns."""

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
    """The kernel with some stages replaced."""
    unknown = set(changes or {}) - set(STAGES)
    assert not unknown, f"no such stages: {unknown}"
    body = "\n".join({**STAGES, **(changes or {})}.values())
    given = {"out": np.zeros(128, np.float32), **(buffers or {})}
    return Kernel(body, given, block=(128, 1, 1), **options)  # type: ignore[arg-type]
