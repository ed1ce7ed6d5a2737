"""A small TMA kernel in stages: load a box, wait, add 1, publish, store the box. A test replaces stages.

64 threads. `x` and `out` are u32 [4, 16] (256 bytes), the box is all of it, without swizzle. Thread t has word t.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conformance.vm.kernel import FENCE, SYNC, Array, Kernel, Map, init, replaced, wait

X = np.arange(64, dtype=np.uint32) * 3
MAPS = {
    "from": Map("x", "u32", (16, 4), (64,), (16, 4)),
    "to": Map("out", "u32", (16, 4), (64,), (16, 4)),
}
LOAD = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r41], [%from, {%r30, %r30}], "
    "[mbar];"
)
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%to, {%r30, %r30}], [%r41];"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 256;"

STAGES: dict[str, str] = {
    "declare": ".shared .align 1024 .b8 buf[256]; .shared .align 8 .b64 mbar; .shared .align 8 .b64 other;",
    "setup": init("mbar", "other"),
    "addresses": """mov.u32 %r41, buf; shl.b32 %r42, %tx, 2; add.u32 %r42, %r42, %r41; mov.u32 %r30, 0;
setp.ne.u32 %p3, %tx, 0;""",
    "before load": "@%p3 bra LOADED;",
    "load": f"{EXPECT}\n{LOAD}",
    "after load": "LOADED:",
    "wait": wait("mbar", 0),
    "compute": "ld.shared.u32 %r1, [%r42];\nadd.u32 %r1, %r1, 1;\nst.shared.u32 [%r42], %r1;",
    "publish": f"{FENCE}\n{SYNC}",
    "before store": "@%p3 bra END;",
    "store": STORE,
    "commit": "cp.async.bulk.commit_group;",
    "drain": "cp.async.bulk.wait_group.read 0;",
    "end": "END: ret;",
}


def copy_kernel(
    changes: Mapping[str, str] | None = None, buffers: Mapping[str, Array] | None = None, **options: object
) -> Kernel:
    """The kernel with some stages replaced."""
    options = {"block": (64, 1, 1), "maps": MAPS, "inputs": ("x",), **options}
    body = "\n".join(replaced(STAGES, changes).values())
    return Kernel(body, {"x": X, "out": np.zeros(64, np.uint32), **(buffers or {})}, **options)  # type: ignore[arg-type]
