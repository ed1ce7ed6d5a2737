"""Runs the sm_90a programs of pages on a Hopper GPU: as written, with one party delayed, and under compute-sanitizer.

    python -m conformance.meta.docs.programs_on_device pack PROGRAMS.json        here
    python3 programs_on_device.py run PROGRAMS.json OUT.json [--logs FOLDER]     there: numpy and cuda.bindings alone

A delay widens the window of a race and changes nothing that the kernel promises: a mended kernel is still right with
it. Before each launch another kernel fills all shared memory with 0xa5. `--no-dirt` skips that, and so does a run whose
filler fails. A wait for an mbarrier gives up after a while, so that a kernel that would hang ends. Each program has its
own process, because some fault.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

Program = Mapping[str, str]
"""What `pack` writes for a program: name, rule, kernel (PTX), python, and patient: the kernel with waits that give
up."""
Launch = Callable[..., None]
"""The type of `vm.launch` in the programs."""

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
MAX_LAUNCHES = 2000
SECONDS = 1.0
LAUNCHES_UNDER_TOOLS = 3
DIRT_BYTES = 227 * 1024
_ALLOCATED = 512


def _late(which: str) -> str:
    """Delays by 20 microseconds the threads for which `which`, a PTX comparison, holds."""
    register, comparison, number = which.split()
    return (
        "  {\n  .reg .b32 %where;\n  .reg .pred %late_one;\n"
        f"  mov.u32 %where, {register};\n  setp.{comparison}.u32 %late_one, %where, {number};\n"
        "  @%late_one nanosleep.u32 20000;\n  }\n"
    )


_SECOND_WARP, _FIRST_WARP, _FIRST_CTA = _late("%tid.x ge 32"), _late("%tid.x lt 32"), _late("%ctaid.x eq 0")
_WIDE = ", ".join(f"%wide{number}" for number in range(128))
_ZEROS = "".join(f"  mov.f32 %wide{number}, 0f00000000;\n" for number in range(128))
_PRODUCTS = 16 * (f"  wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {{{_WIDE}}}, %ones, %ones, 1, 1, 1, 0, 0;\n")
_BUSY = (
    ("  mov.u32 %r5, 0;", f"  .reg .f32 %wide<128>;\n  .reg .b64 %ones;\n  and.b64 %ones, %rd2, 0x3fff;\n{_ZEROS}"),
    ("  wgmma.mma_async", _PRODUCTS),
    (
        "  st.global.f32 [%rd3], %d0;",
        "  .reg .pred %never;\n  setp.eq.f32 %never, %wide0, 0f3f000000;\n  @%never mov.f32 %d0, %wide0;\n",
    ),
)
"""Work for the tensor core ahead of the product under test. Both operands are one core matrix of ones."""
LATE: Mapping[str, tuple[tuple[str, str], ...]] = {
    "found/cutlass-one-barrier-exchange": (("  ld.shared.b32 %r6", _SECOND_WARP),),
    "found/cutlass-mbarrier-init": (("  @%first mbarrier.init", _FIRST_WARP),),
    "found/fla-hgrn-rows": (("  st.global.b32 [%rd1], %r2;", _SECOND_WARP),),
    "found/gluon-im2col-stage": _BUSY,
    "found/cutlass-relaxed-barrier": (
        ("  st.shared::cluster.b32", 64 * "  st.volatile.shared::cluster.b32 [%r3], %r1;\n"),
    ),
    "found/cutlass-cta-scope": (("  st.shared.b32 [%r2], %r4;", 64 * "  st.volatile.shared.b32 [%r2], %r0;\n"),),
    "found/cutlass-neighbour-ends": (("  mapa.", _FIRST_CTA),),
    "rules/cluster-life": (("  mapa.", _FIRST_CTA),),
    "rules/lanes": (("  st.shared.b32 [%r2], %r0;", _FIRST_WARP),),
    "rules/mbarrier": (("WAIT:\n", _late("%tid.x ge 0")),),
    "rules/races": (("  ld.shared.b32 %r4", _SECOND_WARP),),
    "rules/races between CTAs": (
        ("  @%p bra READER;\n  st.global", "  ld.global.b32 %r2, [%rd0 + 4];\n  st.global.b32 [%rd2 + 4], %r2;\n"),
        ("  st.global.b32 [%rd0], 7;", _FIRST_CTA),
    ),
}
"""Lines to insert before others.

The reader of another CTA's value first reads a neighbour of that value, before it polls, so that its L1 may hold the
line.
"""


def widened(name: str, kernel: str) -> str:
    """`kernel` with the delayed party of the program `name`, "" if it has none."""
    key = f"{name} between CTAs" if "READER:" in kernel else name
    for anchor, text in LATE.get(key, ()):
        if kernel.count(anchor) != 1:
            return ""
        kernel = kernel.replace(anchor, text + anchor)
    return kernel if key in LATE else ""


def pack() -> list[dict[str, str]]:
    """Every program of the sm_90a pages, and two controls that compute-sanitizer must report."""
    from conformance.fakes.patient import patient
    from conformance.meta.docs.pages import pages, trials

    packed: list[dict[str, str]] = []
    for path in pages():
        for number, trial in enumerate(trials(path), 1):
            if ".target sm_90a" not in trial.kernel:
                continue
            name = f"{path.parent.name}/{path.stem}"
            one = {"name": f"{name} {number}", "rule": trial.rule, "kernel": trial.kernel, "python": trial.python}
            packed.append(one)
            if late := widened(name, trial.kernel):
                packed.append({**one, "name": f"{one['name']} late", "kernel": late})
    return [{**one, "patient": patient(one["kernel"])} for one in (*packed, *_controls())]


def _controls() -> Iterator[dict[str, str]]:
    head = (
        ".version 8.7\n.target sm_90a\n.address_size 64\n"
        ".visible .entry kernel(.param .u64 x)\n{\n  .reg .b32 %r0;\n  .reg .b64 %rd0;\n  ld.param.u64 %rd0, [x];\n"
    )
    python = (
        "import numpy as np\n\nimport megamoe.vm\n\nx = np.zeros(1, np.uint32)\n"
        'vm = megamoe.vm.Device("sm_90a")\nvm.launch("kernel.ptx", "kernel", 1, 1, x)\n'
    )
    for rule, body in (
        ("out-of-bounds", "  mov.u32 %r0, 7;\n  st.global.b32 [%rd0 + 1073741824], %r0;\n"),
        ("misaligned", "  mov.u32 %r0, 7;\n  st.global.b32 [%rd0 + 2], %r0;\n"),
    ):
        yield {"name": f"control/{rule} 1", "rule": rule, "kernel": f"{head}{body}  ret;\n}}\n", "python": python}


# On the device


def filler(size: int) -> str:
    """A kernel `dirt` with 1024 threads that fill `size` bytes of shared memory. `size` is a multiple of 4, at least
    4096."""
    return f""".version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry dirt()
{{
  .reg .b32 %r<3>;
  .reg .pred %p;
  mov.u32 %r0, %tid.x;
  shl.b32 %r0, %r0, 2;
  mov.u32 %r1, smem;
FILL:
  add.u32 %r2, %r1, %r0;
  st.volatile.shared.b32 [%r2], 0xa5a5a5a5;
  add.u32 %r0, %r0, 4096;
  setp.lt.u32 %p, %r0, {size};
  @%p bra FILL;
  ret;
}}
"""


class Gpu:
    """Launches a page's kernel on device 0. Raises RuntimeError with the driver's error name."""

    def __init__(self, ptx: str, dirty: bool) -> None:
        self._least = _ALLOCATED if dirty else 0
        self._driver = import_module("cuda.bindings.driver")
        self._call(self._driver.cuInit(0))
        device = self._call(self._driver.cuDeviceGet(0))
        self._call(self._driver.cuCtxSetCurrent(self._call(self._driver.cuDevicePrimaryCtxRetain(device))))
        self._module = self._call(self._driver.cuModuleLoadData(ptx.encode() + b"\0"))
        self._kernel = self._call(self._driver.cuModuleGetFunction(self._module, b"kernel"))
        self._patient = "gave_up" in ptx
        self._buffers: list[Any] = []
        self._dirt = None
        if dirty:
            dirt = self._call(self._driver.cuModuleLoadData(filler(DIRT_BYTES).encode() + b"\0"))
            self._dirt = self._call(self._driver.cuModuleGetFunction(dirt, b"dirt"))
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call(self._driver.cuFuncSetAttribute(self._dirt, attribute, DIRT_BYTES))

    def fill(self) -> None:
        """Fills all shared memory of the device with 0xa5."""
        self._call(self._driver.cuLaunchKernel(self._dirt, 132, 1, 1, 1024, 1, 1, DIRT_BYTES, 0, 0, 0))
        self._call(self._driver.cuCtxSynchronize())

    def _call(self, result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code):
            raise RuntimeError(code.name)
        return values[0] if values else None

    def launch(self, _file: str, _entry: str, grid: int, block: int, *arguments: Any, cluster: int = 1) -> None:
        """Like `megamoe.vm.Device.launch`, for NumPy arrays and integers."""
        driver, arrays, held = self._driver, list[tuple[Any, Any]](), list[Any]()
        if self._dirt is not None:
            self.fill()
        for one in arguments:
            if isinstance(one, int):
                held.append(ctypes.c_uint32(one))
                continue
            if len(self._buffers) <= len(arrays):
                self._buffers.append(self._call(driver.cuMemAlloc(max(self._least, one.nbytes))))
            buffer = self._buffers[len(arrays)]
            self._call(driver.cuMemcpyHtoD(buffer, one.ctypes.data, one.nbytes))
            arrays.append((one, buffer))
            held.append(ctypes.c_uint64(int(buffer)))
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(one) for one in held))
        how = driver.CUlaunchConfig()
        how.gridDimX, how.gridDimY, how.gridDimZ = grid, 1, 1
        how.blockDimX, how.blockDimY, how.blockDimZ = block, 1, 1
        attributes = list[Any]()
        if cluster > 1:
            shape = driver.CUlaunchAttribute()
            shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            shape.value.clusterDim.x, shape.value.clusterDim.y, shape.value.clusterDim.z = cluster, 1, 1
            attributes.append(shape)
        how.numAttrs, how.attrs = len(attributes), attributes
        self._call(driver.cuLaunchKernelEx(how, self._kernel, ctypes.addressof(pointers), 0))
        self._call(driver.cuCtxSynchronize())
        for array, buffer in arrays:
            self._call(driver.cuMemcpyDtoH(array.ctypes.data, buffer, array.nbytes))

    def gave_up(self) -> int:
        """Number of threads whose waits gave up, over all launches."""
        if not self._patient:
            return 0
        address, count = self._call(self._driver.cuModuleGetGlobal(self._module, b"gave_up")), ctypes.c_uint32()
        self._call(self._driver.cuMemcpyDtoH(ctypes.addressof(count), address, 4))
        return count.value


def compared(python: str) -> tuple[Any, list[tuple[Any, Any]]]:
    """The code of a page's block without its assertions, and the two sides of each asserted comparison."""
    tree = ast.parse(python)
    sides = list[tuple[Any, Any]]()
    for node in (node for node in tree.body if isinstance(node, ast.Assert)):
        (found,) = (one for one in ast.walk(node.test) if isinstance(one, ast.Compare))
        both = (found.left, found.comparators[0])
        left, right = (compile(ast.fix_missing_locations(ast.Expression(one)), "page", "eval") for one in both)
        sides.append((left, right))
    tree.body = [node for node in tree.body if not isinstance(node, ast.Assert)]
    return compile(tree, "page", "exec"), sides


def tried(python: str, launch: Launch, launches: int, seconds: float) -> dict[str, Any]:
    """Runs the block up to `launches` times or for `seconds`, and counts wrong elements in what it asserts."""
    import numpy as np

    code, sides = compared(python)
    machine = ModuleType("megamoe.vm")
    machine.Device = lambda *_args, **_named: SimpleNamespace(launch=launch)  # type: ignore[attr-defined]
    package = ModuleType("megamoe")
    package.vm = machine  # type: ignore[attr-defined]
    wrong, elements, bad, done, error, began = 0, 0, 0, 0, "", time.monotonic()
    with patch.dict(sys.modules, {"megamoe": package, "megamoe.vm": machine}):
        while done < launches and time.monotonic() - began < seconds:
            names = dict[str, Any]()
            try:
                exec(code, names)
            except RuntimeError as fault:
                error = str(fault)
                break
            done += 1
            here = 0
            for left, right in sides:
                unequal = np.asarray(eval(left, names)) != np.asarray(eval(right, names))
                here, elements = here + int(unequal.sum()), elements + unequal.size
            wrong, bad = wrong + here, bad + bool(here)
    return {"launches": done, "wrong": wrong, "elements": elements, "launches_with_wrong": bad, "error": error}


def _nothing(error: str) -> dict[str, Any]:
    return {"launches": 0, "wrong": 0, "elements": 0, "launches_with_wrong": 0, "error": error}


def one(program: Program, under_tool: bool, dirty: bool) -> dict[str, Any]:
    """The device's answer to one program, computed in this process."""
    try:
        gpu = Gpu(program["patient"], dirty)
    except RuntimeError as refused:
        return _nothing(f"loading: {refused}")
    launches = LAUNCHES_UNDER_TOOLS if under_tool else MAX_LAUNCHES
    answer = tried(program["python"], gpu.launch, launches, SECONDS)
    return answer if answer["error"] else {**answer, "gave_up": gpu.gave_up()}


def summary(log: str) -> dict[str, Any]:
    """Number of errors and warnings in a compute-sanitizer log, -1 if it does not say, and the first one."""
    found = re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)", log)
    errors = sum(int(number) for number in found.groups() if number) if found else -1
    lines = [line.removeprefix("=========").strip() for line in log.splitlines() if line.startswith("=========")]
    said = [
        line for line in lines if line and not re.match(r"COMPUTE-SANITIZER|(?:ERROR|RACECHECK) SUMMARY|at |by ", line)
    ]
    return {"errors": errors, "says": said[0] if said and errors > 0 else ""}


def asked_of_tools(programs: Sequence[Program]) -> Iterator[tuple[int, str]]:
    """Pairs of program number and tool. Delayed programs are left out, because their kernels are modified."""
    for number, program in enumerate(programs):
        if program["name"].endswith(" late"):
            continue
        wanted = {
            "memcheck": bool(program["rule"]),
            "racecheck": True,
            "synccheck": True,
            "initcheck": program["rule"].startswith("uninitialised"),
        }
        yield from ((number, tool) for tool in TOOLS if wanted[tool])


def answered(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """A child's last output, or that it did not end, or how it ended. Its own children end with it."""
    try:
        child = subprocess.Popen(
            [*command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    except FileNotFoundError as missing:
        return _nothing(str(missing))
    try:
        said, complained = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return _nothing("it did not end")
    try:
        return json.loads(said.strip().rpartition("\n")[2])
    except ValueError:
        last = complained.strip().rpartition("\n")[2][:300]
        return _nothing(f"exit {child.returncode}: {last}")


def run(file: Path, logs: Path, dirty: bool) -> dict[str, Any]:
    """Runs every program plainly, then those with a defect under the tools, and the mended ones under racecheck and
    synccheck."""
    programs: list[Program] = json.loads(file.read_text("utf-8"))
    logs.mkdir(parents=True, exist_ok=True)

    def plain(number: int) -> dict[str, Any]:
        given = [sys.executable, __file__, "one", str(file), str(number), *([] if dirty else ["--no-dirt"])]
        return answered(given, 12)

    def checked(asked: tuple[int, str]) -> dict[str, Any]:
        number, tool = asked
        log = logs / f"{number}-{tool}.log"
        command = ["compute-sanitizer", "--tool", tool, "--log-file", str(log), "--print-limit", "3"]
        if tool == "racecheck":
            command += ["--racecheck-report", "all"]
        command += [sys.executable, __file__, "one", str(file), str(number), "--no-dirt", "--tool"]
        answer = answered(command, 30)
        said = log.read_text("utf-8", "replace") if log.exists() else ""
        return {"launches": answer["launches"], "error": answer["error"], **summary(said)}

    began = time.monotonic()
    if dirty:
        failed = answered([sys.executable, __file__, "fill", str(file)], 20)["error"]
        dirty = not failed
        print(f"filler: {failed or 'works'}", flush=True)
    with ThreadPoolExecutor(12) as pool:
        table = {one["name"]: {"rule": one["rule"], **answer}
                 for one, answer in zip(programs, pool.map(plain, range(len(programs))), strict=True)}  # fmt: skip
    for name, answer in table.items():
        print(f"{name:42} {answer['rule']:28} wrong {answer['wrong']}/{answer['elements']} in "
              f"{answer['launches_with_wrong']}/{answer['launches']} gave up {answer.get('gave_up', '')} "
              f"{answer['error']}")  # fmt: skip
    print(f"{time.monotonic() - began:.1f} s plainly", flush=True)
    asked = list(asked_of_tools(programs))
    with ThreadPoolExecutor(15) as pool:
        said = list(pool.map(checked, asked))
    for (number, tool), answer in zip(asked, said, strict=True):
        name = programs[number]["name"]
        table[name].setdefault("sanitizer", {})[tool] = answer
    for name, answer in table.items():
        print(f"{name:42} " + " ".join(f"{tool[:4]} {one['errors']} of {one['launches']} {one['error'][:60]}"
                                       for tool, one in answer.get("sanitizer", {}).items()))  # fmt: skip
    print(f"{time.monotonic() - began:.1f} s in all")
    return {"dirt": dirty, "programs": table}


def main(arguments: Sequence[str]) -> None:
    """The commands in this file's docstring, and `one` and `fill`, which `run` starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("pack", "run", "one", "fill"))
    parser.add_argument("file", type=Path)
    parser.add_argument("other", nargs="?", default="")
    parser.add_argument("--tool", action="store_true")
    parser.add_argument("--no-dirt", action="store_true")
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    given = parser.parse_args(arguments)
    if given.command == "pack":
        given.file.write_text(json.dumps(pack(), indent=1) + "\n", "utf-8")
    elif given.command == "fill":
        try:
            Gpu(json.loads(given.file.read_text("utf-8"))[0]["kernel"], dirty=True).fill()
        except RuntimeError as refused:
            print(json.dumps(_nothing(str(refused))))
        else:
            print(json.dumps(_nothing("")))
    elif given.command == "one":
        program = json.loads(given.file.read_text("utf-8"))[int(given.other)]
        print(json.dumps(one(program, given.tool, dirty=not given.no_dirt)))
    else:
        answer = run(given.file, given.logs, dirty=not given.no_dirt)
        Path(given.other).write_text(json.dumps(answer, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
