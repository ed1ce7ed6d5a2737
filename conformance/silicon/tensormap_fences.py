"""Asks a Hopper GPU when a copy sees a tensor map that its kernel has just changed in global memory.

    python3 tensormap_fences.py OUT.json        on the device: ptxas and the driver alone

A CTA copies a box through a map (or does not, so that nothing has cached the map), gives the map another base address,
and copies a box again. It counts the words that come from the first tensor. `ways` of the change: tensormap.replace in
global memory, or a changed copy that tensormap.cp_fenceproxy writes, which releases by itself (PTX ISA 9.7.13.16).
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

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


def _checked(status: int) -> None:
    if status:
        raise SystemExit(f"the driver returns {status}")


def _assembled(source: str) -> bytes:
    with TemporaryDirectory() as folder:
        file, cubin = Path(folder, "maps.ptx"), Path(folder, "maps.cubin")
        file.write_text(source)
        command = ["ptxas", "-arch=sm_90a", "-o", str(cubin), str(file)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            raise SystemExit(made.stderr)
        return cubin.read_bytes()


class _Memory:
    """The tensors of ones and twos, the maps of the first, and the output."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self.driver = driver
        self.tensors = [self._filled((ctypes.c_uint32 * 1024)(*[value] * 1024)) for value in (1, 2)]
        self.encoded = self._map(self.tensors[0].value) * CTAS
        self.maps = self._filled(ctypes.create_string_buffer(self.encoded, len(self.encoded)))
        self.out = self._filled((ctypes.c_uint32 * (CTAS * BOX))())

    def _filled(self, content: ctypes.Array[ctypes.c_uint32] | ctypes.Array[ctypes.c_char]) -> ctypes.c_uint64:
        place = ctypes.c_uint64()
        size = ctypes.c_size_t(ctypes.sizeof(content))
        _checked(self.driver.cuMemAlloc_v2(ctypes.byref(place), size))
        _checked(self.driver.cuMemcpyHtoD_v2(place, content, size))
        return place

    def _map(self, base: int) -> bytes:
        place = (ctypes.c_char * 192)()
        at = -ctypes.addressof(place) % 64
        u32, dims, unused = ctypes.c_uint32 * 1, (ctypes.c_uint64 * 1)(1024), (ctypes.c_uint64 * 1)(0)
        uint32_type, none = 2, 0
        _checked(self.driver.cuTensorMapEncodeTiled(
            ctypes.byref(place, at), uint32_type, 1, ctypes.c_uint64(base), dims, unused, u32(BOX), u32(1), none, none,
            none, none,
        ))  # fmt: skip
        return place.raw[at : at + MAP_BYTES]

    def stale(self, function: ctypes.c_void_p) -> int:
        """Words of the first tensor in a launch, which begins with fresh maps."""
        content = ctypes.create_string_buffer(self.encoded, len(self.encoded))
        _checked(self.driver.cuMemcpyHtoD_v2(self.maps, content, ctypes.c_size_t(len(self.encoded))))
        given = (self.maps, self.tensors[1], self.out)
        arguments = (ctypes.c_void_p * 3)(*[ctypes.addressof(one) for one in given])
        _checked(self.driver.cuLaunchKernel(function, CTAS, 1, 1, BOX, 1, 1, 0, None, arguments, None))
        _checked(self.driver.cuCtxSynchronize())
        answer = (ctypes.c_uint32 * (CTAS * BOX))()
        _checked(self.driver.cuMemcpyDtoH_v2(answer, self.out, ctypes.c_size_t(ctypes.sizeof(answer))))
        return sum(word == 1 for word in answer)


def ask() -> dict[str, object]:
    """The GPU's answers, by kernel."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _checked(driver.cuInit(0))
    _checked(driver.cuDeviceGet(ctypes.byref(device), 0))
    _checked(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _checked(driver.cuCtxSetCurrent(context))
    memory, stale = _Memory(driver), dict[str, int]()
    for one in changes():
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _checked(driver.cuModuleLoadData(ctypes.byref(module), _assembled(text(one))))
        _checked(driver.cuModuleGetFunction(ctypes.byref(function), module, one.name.encode()))
        stale[one.name] = sum(memory.stale(function) for _ in range(LAUNCHES))
    version = subprocess.run(["ptxas", "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
    return {"stale_words": stale, "words": CTAS * BOX * LAUNCHES, "ptxas": version}


if __name__ == "__main__":
    answers = json.dumps(ask(), indent=1)
    Path(sys.argv[1]).write_text(answers + "\n")
    print(answers)
