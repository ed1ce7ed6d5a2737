"""Kernels of public repositories, from checkouts, through the doors: `nox -s witness -- --sources DIR`.

A case calls one function of a checkout and compares its result with torch. Nothing of the checkouts is committed except
the list of cases and their outcomes: results/public.jsonl and its table.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import linecache
import multiprocessing
import re
import resource
import runpy
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pebble import ProcessPool

from conformance.witness import references
from conformance.witness.apart import LostError, result_of
from conformance.witness.public_record import ARGUED, RECORD, TABLE, PublicRow, read_rows, table
from conformance.witness.record import rows_as_text
from megamoe import torch_cuda
from megamoe.contract import Target
from megamoe.contract.backend import UnsupportedError
from megamoe.contract.machine import KernelFault, LaunchRefusedError
from megamoe.findings import KernelFinding, Ledger
from megamoe.records.files import write_file
from megamoe.records.provenance import installed_version
from megamoe.vm import Device

SETTLED = ("ok", "argued", "defect", "uncompiled")
"""Outcomes that a run need not repeat: they show no fault of ours."""
SM_COUNT = 2
"""The number of SMs that persistent kernels see: so few that each CTA has two tiles of a small problem."""
STEP_BUDGET = 40_000_000
RECORDED = "eager"
"""The schedule of the record."""
PACKAGES = "packages"
"""The folder beside the checkouts with imports of theirs that the environment lacks: `pip install --target`."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A public repository at a commit, for the package `distribution` of `version`; "" is any version.

    `root`: the folder in it that goes on the import path, if any.
    """

    repository: str
    commit: str
    distribution: str
    version: str = ""
    root: str = ""

    def folder(self, sources: Path) -> Path | None:
        """Its place under `sources`, as owner+name@commit, owner+name or name; None if it is not there."""
        whole = self.repository.replace("/", "+")
        names = (f"{whole}@{self.commit[:12]}", whole, self.repository.partition("/")[2])
        return next((sources / name for name in names if (sources / name).is_dir()), None)

    def package(self, sources: Path | None) -> tuple[str, str] | None:
        """The version that runs and its folder, "" for the environment; None if the version is nowhere.

        If the environment has another version, `pip install --target DIR/NAME==VERSION` provides the right one.
        """
        installed = installed_version(self.distribution)
        if installed and self.version in ("", installed):
            return installed, ""
        beside = None if sources is None else sources / f"{self.distribution}=={self.version}"
        return (self.version, str(beside)) if beside is not None and beside.is_dir() else None


@dataclass(frozen=True, slots=True)
class PublicCase:
    """A call of `function` with `arguments`, in the module of the file `path` of a checkout, on `target`.

    If there is a `driver`, it is called instead, with the module and the arguments: it calls the function, and raises
    AssertionError if the result is wrong. Without one the function itself raises it, as tests do. `script`: the file
    runs its kernels on import, so only its definitions are used. The driver of a CUDA header gets a `Header` for a
    module. `skipped`: why it cannot run here.
    """

    family: str
    checkout: Checkout
    path: str
    target: Target
    function: str
    arguments: Mapping[str, object] = field(default_factory=dict[str, object])
    driver: Callable[..., object] | None = None
    script: bool = False
    skipped: str = ""

    @property
    def call(self) -> str:
        """The function and its arguments, for readers."""
        if self.function == MAIN:
            return " ".join((self.path.rpartition("/")[2], str(self.arguments["options"]))).strip()
        return f"{self.function}({', '.join(f'{name}={_shown(value)}' for name, value in self.arguments.items())})"

    @property
    def name(self) -> str:
        """Unique name among all cases."""
        return " ".join((self.family, self.path, self.call, self.target))


@dataclass(frozen=True, slots=True)
class Header:
    """A CUDA header of the checkout in `folder`, for kernels that `device` launches."""

    device: Device
    folder: Path
    name: str


def _shown(value: object) -> str:
    return value.name if isinstance(value, Named) else str(value) if isinstance(value, torch.dtype) else repr(value)


@dataclass(frozen=True, slots=True)
class Named:
    """An argument that is an attribute of the case's module: `Named("t7.schedulers.0")`."""

    name: str

    def of(self, module: object) -> object:
        """Returns the attribute."""
        found: Any = module
        for part in self.name.split("."):
            found = found[int(part)] if part.isdigit() else getattr(found, part)
        return found


def cases() -> tuple[PublicCase, ...]:
    """Returns all cases, in the order of the record."""
    from conformance.witness import cutedsl_examples, deep_gemm_kernels, operator_libraries, triton_tutorials

    return (
        *triton_tutorials.CASES, *cutedsl_examples.CASES, *deep_gemm_kernels.CASES, *operator_libraries.CASES
    )  # fmt: skip


class Counted(Device):
    """A device that counts its launches: a case without a launch shows nothing."""

    launches = 0

    @contextmanager
    def watched(self, ptx: str, origin: str = "") -> Iterator[None]:
        """Counts a launch; see Device."""
        self.launches += 1
        with super().watched(ptx, origin):
            yield


# In the process of a target.

_OPENED = ExitStack()
_COMPILERS = ("CompilationError", "DSLUserCodeError")
"""Exceptions of Triton and CuTeDSL for source that they refuse."""


def settle(target: Target, package: str = "") -> None:
    """Opens the doors of this process for good, with the packages of the folder `package`."""
    if package:
        sys.path.insert(0, package)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _OPENED.enter_context(torch_cuda.on_host(target, SM_COUNT))
    # Some programs time themselves once they have checked the result.
    _OPENED.enter_context(patch.object(torch_cuda.HostEvent, "elapsed_time", lambda event, other: 1.0))
    _OPENED.enter_context(references.on_host())
    if importlib.util.find_spec("triton") is not None:
        from triton._C.libtriton import nvidia

        # Tutorials create a cuBLAS handle beside their kernels; no case uses it.
        nvidia.cublas.CublasLt = lambda workspace: None


def _device(case: PublicCase, schedule: str) -> Counted:
    device = Counted(
        case.target, schedule=schedule, sm_count=SM_COUNT, step_budget=STEP_BUDGET, profile="lenient", suppress=ARGUED
    )
    device.reported = _nothing
    device.printed = _nothing
    _open_doors(case, device)
    return device


def _nothing(told: object) -> None:
    """Silences the programs."""


def _open_doors(case: PublicCase, device: Device) -> None:
    if importlib.util.find_spec("triton") is not None:
        from megamoe import triton

        triton.install(device, sm_count=SM_COUNT)
    if "CuTeDSL" in case.path:
        from megamoe import cutedsl

        cutedsl.install(device)


def judged(case: PublicCase, sources: str, schedule: str = RECORDED) -> PublicRow:
    """Runs a case under `schedule` and returns its row."""
    return ran(case, sources, schedule)[0]


def ran(case: PublicCase, sources: str, schedule: str) -> tuple[PublicRow, list[KernelFinding]]:
    """Runs a case under `schedule`; returns its row, and its findings of every grade."""
    row = blank(case, Path(sources))
    if row.reason:
        return row, []
    if (beside := str(Path(sources) / PACKAGES)) not in sys.path:
        sys.path.append(beside)
    folder = case.checkout.folder(Path(sources))
    assert folder is not None, "blank has looked"
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    device = _device(case, schedule)
    status, reason = "ok", ""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            torch.manual_seed(0)
            _call(case, folder, device)
    except ModuleNotFoundError as missing:
        status, reason = "not_run", f"the package {missing.name} is not there"
    except pytest.skip.Exception as skip:
        status, reason = "not_run", f"it skips itself: {skip}"
    except AssertionError as wrong:
        status, reason = "wrong", _sentence(wrong, folder)
    except KernelFault as stop:
        status, reason = "finding", str(stop)
    except (UnsupportedError, LaunchRefusedError) as lacking:
        status, reason = "unsupported", str(lacking)
    except (Exception, SystemExit) as problem:  # code of other people raises anything, and each failure has its row
        status = "uncompiled" if type(problem).__name__ in _COMPILERS else "unsupported"
        reason = _sentence(problem, folder)
    if status == "ok" and not device.launches:
        status, reason = "unsupported", "it launched no kernel"
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    errors = [one for one in device.findings if one.grade == "error" or one.ends]
    told = tuple(sorted({_told(one, folder) for one in device.findings if one not in errors}))
    reasons = [_argued(device.ledger, one) for one in errors]
    if status in ("ok", "wrong", "finding") and errors:
        if all(reasons):
            status, reason = "argued" if status == "ok" else "defect", " ".join(dict.fromkeys(reasons))
        elif status == "ok":
            status = "finding"
    row = replace(
        row,
        status=status,
        reason=" ".join(reason.replace(str(folder), "").split())[:MAX_REASON],
        errors=tuple(sorted({_told(one, folder) for one in errors})),
        told=told,
        launches=device.launches,
        cpu_seconds=round(used, 1),
        seconds=round(time.perf_counter() - begin, 1),
    )
    return row, device.findings


def _argued(ledger: Ledger, finding: KernelFinding) -> str:
    """What the ledger says about a finding; also about one that ended its launch, which no suppression covers."""
    return next((entry.reason for entry in ledger.suppressions if entry.matches(finding)), "")


def _call(case: PublicCase, folder: Path, device: Device) -> None:
    if case.function == MAIN:
        _main(folder / case.path, str(case.arguments["options"]))
        return
    path = Path(case.path)
    module = _module(folder, case) if path.suffix == ".py" else Header(device, folder, path.name)
    values = {key: one.of(module) if isinstance(one, Named) else one for key, one in case.arguments.items()}
    call = getattr(module, case.function) if case.driver is None else partial(case.driver, module)
    call(**values)


MAIN = "__main__"
"""The function of a case that runs its file as a program; its argument `options` is a command line."""


def _main(file: Path, options: str) -> None:
    before, path = sys.argv, list(sys.path)
    sys.argv = [str(file), *options.split()]
    sys.path.insert(0, str(file.parent))
    try:
        runpy.run_path(str(file), run_name=MAIN)
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.argv, sys.path[:] = before, path


MAX_REASON, MAX_KERNEL = 600, 48
"""Limits for the characters of a reason and of a kernel's name, into which CuTeDSL puts the types of its arguments."""


def _told(finding: KernelFinding, folder: Path) -> str:
    """Rule and place of a finding; a place in a checkout is relative to the checkout."""
    place = str(finding.place).replace(f"{folder}/", "").replace(f"{folder.parent}/", "")
    if (at := place.find("site-packages/")) >= 0:
        place = place[at + len("site-packages/") :]
    kernel = finding.kernel if len(finding.kernel) <= MAX_KERNEL else f"{finding.kernel[:MAX_KERNEL]}..."
    return f"{finding.rule} at {place}, kernel {kernel}"


def _sentence(problem: BaseException, folder: Path) -> str:
    """Type and message of an exception, and the last line of the checkout in its traceback."""
    trace, place = problem.__traceback__, ""
    while trace is not None:
        if (file := trace.tb_frame.f_code.co_filename).startswith(str(folder)):
            place = f" at {Path(file).name} line {trace.tb_lineno}"
        trace = trace.tb_next
    said = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(problem)).split())
    # A compiler's error message quotes the source first, so keep its end.
    said = said if len(said) <= MAX_REASON // 2 else f"... {said[-MAX_REASON // 2 :]}"
    return f"{type(problem).__name__}{place}: {said or 'no message'}"


def _module(folder: Path, case: PublicCase) -> ModuleType:
    """Returns the module of a case's file, imported once; for a script only its definitions."""
    path = folder / case.path
    package = case.checkout.root
    for place in (folder / package, path.parent):
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
    if package:
        return importlib.import_module(".".join(path.relative_to(folder / package).with_suffix("").parts))
    if (known := sys.modules.get(path.stem)) is not None and known.__file__ == str(path):
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a Python file has a specification"
    assert spec.loader is not None, "a Python file has a loader"
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        if case.script:
            linecache.checkcache()
            exec(compile(_definitions(path.read_text("utf-8")), str(path), "exec"), vars(module))
        else:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _definitions(text: str) -> ast.Module:
    """A script up to the first statement that runs something, and after that only its imports, definitions and aliases.

    A script runs something at its first bare call, or where it assigns the result of a function of its own.
    """
    tree, kept, running = ast.parse(text), list[ast.stmt](), False
    own = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    for one in tree.body:
        running |= isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)
        match one:
            case ast.Assign(value=ast.Call(func=ast.Name(id=called))):
                running |= called in own
            case _:
                pass
        plain = isinstance(one, ast.Assign) and isinstance(one.value, ast.Name | ast.Attribute | ast.Constant)
        benchmark = isinstance(one, ast.FunctionDef) and "perf_report" in "".join(map(ast.dump, one.decorator_list))
        defines = isinstance(one, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)
        if not benchmark and (defines or plain or not running):
            kept.append(one)
    tree.body = kept
    return tree


# In the deciding process.


def blank(case: PublicCase, sources: Path | None) -> PublicRow:
    """Returns the row of a case that has not run, with the reason if it cannot."""
    digest, reason = "", case.skipped
    folder = None if sources is None else case.checkout.folder(sources)
    if folder is None:
        reason = reason or f"no checkout of {case.checkout.repository} is there"
    elif not (folder / case.path).is_file():
        reason = reason or f"the checkout has no {case.path}"
    else:
        digest = sha256((folder / case.path).read_bytes()).hexdigest()[:12]
    package = case.checkout.package(sources)
    version = case.checkout.version if package is None else package[0]
    if package is None:
        reason = reason or f"{case.checkout.distribution} {version} is not there"
    about = case.checkout
    return PublicRow(
        family=case.family, repository=about.repository, commit=about.commit, path=case.path, source=digest,
        call=case.call, target=case.target, compiler=f"{about.distribution} {version}".strip(), status="not_run",
        reason=reason,
    )  # fmt: skip


def examined(chosen: Iterable[PublicCase], sources: Path, schedule: str = RECORDED) -> Iterator[PublicRow]:
    """Yields the rows of the cases as they finish under `schedule`; each target has its own process."""
    spawn = multiprocessing.get_context("spawn")
    ready = dict[tuple[Target, str], list[tuple[PublicCase, PublicRow]]]()
    for case in chosen:
        row = blank(case, sources)
        if row.reason:
            yield row
        else:
            _, package = case.checkout.package(sources) or ("", "")
            ready.setdefault((case.target, package), []).append((case, row))
    for place, members in ready.items():
        with ProcessPool(1, context=spawn, initializer=settle, initargs=place) as pool:
            for case, row in members:
                try:
                    row = result_of(pool, judged, case, str(sources), schedule)
                except LostError as lost:
                    row = replace(row, status="timed_out" if lost.over_time else "crashed", reason=str(lost))
                yield row


def renew(sources: Path, only: str = "", resume: bool = False) -> bool:
    """Runs the cases whose name contains `only` and records their rows one by one. Returns whether all are right.

    `resume`: only runs cases that are not right yet.
    """
    listed = cases()
    known = {row.name: row for row in (read_rows(RECORD.read_text("utf-8")) if RECORD.exists() else [])}
    rows = {case.name: known.get(case.name) or blank(case, None) for case in listed}
    chosen = [case for case in listed if only in case.name]
    if resume:
        chosen = [case for case in chosen if rows[case.name].status not in SETTLED]
    good = True
    for row in examined(chosen, sources):
        rows[row.name] = row
        good &= row.status in (*SETTLED, "not_run")
        _say(row)
        write_file(RECORD, rows_as_text(rows.values()), "the record of public kernels", durable=False)
    write_file(RECORD, rows_as_text(rows.values()), "the record of public kernels")
    write_file(TABLE, table(list(rows.values())), "the table of public kernels", durable=False)
    return good


def tried(sources: Path, only: str, schedule: str) -> bool:
    """Runs the cases whose name contains `only` under `schedule` and writes no record. Returns whether all are right.

    Prints at the end how many are "ok", which those with an argued finding are not.
    """
    ran = list[PublicRow]()
    good = True
    for row in examined([case for case in cases() if only in case.name], sources, schedule):
        good &= row.status in (*SETTLED, "not_run")
        _say(row)
        if row.status not in ("uncompiled", "not_run"):
            ran.append(row)
    fine = sum(row.status == "ok" for row in ran)
    print(f"{fine} of {len(ran)} cases that ran are right and without a finding of grade error under {schedule}")
    return good


def _say(row: PublicRow) -> None:
    said = ": ".join(filter(None, (row.name, row.reason, "; ".join(row.errors))))
    print(f"{row.status:11} {row.cpu_seconds:6.1f} s  {said}", flush=True)
