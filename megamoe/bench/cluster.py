"""Measure on a Ray cluster: all rows of one case form a task, so that their backends take turns on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megamoe.bench.run import BenchSettings, Outcome, device_of, timed_group
from megamoe.bench.worker import BenchWorker
from megamoe.contract import DeviceFacts, Row
from megamoe.contract.scratch import scratch_folder
from megamoe.judge.cluster import Failure, Task, settle, shared_out, task_of
from megamoe.records.files import write_file
from megamoe.records.lines import RunHeader


@dataclass(frozen=True, slots=True)
class Timed:
    """The results of one case: its outcomes, and the PTX of its programs by file name."""

    outcomes: tuple[Outcome, ...]
    programs: dict[str, bytes]


def device_on_cluster(row: Row, settings: BenchSettings) -> DeviceFacts | None:
    """The device of a node that can run `row`. None if the node does not say; its rows then say why."""
    ((_, found),) = shared_out([(row, (device_there, (task_of(row, settings.specs),)))])
    return found if isinstance(found, DeviceFacts) else None


def timed_on_cluster(
    groups: Sequence[Sequence[Row]], header: RunHeader, settings: BenchSettings, folder: Path
) -> Iterator[Outcome]:
    """Measures each group, the rows of one case, on a node with a matching device. Writes programs to `folder`.

    Floors are computed from the node's own device.
    """
    from megamoe.bench.case import CaseSettings, lost

    by_first = {group[0]: tuple(group) for group in groups}
    alone = header.model_copy(update={"device": None})
    calls = [
        (first, (timed_there, (task_of(first, settings.specs), group, alone, settings)))
        for first, group in by_first.items()
    ]
    for first, answer in shared_out(calls):
        if isinstance(answer, Timed):
            for name, ptx in answer.programs.items():
                write_file(folder / Path(name).name, ptx, "the program", durable=False)
            yield from answer.outcomes
            continue
        assert isinstance(answer, Failure)
        for row in by_first[first]:
            case = CaseSettings(header.run, specs=settings.specs)
            gone = lost(row, case, answer.status, answer.sentence)
            yield Outcome(gone.record, gone.timings)


def device_there(task: Task) -> DeviceFacts | None:
    """The device of this node."""
    settle(task)
    with scratch_folder("bench") as folder, BenchWorker(folder / "progress") as worker:
        return device_of(task.row, worker, folder)


def timed_there(task: Task, rows: tuple[Row, ...], header: RunHeader, settings: BenchSettings) -> Timed:
    """Measures the rows of one case on this node, in a worker that ends afterwards."""
    settle(task)
    with scratch_folder("bench") as folder, BenchWorker(folder / "progress") as worker:
        outcomes = tuple(timed_group(rows, header, settings, worker, folder))
        return Timed(outcomes, {path.name: path.read_bytes() for path in sorted(folder.glob("*.ptx"))})
