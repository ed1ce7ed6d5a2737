"""`megamoe check`: PTX, CUDA C++ and test suites of kernels on the machine, without a GPU."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, cast, get_args

import typer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from megamoe.contract.machine import KernelMachine

from megamoe.cli.options import AskedLaunch, Sought, with_options
from megamoe.cli.terminal import complain, console
from megamoe.contract import TARGETS, UnsupportedError
from megamoe.contract.counted import counted
from megamoe.contract.known_names import nearest
from megamoe.contract.machine import KernelFault, LaunchRefusedError, MisreadPtxError
from megamoe.contract.scratch import scratch_folder
from megamoe.export.findings import CheckedRun, Complaint, Format, read_findings, rendered
from megamoe.findings import KernelFinding, Ledger, SourceLine
from megamoe.given.entry_names import source_name, with_source_names
from megamoe.records.files import check_place, write_file
from megamoe.records.lines import RecordError
from megamoe.runner.limits import TimeIsUpError, memory_at_most, share_of_memory, time_at_most
from megamoe.spec.selection import expand_schedules

SCHEDULES = ("eager", "lazy", "late_cta:0", "late_warp:0", "random:0")
"""The schedules for a launch: work completes at once, as late as the waits allow, and in between; and a CTA of each
cluster, or a warp of each CTA, comes late."""
_KERNELS = (".ptx", ".cu")
_WRITTEN = "findings to"
_DTYPES = {
    "f16": "float16", "f32": "float32", "f64": "float64", "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
}  # fmt: skip
_TORCH_ONLY = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
"""Kinds that NumPy lacks. Their arrays are passed as bytes."""
_ELSEWHERE = ((r"bfloat16|bf", "bf16"), (r"(?:f?p?8?|float8_?)(e4m3|e5m2).*", r"\1"), (r"fp(\d+)|float(\d+)", r"f\1\2"),
              (r"half", "f16"), (r"float", "f32"), (r"double", "f64"), (r"(?:i|int)(\d+)", r"s\1"),
              (r"(?:uint|b)(\d+)", r"u\1"), (r"int", "s32"), (r"long", "s64"), (r"bool|char|byte", "u8"))  # fmt: skip
"""What other languages and libraries call the kinds."""
_PTX_LINE = re.compile(r"\b(?:PTX line (\d+)|line (\d+), column (\d+))")
_ARRAY = re.compile(r"(\w+)\[(\d+)\]")

MAX_ELEMENTS = 1 << 28
WARP = 32
"""Threads of a warp."""

Sources = Annotated[list[str], typer.Argument(metavar="KERNEL.ptx|KERNEL.cu|TEST.py[::NAME]", help="What to check.")]
Target = Annotated[str, typer.Option("--target", metavar="NAME", help="sm_90a or sm_100a.")]
Schedule = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="eager, lazy, late_cta:RANK, late_warp:INDEX, random:SEED[-LAST].  [default: five; eager for tests]",
    ),
]
Entry = Annotated[
    str | None, typer.Option("--entry", metavar="NAME", help="Launch this kernel instead of only reading the file.")
]
KeptPtx = Annotated[
    Path | None, typer.Option("--keep-ptx", metavar="FILE", help="Write the PTX that line numbers refer to.")
]


@with_options
def check(
    sources: Sources, sought: Sought, launch: AskedLaunch, target: Target = "sm_100a", schedule: Schedule = None,
    entry: Entry = None, keep_ptx: KeptPtx = None,
) -> None:  # fmt: skip
    """Looks for rules that kernels break. Exit status: 0 none, 1 findings or refusals, 2 unusable input.

    By default a kernel's file is only read and bound: every instruction of every entry must have a meaning. With
    --entry the kernel is launched under several schedules, which must agree. pytest runs a test suite, with the machine
    as its GPU.
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
    if keep_ptx is not None and (tests or len(kernels) != 1):
        _unusable("--keep-ptx writes the PTX of one kernel's file")
    if entry is None and launch.idle:
        _unusable(f"--{launch.idle} does nothing without --entry NAME, which launches a kernel of one file")
    if sought.format not in get_args(Format):
        _unusable(f"--format {sought.format}: the formats are {', '.join(get_args(Format))}")
    if sought.output is not None:
        try:
            check_place(sought.output, _WRITTEN)
        except RecordError as problem:
            _unusable(str(problem))
    schedules = expand_schedules(schedule or [])
    checked = CheckedRun(_ledger(target, sought))
    for kernel in kernels:
        try:
            with memory_at_most(share_of_memory(1)):
                if keep_ptx is not None:
                    _kept(kernel, target, entry, keep_ptx)
                if entry is None:
                    _read(kernel, target, checked, launch.timeout)
                else:
                    _launched(kernel, target, entry, launch, schedules or SCHEDULES, checked)
        except MemoryError:
            most = share_of_memory(1) / 2**30
            said = f"{kernel}: it takes more memory than this machine has, {most:.3g} GiB"
            checked.failures.append(Complaint(f"too much memory for {kernel}", said))
        except MisreadPtxError as wrong:
            checked.failures += _misread(kernel, target, wrong)
        except LaunchRefusedError as refused:
            _unusable(_about(kernel, refused))
        except TimeIsUpError as late:
            checked.failures.append(Complaint(f"no end of {kernel} in time", f"{kernel}: {late}"))
        except (typer.Exit, UnsupportedError, OSError):
            raise
        except Exception as broken:
            checked.failures.append(Complaint(f"an error of the machine on {kernel}", f"{kernel}: {_broken(broken)}"))
    for name in (schedules or ["eager"]) if tests else []:
        _tested(tests, target, name, sought, launch.timeout, checked)
    _write(checked, sought)
    raise typer.Exit(int(checked.failed))


def _ledger(target: str, sought: Sought) -> Ledger:
    from megamoe.vm import Device

    try:
        return Device(target, profile=sought.profile, suppress=sought.suppress).ledger
    except (ValueError, UnsupportedError) as wrong:
        _unusable(str(wrong))


def _write(checked: CheckedRun, sought: Sought) -> None:
    text = rendered(checked, cast("Format", sought.format))
    if sought.output is None:
        console().print(text, markup=False, end="")
        return
    try:
        write_file(sought.output, text, _WRITTEN)
    except RecordError as problem:
        _unusable(str(problem))
    found = f"{counted(len(checked.ledger.findings), 'finding')}, {counted(len(checked.failures), 'failure')}"
    console().print(f"{sought.output}: {found}", markup=False)


def _kept(kernel: str, target: str, entry: str | None, file: Path) -> None:
    """Write the PTX of `kernel` to `file`, as it is read or launched."""
    from megamoe.vm import Device, as_ptx, with_entry

    source = Path(kernel)
    ptx = as_ptx(source, target) if entry is None else with_entry(Device(target).machine, source, entry)[0]
    try:
        write_file(file, ptx, "PTX to")
    except RecordError as problem:
        _unusable(str(problem))


def _unusable(sentence: str) -> NoReturn:
    complain(f"megamoe: {sentence}")
    raise typer.Exit(2)


def _about(kernel: str, refused: Exception) -> str:
    """A sentence that names the file once."""
    said = str(refused)
    return said if kernel in said or str(Path(kernel)) in said else f"{kernel}: {said}"


def _broken(error: Exception) -> str:
    """A sentence about an exception that no kernel should cause, with its place in our code."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    what = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    place = f"{last.filename}:{last.lineno} in {last.name}"
    return f"this is an error of the machine, not of the kernel: {what}, at {place}; please report it, with this file"


def _read(kernel: str, target: str, checked: CheckedRun, timeout: float) -> None:
    """Binds every entry of the kernel file."""
    from megamoe.vm import Device, as_ptx, no_kernel, sentences

    device = Device(target)
    with sentences(device.machine, kernel), time_at_most(timeout, device.machine.whereabouts):
        ptx = as_ptx(Path(kernel), target)
        if not device.machine.entries(ptx):
            _unusable(no_kernel(Path(kernel)))
        entries = device.machine.entries(ptx)
        for name, parameters in entries.items():
            if _bound(device.machine, kernel, ptx, name, checked):
                takes = f"{kernel}: {_shown(name, entries)}: {counted(len(parameters), 'parameter')}"
                checked.said.append(f"{takes}; every instruction has a meaning on {target}")
        checked.said.append(
            f"{kernel}: it was only read; --entry NAME launches a kernel, with --grid, --block, --cluster, --smem and "
            "an --arg for each parameter"
        )


def _shown(name: str, entries: Collection[str]) -> str:
    """An entry as its source calls it; with its mangled name if others are called the same."""
    shown = source_name(name)
    return shown if [source_name(one) for one in entries].count(shown) == 1 else f"{shown} ({name})"


def _bound(machine: KernelMachine, kernel: str, ptx: str, name: str, checked: CheckedRun) -> bool:
    """Whether every instruction of an entry has a meaning. Each that has none is a failure."""
    from megamoe.vm import sentences

    try:
        with sentences(machine):
            machine.bind(ptx, name)
    except UnsupportedError as unknown:
        for said in str(unknown).splitlines():
            whole = f"{kernel}: {source_name(name)}: {with_source_names(said)}"
            checked.failures.append(Complaint("refused instruction", whole, _place(machine, kernel, ptx, said)))
        return False
    return True


def _place(machine: KernelMachine, kernel: str, ptx: str, said: str) -> SourceLine | None:
    """The place of the PTX line that a sentence names: in the source if it is known, else in the file of PTX."""
    found = _PTX_LINE.search(said)
    if found is None:
        return None
    line, column = int(found[1] or found[2]), int(found[3] or 0)
    source = SourceLine.of(machine.source_of(ptx, line))
    return source[0] if source else SourceLine(kernel, line, column) if kernel.endswith(".ptx") else None


def _misread(kernel: str, target: str, wrong: MisreadPtxError) -> Iterator[Complaint]:
    """What is wrong with a text that is not PTX, each with its place."""
    from megamoe.vm import Device, as_ptx

    machine, ptx = Device(target).machine, as_ptx(Path(kernel), target)
    for said in str(wrong).splitlines():
        place = _place(machine, kernel, ptx, said.removeprefix(f"{kernel}, "))
        yield Complaint("refused instruction" if "PTX line" in said else "unreadable PTX", said, place)


def _launched(
    kernel: str, target: str, entry: str, launch: AskedLaunch, schedules: Sequence[str], checked: CheckedRun
) -> None:
    """Launches under each schedule on the same arguments. A launch that breaks a rule is not compared."""
    from megamoe.vm import Device, sentences, with_entry

    machine = Device(target).machine
    try:
        with sentences(machine, kernel), time_at_most(launch.timeout, machine.whereabouts):
            ptx, name = with_entry(machine, Path(kernel), entry)
            if not _bound(machine, kernel, ptx, name, checked):
                return
            checked.said += [f"{kernel}: {one}" for one in _nobody_late(launch, schedules, ptx)]
    except MisreadPtxError:
        raise
    except ValueError as refused:
        _unusable(_about(kernel, refused))
    first: list[object] | None = None
    for name in schedules:
        args = [_argument(text, index) for index, text in enumerate(launch.arg or [])]
        try:
            device = Device(target, schedule=name)
            device.ledger, device.reported = checked.ledger, _gathered
            with time_at_most(launch.timeout, device.machine.whereabouts):
                device.launch(Path(kernel), entry, launch.grid, launch.block, *args, cluster=launch.cluster,
                              smem=launch.smem)  # fmt: skip
        except KernelFault:
            continue
        except TimeIsUpError as late:
            checked.failures.append(
                Complaint(f"no end of {kernel} in time", f"{kernel}: under the schedule {name}: {late}")
            )
            return
        except UnsupportedError as lacking:
            said = str(lacking).removeprefix(f"{kernel}, ")
            whole = f"{kernel}: under the schedule {name}: {said}"
            checked.failures.append(Complaint("refused instruction", whole, _place(machine, kernel, ptx, said)))
            return
        except ValueError as refused:
            _unusable(_about(kernel, refused))
        if first is not None and (unlike := _unlike(first, args)) is not None:
            checked.ledger.take([_depends(kernel, entry, f"argument {unlike[0]} is another under the schedule "
                                 f"{name} than under {schedules[0]}, from byte {unlike[1]} on")])  # fmt: skip
            return
        first = first or args
    if not checked.ledger.findings:
        agree = f"the same results under {', '.join(schedules)}"
        checked.said.append(f"{kernel}: {entry}: no rule broken, {agree}")


def _nobody_late(launch: AskedLaunch, schedules: Sequence[str], ptx: str) -> Iterator[str]:
    """A sentence for each schedule that was asked for and makes late what the launch does not have.

    Ranks and indices count modulo the number of CTAs or warps, so that one schedule serves launches of all sizes.
    """
    warps = -(-math.prod(launch.block) // WARP)
    # A kernel that declares the size of its clusters decides it.
    ctas = 0 if ".reqnctapercluster" in ptx else math.prod(launch.cluster)
    for name in schedules if schedules is not SCHEDULES else ():
        which, _, number = name.partition(":")
        count, whole, part = {"late_warp": (warps, "CTA", "warp"), "late_cta": (ctas, "cluster", "CTA")}.get(
            which, (0, "", "")
        )
        if count == 1:
            yield f"the schedule {name} delays nothing: a {whole} of this launch has one {part}"
        elif 0 < count <= int(number):
            yield (f"the schedule {name} delays {part} {int(number) % count}: a {whole} of this launch has "
                   f"{count} {part}s, and the number counts modulo {count}")  # fmt: skip


def _gathered(finding: KernelFinding) -> None:
    """Reports nothing: the ledger has the finding, and all findings are reported at the end."""


def _unlike(before: list[object], after: list[object]) -> tuple[int, int] | None:
    """The first argument and byte at which two runs differ."""
    import numpy as np

    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.tobytes() != other.tobytes():
            return index, int(np.flatnonzero(one.view(np.uint8) != other.view(np.uint8))[0])
    return None


def _depends(kernel: str, entry: str, detail: str) -> KernelFinding:
    wrong = "The results depend on when asynchronous work ends."
    return KernelFinding("schedule-dependent", "error", detail, entry, wrong=wrong, origin=kernel,
                         mend="Look for a wait or a barrier that is missing.",
                         page="docs/rules/races.md")  # fmt: skip


def _argument(text: str, index: int) -> object:
    import numpy as np

    if text == "null":
        return None
    if matched := _ARRAY.fullmatch(text):
        name, size = matched[1], int(matched[2])
        if size > MAX_ELEMENTS:
            _unusable(f"--arg {text}: an array has at most {MAX_ELEMENTS} elements")
        if name not in _DTYPES and name not in _TORCH_ONLY:
            kinds = [*_DTYPES, *_TORCH_ONLY]
            _unusable(f"--arg {text}: no dtype {name!r}{_meant(name, kinds)}; there are {', '.join(kinds)}")
        if name in _DTYPES and not name.startswith("f"):
            return np.zeros(size, _DTYPES[name])
        drawn = np.random.default_rng(index).standard_normal(size)
        return drawn.astype(_DTYPES[name]) if name in _DTYPES else _rounded(drawn, _TORCH_ONLY[name])
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    _unusable(f"--arg {text}: write a number, null, or DTYPE[SIZE] such as f32[1024] or s32[4]")


def _meant(name: str, kinds: Sequence[str]) -> str:
    """ "; did you mean 's32'?" for i32."""
    known = (found.expand(kind) for written, kind in _ELSEWHERE if (found := re.fullmatch(written, name.lower())))
    meant = next((kind for kind in known if kind in kinds), "")
    return f"; did you mean {meant!r}?" if meant else nearest(name, kinds)


def _rounded(numbers: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[np.uint8]:
    """The bytes of `numbers`, rounded to a dtype of torch."""
    import torch

    return torch.from_numpy(numbers).to(getattr(torch, dtype)).view(torch.uint8).numpy()


def _tested(
    tests: list[str], target: str, schedule: str, sought: Sought, timeout: float, checked: CheckedRun
) -> None:  # fmt: skip
    """Runs test suites in their own process. pytest writes to stderr if stdout gets findings that are not text."""
    if importlib.util.find_spec("pytest") is None:
        _unusable(f"{' '.join(tests)}: pytest runs test-suites, and it is not installed: pip install pytest")
    for one in tests:
        if not Path(one.partition("::")[0]).exists():
            _unusable(f"{one}: there is no such file; name TEST.py or TEST.py::NAME")
    with scratch_folder("check") as folder:
        found = folder / "findings.json"
        command = [sys.executable, "-m", "pytest", "-q", "--megamoe-vm", target, "--megamoe-schedule", schedule]
        command += ["--megamoe-findings", str(found), "--megamoe-profile", sought.profile]
        command += ["--megamoe-timeout", str(timeout)]
        command += [] if sought.suppress is None else ["--megamoe-suppress", str(sought.suppress.resolve())]
        aside = sys.stderr if sought.format != "text" and sought.output is None else None
        status = subprocess.run([*command, *tests], check=False, stdout=aside).returncode
        if status > 1:
            _unusable(f"pytest ended with status {status}: {' '.join(tests)}")
        if found.exists():
            checked.ledger.take(read_findings(found))
    if status:
        named = " ".join(tests)
        checked.failures.append(
            Complaint(f"failing tests under {schedule}", f"{named}: tests fail under the schedule {schedule}")
        )
