"""Asks a Hopper GPU what becomes of accesses to the shared memory of a peer that may not have started yet.

    python3 -m conformance.silicon.early_peers OUT.json     on the device: NumPy, ptxas and the driver
    python3 -m conformance.silicon.early_peers one NAME     there, one kernel in this process: for cuda-gdb

A grid overflows the device, and its CTAs last for unlike times. The first thing that lane i of a CTA does is to
exchange word i of its own CTA, for `own`. Then it accesses word RANK of the peer i, where RANK is the rank of its own
CTA, and leaves `sent` there. If a peer's exchange returns `sent`, the access was earlier than the first one of the
peer: it was early. If that exchange does not return `sent`, and the word is not `sent` after a barrier of the cluster,
the access is lost. `own` and `sent` are new in each cluster. Where lanes arrive at an mbarrier, lane 0 initialises it
first; an arrival is lost if the phase does not end. A kernel that fails ends its process, because the driver cannot
recover from that. So each runs in processes of its own, first alone and then beside those of others.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from conformance.silicon.whole.on_device import Device, ptxas_version

PROCESSES = {1: 1, 4: 3}
"""Processes that launch a kernel, by the number of processes that run at once."""
SECONDS = 0.3
"""For which a process launches it again and again."""
MOST = 500
"""Launches of a process."""
CTAS = {32: 16384, 1024: 2112}
"""CTAs of a grid by threads of a CTA: several times as many as an H200 holds at once."""
LARGE_CLUSTER = 14
"""CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED."""
_ACCESSES = {
    "store": "  @%peer st.relaxed.cluster.shared::cluster.b32 [%far], %sent;",
    "exchange": "  @%peer atom.relaxed.cluster.shared::cluster.exch.b32 %got, [%far], %sent;",
    "reduction": "  @%peer red.relaxed.cluster.shared::cluster.and.b32 [%far], 0;\n"
    "  @%peer red.relaxed.cluster.shared::cluster.or.b32 [%far], %sent;",
    "load": "  @%peer ld.relaxed.cluster.shared::cluster.b32 %got, [%far];",
    "arrival": "  @%peer mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%far];",
}
_MEET = "  fence.mbarrier_init.release.cluster; barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
_OVERWRITE = "  nanosleep.u32 50000; @%peer st.relaxed.cluster.shared::cta.b32 [%near], %own;"
_EXCHANGED = """  setp.eq.u32 %early, %first, %sent; setp.ne.and.u32 %lost, %last, %sent, %peer;
  @%early mov.pred %lost, 0;"""
_JUDGED = {
    "store": _EXCHANGED,
    "exchange": _EXCHANGED,
    "reduction": _EXCHANGED,
    "load": "  setp.ne.and.u32 %early, %got, %own, %peer; mov.pred %lost, 0;",
    "arrival": """  mov.pred %early, 0; setp.eq.u32 %lost, %lane, 0;
  @%lost mbarrier.test_wait.parity.shared::cta.b64 %done, [%base], 0;
  @%done mov.pred %lost, 0;""",
}


@dataclass(frozen=True)
class Early:
    """A kernel. `how`: "unordered", "met" (the cluster meets before the access), or "overwritten" (each CTA stores
    `own` once more a while after the access: each access must count as lost)."""

    what: str
    cluster: int
    threads: int
    how: str = "unordered"

    @property
    def name(self) -> str:
        """The name of the entry."""
        return f"{self.what}_{self.how}_cluster_of_{self.cluster}_threads_{self.threads}"


def kernels() -> Iterator[Early]:
    """Every kernel, those that check the counts last."""
    for threads in CTAS:
        for cluster in (2, 4, 8, 16):
            for what in _ACCESSES:
                yield Early(what, cluster, threads)
    for threads in CTAS:
        for cluster in (4, 8):
            for what in _ACCESSES:
                yield Early(what, cluster, threads, "met")
    yield Early("store", 4, 32, "overwritten")


def text(one: Early) -> str:
    """The kernel's module. Parameters: where it adds the numbers of early and lost accesses; when each CTA began; a
    number of the launch."""
    arrives = one.what == "arrival"
    begins = (
        "  setp.eq.u32 %first_lane, %lane, 0; @%first_lane mbarrier.init.shared::cta.b64 [%base], %ctas;"
        if arrives
        else "  @%peer atom.relaxed.cluster.shared::cta.exch.b32 %first, [%near], %own;"
    )
    far = "%base" if arrives else "%far"
    return f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry {one.name}(.param .u64 counts, .param .u64 times, .param .u32 launch)
{{
  .shared .align 16 .b32 word[16];
  .reg .b32 %lane, %rank, %ctas, %base, %near, %far, %own, %sent, %first, %got, %last, %r;
  .reg .b64 %counts, %at, %began;
  .reg .pred %peer, %early, %lost, %done, %first_lane;
  mov.u64 %began, %globaltimer;
  mov.u32 %lane, %tid.x; mov.u32 %ctas, %cluster_nctarank; mov.u32 %rank, %cluster_ctarank; mov.u32 %base, word;
  ld.param.u32 %r, [launch]; mov.u32 %own, %clusterid.x; mad.lo.u32 %own, %r, {CTAS[32]}, %own;
  shl.b32 %own, %own, 1; or.b32 %sent, %own, 1;
  setp.lt.u32 %peer, %lane, %ctas; mad.lo.u32 %near, %lane, 4, %base; mov.u32 %first, 0; mov.u32 %got, 0;
  mov.pred %done, 0;
{begins}
{_MEET if one.how == "met" else ""}
  mad.lo.u32 %far, %rank, 4, %base;
  @%peer mapa.shared::cluster.u32 %far, {far}, %lane;
{_ACCESSES[one.what]}
{_OVERWRITE if one.how == "overwritten" else ""}
  barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
  mov.u32 %last, 0;
{"" if arrives else "  @%peer ld.relaxed.cluster.shared::cta.b32 %last, [%near];"}
{_JUDGED[one.what]}
  ld.param.u64 %counts, [counts];
  @%early red.global.add.u32 [%counts], 1;
  @%lost red.global.add.u32 [%counts + 4], 1;
  ld.param.u64 %at, [times]; mov.u32 %r, %ctaid.x; mad.wide.u32 %at, %r, 8, %at;
  setp.eq.u32 %first_lane, %lane, 0; @%first_lane st.global.b64 [%at], %began;
  mad.lo.u32 %r, %r, 0x9e3779b1, %own; shr.u32 %r, %r, 17; nanosleep.u32 %r;
  ret;
}}
"""


def _asked(one: Early) -> dict[str, Any]:
    """What a kernel counts in one process, and how its last launch failed."""
    device, ctas = Device(), CTAS[one.threads]
    device.PATIENCE = 5.0
    counts, times = device.memory(8), device.memory(8 * ctas)
    module, _ = device.compiled(text(one))
    function = ctypes.c_void_p()
    device.checked(device.driver.cuModuleGetFunction(ctypes.byref(function), module, one.name.encode()))
    device.checked(device.driver.cuFuncSetAttribute(function, LARGE_CLUSTER, 1))
    told = {"launches": 0, "early": 0, "lost": 0, "failure": "", "most_ns_between_starts": 0}
    # Shared memory may hold words of an earlier process.
    first, begun = 1 + os.getpid() % 128 * MOST, time.monotonic()
    while told["launches"] < MOST and time.monotonic() - begun < SECONDS:
        values = [ctypes.c_uint64(counts), ctypes.c_uint64(times), ctypes.c_uint32(first + told["launches"])]
        try:
            device.write(counts, bytes(8))
            device.launch(module, one.name, ctas, one.threads, values, cluster=one.cluster)
            early, lost = device.read(counts, 8).view(np.uint32).tolist()
            began = device.read(times, 8 * ctas).view(np.uint64).reshape(-1, one.cluster)
        except RuntimeError as error:
            told["failure"] = f"launch {told['launches'] + 1}: {error}"
            break
        apart = int((began.max(1) - began.min(1)).max())
        told = {
            "launches": told["launches"] + 1,
            "early": told["early"] + early,
            "lost": told["lost"] + lost,
            "failure": "",
            "most_ns_between_starts": max(told["most_ns_between_starts"], apart),
        }
    return told


def _together(one: Early, some: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the processes of a kernel count together. `words`: those that launches without a failure wrote, or
    mbarriers."""
    launches = sum(told["launches"] for told in some)
    return {
        "launches": launches,
        "words": launches * CTAS[one.threads] * (1 if one.what == "arrival" else one.cluster),
        "early": sum(told["early"] for told in some),
        "lost": sum(told["lost"] for told in some),
        "failures": [told["failure"] for told in some if told["failure"]],
        "most_ns_between_starts": max(told["most_ns_between_starts"] for told in some),
    }


def ask() -> dict[str, object]:
    """The GPU's answers, by kernel."""
    answers = dict[str, object]()
    for beside, many in PROCESSES.items():
        with ProcessPoolExecutor(beside, get_context("spawn"), max_tasks_per_child=1) as pool:
            waiting = [(one, [pool.submit(_asked, one) for _ in range(many)]) for one in kernels()]
            together = {one.name: _together(one, [told.result() for told in some]) for one, some in waiting}
        answers[f"{many} of {beside} at once"] = together
    return {**answers, "ptxas": ptxas_version()}


if __name__ == "__main__":
    if sys.argv[1] == "one":
        print(_asked(next(one for one in kernels() if one.name == sys.argv[2])))
    else:
        Path(sys.argv[1]).write_text(json.dumps(ask(), indent=1) + "\n")
