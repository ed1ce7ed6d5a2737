"""Asks a Hopper GPU when a copy sees a tensor map that its kernel has just changed in global memory.

    python3 -m conformance.silicon.tensormap_fences OUT.json     on the device: NumPy, ptxas and the driver

A CTA copies a box through a map (or does not, so that nothing has cached the map), gives the map another base address,
and copies a box again. It counts the words that come from the first tensor. `ways` of the change: tensormap.replace in
global memory, or a changed copy that tensormap.cp_fenceproxy writes, which releases by itself (PTX ISA 9.7.13.16).
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from conformance.silicon.whole.on_device import Device, ptxas_version

CTAS, LAUNCHES, MAP_BYTES, BOX = 132, 200, 128, 32
_WAYS = {
    "replace": "  tensormap.replace.tile.global_address.global.b1024.b64 [%map], %other;",
    "copy": f"""  tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%copied], %other;
SKIP:
  bar.warp.sync 0xffffffff;
  tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%map], [%copied],
    {MAP_BYTES};""",
}
_RELEASE = "  fence.proxy.tensormap::generic.release.gpu;"
_ACQUIRE = f"  fence.proxy.tensormap::generic.acquire.gpu [%map], {MAP_BYTES};"


@dataclass(frozen=True)
class Change:
    """A kernel. `used`: the CTA has copied through the map before. `acquires`: before it copies again."""

    way: str
    used: bool
    releases: bool
    acquires: bool

    @property
    def name(self) -> str:
        """The name of the entry."""
        fences = [word for word, has in (("release", self.releases), ("acquire", self.acquires)) if has]
        return "_".join([self.way, "used" if self.used else "unused", *(fences or ["unfenced"])])

    @property
    def fenced(self) -> bool:
        """Whether all fences are there that the ISA asks for."""
        return self.acquires and (self.releases or self.way == "copy")


def changes() -> Iterator[Change]:
    """Every kernel."""
    for used in (True, False):
        for acquires in (True, False):
            for releases in (True, False):
                yield Change("replace", used, releases, acquires)
            yield Change("copy", used, False, acquires)


def _box(parity: int) -> str:
    return f"""  @!%first bra HAVE{parity};
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], {4 * BOX};
  cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [box], [%map, {{%zero}}], [full];
HAVE{parity}:
  mbarrier.try_wait.parity.shared::cta.b64 %done, [full], {parity};
  @!%done bra HAVE{parity};"""


def text(one: Change) -> str:
    """Parameters: a map for each CTA, the address of the other tensor, and the words that each lane has loaded."""
    change = _WAYS[one.way] if one.way == "copy" else _WAYS[one.way] + "\nSKIP:"
    return f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry {one.name}(.param .u64 maps, .param .u64 tensor, .param .u64 out)
{{
  .shared .align 128 .b8 box[{4 * BOX}]; .shared .align 128 .b8 place[{MAP_BYTES}]; .shared .align 8 .b64 full;
  .reg .b32 %lane, %cta, %zero, %copied, %r<4>; .reg .b64 %map, %other, %out, %rd<4>; .reg .pred %first, %done;
  ld.param.u64 %map, [maps]; ld.param.u64 %other, [tensor]; ld.param.u64 %out, [out];
  mov.u32 %lane, %tid.x; mov.u32 %cta, %ctaid.x; mov.u32 %zero, 0; mov.u32 %copied, place;
  mul.wide.u32 %rd0, %cta, {MAP_BYTES}; add.u64 %map, %map, %rd0; setp.eq.u32 %first, %lane, 0;
  mul.wide.u32 %rd0, %lane, 4; add.u64 %rd1, %map, %rd0; mad.lo.u32 %r0, %lane, 4, %copied;
  ld.global.b32 %r1, [%rd1]; st.shared.b32 [%r0], %r1;
  @%first mbarrier.init.shared::cta.b64 [full], 1;
  fence.proxy.async; bar.sync 0;
{_box(0) if one.used else ""}
  fence.proxy.async; bar.sync 0;
  @!%first bra SKIP;
{change}
  bar.sync 0;
{_RELEASE if one.releases else ""}
{_ACQUIRE if one.acquires else ""}
{_box(int(one.used))}
  mov.u32 %r2, box; mad.lo.u32 %r2, %lane, 4, %r2; ld.shared.b32 %r3, [%r2];
  mad.lo.u32 %r2, %cta, {BOX}, %lane; mul.wide.u32 %rd2, %r2, 4; add.u64 %rd2, %rd2, %out;
  st.global.b32 [%rd2], %r3;
  ret;
}}
"""


def _map_of(device: Device, base: int) -> bytes:
    """A map of the 1024 words at `base`, as the driver encodes it."""
    place = (ctypes.c_char * 192)()
    at = -ctypes.addressof(place) % 64
    u32, dims, unused = ctypes.c_uint32 * 1, (ctypes.c_uint64 * 1)(1024), (ctypes.c_uint64 * 1)(0)
    uint32_type, none = 2, 0
    device.checked(device.driver.cuTensorMapEncodeTiled(
        ctypes.byref(place, at), uint32_type, 1, ctypes.c_uint64(base), dims, unused, u32(BOX), u32(1), none, none,
        none, none,
    ))  # fmt: skip
    return place.raw[at : at + MAP_BYTES]


def ask() -> dict[str, object]:
    """The GPU's answers, by kernel. Each launch begins with fresh maps."""
    device, stale = Device(), dict[str, int]()
    tensors = [device.memory(4096, np.full(1024, value, np.uint32)) for value in (1, 2)]
    encoded = _map_of(device, tensors[0]) * CTAS
    maps, out = device.memory(len(encoded)), device.memory(4 * CTAS * BOX)
    values = [ctypes.c_uint64(place) for place in (maps, tensors[1], out)]
    for one in changes():
        module, _ = device.compiled(text(one))
        stale[one.name] = 0
        for _ in range(LAUNCHES):
            device.write(maps, encoded)
            device.launch(module, one.name, CTAS, BOX, values)
            stale[one.name] += int((device.read(out, 4 * CTAS * BOX).view(np.uint32) == 1).sum())
    return {"stale_words": stale, "words": CTAS * BOX * LAUNCHES, "ptxas": ptxas_version()}


if __name__ == "__main__":
    answers = json.dumps(ask(), indent=1)
    Path(sys.argv[1]).write_text(answers + "\n")
    print(answers)
