"""Calls of the driver, recorded by a fake driver that writes every call and launches nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from conformance import ROOT

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="the driver that writes down its calls is made by cc"),
    pytest.mark.skipif(
        find_spec("cuda") is None or find_spec("cuda.bindings") is None,
        reason="calling a driver needs cuda-bindings (the extra `gpu`)",
    ),
]
REFUSED = {
    "cuModuleLoadData": "loading",
    "cuModuleGetFunction": "looking up the kernel product",
    "cuTensorMapEncodeTiled": "encoding the tensor map of 'a'",
    "cuLaunchKernelEx": "launching product with grid (1, 1, 1), block (128, 1, 1)",
    "cuStreamSynchronize": "waiting for the end",
}
# Output file -> a probe of probe.py, and the failure that the driver plays.
ATTEMPTS = {
    "product": ("product_probe", ""),
    "exchange": ("exchange_probe", ""),
    "fault": ("exchange_probe", "fault=700"),
    **{call: ("product_probe", f"{call}=1") for call in REFUSED},
    "thread": ("product_probe", "thread"),
    "moved": ("moved product_probe", ""),
    "move refused": ("moved product_probe", "cuTensorMapReplaceAddress=1"),
    "pointers": ("moved exchange_probe", ""),
}
# One process imports and assembles, which takes as long as ten attempts. A fork of it makes each attempt and exits
# without unloading torch, which would take longer.
SCRIPT = """
import json, os, sys
import backends.gpu.kernels as kernels
from backends.gpu.driver import call
from conformance.gpu import probe as probes
from megamoe.contract import DeviceError, DeviceLostError
def moved(probe):
    names = (*probe.tensors, *probe.program.scratch)
    loaded = kernels.LoadedKernels(probe.program, names, 0x11)
    for first, stream in ((1 << 12, 0x77), (1 << 12, 0x77), (1 << 13, 0x78)):
        loaded.launch([first * (index + 1) for index in range(len(names))], stream)
def attempt(probe, moves):
    kernels.current_stream = lambda: 0x77
    try:
        if moves:
            return moved(probe)
        with kernels.bound_program(probe.program, probe.tensors) as bound:
            bound.enqueue()
            call("cuStreamSynchronize", 0x77, doing="waiting for the end")
    except DeviceError as error:
        print(type(error).__name__, error)
    print("lost to:", DeviceLostError.met)
made = {name: getattr(probes, name)() for name in ("product_probe", "exchange_probe")}
for probe in made.values():
    kernels.device_code(probe.program.ptx, probe.program.target)
for name, (probe, failure) in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 1)
        if failure:
            os.environ["FAKE_FAILURE"] = failure
        attempt(made[probe.removeprefix("moved ")], probe.startswith("moved "))
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1] != 0:
        sys.exit(f"attempt {name} failed")
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines that the fake libcuda.so.1 wrote in each attempt, and how the attempt ended."""
    folder = tmp_path_factory.mktemp("driver")
    source = ROOT / "conformance" / "fakes" / "driver.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(source), "-ldl"], check=True)
    environment = {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT), "PATH": os.defpath, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(ATTEMPTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return {name: (folder / name).read_text().splitlines() for name in ATTEMPTS}


def test_a_tensor_map_and_a_launch_are_what_the_program_says(told: dict[str, list[str]]) -> None:
    lines = told["product"]
    maps = [line for line in lines if line.startswith("cuTensorMapEncodeTiled")]
    wanted = "aligned=1 type=9 rank=2 dims=64,64 stride=128 box=64,64 steps=1,1 swizzle=3"
    assert maps == [f"cuTensorMapEncodeTiled {wanted}"] * 2, "other tensor maps were asked for"
    launch = next(line for line in lines if line.startswith("grid="))
    assert launch.startswith("grid=1,1,1 block=128,1,1 smem=16448 stream=0x77 attrs=0")
    assert launch.endswith("first=5a5a5a5a5a5a5a5a"), "the first parameter is not the map that the driver encoded"
    assert "cuModuleUnload 0x11" in lines, "the module was not unloaded"


def test_a_cluster_and_much_shared_memory_are_asked_for(told: dict[str, list[str]]) -> None:
    lines = told["exchange"]
    # 8 is CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 4 is CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION.
    assert "cuFuncSetAttribute 0x22 8 98304" in lines
    assert any("smem=98304 stream=0x77 attrs=1 id=4 cluster=2,1,1" in line for line in lines)
    allowed = lines.index("cuFuncSetAttribute 0x22 8 98304")
    assert allowed < lines.index("cuLaunchKernelEx 0x22"), "the opt-in came after the launch"


@pytest.mark.parametrize("call", REFUSED)
def test_a_return_code_is_a_sentence(told: dict[str, list[str]], call: str) -> None:
    lines = told[call]
    said = next(line for line in lines if line.startswith("DeviceError "))
    assert f"{call} returned CUDA_ERROR_INVALID_VALUE (invalid argument) while {REFUSED[call]}" in said
    assert lines[-1] == "lost to: None", "a refused call does not break the device"


def test_a_fault_says_that_the_device_is_lost(told: dict[str, list[str]]) -> None:
    lines = told["fault"]
    said = next(line for line in lines if line.startswith("DeviceLostError "))
    assert "cuStreamSynchronize returned CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)" in said
    assert lines[-1].startswith("lost to: cuStreamSynchronize returned")


def test_a_loaded_program_goes_with_its_tensors(told: dict[str, list[str]]) -> None:
    lines = told["moved"]
    launches = [line for line in lines if line.startswith("grid=")]
    assert ["stream=0x77" in line for line in launches] == [True, True, False], "the stream of a call is not its own"
    assert sum(line.startswith("cuTensorMapEncodeTiled") for line in lines) == 2, "a map is encoded once"
    moved = [line.split()[1] for line in lines if line.startswith("cuTensorMapReplaceAddress")]
    assert len(moved) == 2, "a map moves when its tensor does, and only then"
    assert launches[2].endswith(f"first={int(moved[0], 16):016x}"), "the kernel reads a map that has not moved"
    said = next(line for line in told["move refused"] if line.startswith("DeviceError "))
    assert "cuTensorMapReplaceAddress returned CUDA_ERROR_INVALID_VALUE (invalid argument) while moving" in said


def test_a_pointer_is_that_of_its_call(told: dict[str, list[str]]) -> None:
    launches = [line for line in told["pointers"] if line.startswith("grid=")]
    seen = [int(line.rpartition("first=")[2], 16) for line in launches]
    assert seen == [1 << 12, 1 << 12, 1 << 13], "the kernel reads where an earlier call's tensor was"


def test_a_thread_without_a_context_enters_that_of_the_program(told: dict[str, list[str]]) -> None:
    lines = told["thread"]
    assert "cuCtxSetCurrent 0x33" in lines
    assert lines.index("cuCtxSetCurrent 0x33") < lines.index("cuLaunchKernelEx 0x22"), "the launch was lost"
