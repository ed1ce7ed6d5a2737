"""The header of a run: its selection, its revision, its machine."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megamoe import CHECKOUT, SPECS
from megamoe.records.lines import RunHeader, Shard
from megamoe.spec.selection import Selection

EXPECTED = CHECKOUT / "conformance" / "expected.yaml"


def run_header(
    selection: Selection,
    owed_rows: int,
    specs: Path | None = None,
    expected: Path | None = None,
    shard: Shard | None = None,
) -> RunHeader:
    """The header of a run that starts now, with a unique id. `specs`, `expected`: the run's files, None for ours.

    `shard`: the run's part of a run set.
    """
    started = datetime.now(UTC)
    return RunHeader(
        run=f"{started:%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}",
        started=started.isoformat(timespec="seconds"),
        selection=selection.kept,
        owed_rows=owed_rows,
        git_revision=git_revision(CHECKOUT),
        megamoe=version("megamoe"),
        python=platform.python_version(),
        torch=installed_version("torch"),
        numpy=installed_version("numpy"),
        platform=platform.platform(),
        machine=platform.machine(),
        cpu_count=os.cpu_count(),
        digests=digests_of(specs, expected),
        shard=shard,
    )


def digests_of(specs: Path | None = None, expected: Path | None = None) -> dict[str, str]:
    """SHA-256 of the specs, of the file of expected failures, and of the code on disk.

    The code means megamoe, backends and the pinned versions: two trees that differ in any of them have different
    digests, committed or not.
    """
    package = Path(__file__).resolve().parents[1]
    code = [path for room in (package, package.parent / "backends") for path in room.rglob("*")]
    pins = [package.parent / name for name in ("constraints.txt", "pyproject.toml")]
    return {
        "specs": _digest(sorted((specs or SPECS).glob("*.yaml")), specs or SPECS),
        "expected": _digest([expected or EXPECTED], (expected or EXPECTED).parent, named=False),
        "code": _digest(sorted(path for path in (*code, *pins) if path.suffix != ".pyc"), package.parent),
    }


def _digest(paths: Sequence[Path], root: Path, named: bool = True) -> str:
    whole = hashlib.sha256()
    for path in paths:
        if path.is_file() and "specs" not in path.relative_to(root).parts[:-1]:
            name = str(path.relative_to(root)) if named else ""
            whole.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def git_revision(folder: Path) -> str | None:
    """The commit checked out at `folder`, with "+changes" if files differ from it; None outside a git work tree."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return f"{commit}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit


def committed(path: Path) -> bool:
    """Whether git tracks the file at `path`, unchanged since its commit."""
    tracked = _git(path.parent, "ls-files", "--error-unmatch", "--", path.name)
    return bool(tracked) and _git(path.parent, "diff", "--name-only", "HEAD", "--", path.name) == ""


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
