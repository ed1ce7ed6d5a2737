"""Rows to measurements: device times where the executor has a clock, counters and compiler figures everywhere.

On a device the rows of one case share a process and its buffers, so backends are timed in turns on the same memory
(megamoe.bench.case). A row that crashes, hangs or damages memory gets that status, and the other rows are measured
again in a fresh process. An executor without a clock gives only counters (megamoe.judge.run).
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from megamoe.bench.timing import Policy
from megamoe.bench.worker import BenchWorker, Death
from megamoe.contract import DeviceFacts, Row
from megamoe.contract.scratch import scratch_folder
from megamoe.judge.figures import FigureMaker
from megamoe.judge.run import DEFAULT_TIMEOUT_S, Judging, RunSettings, judged
from megamoe.records.files import RecordWriter
from megamoe.records.lines import AnyLine, Figures, Record, RunHeader, Shard, Timing
from megamoe.records.provenance import installed_version, run_header
from megamoe.spec.selection import Selection, keeps_time

# Packages, besides megamoe and torch, on which times and figures depend.
SOFTWARE = (
    "cuda-bindings", "nvidia-cutlass-dsl", "nvidia-cuda-nvcc", "apache-tvm-ffi", "triton", "flash-attn-4", "fa3-fwd",
    "quack-kernels", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "humming-kernels",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How to measure rows. `jobs`: workers for untimed rows; `timeout_s`: host seconds per untimed row.

    `policy`: when to stop sampling. `patience`: a factor on the time limits of stages on a device. `specs` and
    `failures`: as in RunSettings. `ray`: the cluster that measures, None for this host.
    """

    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)
    timeout_s: float = DEFAULT_TIMEOUT_S
    specs: Path | None = None
    failures: Path | None = None
    policy: Policy = field(default_factory=Policy)
    patience: float = 1.0
    ray: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """All lines about one row. `software`: versions of the third-party packages that it used."""

    record: Record
    timings: tuple[Timing, ...] = ()
    figures: tuple[Figures, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def lines(self) -> tuple[AnyLine, ...]:
        """All lines, in the order in which they are written."""
        return (self.record, *self.timings, *self.figures)


class BenchRun:
    """A run of `rows`. It measures when outcomes are requested, and appends every line to `output` at once.

    Close it after use. `timed`: the rows whose executor has a clock. `header.device` is known after the first outcome.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        selection: Selection,
        settings: BenchSettings,
        output: Path,
        shard: Shard | None = None,
    ) -> None:
        """`shard`: which part of the selection the rows are; None if they are all of it."""
        self.rows, self.settings, self.output = tuple(dict.fromkeys(rows)), settings, output
        clocks = {name: keeps_time(name) for name in {row.executor for row in self.rows}}
        self.timed = frozenset(row for row in self.rows if clocks[row.executor])
        header = run_header(selection, len(self.rows), settings.specs, shard=shard)
        self.header: RunHeader = header.model_copy(update={"software": _software()})
        self._writer: RecordWriter | None = None
        self._outcomes: dict[Row, Outcome] = {}
        self._measuring = self._measure()

    def outcome(self, row: Row) -> Outcome:
        """The outcome of `row`, one of `rows`. Measures up to it. RecordError if the file cannot be written."""
        while row not in self._outcomes:
            found = next(self._measuring)
            self._outcomes[found.record.row] = found
        return self._outcomes[row]

    def outcomes(self) -> Iterator[Outcome]:
        """All outcomes, in the order of the rows."""
        return (self.outcome(row) for row in self.rows)

    def close(self) -> None:
        """Ends the workers. Rows that were not requested are missing from the file."""
        self._measuring.close()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> BenchRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _measure(self) -> Generator[Outcome, None, None]:
        with (
            scratch_folder("bench") as folder,
            FigureMaker(self.header.run, folder, self.settings.jobs) as figures,
        ):
            for found in self._measured(folder, figures):
                made = tuple(figures.of(found.record.row, found.record.program_sha256))
                whole = Outcome(found.record, found.timings, made, found.software)
                self._append(*whole.lines)
                yield whole

    def _measured(self, folder: Path, figures: FigureMaker) -> Generator[Outcome, None, None]:
        """Timed rows first, with the machine to themselves; then the others, as they finish."""
        timed = [row for row in self.rows if row in self.timed]
        if self.settings.ray is not None:
            yield from self._measured_on_cluster(timed, folder, figures, self.settings.ray)
            return
        if timed:
            with BenchWorker(folder / "progress") as worker:
                self._begin(device_of(timed[0], worker, folder))
                for group in by_case(timed):
                    yield from timed_group(group, self.header, self.settings, worker, folder)
        else:
            self._begin(None)
        yield from self._judged(judged, folder, figures)

    def _measured_on_cluster(
        self, timed: Sequence[Row], folder: Path, figures: FigureMaker, address: str
    ) -> Generator[Outcome, None, None]:
        from megamoe.bench.cluster import device_on_cluster, timed_on_cluster
        from megamoe.judge.cluster import joined, judged_on_cluster

        with joined(address, self.settings.jobs):
            self._begin(device_on_cluster(timed[0], self.settings) if timed else None)
            yield from timed_on_cluster(by_case(timed), self.header, self.settings, folder)
            yield from self._judged(judged_on_cluster, folder, figures)

    def _judged(self, judging: Judging, folder: Path, figures: FigureMaker) -> Generator[Outcome, None, None]:
        """The rows whose executor has no clock."""
        untimed = [row for row in self.rows if row not in self.timed]
        settings = self.settings
        run = RunSettings(
            self.header.run, settings.jobs, settings.timeout_s, settings.specs, settings.failures, programs=folder
        )
        if untimed:
            with closing(judging(untimed, run)) as records:
                for record in records:
                    figures.begin(record.row, record.program_sha256)
                    yield Outcome(record)

    def _begin(self, device: DeviceFacts | None) -> None:
        self.header = self.header.model_copy(update={"device": device})
        self._append(self.header)

    def _append(self, *lines: AnyLine) -> None:
        if self._writer is None:
            self._writer = RecordWriter(self.output)
        for line in lines:
            self._writer.append(line)


def by_case(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups of rows that differ only in the backend, in the order of their first rows."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.target, row.executor), []).append(row)
    return list(groups.values())


def device_of(row: Row, worker: BenchWorker, folder: Path) -> DeviceFacts | None:
    """The device as the executor of `row` describes it. None if that fails; the rows then say why."""
    from megamoe.bench.case import CaseSettings, device_facts

    found = worker.call(device_facts, row, CaseSettings("", programs=folder), folder / "progress")
    return found if isinstance(found, DeviceFacts) else None


def timed_group(
    rows: Sequence[Row], header: RunHeader, settings: BenchSettings, worker: BenchWorker, folder: Path
) -> Generator[Outcome, None, None]:
    """Measures all rows of one case, in as many processes as necessary."""
    from megamoe.bench.case import CaseSettings, lost, measure_case

    case = CaseSettings(header.run, header.device, settings.policy, settings.specs, folder, patience=settings.patience)
    pending = list(rows)
    while pending:
        result = worker.call(measure_case, pending, case, folder / "progress")
        if isinstance(result, Death):
            blamed = [row for row in pending if result.stage is None or result.stage.backend in (None, row.backend)]
            doing = f", while {result.stage.doing}" if result.stage else ""
            done = [lost(row, case, result.status, f"{result.sentence}{doing}") for row in blamed]
        else:
            # Otherwise a process that finishes no row would be followed by more of the same.
            done = result.done or [lost(row, case, "error", "the worker finished no row") for row in pending]
            if result.spoilt:
                worker.replace()
        for one in done:
            yield Outcome(one.record, one.timings, software=one.software)
            pending.remove(one.record.row)


def _software() -> dict[str, str]:
    found = {name: installed_version(name) for name in SOFTWARE}
    return {name: version for name, version in found.items() if version}
