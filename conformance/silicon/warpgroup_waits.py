"""Asks a Hopper GPU whether one warp's wgmma.wait_group covers the shared-memory reads of the warpgroup's other warps.

    python3 -m conformance.silicon.warpgroup_waits OUT.json     on the device: NumPy, ptxas and the driver

Four warps issue a chain of products of ones. Warp 0 waits for the group and overwrites both operands with twos, with no
barrier. A warp whose products still read the operands then has sums above CHAIN * 16. A late warp sleeps ahead of
wgmma.fence, of the products or of commit_group, long enough for a warp that does not wait for it to finish first.
Without warp 0's wait the same overwrite must spoil sums: those kernels show that the others can fail.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from conformance.silicon.whole.on_device import Device, ptxas_version

CHAIN, CTAS, LAUNCHES, SLEEP_NS = 64, 132, 200, 40_000
A_BYTES, B_BYTES = 64 * 16 * 2, 256 * 16 * 2
ONES, TWOS = 0x3C003C00, 0x40004000
LATE_AHEAD_OF = ("nothing", "fence", "products", "commit")
_SUMS = [f"%d{index}" for index in range(128)]


def _descriptor(register: str, offset: int) -> str:
    """K-major, no swizzle: core matrices of 128 bytes, K neighbours 128 apart, row neighbours 256 (9.7.15.5.1.2)."""
    bits = 128 >> 4 << 16 | 256 >> 4 << 32
    return f"""  add.u32 %r2, %r1, {offset}; shr.u32 %r2, %r2, 4; cvt.u64.u32 {register}, %r2;
  or.b64 {register}, {register}, {bits};"""


def _late(here: str, late: str) -> str:
    # A guarded sleep would be a branch, behind which ptxas serializes the products.
    return "  nanosleep.u32 %sleep;" if here == late else ""


def text(late: str, waits: bool, chain: int = CHAIN) -> str:
    """One kernel of `chain` products. Warp 2 is late ahead of `late`; warp 0 overwrites, and `waits` before that."""
    product = (
        f"  wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {{{', '.join(_SUMS)}}}, %rd2, %rd3, %more, 1, 1, 0, 0;"
    )
    products = "\n".join(
        [f"  setp.ne.u32 %more, %zero, 0;\n{product}", "  setp.eq.u32 %more, %zero, 0;"] + [product] * (chain - 1)
    )
    wait = "  wgmma.wait_group.sync.aligned 0;"
    right = f"{int.from_bytes(struct.pack('>f', chain * 16), 'big'):08X}"
    wrong = "\n".join(f"  setp.neu.f32 %more, {one}, 0f{right}; @%more add.u32 %r6, %r6, 1;" for one in _SUMS)
    return f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry {name(late, waits)}(.param .u64 out)
{{
  .shared .align 1024 .b8 tile[{A_BYTES + B_BYTES}];
  .reg .b32 %r<10>, %zero, %sleep; .reg .b64 %rd<6>; .reg .f32 %d<128>; .reg .pred %more, %over, %late, %p;
  ld.param.u64 %rd0, [out]; mov.u32 %r0, %tid.x; mov.u32 %r1, tile; mov.u32 %r6, 0; mov.u32 %zero, %ctaid.y;
  shr.u32 %r3, %r0, 5; setp.eq.u32 %over, %r3, 0; setp.eq.u32 %late, %r3, 2;
  selp.u32 %sleep, {SLEEP_NS}, 0, %late;
  mad.lo.u32 %r4, %r0, 4, %r1; add.u32 %r5, %r1, {A_BYTES + B_BYTES};
FILL:
  st.shared.b32 [%r4], {ONES}; add.u32 %r4, %r4, 512; setp.lt.u32 %p, %r4, %r5; @%p bra FILL;
{_descriptor("%rd2", 0)}
{_descriptor("%rd3", A_BYTES)}
  fence.proxy.async.shared::cta; bar.sync 0;
{_late("fence", late)}
  wgmma.fence.sync.aligned;
{_late("products", late)}
{products}
{_late("commit", late)}
  wgmma.commit_group.sync.aligned;
  @!%over bra JUDGE;
{wait if waits else ""}
  mad.lo.u32 %r4, %r0, 16, %r1; mov.u32 %r7, {TWOS};
OVER:
  st.shared.v4.b32 [%r4], {{%r7, %r7, %r7, %r7}}; add.u32 %r4, %r4, 512; setp.lt.u32 %p, %r4, %r5; @%p bra OVER;
  fence.proxy.async.shared::cta;
JUDGE:
{wait}
{wrong}
  mov.u32 %r8, %ctaid.x; mad.lo.u32 %r8, %r8, 128, %r0; mul.wide.u32 %rd1, %r8, 4; add.u64 %rd1, %rd1, %rd0;
  st.global.u32 [%rd1], %r6;
  ret;
}}
"""


def name(late: str, waits: bool) -> str:
    """The name of a kernel."""
    return f"late_{late}_{'waits' if waits else 'does_not'}"


def kernels() -> Iterator[tuple[str, bool]]:
    """Where warp 2 is late, and whether warp 0 waits."""
    return ((late, waits) for waits in (True, False) for late in LATE_AHEAD_OF)


def _wrong_sums(device: Device, module: ctypes.c_void_p, entry: str, out: int) -> list[int]:
    """Wrong sums of LAUNCHES launches, by warp."""
    wrong = np.zeros(4, np.int64)
    for _ in range(LAUNCHES):
        device.launch(module, entry, CTAS, 128, [ctypes.c_uint64(out)])
        wrong += device.read(out, 4 * CTAS * 128).view(np.uint32).reshape(CTAS, 4, 32).sum(axis=(0, 2), dtype=np.int64)
    return wrong.tolist()


def ask() -> dict[str, object]:
    """The H200's answers, by kernel."""
    device = Device()
    out, found, said = device.memory(4 * CTAS * 128), dict[str, list[int]](), ""
    for late, waits in kernels():
        module, told = device.compiled(text(late, waits))
        said += told
        found[name(late, waits)] = _wrong_sums(device, module, name(late, waits), out)
    return {
        "wrong_sums_by_warp": found,
        "sums_by_warp": CTAS * 32 * 128 * LAUNCHES,
        "serialized": "serialized" in said,
        "ptxas": ptxas_version(),
    }


if __name__ == "__main__":
    answers = json.dumps(ask(), indent=1)
    Path(sys.argv[1]).write_text(answers + "\n")
    print(answers)
