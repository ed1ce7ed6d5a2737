"""What can run here and, for what cannot, why."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megamoe import CHECKOUT
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
from megamoe.spec.error import SpecError
from megamoe.spec.load import load_specs


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis. `detail` says what was found, or why it is missing and what that costs."""

    subject: str
    works: bool
    detail: str


def diagnose(specs: Path | None = None) -> Iterator[Finding]:
    """Every finding, cheap ones first. Nothing raises: whatever is broken is a finding that does not work."""
    yield Finding("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Finding("megamoe", True, f"{installed_version('megamoe')}, revision {git_revision(CHECKOUT)}")
    for name in ("torch", "numpy"):
        found = installed_version(name)
        yield Finding(name, found is not None, found or f"not installed: pip install {name}")
    try:
        ops = tuple(load_specs(specs))
        yield Finding("specs", True, f"ops: {', '.join(ops)}")
    except SpecError as error:
        ops = ()
        yield Finding("specs", False, str(error))
    for name in backend_names():
        yield from _backend_findings(name, ops)
    for name in executor_names():
        yield from _executor_findings(name)
    yield _gpu()
    yield _assembler()


def _backend_findings(name: str, ops: tuple[str, ...]) -> Iterator[Finding]:
    try:
        backend = load_backend(name)
        offers = {op: backend.targets(op) for op in ops}
        absent = backend.missing() if isinstance(backend, Borrowed) else None
    except Exception as error:
        yield Finding(f"backend {name}", False, f"cannot be loaded: {_one_line(error)}")
        return
    if isinstance(backend, Borrowed):
        has = [f"{op} for {', '.join(targets)}" for op, targets in offers.items() if targets]
        yield Finding(f"backend {name}", absent is None, absent or f"{'; '.join(has)}; on a device only")
        return
    for op, targets in offers.items():
        missing = [target for target in TARGETS if target not in targets]
        detail = f"for {', '.join(targets)}" if targets else "no kernel"
        yield Finding(
            f"backend {name}, {op}",
            bool(targets),
            detail + (f"; not for {', '.join(missing)}" * bool(targets and missing)),
        )


def _executor_findings(name: str) -> Iterator[Finding]:
    try:
        executor = load_executor(name)
        reasons: dict[Target, str | None] = {target: executor.unavailable(target) for target in TARGETS}
    except Exception as error:
        yield Finding(f"executor {name}", False, f"cannot be loaded: {_one_line(error)}")
        return
    for target, reason in reasons.items():
        yield Finding(f"executor {name}, {target}", reason is None, reason or "runs here")


def _gpu() -> Finding:
    try:
        import torch

        if torch.cuda.is_available():
            device = torch.cuda.get_device_properties(torch.cuda.current_device())
            detail = (
                f"{device.name}, compute capability {device.major}.{device.minor}, {device.multi_processor_count} "
                f"multiprocessors, {device.total_memory / 2**30:.0f} GiB, L2 of {device.L2_cache_size >> 20} MiB; "
                f"torch for CUDA {torch.version.cuda}"
            )
            return Finding("GPU", True, detail)
        built_for = torch.version.cuda
    except Exception as error:
        return Finding("GPU", False, f"torch cannot say: {_one_line(error)}")
    why = "no device or driver is visible" if built_for else "this torch is built without CUDA"
    return Finding("GPU", False, f"none: {why}; the vm executor needs none, and rows on gpu are owed if asked for only")


def _assembler() -> Finding:
    """ptxas, from the nvidia-cuda-nvcc wheel or from the search path."""
    path = _packaged_ptxas() or shutil.which("ptxas")
    if path is None:
        return Finding("ptxas", False, "not found: pip install nvidia-cuda-nvcc; assembling is then `unsupported`")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("ptxas", False, f"does not run: {_one_line(error)}")
    release = [line for line in done.stdout.splitlines() if "release" in line]
    return Finding("ptxas", True, release[0].strip() if release else "of unknown release")


def _packaged_ptxas() -> str | None:
    from importlib.metadata import PackageNotFoundError, files

    try:
        found = [file for file in files("nvidia-cuda-nvcc") or () if file.name in ("ptxas", "ptxas.exe")]
    except PackageNotFoundError:
        return None
    return str(found[0].locate()) if found else None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
