"""megamoe.vm: arguments as the kernel declares them, memory in place, errors in sentences, little overhead."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends.vm.load import load
from backends.vm.machine.machine import LaunchRequest, Machine
from conformance.fakes.low_memory import low_memory
from megamoe.contract.machine import PixelBox, Stretch
from megamoe.given.entry_names import plain_name
from megamoe.vm import Device, KernelFault, LaunchRefusedError, UnsupportedError, host_waited, tensor_map

HEAD = ".version 8.7\n.target sm_100a\n.address_size 64\n"
SCALE = f"""{HEAD}
.visible .entry scale(.param .u64 y, .param .u64 x, .param .f32 a, .param .s16 skip, .param .u64 none)
{{
  .reg .pred %p<3>;
  .reg .f32 %f<4>;
  .reg .u64 %rd<8>;
  .reg .u32 %r<2>;
  .reg .s16 %h<2>;
  ld.param.u64 %rd1, [y];
  ld.param.u64 %rd2, [x];
  ld.param.f32 %f1, [a];
  ld.param.s16 %h1, [skip];
  ld.param.u64 %rd3, [none];
  setp.ne.u64 %p1, %rd3, 0;
  @%p1 trap;
  mov.u32 %r1, %tid.x;
  cvt.u64.u32 %rd4, %r1;
  cvt.s64.s16 %rd5, %h1;
  add.u64 %rd4, %rd4, %rd5;
  shl.b64 %rd4, %rd4, 2;
  add.u64 %rd1, %rd1, %rd4;
  add.u64 %rd2, %rd2, %rd4;
  ld.global.f32 %f2, [%rd2];
  mul.f32 %f3, %f2, %f1;
  st.global.f32 [%rd1], %f3;
  ret;
}}
"""
ADDRESS = f"""{HEAD}
.visible .entry address(.param .u64 y, .param .u64 x)
{{
  .reg .u64 %rd<4>;
  ld.param.u64 %rd1, [y];
  ld.param.u64 %rd2, [x];
  st.global.u64 [%rd1], %rd2;
  ret;
}}
"""
FIRST = f"""{HEAD}
.visible .entry first(.param .u64 a, .param .u64 b)
{{
  .reg .u64 %rd<3>;
  .reg .u32 %r<2>;
  ld.param.u64 %rd1, [a];
  ld.param.u64 %rd2, [b];
  griddepcontrol.launch_dependents;
  ld.global.u32 %r1, [%rd2];
  st.global.u32 [%rd1], 7;
  ret;
}}
"""
"""Writes `a` and reads `b`."""
SECOND = FIRST.replace("entry first", "entry second").replace("st.global.u32 [%rd1], 7;", "")
"""Reads `b`."""
BEHIND = f"""{HEAD}
.visible .entry behind(.param .u64 table)
{{
  .reg .u64 %rd<4>;
  .reg .f32 %f<2>;
  ld.param.u64 %rd1, [table];
  ld.global.u64 %rd2, [%rd1];
  ld.global.f32 %f1, [%rd2];
  add.f32 %f1, %f1, 1.0;
  st.global.f32 [%rd2], %f1;
  ret;
}}
"""
COUNT = f"""{HEAD}
.global .u32 counter = 7;
.visible .entry count(.param .u64 y)
{{
  .reg .u64 %rd<4>;
  .reg .u32 %r<4>;
  ld.param.u64 %rd1, [y];
  atom.global.add.u32 %r1, [counter], 1;
  st.global.u32 [%rd1], %r1;
  ret;
}}
"""
STRUCT = f"""{HEAD}
.visible .entry second(.param .u64 y, .param .align 8 .b8 pair[16])
{{
  .reg .u64 %rd<4>;
  ld.param.u64 %rd1, [y];
  ld.param.u64 %rd2, [pair+8];
  st.global.u64 [%rd1], %rd2;
  ret;
}}
"""
TMA = f"""{HEAD}
.visible .entry box(.param .u64 y, .param .align 64 .b8 map[128])
{{
  .reg .pred %p<2>;
  .reg .u64 %rd<4>;
  .reg .u32 %r<8>;
  .shared .align 128 .b8 tile[256];
  .shared .align 8 .b64 bar;
  ld.param.u64 %rd1, [y];
  mov.b64 %rd2, map;
  mov.u32 %r1, bar;
  mov.u32 %r2, tile;
  mov.u32 %r3, 1;
  mov.u32 %r4, 4;
  mbarrier.init.shared.b64 [%r1], 1;
  fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;
  cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd2, {{%r4, %r3}}], [%r1];
wait:
  mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
  @!%p1 bra wait;
  ld.shared.u32 %r5, [%r2];
  st.global.u32 [%rd1], %r5;
  ret;
}}
"""


@pytest.fixture
def vm() -> Device:
    return Device("sm_100a")


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_scalars_are_typed_by_the_kernel(vm: Device, kind: str) -> None:
    x, y = torch.arange(40.0), torch.full((40,), -1.0)
    given = (y, x) if kind == "torch" else (y.numpy(), x.numpy())
    counters = vm.launch(SCALE, "scale", 1, (32, 1), *given, 3, np.int64(2), None)
    assert y.tolist() == [-1, -1, *(3.0 * i for i in range(2, 34)), *[-1] * 6], "the kernel's memory is the array's own"
    assert counters["instructions_memory"] > 0, "a launch says what it executed"


def test_a_view_is_passed_by_its_first_element(vm: Device) -> None:
    x, y = torch.arange(100.0), np.zeros(100, np.float32)
    vm.launch(SCALE, "scale", 1, 32, y[50:], x[7:], 2.0, -1, None)
    assert y.tolist() == [0.0] * 49 + [2.0 * i for i in range(6, 38)] + [0.0] * 19


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_allocations_are_aligned_as_a_gpu_would(vm: Device, size: int) -> None:
    seen = np.zeros(1, np.uint64)
    for array in (np.zeros(size, np.uint8), torch.zeros(size, dtype=torch.uint8)):
        vm.launch(ADDRESS, "address", 1, 1, seen, array)
        assert seen[0] % 256 == 0, f"cudaMalloc aligns to 256 bytes, and this is {seen[0]:#x}"


def test_arrays_that_share_memory_stay_one(vm: Device) -> None:
    whole = np.zeros(64, np.float32)
    vm.launch(SCALE, "scale", 1, 32, torch.from_numpy(whole[32:]), whole, 1.0, 0, None)
    seen = np.zeros(2, np.uint64)
    vm.launch(ADDRESS, "address", 1, 1, seen[:1], whole, memory=[torch.from_numpy(whole[32:])])
    vm.launch(ADDRESS, "address", 1, 1, seen[1:], torch.from_numpy(whole[32:]), memory=[whole])
    assert seen[1] - seen[0] == 128, "addresses in one allocation keep their distance"


def test_tensors_are_found_behind_addresses_in_memory(vm: Device) -> None:
    hidden, array = torch.ones(3), np.ones(3, np.float32)
    vm.launch(BEHIND, "behind", 1, 1, torch.tensor([hidden.data_ptr()]))
    assert hidden[0] == 2
    vm.launch(BEHIND, "behind", 1, 1, np.array([array.ctypes.data]), memory=[array])
    assert array[0] == 2


def test_variables_of_a_module_live_as_long_as_the_device(vm: Device) -> None:
    seen = np.zeros(1, np.uint32)
    for expected in (7, 8, 9):
        vm.launch(COUNT, "count", 1, 1, seen)
        assert seen[0] == expected
    with pytest.raises(KernelFault):
        vm.launch(COUNT, "count", 1, 1, None)
    vm.launch(COUNT, "count", 1, 1, seen)
    assert seen[0] == 7, "a fault ends the device's context, and its variables with it"


@pytest.mark.parametrize("pair", [struct.pack("<QQ", 1, 2), np.array((1, 2), "u8,u8")[()]])
def test_a_struct_is_given_as_its_bytes(vm: Device, pair: object) -> None:
    seen = np.zeros(1, np.uint64)
    vm.launch(STRUCT, "second", 1, 1, seen, pair)
    assert seen[0] == 2


def test_a_tensor_map_knows_the_tensor(vm: Device) -> None:
    x, seen = torch.arange(64 * 64, dtype=torch.int32).reshape(64, 64)[8:], np.zeros(1, np.int32)
    vm.launch(TMA, "box", 1, 1, seen, tensor_map(x, (4, 16)))
    assert seen[0] == (8 + 1) * 64 + 4, "coordinates are dimension 0 first, and begin at the view"


def test_an_im2col_map_knows_the_images(vm: Device) -> None:
    """Images [n, h, w, c], and corners in that order: the first pixel of the box lies outside, above the image."""
    x, seen = torch.arange(1, 2 * 5 * 4 * 8 + 1, dtype=torch.int32).reshape(2, 5, 4, 8), np.zeros(1, np.int32)
    box = PixelBox((-1, 0), (0, -1), 8)
    source = TMA.replace(".2d", ".4d").replace("global.tile", "global.im2col")
    source = source.replace("{%r4, %r3}], [%r1]", "{%r4, %r3, %r6, %r7}], [%r1], {%h1, %h1}")
    at = ".reg .u16 %h<2>; mov.b16 %h1, 1; mov.u32 %r6, -1; mov.u32 %r7, 1; mov.u32 %r3, 2;"
    vm.launch(source.replace("mov.u32 %r3, 1;", at), "box", 1, 1, seen, tensor_map(x, (8,), im2col=box))
    assert seen[0] == x[1, 0, 3, 4], "image 1, height -1 and width 2, both moved by one, channel 4"


GRID = f"""{HEAD}
.visible .entry where(.param .u64 y)
{{
  .reg .u64 %rd<2>;
  .reg .u32 %r<4>;
  ld.param.u64 %rd1, [y];
  mov.u32 %r1, %envreg1;
  mov.u32 %r2, %envreg2;
  or.b32 %r3, %r1, %r2;
  st.global.u32 [%rd1], %r3;
  ret;
}}
"""


def test_a_cooperative_launch_has_a_barrier_of_its_grid(vm: Device) -> None:
    seen = np.zeros(1, np.uint32)
    vm.launch(GRID, "where", 1, 1, seen)
    assert not seen[0], "cooperative_groups take that for a grid that cannot meet"
    vm.launch(GRID, "where", 1, 1, seen, cooperative=True)
    assert seen[0], "the address of the barrier"
    with pytest.raises(LaunchRefusedError, match=r"a cooperative launch of 100000 CTAs, of which only \d+ fit"):
        vm.launch(GRID, "where", 100_000, 1, seen, cooperative=True)


I32 = np.zeros(4, np.int32)
SPARSE = torch.zeros(4, 4).to_sparse()
UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "a sparse tensor": ({"args": (SPARSE, I32)}, "a tensor has the layout torch.sparse_coo; .* t.to_dense()"),
    "a sparse tensor in memory": ({"memory": [SPARSE]}, "a tensor has the layout torch.sparse_coo"),
    "a sparse workspace": ({"scratch": [SPARSE]}, "a tensor has the layout torch.sparse_coo"),
    "a tensor that is nowhere": ({"args": (torch.zeros(4, device="meta"), I32)}, "a tensor is on meta; .* of the CPU"),
    "half a byte of shared memory": ({"smem": 1.5}, "smem is 1.5; it must be a whole number of bytes"),
    "shared memory in words": ({"smem": "8"}, "smem is '8'; it must be a whole number"),
    "no shared memory": ({"smem": None}, "smem is None; it must be a whole number"),
    "memory that is no array": ({"memory": [3]}, "memory is given int; it takes tensors and NumPy arrays"),
    "memory that is no list": ({"memory": 5}, "memory is 5; it takes a list of tensors"),
    "scratch that is no list": ({"scratch": 5}, "scratch is 5; it takes a list of tensors"),
    "an entry that is no name": ({"entry": 3}, "the entry is 3; it must be the name of a kernel: first"),
    "a source that is no text": ({"source": None}, "the source is NoneType; it must be text or the name of a file"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_input_is_refused_in_a_sentence(name: str, vm: Device) -> None:
    options, sentence = UNUSABLE[name]
    left = {"source": FIRST, "entry": "first", "args": (I32, I32), **options}
    source, entry, args = (left.pop(one) for one in ("source", "entry", "args"))
    with pytest.raises(LaunchRefusedError, match=sentence):
        vm.launch(source, entry, 1, 1, *args, **left)


def ran_after(vm: Device, between: Callable[[np.ndarray[Any, Any]], object], *, dependent: bool = False) -> list[str]:
    """The rules that SECOND breaks if it reads what FIRST wrote, with `between` done in between to that array."""
    a, b = np.zeros(4, np.uint32), np.ones(4, np.uint32)
    vm.launch(FIRST, "first", 1, 1, a, b)
    between(a)
    vm.launch(SECOND, "second", 1, 1, b, a, dependent=dependent)
    return [one.rule for one in vm.findings]


def test_a_dependent_launch_is_checked_until_it_waits() -> None:
    vm = Device(profile="lenient")
    assert ran_after(vm, lambda a: None) == [], "a launch without the option begins when the one before has ended"
    assert ran_after(vm, lambda a: None, dependent=True) == ["dependent-launch-not-awaited"]
    said = str(vm.findings[0])
    assert "kernel second, PTX line 12" in said, said
    assert "first, which wrote it at PTX line 13" in said, said


def test_a_dependent_launch_that_waits_is_clean() -> None:
    vm = Device()
    a = np.zeros(4, np.uint32)
    vm.launch(FIRST, "first", 1, 1, a, a.copy())
    waits = SECOND.replace("griddepcontrol.launch_dependents", "griddepcontrol.wait")
    vm.launch(waits, "second", 1, 1, a.copy(), a, dependent=True)
    assert not vm.findings, f"found {list(map(str, vm.findings))}"


@pytest.mark.parametrize("between", [lambda a: host_waited(), lambda a: a.fill(3)], ids=["waits", "writes"])
def test_work_of_the_host_orders_two_launches(between: Callable[..., object]) -> None:
    found = ran_after(Device(profile="lenient"), between, dependent=True)
    assert found == [], f"the host was in between, and {found} was found"


def test_a_dependent_launch_gets_the_memory_that_an_earlier_one_had() -> None:
    """A larger array at the same place: marks of the smaller one say nothing about it."""
    machine = Device().machine
    room = np.zeros(4096, np.uint8)
    small, large = (Stretch("a", room.ctypes.data, size, writable=True) for size in (16, 4096))
    where, end = (struct.pack("<Q", room.ctypes.data + offset) for offset in (0, 4092))
    machine.launch(FIRST, "first", (1, 1, 1), (1, 1, 1), [where, where], memory=[small])
    machine.launch(SECOND, "second", (1, 1, 1), (1, 1, 1), [where, end], memory=[large], dependent=True)
    assert not machine.findings, f"found {list(map(str, machine.findings))}"


@pytest.mark.parametrize(
    ("ptx", "place"),
    [
        (SCALE, "the nearest is `argument 0` (400 bytes), 0 bytes after the end"),
        (SCALE.replace("shl.b64 %rd4, %rd4, 2;", "shl.b64 %rd4, %rd4, 1;"), "not a multiple of 4 (byte 2 of `argument"),
    ],
    ids=["outside", "misaligned"],
)
def test_a_finding_says_the_same_wherever_its_memory_lies(ptx: str, place: str, vm: Device) -> None:
    """Addresses of the process differ from run to run, so a finding names bytes of arguments."""
    arrays = [(np.zeros(100, np.float32), np.zeros(128, np.float32)) for _ in range(2)]
    said: list[str] = []
    for y, x in arrays:
        with pytest.raises(KernelFault) as fault:
            vm.launch(ptx, "scale", 1, 128, y, x, 1.0, 0, None)
        said.append(str(fault.value))
    assert place in said[0]
    assert said[0] == said[1]


POINTED = f"""{HEAD}
.visible .entry pointed(.param .u64 pointers)
{{
  .reg .u64 %rd<3>;
  .reg .u32 %r<2>;
  ld.param.u64 %rd1, [pointers];
  ld.global.u64 %rd2, [%rd1+8];
  ld.global.u32 %r1, [%rd2+OFFSET];
  ret;
}}
"""


@pytest.mark.parametrize("low", [False, True], ids=["anywhere", "low"])
def test_memory_behind_pointers_is_named_by_the_first_of_them(low: bool, vm: Device) -> None:
    """Debian's Python is no position-independent executable: its heap lies below 2 ** 32."""
    said: list[str] = []
    for size in (32, 64):
        data = low_memory(size) if low else np.zeros(size, np.float32)
        tensor = torch.from_numpy(data)
        pointers = np.array([0, tensor.data_ptr() + 4, tensor.data_ptr()], np.uint64)
        vm.launch(POINTED.replace("OFFSET", "4"), "pointed", 1, 1, pointers)
        with pytest.raises(KernelFault) as fault:
            vm.launch(POINTED.replace("OFFSET", "2"), "pointed", 1, 1, pointers)
        said.append(str(fault.value))
    assert "(byte 6 of `memory of pointer 1 in argument 0`)" in said[0]
    assert said[0] == said[1], "a finding says the same wherever its memory lies"


def test_an_input_that_cannot_be_written_stays_so(vm: Device) -> None:
    y = np.zeros(32, np.float32)
    y.flags.writeable = False
    with pytest.raises(KernelFault, match="read-only"):
        vm.launch(SCALE, "scale", 1, 32, y, np.zeros(32, np.float32), 1.0, 0, None)


def _args() -> list[object]:
    return [torch.zeros(32), torch.zeros(32), 1.0, 0, None]


ALONE = ".version 8.7\n.target sm_100a\n.address_size 64\n.visible .entry alone()\n{\n  ret;\n}\n"
REFUSED: list[tuple[str, Callable[[Device], object], str]] = [
    ("no entry", lambda vm: vm.launch(SCALE, "scal", 1, 1), "no entry 'scal'; its entries are: scale; did you mean"),
    ("too few", lambda vm: vm.launch(SCALE, "scale", 1, 1, 3), r"takes 5 arguments \(.u64 y, .*\) and is given 1"),
    ("too many", lambda vm: vm.launch(ALONE, "alone", 1, 1, 3), r"^alone takes no arguments and is given 1$"),
    ("a word", lambda vm: vm.launch(SCALE, "scale", 1, 1, *_args()[:2], "3", 0, None), r"argument 2 .*cannot be '3'"),
    ("half", lambda vm: vm.launch(SCALE, "scale", 1, 1, *_args()[:3], 0.5, None), r"argument 3 .*cannot be 0\.5"),
    ("large", lambda vm: vm.launch(SCALE, "scale", 1, 1, *_args()[:3], 1 << 16, None), "argument 3 .*cannot be 65536"),
    ("not a pointer", lambda vm: vm.launch(SCALE, "scale", 1, 1, 0.5, *_args()[1:]), r"argument 0 .*cannot be 0\.5"),
    ("not a pointer's", lambda vm: vm.launch(SCALE, "scale", 1, 1, 3.5, *_args()[1:]), "for a pointer, give an array"),
    ("null", lambda vm: vm.launch(SCALE, "scale", 1, 1, *_args()[:2], None, 0, None), "argument 2 .*is no pointer"),
    ("bytes", lambda vm: vm.launch(STRUCT, "second", 1, 1, None, b"12"), "given bytes, which makes 2 bytes"),
    ("number", lambda vm: vm.launch(STRUCT, "second", 1, 1, None, 12), "is a struct; give its bytes, not 12"),
    ("block", lambda vm: vm.launch(SCALE, "scale", 1, 2048, *_args()), "at most 1024 threads"),
    ("sizes", lambda vm: vm.launch(SCALE, "scale", (1, 1, 1, 1), 1, *_args()), "grid has 4 sizes"),
    ("box", lambda vm: vm.launch(TMA, "box", 1, 1, None, tensor_map(torch.zeros(8, 8), (4, 3))), r"1 of box.*box\[0\]"),
    ("no PTX", lambda vm: vm.launch(f"{HEAD}.entry", "scale", 1, 1), "line 4"),
    ("no file", lambda vm: vm.launch("none.ptx", "scale", 1, 1), "neither text of several lines nor a file"),
    ("target", lambda vm: vm.launch(SCALE.replace("sm_100a", "sm_90a"), "scale", 1, 1, *_args()), "compile it for"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), [one[1:] for one in REFUSED], ids=[one[0] for one in REFUSED])
def test_what_no_gpu_takes_is_refused_in_a_sentence(
    vm: Device, call: Callable[[Device], object], sentence: str
) -> None:
    with pytest.raises(LaunchRefusedError, match=sentence):
        call(vm)


def test_what_the_machine_lacks_is_said() -> None:
    with pytest.raises(UnsupportedError, match="sm_80"):
        Device("sm_80")
    with pytest.raises(UnsupportedError, match=r"foo\.bar"):
        Device("sm_100a").launch(SCALE.replace("mul.f32", "foo.bar"), "scale", 1, 1, *_args())


def test_a_file_that_cannot_be_launched_is_named(tmp_path: Path) -> None:
    (file := tmp_path / "scale.ptx").write_text(SCALE.replace("mul.f32", "mul.f32 mul"))
    with pytest.raises(LaunchRefusedError, match=re.escape(f"{file}, line ")):
        Device("sm_100a").launch(file, "scale", 1, 1, *_args())
    file.write_text(SCALE.replace("mul.f32", "mull.f32"))
    with pytest.raises(UnsupportedError, match=re.escape(f"{file}, PTX line ") + ".*did you mean `mul`"):
        Device("sm_100a").launch(str(file), "scale", 1, 1, *_args())


def test_a_text_of_ptx_that_lacks_its_version_is_no_cuda(vm: Device) -> None:
    with pytest.raises(LaunchRefusedError, match=r"^<ptx>, line 2, column 1: '\.target' stands where '\.version'"):
        vm.launch(SCALE.replace(".version 8.7", ""), "scale", 1, 32)


def test_ptx_for_an_older_gpu_runs(vm: Device) -> None:
    for target in ("sm_80", "sm_90", "sm_100", "sm_100f"):
        vm.launch(SCALE.replace("sm_100a", target), "scale", 1, 32, *_args())


def test_a_workspace_may_keep_values_that_nobody_wrote(vm: Device) -> None:
    stored = SCALE[: SCALE.index(".reg")] + ".reg .u64 %rd<2>;\n.reg .u32 %r<2>;\n"
    stored += "ld.param.u64 %rd1, [y];\nst.global.u32 [%rd1], %r1;\nret;\n}\n"
    space, both = np.zeros(4, np.uint32), np.zeros(8, np.uint32)
    rest = (space, 1.0, 0, None)
    with pytest.raises(KernelFault, match="uninitialised-register"):
        vm.launch(stored, "scale", 1, 1, np.zeros(4, np.uint32), *rest)
    with pytest.raises(KernelFault, match="uninitialised-register"):
        vm.launch(stored, "scale", 1, 1, np.zeros(4, np.uint32), *rest, scratch=[space])
    for given in (space, np.zeros(4099, np.uint8)[3:][:16].copy()):
        vm.launch(stored, "scale", 1, 1, given, np.zeros(1), *rest[1:], scratch=[given])
    for given, other in ((both[:4], both[4:]), (both, both[:4]), (torch.from_numpy(both)[2:], both[2:4])):
        with pytest.raises(LaunchRefusedError, match="shares its allocation with argument 1"):
            vm.launch(stored, "scale", 1, 1, given, other, *rest[1:], scratch=[given])
    with pytest.raises(LaunchRefusedError, match="scratch is given int"):
        vm.launch(stored, "scale", 1, 1, *rest, scratch=[3])


MANGLED = {
    "_Z5twicePf": "twice",
    "_ZL5twicePf": "twice",
    "_ZN2ns5twiceIfEEvPT_": "ns::twice",
    "_ZN36_GLOBAL__N__00000000_9_source_cu_tma5twiceEPi": "twice",
    "_Z3fooP5twice": "foo",
    "twice": "",
    "_Z": "",
}


def test_entries_are_found_by_the_name_of_the_source() -> None:
    ptx = "\n".join(f".visible .entry {name}() {{ ret; }}" for name in MANGLED if name not in ("twice", "_Z"))
    vm = Device("sm_100a")
    for entry, wrong in {"bar": "no entry 'bar'", "twice": "more than one entry 'twice'", "wice": "no entry"}.items():
        with pytest.raises(LaunchRefusedError, match=wrong):
            vm.launch(HEAD + ptx, entry, 1, 1)
    for entry in ("foo", "ns::twice"):
        vm.launch(HEAD + ptx, entry, 1, 1)
    assert {name: plain_name(name) for name in MANGLED} == MANGLED


CUDA = r"""
template <typename T> __device__ T twice(T x) { return x + x; }
__global__ void doubled(float *y, int n) { if (threadIdx.x < n) y[threadIdx.x] = twice(y[threadIdx.x]); }
"""


def test_cuda_is_compiled_and_found_by_its_own_name(vm: Device, tmp_path: Path) -> None:
    racing = "__global__ void racing(int *y) {\n  __shared__ int s;\n  s = threadIdx.x;\n  *y = s;\n}\n"
    (tmp_path / "doubled.cu").write_text(CUDA + racing)
    y = torch.ones(4)
    vm.launch(CUDA, "doubled", 1, 32, y, 4)
    vm.launch(tmp_path / "doubled.cu", "doubled", 1, 32, y, 4)
    assert y.tolist() == [4] * 4
    with pytest.raises(KernelFault, match="race") as caught:
        vm.launch(tmp_path / "doubled.cu", "racing", 1, 64, y)
    place = f"it at {tmp_path / 'doubled.cu'}:{CUDA.count(chr(10)) + 4}:"
    assert f"; the other access: warp 0 wrote {place}" in str(caught.value), "both lines are in the sentence"
    places = {(one.place.file, one.place.line) for one in caught.value.findings}
    assert (str(tmp_path / "doubled.cu"), CUDA.count("\n") + 4) in places, f"a line of the file: {places}"


def test_a_door_parses_once_and_copies_nothing(vm: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m conformance.witness --doors` times the cost of a launch beyond the machine's own."""
    x, y = torch.ones(32), torch.zeros(32)
    vm.launch(SCALE, "scale", 1, 32, y, x, 1.0, 0, None)
    own, reached = Machine.perform, list[bool]()

    def perform(machine: Machine, asked: LaunchRequest) -> None:
        for tensor in (x, y):
            buffer = machine.memory.holding(tensor.data_ptr())
            reached.append(buffer is not None and np.shares_memory(buffer.data, tensor.numpy()))
        own(machine, asked)

    monkeypatch.setattr(Machine, "perform", perform)
    parsed = load.cache_info().misses
    vm.launch(SCALE, "scale", 1, 32, y, x, 2.0, 0, None)
    assert load.cache_info().misses == parsed, "a source that was launched before is parsed again"
    assert reached == [True, True], "an argument is copied for a launch"
    assert y.eq(2).all()


def test_importing_a_door_imports_no_machine_and_no_framework() -> None:
    code = (
        "import megamoe.vm, sys; print(*(m for m in sys.modules if m.split('.')[0] in ('backends', 'torch', 'triton')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [], "a door finds its machine by entry point, when it is used"
