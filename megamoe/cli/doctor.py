"""`megamoe doctor`: what can run here and, for what cannot, why. A table, or JSON."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from megamoe import CHECKOUT
from megamoe.cli.options import Specs, console
from megamoe.contract import (
    TARGETS,
    Borrowed,
    Target,
    backend_names,
    executor_names,
    load_backend,
    load_executor,
)
from megamoe.records.provenance import git_revision, installed_version
from megamoe.spec.load import load_specs
from megamoe.spec.marked_yaml import SpecError


def doctor(
    specs: Specs = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON array instead of a table.")] = False,
) -> None:
    """Says what can run here and, for what cannot, why."""
    found = list(capabilities(specs))
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=1))
        return
    table = Table(box=None, show_header=False)
    for one in found:
        mark = "[green]yes[/]" if one.works else "[yellow]no[/]"
        table.add_row(mark, escape(one.subject), escape(one.detail))
    console().print(table)


@dataclass(frozen=True, slots=True)
class Capability:
    """What this machine can or cannot do. `detail`: what was found, or what is missing and what that costs."""

    subject: str
    works: bool
    detail: str


def capabilities(specs: Path | None = None) -> Iterator[Capability]:
    """Checks the machine, cheap checks first. Raises nothing: what is broken is a Capability that does not work."""
    yield Capability("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Capability("megamoe", True, f"{installed_version('megamoe')}, revision {git_revision(CHECKOUT)}")
    for name in ("torch", "numpy"):
        found = installed_version(name)
        yield Capability(name, found is not None, found or f"not installed: pip install {name}")
    try:
        ops = tuple(load_specs(specs))
        yield Capability("specs", True, f"ops: {', '.join(ops)}")
    except SpecError as error:
        ops = ()
        yield Capability("specs", False, str(error))
    for name in backend_names():
        yield from _backend_capabilities(name, ops)
    for name in executor_names():
        yield from _executor_capabilities(name)
    yield _gpu()
    yield _assembler()


def _backend_capabilities(name: str, ops: tuple[str, ...]) -> Iterator[Capability]:
    try:
        backend = load_backend(name)
        offers = {op: backend.targets(op) for op in ops}
        absent = backend.missing() if isinstance(backend, Borrowed) else None
    except Exception as error:
        yield Capability(f"backend {name}", False, f"cannot be loaded: {_one_line(error)}")
        return
    if isinstance(backend, Borrowed):
        has = [f"{op} for {', '.join(targets)}" for op, targets in offers.items() if targets]
        yield Capability(f"backend {name}", absent is None, absent or f"{'; '.join(has)}; on a device only")
        return
    for op, targets in offers.items():
        missing = [target for target in TARGETS if target not in targets]
        detail = f"for {', '.join(targets)}" if targets else "no kernel"
        yield Capability(
            f"backend {name}, {op}",
            bool(targets),
            detail + (f"; not for {', '.join(missing)}" * bool(targets and missing)),
        )


def _executor_capabilities(name: str) -> Iterator[Capability]:
    try:
        executor = load_executor(name)
        reasons: dict[Target, str | None] = {target: executor.unavailable(target) for target in TARGETS}
    except Exception as error:
        yield Capability(f"executor {name}", False, f"cannot be loaded: {_one_line(error)}")
        return
    for target, reason in reasons.items():
        yield Capability(f"executor {name}, {target}", reason is None, reason or "runs here")


def _gpu() -> Capability:
    try:
        import torch

        if torch.cuda.is_available():
            device = torch.cuda.get_device_properties(torch.cuda.current_device())
            detail = (
                f"{device.name}, compute capability {device.major}.{device.minor}, {device.multi_processor_count} "
                f"multiprocessors, {device.total_memory / 2**30:.0f} GiB, L2 of {device.L2_cache_size >> 20} MiB; "
                f"torch for CUDA {torch.version.cuda}"
            )
            return Capability("GPU", True, detail)
        built_for = torch.version.cuda
    except Exception as error:
        return Capability("GPU", False, f"torch cannot say: {_one_line(error)}")
    why = "no device or driver is visible" if built_for else "this torch is built without CUDA"
    return Capability(
        "GPU", False, f"none: {why}; the vm executor needs none, and rows on gpu are owed only if asked for"
    )


def _assembler() -> Capability:
    """The ptxas of the nvidia-cuda-nvcc wheel, or else of the search path."""
    path = _packaged_ptxas() or shutil.which("ptxas")
    if path is None:
        return Capability("ptxas", False, "not found: pip install nvidia-cuda-nvcc; assembling is then `unsupported`")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Capability("ptxas", False, f"does not run: {_one_line(error)}")
    release = [line for line in done.stdout.splitlines() if "release" in line]
    return Capability("ptxas", True, release[0].strip() if release else "of unknown release")


def _packaged_ptxas() -> str | None:
    try:
        found = [file for file in files("nvidia-cuda-nvcc") or () if file.name in ("ptxas", "ptxas.exe")]
    except PackageNotFoundError:
        return None
    return str(found[0].locate()) if found else None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
