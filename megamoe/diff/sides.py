"""One side of a comparison: record files, folders of them, or the records that a git revision tracks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

from megamoe.contract import DeviceFacts
from megamoe.records.files import RecordFile, parse_records, read_records
from megamoe.records.lines import RunHeader

BASELINES = "results/baselines"
MAX_GIT_SECONDS = 60


class ComparisonError(Exception):
    """Two sides that cannot be compared; the text says why and what would be right."""


@dataclass(frozen=True, slots=True)
class Side:
    """The record files of one side. Messages call it `label`."""

    label: str
    files: tuple[RecordFile, ...]

    @property
    def headers(self) -> dict[str, RunHeader]:
        """The runs of the files, by id."""
        return {header.run: header for file in self.files for header in file.headers}

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about torn files."""
        return tuple(file.torn for file in self.files if file.torn)


def read_side(name: str, root: Path | None = None) -> Side:
    """The side that `name` means: a file, a folder of *.jsonl, REV (its results/baselines) or REV:PATH.

    A name that exists as a path is a path. git runs in `root`, the current folder by default. Raises ComparisonError or
    RecordError.
    """
    if not name:
        raise ComparisonError("a side has an empty name; give a record file, a folder of them, or a git revision")
    path = Path(name)
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if not files:
            raise ComparisonError(f"there is no *.jsonl in the folder {name}")
        return Side(name, tuple(read_records(file) for file in files))
    if path.exists():
        return Side(name, (read_records(path),))
    return _tracked(name, root or Path.cwd())


def _tracked(name: str, root: Path) -> Side:
    revision, colon, inside = name.partition(":")
    commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        raise ComparisonError(f"{name}: there is no such file or folder, and {revision!r} is no git revision here")
    where = commit.decode().strip()
    inside = inside.rstrip("/") if colon else BASELINES
    listed = _git(root, "ls-tree", "-r", "-z", "--name-only", "--full-tree", where, "--", inside)
    names = [path for path in (listed or b"").decode().split("\0") if path]
    paths = [path for path in names if path == inside or _directly_in(path, inside)]
    if not paths:
        raise ComparisonError(f"{name}: revision {where[:12]} tracks no record file at {inside}")
    label = name if revision == where else f"{name} ({where[:12]})"
    return Side(label, tuple(_blob(root, where, path) for path in paths))


def _directly_in(path: str, folder: str) -> bool:
    return Path(path).parent == Path(folder) and path.endswith(".jsonl")


def _blob(root: Path, commit: str, path: str) -> RecordFile:
    data = _git(root, "cat-file", "blob", f"{commit}:{path}")
    if data is None:
        raise ComparisonError(f"git cannot read {commit[:12]}:{path}")
    return parse_records(Path(f"{commit[:12]}:{path}"), data)


def _git(root: Path, *arguments: str) -> bytes | None:
    """The output of git, None if it refuses."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, timeout=MAX_GIT_SECONDS, check=False)
    except OSError as error:
        raise ComparisonError(f"git cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise ComparisonError(f"git {arguments[0]} did not end within {MAX_GIT_SECONDS} s") from None
    return done.stdout if done.returncode == 0 else None


# The facts that decide how fast a device is. Not the clocks as found: an idle device lowers them.
_IDENTITY = ("name", "compute_capability", "driver", "toolkit", "multiprocessors", "memory_bytes", "power_limit_w")


def differences_of_machines(before: Side, after: Side, kinds: Set[str]) -> list[str]:
    """Sentences about devices and versions that differ between the sides, or within one.

    `kinds`: of the keys in common. Verdicts and counters depend on no machine, figures on the assembler, times on
    everything.
    """
    found: list[str] = []
    if "figures" in kinds:
        assemblers = [{line.assembler for file in side.files for line in file.figures} for side in (before, after)]
        for name in sorted({one.partition(" ")[0] for one in assemblers[0] | assemblers[1]}):
            versions = [[one for one in side if one.partition(" ")[0] == name] for side in assemblers]
            found += _differing(f"assembler {name}", versions) if all(versions) else []
    return found + (_timing_differences(before, after) if "timing" in kinds else [])


def _timing_differences(before: Side, after: Side) -> list[str]:
    found: list[str] = []
    headers: list[list[RunHeader]] = [[], []]
    for side, mine in zip((before, after), headers, strict=True):
        known = side.headers
        for run in sorted({line.run for file in side.files for line in file.timings}):
            if run in known:
                mine.append(known[run])
            else:
                found.append(f"{side.label} has no header of run {run}, so that its machine is unknown")
    if not all(headers):
        return found
    for name in _IDENTITY:
        found += _differing(f"device {name}", [[_of(header.device, name) for header in side] for side in headers])
    found += _differing("torch", [[header.torch or "none" for header in side] for side in headers])
    for name in sorted({name for side in headers for header in side for name in header.software}):
        found += _differing(name, [[header.software.get(name, "none") for header in side] for side in headers])
    return found


def _of(device: DeviceFacts | None, name: str) -> str:
    return "none" if device is None else str(getattr(device, name))


def _differing(what: str, sides: Iterable[Iterable[str]]) -> list[str]:
    before, after = (" and ".join(sorted(set(side))) for side in sides)
    if before == after and " and " not in before:
        return []
    return [f"{what}: {before} before, {after} after"]
