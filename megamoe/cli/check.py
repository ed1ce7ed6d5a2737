"""`megamoe check`: PTX, CUDA C++ and test-suites of kernels on the machine, without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from megamoe.cli.terminal import complain, console
from megamoe.contract import TARGETS, UnsupportedError
from megamoe.contract.machine import KernelFault, LaunchRefusedError

SCHEDULES = ("eager", "lazy", "random:0", "random:1")
"""What a launch is tried under: work that completes at once, as late as the waits allow, and in between."""
_KERNELS = (".ptx", ".cu")
_DTYPES = {
    "f16": "float16", "f32": "float32", "f64": "float64", "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
}  # fmt: skip
_ARRAY = re.compile(r"(\w+)\[(\d+)\]")

Sources = Annotated[list[str], typer.Argument(metavar="KERNEL.ptx|KERNEL.cu|TEST.py[::NAME]", help="What to check.")]
Target = Annotated[str, typer.Option("--target", metavar="NAME", help="sm_90a or sm_100a.")]
Schedule = Annotated[
    list[str] | None,
    typer.Option("--schedule", metavar="NAME", help="eager, lazy, random:SEED.  [default: four; eager for tests]"),
]
Entry = Annotated[str | None, typer.Option("--entry", metavar="NAME", help="Launch this kernel, not just read all.")]
Sizes = Annotated[str, typer.Option(metavar="X[,Y[,Z]]")]
Arg = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="VALUE", help="An argument: f32[1024] (random), u64[4] (zeros), 3.0, null."),
]


def check(
    sources: Sources, target: Target = "sm_100a", schedule: Schedule = None, entry: Entry = None, grid: Sizes = "1",
    block: Sizes = "128", cluster: Sizes = "1", smem: Annotated[int, typer.Option(min=0)] = 0, arg: Arg = None,
) -> None:  # fmt: skip
    """Looks for rules that kernels break. Exit status: 0 none, 1 findings, 2 input that cannot be used.

    A kernel's file alone is read and bound: every instruction of every entry must have a meaning. With --entry it is
    launched under several schedules, which must agree. A test-suite is run by pytest, with the machine for a GPU.
    """
    if target not in TARGETS:
        _unusable(f"there is no machine for the target {target!r}; there is {' and '.join(TARGETS)}")
    tests = [one for one in sources if one.partition("::")[0].endswith(".py")]
    kernels = [one for one in sources if one not in tests]
    for one in kernels:
        if Path(one).suffix not in _KERNELS:
            _unusable(f"{one}: a source is KERNEL.ptx, KERNEL.cu or TEST.py::NAME")
    if entry is not None and (tests or len(kernels) != 1):
        _unusable("--entry launches a kernel of one file")
    found = 0
    for kernel in kernels:
        try:
            if entry is None:
                found += _read(kernel, target)
            else:
                shape = (_sizes(grid), _sizes(block), _sizes(cluster), smem)
                found += _launched(kernel, target, entry, shape, arg or [], schedule or list(SCHEDULES))
        except LaunchRefusedError as refused:
            _unusable(f"{kernel}: {refused}")
    for name in (schedule or ["eager"]) if tests else []:
        found += _tested(tests, target, name)
    raise typer.Exit(int(found > 0))


def _say(text: str) -> None:
    console().print(text, markup=False)


def _unusable(sentence: str) -> NoReturn:
    complain(f"megamoe: {sentence}")
    raise typer.Exit(2)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        _unusable(f"{text!r} is no size; write 8 or 8,2,1")


def _read(kernel: str, target: str) -> int:
    """Bind every entry; the number of findings."""
    from megamoe.vm import Device, as_ptx, sentences

    device = Device(target)
    found = 0
    with sentences(device.machine):
        ptx = as_ptx(Path(kernel), target)
        for name, parameters in device.machine.entries(ptx).items():
            try:
                with sentences(device.machine):
                    device.machine.bind(ptx, name)
                _say(f"{kernel}: {name}: {len(parameters)} parameters; every instruction has a meaning on {target}")
            except UnsupportedError as unknown:
                found += 1
                _say(f"{kernel}: {name}: {unknown}")
    return found


def _launched(
    kernel: str, target: str, entry: str, shape: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int],
    given: list[str], schedules: list[str],
) -> int:  # fmt: skip
    """Launch under each schedule on the same arguments; the number of findings."""
    import numpy as np

    from megamoe.vm import Device

    grid, block, cluster, smem = shape
    first: list[object] | None = None
    for name in schedules:
        args = [_argument(text, index) for index, text in enumerate(given)]
        try:
            device = Device(target, schedule=name)
            device.launch(Path(kernel), entry, grid, block, *args, cluster=cluster, smem=smem)
        except (KernelFault, UnsupportedError) as finding:
            _say(f"{kernel}: under the schedule {name}: {finding}")
            return 1
        except ValueError as refused:
            _unusable(f"{kernel}: {refused}")
        for index, (before, after) in enumerate(zip(first or args, args, strict=True)):
            if isinstance(after, np.ndarray) and isinstance(before, np.ndarray) and before.tobytes() != after.tobytes():
                unlike = int(np.flatnonzero(before.view(np.uint8) != after.view(np.uint8))[0])
                _say(
                    f"{kernel}: {entry} writes another argument {index} under the schedule {name} than under "
                    f"{schedules[0]}, from byte {unlike} on: an order is missing"
                )
                return 1
        first = first or args
    _say(f"{kernel}: {entry}: no rule broken, the same results under {', '.join(schedules)}")
    return 0


def _argument(text: str, index: int) -> object:
    import numpy as np

    if text == "null":
        return None
    if matched := _ARRAY.fullmatch(text):
        name, size = matched[1], int(matched[2])
        if name not in _DTYPES:
            _unusable(f"--arg {text}: no dtype {name!r}; there are {', '.join(_DTYPES)}")
        if name.startswith("f"):
            return np.random.default_rng(index).standard_normal(size).astype(_DTYPES[name])
        return np.zeros(size, _DTYPES[name])
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    _unusable(f"--arg {text}: write a number, null, or DTYPE[SIZE] such as f32[1024]")


def _tested(tests: list[str], target: str, schedule: str) -> int:
    """Run test-suites; 1 if a test fails, 2 is raised for what pytest cannot use."""
    command = [sys.executable, "-m", "pytest", "-q", "--megamoe-vm", target, "--megamoe-schedule", schedule, *tests]
    status = subprocess.run(command, check=False).returncode
    if status > 1:
        _unusable(f"pytest ended with status {status}: {' '.join(tests)}")
    return status
