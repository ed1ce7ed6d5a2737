"""A tracked baseline: the verdict, counters and compiler figures that a change must keep, or accept on purpose.

`results/baselines/vm.jsonl` holds every row of the smoke profile on the VM. It is a record file without the values that
differ between runs or machines (host seconds, error metrics, input digests, run ids). It is sorted, so that a diff
shows exactly what changed: a program's figures and its rows, and after each row the acceptances that explain its
current state, newest first. This order lets git merge acceptances from two branches: the older acceptances, which
neither branch changes, separate one row's additions from the next row's, and the header stays the first acceptance's. A
device's baseline also holds times, with their runs. Only rows that passed are in a baseline.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from megamoe import CHECKOUT
from megamoe.contract import Row
from megamoe.records.files import RecordFile, locked, read_records, write_file
from megamoe.records.keys import Key, KeyedLine
from megamoe.records.lines import BASELINE_RUN, Acceptance, AnyLine, Figures, Record, RecordError, RunHeader, Timing
from megamoe.spec.selection import Selection, SelectionError, parse_row

BASELINES = CHECKOUT / "results" / "baselines"
VM_BASELINE = BASELINES / "vm.jsonl"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The lines of one baseline file, keyed by their subject. Empty if there is no file at `path`."""

    path: Path
    headers: Mapping[str, RunHeader] = field(default_factory=dict[str, RunHeader])
    records: Mapping[Row, Record] = field(default_factory=dict[Row, Record])
    figures: Mapping[Key, Figures] = field(default_factory=dict[Key, Figures])
    timings: Mapping[Key, Timing] = field(default_factory=dict[Key, Timing])
    acceptances: tuple[Acceptance, ...] = ()

    @property
    def lines(self) -> Iterator[AnyLine]:
        """All lines in the order of the file."""
        yield from (header for _, header in sorted(self.headers.items()))
        lines = (*self.figures.values(), *self.records.values(), *self.timings.values())
        placed = [(_place(line), line) for line in lines]
        placed += [(_place_of_acceptance(line, at), line) for at, line in enumerate(self.acceptances)]
        yield from (line for _, line in sorted(placed, key=lambda pair: pair[0]))


_Place = tuple[str, str, str, str, str, int, str, int]


def _place(line: KeyedLine) -> _Place:
    key = Key.of(line)
    schedule = "eager" if isinstance(line, Timing) else key.schedule
    kind = 1 if isinstance(line, Timing) else 0
    return key.case, key.backend, key.target, key.executor, schedule, kind, key.temperature or key.assembler, 0


def _place_of_acceptance(line: Acceptance, at: int) -> _Place:
    """Sorts after every line that the acceptance may be about. `at`: the number of earlier acceptances."""
    try:
        case, backend, target, executor, schedule = parse_row(line.row)
        return case, backend, target, executor, schedule, 2, "", -at
    except SelectionError:
        return line.row, "", "", "", "", 2, "", -at


def baseline_for(executor: str, header: RunHeader | None) -> Path:
    """The baseline file for rows of `executor`: the VM's, or the device's. Raises RecordError if the run had no
    device."""
    if executor == "vm":
        return VM_BASELINE
    if header is None or header.device is None:
        raise RecordError(f"rows of {executor} come from a run whose header describes no device; name a --baseline")
    words = re.findall(r"[a-z0-9]+", header.device.name.lower())
    return BASELINES / f"{'-'.join(word for word in words if word not in ('nvidia', 'hbm3e', 'hbm3'))}.jsonl"


def settled(record: Record) -> Record:
    """The part of `record` that two runs on two machines repeat: status, counters in order, and program."""
    kept = dict(sorted(record.counters.items()))
    return Record(
        run=BASELINE_RUN,
        op=record.op,
        **record.row._asdict(),
        status=record.status,
        sentence="" if record.status == "passed" else record.sentence,
        counters=kept,
        judge_host_seconds=None,
        program_sha256=record.program_sha256,
    )


def settled_figures(figures: Figures) -> Figures:
    """The same for figures: kernels and their numbers, sorted by name."""
    kernels = {entry: dict(sorted(numbers.items())) for entry, numbers in sorted(figures.kernels.items())}
    return figures.model_copy(update={"run": BASELINE_RUN, "cubin_sha256": None, "kernels": kernels})


def rebuilt(
    baseline: Baseline, lines: Iterable[KeyedLine], headers: Mapping[str, RunHeader], accepted: Sequence[Acceptance]
) -> Baseline:
    """A baseline of `lines`, with the headers of their runs (`headers` takes precedence) and `accepted` appended.

    Without times, all lines are settled under one header. With times, lines keep their runs, because a time means
    nothing without the device that it was measured on.
    """
    lines = list(lines)
    known = {**baseline.headers, **headers}
    if any(isinstance(line, Timing) for line in lines):
        kept = {line.run: known[line.run] for line in lines if line.run in known}
    else:
        latest = max(headers.values(), key=lambda header: header.started, default=None)
        first = baseline.headers.get(BASELINE_RUN, latest)
        kept = {} if first is None else {BASELINE_RUN: _settled_header(first, latest or first)}
        lines = [settled(line) if isinstance(line, Record) else line for line in lines]
        lines = [settled_figures(line) if isinstance(line, Figures) else line for line in lines]
    return Baseline(
        baseline.path,
        kept,
        {line.row: line for line in lines if isinstance(line, Record)},
        {Key.of(line): line for line in lines if isinstance(line, Figures)},
        {Key.of(line): line for line in lines if isinstance(line, Timing)},
        (*baseline.acceptances, *accepted),
    )


def _settled_header(first: RunHeader, latest: RunHeader) -> RunHeader:
    """The header for settled lines: the header of the `first` acceptance, with the compilers of the latest run.

    Nothing else in it changes and it counts no rows. Otherwise acceptances on two branches would conflict.
    """
    selection: dict[str, str | tuple[str, ...]] = Selection().kept
    anywhere = {"platform": "any", "machine": "any", "cpu_count": None, "device": None, "digests": {}}
    unsaid = {"owed_rows": 0, "git_revision": None, "software": latest.software}
    return first.model_copy(update={"run": BASELINE_RUN, "selection": selection, **anywhere, **unsaid})


def read_baseline(path: Path) -> Baseline:
    """Reads the baseline at `path`. Returns an empty one if there is no such file.

    Raises RecordError if the file is not a record file, has a torn line, has two lines with one key, or holds a row
    that did not pass.
    """
    if not path.exists():
        return Baseline(path)
    found = read_records(path)
    if found.torn:
        raise RecordError(f"{found.torn}; a baseline is written whole: restore it from git")
    for line in (*found.records, *found.timings):
        if line.status != "passed":
            raise RecordError(f"{path}: the baseline holds {Key.of(line)} as {line.status}; take out what did not pass")
    # The file has the newest acceptance of a row first. The sort is stable, so equal timestamps keep their order.
    acceptances = [*reversed(found.acceptances)]
    return Baseline(
        path,
        _keyed(found, "run", ((header.run, header) for header in found.headers)),
        _keyed(found, "record", ((record.row, record) for record in found.records)),
        _keyed(found, "figures", ((Key.of(line), line) for line in found.figures)),
        _keyed(found, "timing", ((Key.of(line), line) for line in found.timings)),
        tuple(sorted(acceptances, key=lambda line: line.accepted)),
    )


_K = TypeVar("_K", bound=object)
_L = TypeVar("_L", bound=AnyLine)


def _keyed(file: RecordFile, kind: str, pairs: Iterable[tuple[_K, _L]]) -> dict[_K, _L]:
    lines: dict[_K, _L] = {}
    for key, line in pairs:
        if key in lines:
            raise RecordError(f"{file.path}: the baseline has two lines of kind {kind} about {key}; keep one")
        lines[key] = line
    return lines


def write_baseline(baseline: Baseline) -> None:
    """Replaces the file atomically: a reader sees the old one or the new one. Raises RecordError if it cannot be
    written."""
    text = "".join(f"{line.model_dump_json()}\n" for line in baseline.lines)
    write_file(baseline.path, text, "the baseline")


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Locks the baseline at `path`. Hold the lock from before the read until after the write.

    Raises RecordError if another command holds the lock, or if the folder cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RecordError(f"cannot write the baseline {path}: {error.strerror}") from error
    with locked(folder, f"the baselines in {path.parent} are being written by another command; try again"):
        yield
