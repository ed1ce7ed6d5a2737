"""Asks a Hopper GPU where st.async and red.async work, and where reserved shared memory lies.

    python3 -m conformance.silicon.async_stores OUT.json     on the device: NumPy, ptxas and the driver

Lane 0 of each CTA stores a word, or adds it, into the CTA whose rank is `distance` further in the cluster, and the CTA
waits for the bytes. A kernel that fails ends its process, because the driver cannot recover from that, so each has one
of its own.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from conformance.silicon.whole.on_device import Device, ptxas_version

HELD, SENT = 7, 40
"""The word before, and the word that CTA 0 sends; CTA 1 sends one more."""
OFFSETS = ("begin", "0", "1", "end", "cap")
_SPELLINGS = {
    "st.async": "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32",
    "red.async": "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32",
}


@dataclass(frozen=True)
class Store:
    """A kernel, which declares clusters of `declared` CTAs, and a launch that gives clusters of `given`."""

    what: str
    declared: int | None
    given: int | None
    distance: int

    @property
    def name(self) -> str:
        """The name of the entry."""
        sizes = {"declared": self.declared, "given": self.given}
        clusters = [f"cluster_of_{size}_{how}" for how, size in sizes.items() if size is not None]
        return "_".join([self.what.replace(".", "_"), *(clusters or ["no_cluster"]),
                         "other" if self.distance else "own"])  # fmt: skip

    @property
    def ctas(self) -> int:
        """CTAs of the launch."""
        return self.declared or self.given or 1

    @property
    def words(self) -> int:
        """How many words the kernel leaves: one a CTA, and %is_explicit_cluster."""
        return self.ctas + 1


def stores() -> Iterator[Store]:
    """Every kernel."""
    for what in _SPELLINGS:
        yield Store(what, None, None, 0)
        for ctas, distance in ((1, 0), (2, 0), (2, 1)):
            yield Store(what, ctas, None, distance)
            yield Store(what, None, ctas, distance)


def text(one: Store) -> str:
    """The kernel's module. Parameter: where each CTA leaves its word."""
    cluster = f".explicitcluster .reqnctapercluster {one.declared}" if one.declared else ""
    return f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry {one.name}(.param .u64 out) {cluster}
{{
  .shared .align 16 .b32 word; .shared .align 8 .b64 full;
  .reg .b32 %rank, %ctas, %explicit, %to, %word, %full, %value, %cta, %r; .reg .b64 %out, %at;
  .reg .pred %others, %done, %p;
  ld.param.u64 %out, [out]; mov.u32 %rank, %cluster_ctarank; mov.u32 %ctas, %cluster_nctarank;
  mov.u32 %cta, %ctaid.x; mov.u32 %r, %tid.x; setp.ne.u32 %others, %r, 0;
  @%others bra READY;
  mbarrier.init.shared::cta.b64 [full], 1; mov.u32 %r, {HELD}; st.shared.b32 [word], %r;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 4;
  fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;
READY:
  barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
  @%others bra SENT;
  add.u32 %to, %rank, {one.distance}; rem.u32 %to, %to, %ctas; mov.u32 %word, word; mov.u32 %full, full;
  mapa.shared::cluster.u32 %word, %word, %to; mapa.shared::cluster.u32 %full, %full, %to;
  add.u32 %value, %rank, {SENT};
  {_SPELLINGS[one.what]} [%word], %value, [%full];
SENT:
  mbarrier.try_wait.parity.shared::cta.b64 %done, [full], 0; @!%done bra SENT;
  @%others bra LEFT;
  ld.shared.b32 %r, [word]; mul.wide.u32 %at, %cta, 4; add.u64 %at, %at, %out; st.global.b32 [%at], %r;
  setp.ne.u32 %others, %cta, 0; mov.pred %p, %is_explicit_cluster; selp.b32 %explicit, 1, 0, %p;
  @!%others st.global.b32 [%out + {4 * (one.words - 1)}], %explicit;
LEFT:
  barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
  ret;
}}
"""


def offsets_text() -> str:
    """A module whose entry `offsets` leaves the five offsets of reserved shared memory, in the order of OFFSETS."""
    told = "\n".join(
        f"  mov.u32 %r, %reserved_smem_offset_{name}; st.global.b32 [%out+{4 * at}], %r;"
        for at, name in enumerate(OFFSETS)
    )
    return f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry offsets(.param .u64 out)
{{
  .reg .b32 %r; .reg .b64 %out;
  ld.param.u64 %out, [out];
{told}
  ret;
}}
"""


def _left(source: str, entry: str, ctas: int, cluster: int | None, words: int) -> list[int] | str:
    """The words that an entry leaves, or how the launch ended."""
    device = Device()
    out = device.memory(4 * words, np.zeros(words, np.uint32))
    module, _ = device.compiled(source)
    try:
        device.launch(module, entry, ctas, 32, [ctypes.c_uint64(out)], cluster=cluster)
        return device.read(out, 4 * words).view(np.uint32).tolist()
    except RuntimeError as error:
        return str(error)


def ask() -> dict[str, object]:
    """The GPU's answers, by kernel, and the offsets by name."""
    with ProcessPoolExecutor(4, get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = {
            one.name: pool.submit(_left, text(one), one.name, one.ctas, one.given, one.words) for one in stores()
        }
        offsets = pool.submit(_left, offsets_text(), "offsets", 1, None, len(OFFSETS)).result()
        return {
            "left": {name: answer.result() for name, answer in waiting.items()},
            "reserved_smem_offsets": dict(zip(OFFSETS, offsets, strict=True)),
            "ptxas": ptxas_version(),
        }


if __name__ == "__main__":
    answers = json.dumps(ask(), indent=1)
    Path(sys.argv[1]).write_text(answers + "\n")
    print(answers)
