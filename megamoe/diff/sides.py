"""One side of a comparison: record files, folders of them, or the records of a git revision; and its lines by key."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, TypeVar

from megamoe.contract import DeviceFacts
from megamoe.records.files import (
    WHERE_RUNS_ARE,
    RecordFile,
    files_in,
    is_of_another_kind,
    parse_records,
    read_records,
)
from megamoe.records.keys import Key, KeyedLine
from megamoe.records.lines import BASELINE_RUN, AnyLine, Figures, Record, RunHeader, Timing

BASELINES = "results/baselines"
MAX_GIT_SECONDS = 60
SOFTWARE = "vm"
"""The executor that behaves the same on every machine."""


class ComparisonError(Exception):
    """Two sides cannot be compared; the text says why and what would be right."""


@dataclass(frozen=True, slots=True)
class Side:
    """The record files of one side. Messages call it `label`.

    `whole`: it consists of all baselines of a revision, one file per machine. `remarks`: what was left out, and why.
    """

    label: str
    files: tuple[RecordFile, ...]
    whole: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def headers(self) -> dict[str, RunHeader]:
        """The headers of the files' runs, by run id."""
        return {header.run: header for file in self.files for header in file.headers}

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about torn files and about what was left out."""
        return (*(file.torn for file in self.files if file.torn), *self.remarks)

    @property
    def backends(self) -> list[str]:
        """The backends of all lines, sorted."""
        return sorted({line.backend for file in self.files for line in file.lines if isinstance(line, KeyedLine)})


def read_side(name: str, root: Path | None = None) -> Side:
    """The side that `name` refers to: a file, a folder of *.jsonl, REV (its results/baselines) or REV:PATH.

    A name that exists as a path is a path. git runs in `root`, by default the current folder. Raises ComparisonError or
    RecordError.
    """
    if not name:
        raise ComparisonError("a side has an empty name; give a record file, a folder of them, or a git revision")
    path = Path(name)
    if path.exists():
        return Side(name, tuple(read_records(file) for file in files_in([path])))
    return _tracked(name, root or Path.cwd())


def _tracked(name: str, root: Path) -> Side:
    revision, colon, inside = name.partition(":")
    commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        raise ComparisonError(
            f"{name}: there is no such file or folder, and {revision!r} is no git revision here; {WHERE_RUNS_ARE}"
        )
    where = commit.decode().strip()
    inside = inside.rstrip("/") if colon else BASELINES
    listed = _git(root, "ls-tree", "-r", "-z", "--name-only", "--full-tree", where, "--", inside)
    names = [path for path in (listed or b"").decode().split("\0") if path]
    paths = [path for path in names if path == inside or _directly_in(path, inside)]
    held = {path: _blob(root, where, path) for path in paths}
    kept = [path for path, data in held.items() if path == inside or not is_of_another_kind(data)]
    if not kept:
        raise ComparisonError(f"{name}: revision {where[:12]} tracks no record file at {inside}")
    label = name if revision == where else f"{name} ({where[:12]})"
    files = tuple(parse_records(Path(f"{where[:12]}:{path}"), held[path]) for path in kept)
    return Side(label, files, whole=not colon)


def _directly_in(path: str, folder: str) -> bool:
    return Path(path).parent == Path(folder) and path.endswith(".jsonl")


def _blob(root: Path, commit: str, path: str) -> bytes:
    data = _git(root, "cat-file", "blob", f"{commit}:{path}")
    if data is None:
        raise ComparisonError(f"git cannot read {commit[:12]}:{path}")
    return data


def _git(root: Path, *arguments: str) -> bytes | None:
    """The output of git; None if git fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, timeout=MAX_GIT_SECONDS, check=False)
    except OSError as error:
        raise ComparisonError(f"git cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise ComparisonError(f"git {arguments[0]} did not end within {MAX_GIT_SECONDS} s") from None
    return done.stdout if done.returncode == 0 else None


def where_both_ran(before: Side, after: Side, across: bool = False) -> tuple[Side, Side]:
    """Returns both sides. If one is `whole` and the other is not, keeps only baselines from where the other side ran.

    A run on the VM must not be compared with a device's baseline. `across`: any device will do. ComparisonError if no
    baseline is left.
    """
    if before.whole == after.whole:
        return before, after
    if before.whole:
        return _of_places(before, after, across), after
    return before, _of_places(after, before, across)


def _of_places(whole: Side, other: Side, across: bool) -> Side:
    there = {place for file in other.files for place in _places(file, across)}
    if not there:
        return whole
    kept: list[RecordFile] = []
    remarks: list[str] = []
    for file in whole.files:
        here = _places(file, across)
        if not here or here & there:
            kept.append(file)
        else:
            remarks.append(f"{file.path} is left out: {other.label} ran nothing on {_spelt(here)}")
    if not kept:
        held = _spelt({place for file in whole.files for place in _places(file, across)})
        raise ComparisonError(
            f"{whole.label} has baselines of {held}; {other.label} ran on {_spelt(there)}. Name a side that ran there"
        )
    return replace(whole, files=tuple(kept), remarks=(*whole.remarks, *remarks))


def _places(file: RecordFile, across: bool) -> set[tuple[str, str]]:
    """Executor and device of the verdicts and times of a file. The device is "" for a software machine."""
    devices = {header.run: header.device.name for header in file.headers if header.device and not across}
    lines = (*file.records, *file.timings)
    return {(line.executor, "" if line.executor == SOFTWARE else devices.get(line.run, "")) for line in lines}


def _spelt(places: Iterable[tuple[str, str]]) -> str:
    return " and ".join(f"{executor} ({device})" if device else executor for executor, device in sorted(places))


def renamed(before: Side, after: Side, renames: Sequence[str]) -> tuple[Side, Side]:
    """Returns both sides, with backends of `after` renamed to backends of `before`, for each NEW=OLD of `renames`.

    NEW in `after` is compared with OLD in `before`. Lines of NEW in `before` and of OLD in `after` are dropped, so one
    file may serve as both sides. ComparisonError for a name that its side does not have, and for a name used twice.
    """
    names: dict[str, str] = {}
    for text in renames:
        new, equals, old = text.partition("=")
        if not (new and equals and old):
            raise ComparisonError(f"--rename {text!r} is not of the form NEW=OLD, two backends")
        for side, name in ((after, new), (before, old)):
            if name not in side.backends:
                there = ", ".join(side.backends) or "none"
                raise ComparisonError(
                    f"--rename {text}: {side.label} has no line of the backend {name!r}; it has {there}"
                )
        if new in names or old in names.values():
            raise ComparisonError(f"--rename {text}: {new if new in names else old} has a partner already")
        names[new] = old
    if not names:
        return before, after
    held = " and ".join(f"{new} is held against {old}" for new, old in names.items())
    dropped = (names.keys() - set(names.values()), set(names.values()) - names.keys())
    sides = [_without(side, gone) for side, gone in zip((before, after), dropped, strict=True)]
    files = tuple(replace(file, lines=tuple(_under(line, names) for line in file.lines)) for file in sides[1].files)
    return sides[0], replace(sides[1], files=files, remarks=(*sides[1].remarks, held))


def _without(side: Side, backends: Set[str]) -> Side:
    def stays(line: AnyLine) -> bool:
        return not isinstance(line, KeyedLine) or line.backend not in backends

    files = tuple(replace(file, lines=tuple(filter(stays, file.lines))) for file in side.files)
    return replace(side, files=files)


def _under(line: AnyLine, names: Mapping[str, str]) -> AnyLine:
    if not isinstance(line, KeyedLine) or line.backend not in names:
        return line
    return line.model_copy(update={"backend": names[line.backend]})


# The facts that decide how fast a device is. Not the clocks as found: an idle device lowers them.
_IDENTITY = ("name", "compute_capability", "driver", "toolkit", "multiprocessors", "memory_bytes", "power_limit_w")


def differences_of_machines(before: Side, after: Side, kinds: Set[str]) -> list[str]:
    """Sentences about devices and versions that differ between the sides, or within one.

    `kinds`: the kinds of the common keys. Verdicts and counters depend on no machine, figures on the assembler, times
    on everything.
    """
    found: list[str] = []
    if "figures" in kinds:
        assemblers = [{line.assembler for file in side.files for line in file.figures} for side in (before, after)]
        for name in sorted({one.partition(" ")[0] for one in assemblers[0] | assemblers[1]}):
            versions = [[one for one in side if one.partition(" ")[0] == name] for side in assemblers]
            found += _differing(f"assembler {name}", versions) if all(versions) else []
    return found + (_timing_differences(before, after) if "timing" in kinds else [])


def _timing_differences(before: Side, after: Side) -> list[str]:
    """By row: a side may hold rows from several machines, but both sides must have each row from the same one."""
    known = before.headers, after.headers
    unknown = [
        f"{side.label} has no header of run {run}, so that its machine is unknown"
        for side, mine in zip((before, after), known, strict=True)
        for run in sorted({line.run for file in side.files for line in file.timings} - mine.keys())
    ]
    old, new = _runs_by_row(before), _runs_by_row(after)
    pairs = dict.fromkeys((old[key], new[key]) for key in old if key in new)
    found: dict[str, None] = {}
    for pair in pairs:
        headers = [[of[run] for run in sorted(runs) if run in of] for of, runs in zip(known, pair, strict=True)]
        if all(headers):
            found |= dict.fromkeys(_unlike(headers))
    return [*unknown, *found]


def _runs_by_row(side: Side) -> dict[Key, frozenset[str]]:
    runs: dict[Key, set[str]] = {}
    for file in side.files:
        for line in file.timings:
            runs.setdefault(Key.of(line), set()).add(line.run)
    return {key: frozenset(mine) for key, mine in runs.items()}


def _unlike(headers: Sequence[Sequence[RunHeader]]) -> Iterator[str]:
    for name in _IDENTITY:
        yield from _differing(f"device {name}", [[_of(header.device, name) for header in side] for side in headers])
    yield from _differing("torch", [[header.torch or "none" for header in side] for side in headers])
    for name in sorted({name for side in headers for header in side for name in header.software}):
        yield from _differing(name, [[header.software.get(name, "none") for header in side] for side in headers])


def _of(device: DeviceFacts | None, name: str) -> str:
    return "none" if device is None else str(getattr(device, name))


def _differing(what: str, sides: Iterable[Iterable[str]]) -> list[str]:
    before, after = (" and ".join(sorted(set(side))) for side in sides)
    if before == after and " and " not in before:
        return []
    return [f"{what}: {before} before, {after} after"]


# The lines of a side by key


class Lines(NamedTuple):
    """The lines of a side by key. Several lines of one key keep their order."""

    verdicts: dict[Key, list[Record]]
    timings: dict[Key, list[Timing]]
    figures: dict[Key, list[Figures]]

    def keys(self) -> list[Key]:
        """Every key."""
        return [*self.verdicts, *self.timings, *self.figures]


_Line = TypeVar("_Line", bound=KeyedLine)


def by_key(lines: Iterable[_Line]) -> dict[Key, list[_Line]]:
    """`lines` grouped by key."""
    found: dict[Key, list[_Line]] = {}
    for line in lines:
        found.setdefault(Key.of(line), []).append(line)
    return found


def lines_of(side: Side, only: Sequence[str] = ()) -> Lines:
    """The lines of `side` whose key, as text, matches any of the globs `only`; all lines if there are none.

    ComparisonError if one run has two times for one key: a run measures each key once, and copies would outvote other
    runs. Also if one run has two different headers, because it is unknown to which of them its lines belong.
    """
    _refuse_two_origins(side)
    _refuse_copies(side)
    return Lines(
        _matching(by_key(line for file in side.files for line in file.records), only),
        _matching(by_key(line for file in side.files for line in file.timings), only),
        _matching(by_key(line for file in side.files for line in file.figures), only),
    )


def _refuse_two_origins(side: Side) -> None:
    """Refuses a run with two different headers. All baseline files use one run name, so these may differ."""
    first: dict[tuple[str, str], tuple[RunHeader, str]] = {}
    for file in side.files:
        for number, line in enumerate(file.lines, 1):
            if not isinstance(line, RunHeader):
                continue
            place = f"{file.path}, line {number}"
            owner = (line.run, str(file.path) if line.run == BASELINE_RUN else "")
            known, where = first.setdefault(owner, (line, place))
            if known != line:
                names = [name for name in RunHeader.model_fields if getattr(known, name) != getattr(line, name)]
                raise ComparisonError(
                    f"{place}: run {line.run} has a second header, with another {' and '.join(names)}; the first is at "
                    f"{where}. A run has one; keep the one under which its lines were written"
                )


def _refuse_copies(side: Side) -> None:
    places: dict[tuple[Key, str], str] = {}
    for file in side.files:
        for number, line in enumerate(file.lines, 1):
            if not isinstance(line, Timing):
                continue
            key, place = Key.of(line), f"{file.path}, line {number}"
            if (first := places.get((key, line.run))) is not None:
                raise ComparisonError(
                    f"{place}: run {line.run} has a second time of {key}; the first is at {first}. "
                    f"A run times a row once, so that copies count no more than it; keep one of them"
                )
            places[key, line.run] = place


def _matching(lines: dict[Key, list[_Line]], only: Sequence[str]) -> dict[Key, list[_Line]]:
    if not only:
        return lines
    return {key: found for key, found in lines.items() if any(fnmatchcase(str(key), glob) for glob in only)}
