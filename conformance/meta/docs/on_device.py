"""Runs the kernels of docs/found on an H200 and counts wrong elements, for each kernel as found and as mended on its
page.

    python -m conformance.meta.docs.on_device pack KERNELS.json     here
    python3 on_device.py run KERNELS.json OUT.json                  on the device: torch and cuda.bindings alone

Three additional kernels ask more. `own-write` stores by TMA what the same thread wrote an instruction before. `barrier`
stores by TMA what two warps wrote before a barrier. `heir` fills all shared memory of an SM after a CTA that ended with
192 KiB of loads in flight, and checks whether it changes.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

LAUNCHES = 20
ROUNDS = 500
SMS = 132
HEIRS = 2 * SMS * 20
LOADED = 196608
COLD_BYTES = 1 << 29
PAGES = ("cutlass-tma-refill", "gluon-persistent-matmul", "triton-attention-backward")
"""Pages whose kernels fail visibly when many CTAs run them. programs_on_device.py runs all programs unchanged."""
RECORD = Path(__file__).parents[3] / "results" / "records" / "h200-found.json"

_HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
_OWN_WRITE = f"""{_HEAD}.visible .entry kernel(.param .u64 out, .param .u32 rounds)
{{
  .shared .align 16 .b8 tile[16];
  .reg .b32 %r<6>;
  .reg .b64 %rd<3>;
  .reg .pred %p;
  ld.param.u64 %rd0, [out];
  ld.param.u32 %r0, [rounds];
  mov.u32 %r1, %ctaid.x;
  mul.lo.u32 %r1, %r1, %r0;
  mov.u32 %r2, tile;
  mov.u32 %r3, 0;
ROUND:
  add.u32 %r4, %r1, %r3;
  mul.wide.u32 %rd1, %r4, 16;
  add.u64 %rd1, %rd1, %rd0;
  st.shared.v4.b32 [%r2], {{%r4, %r4, %r4, %r4}};
FENCE
  cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 16;
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
  add.u32 %r3, %r3, 1;
  setp.lt.u32 %p, %r3, %r0;
  @%p bra ROUND;
  ret;
}}
"""
_BARRIER = f"""{_HEAD}.visible .entry kernel(.param .u64 out, .param .u32 rounds)
{{
  .shared .align 16 .b8 tile[256];
  .reg .b32 %r<8>;
  .reg .b64 %rd<3>;
  .reg .pred %p, %q;
  ld.param.u64 %rd0, [out];
  ld.param.u32 %r0, [rounds];
  mov.u32 %r1, %ctaid.x;
  mul.lo.u32 %r1, %r1, %r0;
  mov.u32 %r2, tile;
  mov.u32 %r3, 0;
  mov.u32 %r5, %tid.x;
  mad.lo.u32 %r6, %r5, 4, %r2;
  setp.eq.u32 %q, %r5, 0;
ROUND:
  add.u32 %r4, %r1, %r3;
  mul.wide.u32 %rd1, %r4, 256;
  add.u64 %rd1, %rd1, %rd0;
  mad.lo.u32 %r7, %r4, 64, %r5;
  st.shared.b32 [%r6], %r7;
FENCE
  bar.sync 0;
  @%q cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 256;
  @%q cp.async.bulk.commit_group;
  @%q cp.async.bulk.wait_group 0;
  bar.sync 0;
  add.u32 %r3, %r3, 1;
  setp.lt.u32 %p, %r3, %r0;
  @%p bra ROUND;
  ret;
}}
"""
_HEIR = f"""{_HEAD}.extern .shared .align 128 .b8 smem[];
.visible .entry kernel(.param .u64 x, .param .u64 bad)
{{
  .reg .b32 %r<10>;
  .reg .b64 %rd<4>;
  .reg .pred %p, %q;
  ld.param.u64 %rd0, [x];
  ld.param.u64 %rd1, [bad];
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, smem;
  and.b32 %r3, %r1, 1;
  setp.ne.u32 %p, %r3, 0;
  @%p bra HEIR;
  setp.ne.u32 %p, %r0, 0;
  @%p ret;
  mbarrier.init.shared::cta.b64 [%r2], 1;
  fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {LOADED};
  mul.lo.u32 %r3, %r1, 0x9e3779b1;
  and.b32 %r3, %r3, {COLD_BYTES // 2 - 1 & ~127};
  cvt.u64.u32 %rd2, %r3;
  add.u64 %rd0, %rd0, %rd2;
  add.u32 %r4, %r2, 128;
  mov.u32 %r5, 0;
LOAD:
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd0], 16384, [%r2];
  add.u64 %rd0, %rd0, 16384;
  add.u32 %r4, %r4, 16384;
  add.u32 %r5, %r5, 16384;
  setp.lt.u32 %p, %r5, {LOADED};
  @%p bra LOAD;
  ret;
HEIR:
  mov.u32 %r3, 0;
FILL:
  mad.lo.u32 %r4, %r3, 1024, %r0;
  mad.lo.u32 %r4, %r4, 4, %r2;
  st.shared.b32 [%r4], 0xa5a5a5a5;
  add.u32 %r3, %r3, 1;
  setp.lt.u32 %p, %r3, {LOADED // 4096};
  @%p bra FILL;
  bar.sync 0;
  mov.u32 %r6, 0;
AGAIN:
  mov.u32 %r3, 0;
LOOK:
  mad.lo.u32 %r4, %r3, 1024, %r0;
  mad.lo.u32 %r4, %r4, 4, %r2;
  ld.volatile.shared.b32 %r5, [%r4];
  setp.ne.u32 %q, %r5, 0xa5a5a5a5;
  @%q red.global.add.u32 [%rd1], 1;
  add.u32 %r3, %r3, 1;
  setp.lt.u32 %p, %r3, {LOADED // 4096};
  @%p bra LOOK;
  add.u32 %r6, %r6, 1;
  setp.lt.u32 %p, %r6, 20;
  @%p bra AGAIN;
  red.global.add.u32 [%rd1 + 4], 1;
  ret;
}}
"""


def pack() -> dict[str, dict[str, str]]:
    """Name -> "as found" and "mended" -> PTX, for PAGES and the three kernels above."""
    from conformance.meta.docs.pages import pages, trials

    found = {"own-write": {"as found": _OWN_WRITE.replace("FENCE\n", ""),
                           "mended": _OWN_WRITE.replace("FENCE", "  fence.proxy.async.shared::cta;")},
             "barrier": {"as found": _BARRIER.replace("FENCE\n", ""),
                         "mended": _BARRIER.replace("FENCE", "  fence.proxy.async.shared::cta;")},
             "heir": {"as found": _HEIR}}  # fmt: skip
    for path in pages():
        if path.parent.name == "found" and path.stem in PAGES:
            both = list(trials(path))
            found[path.stem] = {"as found": both[0].kernel, "mended": both[1].kernel}
    return found


@dataclass(frozen=True)
class Question:
    """How a kernel is launched. `wrong` counts the wrong elements of its output; `elements` is the number of
    elements."""

    grid: int
    block: int
    arguments: tuple[Any, ...]
    wrong: Callable[[], int]
    elements: int
    output: Any = None
    smem: int = 0


def questions(device: str) -> dict[str, Question]:
    """How each kernel of `pack` is launched, with tensors on `device`."""
    import torch

    ctas = 4 * SMS
    out = torch.zeros(ctas * ROUNDS * 128, dtype=torch.int32, device=device)
    order = torch.arange(out.numel(), dtype=torch.int32, device=device)
    x = torch.arange(128, dtype=torch.int32, device=device)
    bad = torch.zeros(2, dtype=torch.int32, device=device)
    cold = torch.zeros(COLD_BYTES // 4, dtype=torch.int32, device=device)

    def unequal(size: int, expected: Any) -> Callable[[], int]:
        return lambda: int((out[:size] != expected).sum())

    def changed() -> int:
        looked = int(bad[1])
        if looked != LAUNCHES * HEIRS // 2 * 1024:
            raise SystemExit(f"{looked} threads looked at their memory; {LAUNCHES * HEIRS // 2 * 1024} should have")
        return int(bad[0])

    own, through = ctas * ROUNDS * 4, ctas * ROUNDS * 64
    return {
        "triton-attention-backward": Question(
            ctas, 160, (out, ROUNDS), unequal(out.numel(), order), out.numel(), out),
        "own-write": Question(ctas, 1, (out, ROUNDS), unequal(own, order[:own] // 4), own, out),
        "barrier": Question(ctas, 64, (out, ROUNDS), unequal(through, order[:through]), through, out),
        "cutlass-tma-refill": Question(ctas, 64, (x, out), unequal(ctas * 128, x.repeat(ctas)), ctas * 128, out),
        "gluon-persistent-matmul": Question(ctas, 32, (x, out, 3), unequal(96, x[:96]), 96, out),
        "heir": Question(HEIRS, 1024, (cold, bad), changed, HEIRS // 2 * LOADED // 4, smem=LOADED + 1024),
    }  # fmt: skip


def run(kernels: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Launches each kernel LAUNCHES times: total wrong elements, launches that had some, seconds."""
    import torch

    driver = import_module("cuda.bindings.driver")

    def call(result: tuple[Any, ...], doing: str) -> Any:
        code, *values = result
        if int(code):
            raise SystemExit(f"{doing}: {code}")
        return values[0] if values else None

    asked_of = questions("cuda")
    table: dict[str, Any] = {}
    for name, variants in kernels.items():
        for variant, ptx in variants.items():
            asked = asked_of[name]
            module = call(driver.cuModuleLoadData(ptx.encode() + b"\0"), f"loading {name}")
            kernel = call(driver.cuModuleGetFunction(module, b"kernel"), f"finding {name}")
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(driver.cuFuncSetAttribute(kernel, attribute, asked.smem), f"{asked.smem} bytes for {name}")
            held = [ctypes.c_void_p(one.data_ptr()) if hasattr(one, "data_ptr") else ctypes.c_uint32(one)
                    for one in asked.arguments]  # fmt: skip
            pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(one) for one in held))
            wrong, launches, began = 0, 0, time.perf_counter()
            for number in range(LAUNCHES):
                if asked.output is not None:
                    asked.output.fill_(-1)
                torch.cuda.synchronize()
                call(driver.cuLaunchKernel(kernel, asked.grid, 1, 1, asked.block, 1, 1, asked.smem, 0,
                                           ctypes.addressof(pointers), 0), f"launching {name}")  # fmt: skip
                call(driver.cuCtxSynchronize(), f"running {name}, {variant}")
                if name != "heir" or number == LAUNCHES - 1:
                    seen = asked.wrong()
                    wrong, launches = wrong + seen, launches + bool(seen)
            table[f"{name}, {variant}"] = {
                "wrong": wrong, "elements": LAUNCHES * asked.elements, "launches": LAUNCHES,
                "launches_with_wrong": launches, "ctas": asked.grid,
                "seconds": round(time.perf_counter() - began, 2),
            }  # fmt: skip
            print(name, variant, table[f"{name}, {variant}"], flush=True)
    version = call(driver.cuDriverGetVersion(), "asking for the version")
    return {"device": torch.cuda.get_device_name(), "driver_cuda": version, "kernels": table}


def report() -> list[tuple[str, str]]:
    """The record's statements, as (page, sentence)."""
    answers = json.loads(RECORD.read_text("utf-8"))["kernels"]

    def count(name: str, variant: str) -> str:
        one = answers[f"{name}, {variant}"]
        number = f"{one['wrong']:,}" if one["wrong"] else "none"
        return f"{number} of {one['elements']:,} words"

    def launches(name: str) -> str:
        one = answers[f"{name}, as found"]
        return f"in {one['launches_with_wrong']} of {one['launches']} launches"

    found, mended = "as found", "mended"
    return [
        (
            "async-proxy",
            f"On an H200 {count('barrier', found)} were wrong, {launches('barrier')}, where two warps wrote and "
            f"passed a barrier; with the fence {count('barrier', mended)}. Where one thread wrote and issued the store "
            f"at once, {count('own-write', found)} were wrong; with the fence {count('own-write', mended)}.",
        ),
        (
            "triton-attention-backward",
            f"On an H200 {count('triton-attention-backward', found)} were wrong in "
            f"{answers['triton-attention-backward, as found']['launches']} launches of 528 CTAs.",
        ),
        (
            "cutlass-tma-refill",
            f"On an H200 {count('cutlass-tma-refill', found)} were of the wrong tile, "
            f"{launches('cutlass-tma-refill')}; with the barrier {count('cutlass-tma-refill', mended)}.",
        ),
        (
            "gluon-persistent-matmul",
            f"On an H200 {count('heir', found)} of the next CTA's shared memory changed, where the CTA before it had "
            "ended with 192 KiB of loads in flight.",
        ),
    ]


if __name__ == "__main__":
    if sys.argv[1] == "pack":
        Path(sys.argv[2]).write_text(json.dumps(pack(), indent=1) + "\n", "utf-8")
    else:
        answers = run(json.loads(Path(sys.argv[2]).read_text("utf-8")))
        Path(sys.argv[3]).write_text(json.dumps(answers, indent=1) + "\n", "utf-8")
