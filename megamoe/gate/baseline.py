"""A tracked baseline: the verdict, the counters and the compiler figures that a change must keep, or accept on purpose.

`results/baselines/vm.jsonl` holds every row of the smoke profile on the VM. It is a record file, stripped of all that
another run or another machine would not repeat (host seconds, error metrics, digests of inputs, ids of runs), sorted,
and one line a row, so that a diff shows exactly what changed. A file of a device holds times instead, with their runs.
Acceptance lines at the end say who took which change and why. A line is there only if it passed.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from megamoe import CHECKOUT
from megamoe.contract import Row
from megamoe.records.files import RecordFile, read_records
from megamoe.records.lines import (
    Acceptance,
    AnyLine,
    Figures,
    Record,
    RecordError,
    RunHeader,
    Timing,
)
from megamoe.spec.selection import Selection

RUN = "baseline"
"""The id of the run in lines that are the same whichever run they come from."""
BASELINES = CHECKOUT / "results" / "baselines"
VM_BASELINE = BASELINES / "vm.jsonl"


class FiguresKey(NamedTuple):
    """What compiler figures are about. `assembler` is its name; its version is in the line."""

    case: str
    backend: str
    target: str
    assembler: str

    def __str__(self) -> str:
        return f"{self.case} on {self.backend} {self.target}, assembled by {self.assembler}"


class TimingKey(NamedTuple):
    """What a time is about."""

    case: str
    backend: str
    target: str
    executor: str
    temperature: str


@dataclass(frozen=True, slots=True)
class Baseline:
    """The lines of one baseline file by what they are about. `path` need not exist: then all of them are empty."""

    path: Path
    headers: Mapping[str, RunHeader] = field(default_factory=dict[str, RunHeader])
    records: Mapping[Row, Record] = field(default_factory=dict[Row, Record])
    figures: Mapping[FiguresKey, Figures] = field(default_factory=dict[FiguresKey, Figures])
    timings: Mapping[TimingKey, Timing] = field(default_factory=dict[TimingKey, Timing])
    acceptances: tuple[Acceptance, ...] = ()

    @property
    def lines(self) -> Iterator[AnyLine]:
        """All lines in the order of the file: by kind and key, acceptances in the order in which they were given."""
        for group in (self.headers, self.records, self.figures, self.timings):
            yield from (line for _, line in sorted(group.items(), key=lambda pair: pair[0]))
        yield from self.acceptances


def figures_key(figures: Figures) -> FiguresKey:
    """The key of a line of figures: the first word of its assembler is the name."""
    return FiguresKey(figures.case, figures.backend, figures.target, figures.assembler.partition(" ")[0])


def timing_key(timing: Timing) -> TimingKey:
    """The key of a line of times."""
    return TimingKey(timing.case, timing.backend, timing.target, timing.executor, timing.temperature)


def baseline_for(executor: str, header: RunHeader | None) -> Path:
    """The file for rows of `executor`: the VM's, or that of the device of the run. RecordError if it had none."""
    if executor == "vm":
        return VM_BASELINE
    if header is None or header.device is None:
        raise RecordError(f"rows of {executor} come from a run whose header describes no device; name a --baseline")
    words = re.findall(r"[a-z0-9]+", header.device.name.lower())
    return BASELINES / f"{'-'.join(word for word in words if word not in ('nvidia', 'hbm3e', 'hbm3'))}.jsonl"


def settled(record: Record) -> Record:
    """`record` without all that is not compared: what two runs on two machines have in common."""
    kept = dict(sorted(record.counters.items()))
    return Record(
        run=RUN,
        op=record.op,
        **record.row._asdict(),
        status=record.status,
        sentence="" if record.status == "passed" else record.sentence,
        counters=kept,
        judge_host_seconds=None,
        program_sha256=record.program_sha256,
    )


def settled_figures(figures: Figures) -> Figures:
    """As `settled`: the numbers of every kernel in order of their names."""
    kernels = {entry: dict(sorted(numbers.items())) for entry, numbers in sorted(figures.kernels.items())}
    return figures.model_copy(update={"run": RUN, "cubin_sha256": None, "kernels": kernels})


def rebuilt(
    baseline: Baseline,
    lines: Iterable[Record | Figures | Timing],
    headers: Mapping[str, RunHeader],
    accepted: Sequence[Acceptance],
) -> Baseline:
    """A baseline of `lines`, with the headers of their runs (those of `headers` first) and with `accepted` at its end.

    Lines of a machine that repeats exactly are settled, under one header; those of a device keep their runs, as times
    mean nothing without the device that took them.
    """
    lines = list(lines)
    known = {**baseline.headers, **headers}
    if any(isinstance(line, Timing) for line in lines):
        kept = {line.run: known[line.run] for line in lines if line.run in known}
    else:
        latest = max(headers.values(), key=lambda header: header.started, default=baseline.headers.get(RUN))
        rows = sum(isinstance(line, Record) for line in lines)
        kept = {} if latest is None else {RUN: _settled_header(latest, rows)}
        lines = [settled(line) if isinstance(line, Record) else line for line in lines]
        lines = [settled_figures(line) if isinstance(line, Figures) else line for line in lines]
    return Baseline(
        baseline.path,
        kept,
        {line.row: line for line in lines if isinstance(line, Record)},
        {figures_key(line): line for line in lines if isinstance(line, Figures)},
        {timing_key(line): line for line in lines if isinstance(line, Timing)},
        (*baseline.acceptances, *accepted),
    )


def _settled_header(header: RunHeader, rows: int) -> RunHeader:
    """The header of lines that are the same on every host: versions and revision of whoever accepted last."""
    selection: dict[str, str | tuple[str, ...]] = asdict(Selection())
    anywhere = {"platform": "any", "machine": "any", "cpu_count": None, "device": None}
    return header.model_copy(update={"run": RUN, "selection": selection, "owed_rows": rows, **anywhere})


def read_baseline(path: Path) -> Baseline:
    """The baseline at `path`, an empty one if there is no such file.

    RecordError for a file that is no record file, has a torn line, says something twice, or holds what did not pass.
    """
    if not path.exists():
        return Baseline(path)
    found = read_records(path)
    if found.torn:
        raise RecordError(f"{found.torn}; a baseline is written whole: restore it from git")
    for line in (*found.records, *found.timings):
        if line.status != "passed":
            raise RecordError(f"{path}: the baseline holds {_name(line)} as {line.status}; take out what did not pass")
    return Baseline(
        path,
        _keyed(found, "run", ((header.run, header) for header in found.headers)),
        _keyed(found, "record", ((record.row, record) for record in found.records)),
        _keyed(found, "figures", ((figures_key(line), line) for line in found.figures)),
        _keyed(found, "timing", ((timing_key(line), line) for line in found.timings)),
        found.acceptances,
    )


def _name(line: Record | Timing) -> str:
    return str(line.row) if isinstance(line, Record) else " ".join(timing_key(line))


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
    """Replaces the file at once: whoever reads sees the old one or the new one. RecordError if it cannot be written."""
    text = b"".join(line.model_dump_json().encode() + b"\n" for line in baseline.lines)
    temporary = None
    try:
        baseline.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".jsonl.part", dir=baseline.path.parent)
        with open(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, baseline.path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise RecordError(f"cannot write the baseline {baseline.path}: {error.strerror}") from error


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Keeps everybody else from changing the baseline at `path` between reading and writing it.

    RecordError if somebody else is at it, or its folder cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise RecordError(f"cannot write the baseline {path}: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RecordError(f"the baselines in {path.parent} are being written by another command; try again") from None
    finally:
        os.close(folder)
