"""Collects the material of a report: the lines of record files, ordered by their runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from megamoe.contract import DeviceFacts
from megamoe.records.files import RUNS, RecordFile, files_in, newest_run, read_records, record_files_of
from megamoe.records.keys import Key
from megamoe.records.lines import (
    BASELINE_RUN,
    Acceptance,
    Agreement,
    AnyLine,
    Figures,
    Record,
    RecordError,
    RunHeader,
    Timing,
)

DEFAULT_FOLDERS = ("results/baselines", "results/records")


class Subject(NamedTuple):
    """Backend, target and executor. A heat map has a band of rows for each."""

    backend: str
    target: str
    executor: str

    def __str__(self) -> str:
        return " ".join(self)


@dataclass(frozen=True, slots=True)
class Material:
    """Lines of every kind, each once, from the oldest run to the newest. `notes`: sentences that the reader must see.

    A run without a header in the files counts as older than any run with one.
    """

    files: tuple[RecordFile, ...]
    runs: tuple[RunHeader, ...]
    records: tuple[Record, ...]
    agreements: tuple[Agreement, ...]
    timings: tuple[Timing, ...]
    figures: tuple[Figures, ...]
    acceptances: tuple[Acceptance, ...]
    notes: tuple[str, ...]

    @property
    def subjects(self) -> list[Subject]:
        """The subjects that have a verdict or a time: those of the newest run first, each part in natural order."""
        lines: list[Record | Timing] = [*self.records, *self.timings]
        runs = {header.run: place for place, header in enumerate(self.runs)}
        newest = max((runs.get(line.run, -1) for line in lines), default=-1)
        fresh = {_subject(line) for line in lines if runs.get(line.run, -1) == newest}
        return sorted(set(map(_subject, lines)), key=lambda one: (one not in fresh, [*map(natural, one)]))

    @property
    def ops(self) -> list[str]:
        """The ops of all lines, in natural order."""
        return sorted({line.op for line in (*self.records, *self.timings, *self.figures)}, key=natural)

    @property
    def devices(self) -> dict[str, DeviceFacts | None]:
        """Run -> the device that its rows ran on."""
        return {header.run: header.device for header in self.runs}

    @property
    def latest(self) -> list[Record]:
        """The newest record of each row, in the order of `records`."""
        return list({record.row: record for record in self.records}.values())

    @property
    def latest_timings(self) -> list[Timing]:
        """The newest timing of each row and temperature."""
        return list({Key.of(one): one for one in self.timings}.values())


def _subject(line: Record | Timing) -> Subject:
    return Subject(line.backend, line.target, line.executor)


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key in natural order: A2 before A10, hd=64 before hd=128."""
    parts = re.split(r"([0-9]+)", text)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts if part]


def record_files(given: Sequence[Path] = (), home: Path = Path()) -> list[Path]:
    """The files to read: the given ones (a folder stands for the *.jsonl in it), or else the default files in `home`.

    The defaults are results/baselines, results/records and the newest file of results/runs. Raises RecordError if there
    is none.
    """
    if given:
        return files_in(given)
    found = [file for folder in DEFAULT_FOLDERS for file in record_files_of(home / folder)]
    newest = newest_run(home)
    found += [newest] if newest else []
    if not found:
        places = ", ".join((*DEFAULT_FOLDERS, str(RUNS)))
        raise RecordError(f"there is no record file in {places}: run `megamoe run` first, or name the files")
    return found


def gather(paths: Sequence[Path]) -> Material:
    """Reads the files. Raises RecordError if one cannot be read, or if none holds a line.

    A baseline says what is expected, not what happened last, so it counts as older than any run. All baselines share
    one run id; here each gets the name of its file.
    """
    files = tuple(_with_name_of_its_own(read_records(path)) for path in paths)
    lines = list(dict.fromkeys(_Once(line) for file in files for line in file.lines))
    if not lines:
        names = ", ".join(str(path) for path in paths)
        raise RecordError(f"nothing to report: there is no whole line in {names}")
    found = [one.line for one in lines]
    headers = [line for line in found if isinstance(line, RunHeader)]
    headers.sort(key=lambda header: (not header.run.startswith(BASELINE_RUN), header.started, header.run))
    order = {header.run: place for place, header in enumerate(headers)}
    found.sort(key=lambda line: order.get(line.run, -1))
    return Material(
        files,
        tuple({header.run: header for header in headers}.values()),
        tuple(line for line in found if isinstance(line, Record)),
        tuple(line for line in found if isinstance(line, Agreement)),
        tuple(line for line in found if isinstance(line, Timing)),
        tuple(line for line in found if isinstance(line, Figures)),
        tuple(sorted((line for line in found if isinstance(line, Acceptance)), key=lambda line: line.accepted)),
        tuple(_notes(files, found, order)),
    )


def _with_name_of_its_own(file: RecordFile) -> RecordFile:
    if not any(header.run == BASELINE_RUN for header in file.headers):
        return file
    name = f"{BASELINE_RUN} {file.path.stem}"
    lines = (line.model_copy(update={"run": name}) if line.run == BASELINE_RUN else line for line in file.lines)
    return replace(file, lines=tuple(lines))


class _Once:
    """Compares lines by their text, so that a run in two files counts once."""

    __slots__ = ("line", "text")

    def __init__(self, line: AnyLine) -> None:
        self.line, self.text = line, line.model_dump_json()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Once) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def _notes(files: Sequence[RecordFile], lines: Sequence[AnyLine], known: dict[str, int]) -> Iterable[str]:
    for file in files:
        if file.torn:
            yield file.torn
        if not file.lines:
            yield f"{file.path} holds no line"
    stray = sorted({line.run for line in lines if not isinstance(line, Acceptance)} - known.keys())
    if stray:
        more = f" and {len(stray) - 1} more" if len(stray) > 1 else ""
        yield f"run {stray[0]}{more} has no header in these files, so the origin of its lines is unknown"
