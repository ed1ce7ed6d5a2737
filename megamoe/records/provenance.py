"""The header of a run: its selection, its revision, its machine."""

from __future__ import annotations

import os
import platform
import subprocess
import uuid
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megamoe import CHECKOUT
from megamoe.records.lines import RunHeader
from megamoe.spec.selection import Selection


def run_header(selection: Selection, owed_rows: int) -> RunHeader:
    """The header of a run that starts now; its id is unique."""
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
    )


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


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
