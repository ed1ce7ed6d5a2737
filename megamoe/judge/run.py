"""Judges many rows in worker processes. A crash or a hang fails its own row and leaves the others alone."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from megamoe.contract import Row, Status
from megamoe.judge.worker import end_pool, had_no_turn, worker_pool
from megamoe.records.lines import Record, record_of
from megamoe.runner.child import give_memory_back
from megamoe.runner.forks import interrupts_held_back
from megamoe.runner.limits import share_of_memory
from megamoe.runner.process import manner_of_death
from megamoe.spec.load import load_specs
from megamoe.spec.marked_yaml import SpecError

if TYPE_CHECKING:
    from pebble import ProcessPool

    from megamoe.judge.judge import Bench
    from megamoe.spec.spec import Spec

DEFAULT_TIMEOUT_S = 300.0
GRACE_S = 30.0
"""A worker gets this much longer than a row's timeout before it is killed: it stops the row itself and still has to
compare."""
LARGE: Final = 1 << 25
"""Rows may share an input of at least this many elements: real weights are drawn once per layer."""
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How to run rows. `timeout_s`: host seconds per row. `specs`: folder of the specs, None for ours.

    Folders to write to, None to write nothing: `failures` takes the bundles of failures, `outputs` all outputs,
    `programs` the PTX of all programs (megamoe.judge.figures). `hidden`: more paths that no kernel's process may see.
    `audited`: rows to run again (megamoe.judge.audit); `judged` chooses them.
    """

    run: str
    jobs: int = 1
    timeout_s: float = DEFAULT_TIMEOUT_S
    specs: Path | None = None
    failures: Path | None = None
    outputs: Path | None = None
    programs: Path | None = None
    hidden: tuple[Path, ...] = ()
    audited: frozenset[Row] = frozenset()


Judging = Callable[[Sequence[Row], RunSettings], Generator[Record, None, None]]
"""Judges rows on this host, or on a cluster (megamoe.judge.cluster)."""


def judged(rows: Sequence[Row], settings: RunSettings) -> Generator[Record, None, None]:
    """Yields one record for each of `rows`, as they finish. Closing the iterator, or Ctrl-C, ends the workers.

    Each backend has its own workers, one backend after the other, so that one backend's code cannot reach another's
    verdicts. The rows of a backend start in the given order; the last of each kind, with the least work, is audited. If
    the pool itself breaks (a worker dies while it starts), the remaining rows go to a fresh pool. If a fresh pool
    finishes no row at all, its rows are recorded as crashed.
    """
    settings = replace(settings, audited=chosen_for_audits(rows, settings.specs))
    for group in backends_apart(rows):
        yield from _judged_of_one_backend(group, settings)


def chosen_for_audits(rows: Sequence[Row], specs: Path | None) -> frozenset[Row]:
    """The last row, with the least work, of each op, backend, target, executor and shapes of large inputs.

    Rows of one real layer have the same weights, as in a model. A backend that cached weights by their shape would be
    right in all of these rows, but not on the weights that an audit draws.
    """
    known = load_specs(specs)
    cases = {row.case: row.op for row in rows}
    large = {case: _large_inputs(known.get(op), case) for case, op in cases.items()}
    return frozenset({(row.op, row.backend, row.target, row.executor, large[row.case]): row for row in rows}.values())


def _large_inputs(spec: Spec | None, case_id: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Name and shape of each input of at least LARGE elements. () for a case that `spec` refuses; its row reports
    that."""
    if spec is None:
        return ()
    try:
        case = spec.parse_case(case_id)
        shapes = {name: spec.shape(name, case) for name, one in spec.tensors_of(case).items() if one.role == "input"}
    except SpecError:
        return ()
    return tuple((name, shape) for name, shape in shapes.items() if prod(shape) >= LARGE)


def backends_apart(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows grouped by backend, in the given order."""
    return [[row for row in rows if row.backend == backend] for backend in dict.fromkeys(row.backend for row in rows)]


def _judged_of_one_backend(rows: Sequence[Row], settings: RunSettings) -> Generator[Record, None, None]:
    pending = dict.fromkeys(rows)
    while pending:
        before = len(pending)
        for record in _one_pool(list(pending), settings):
            del pending[record.row]
            yield record
        if len(pending) == before:
            for row in pending:
                yield _record(row, "crashed", "no worker process could be started for this row", settings)
            return


def _one_pool(rows: Sequence[Row], settings: RunSettings) -> Generator[Record, None, None]:
    pool = worker_pool(max(1, min(settings.jobs, len(rows))), "megamoe.judge.judge")
    finished: queue.SimpleQueue[tuple[Row, Future[Record]]] = queue.SimpleQueue()
    try:
        with interrupts_held_back():
            for row in rows:
                future: Future[Record] = pool.schedule(
                    _judge_row, args=(row, settings), timeout=settings.timeout_s + GRACE_S
                )
                future.add_done_callback(partial(_hand_over, finished, row))
        for _ in rows:
            found = _next(finished, pool)
            if found is None:
                break
            record = _record_of_future(*found, settings)
            if record is not None:
                yield record
        pool.close()
    finally:
        end_pool(pool)


def _hand_over(finished: queue.SimpleQueue[tuple[Row, Future[Record]]], row: Row, future: Future[Record]) -> None:
    finished.put((row, future))


def _next(
    finished: queue.SimpleQueue[tuple[Row, Future[Record]]], pool: ProcessPool
) -> tuple[Row, Future[Record]] | None:
    """The next finished row and its future. None if the pool has ended and reports no other row."""
    over = False
    # A get() without a timeout blocks Ctrl-C on some platforms.
    while True:
        try:
            return finished.get(timeout=_POLL_S)
        except queue.Empty:
            # A pool whose workers die at start can end without reporting the row that it was just given.
            if over:
                return None
            over = not pool.active


def _record_of_future(row: Row, future: Future[Record], settings: RunSettings) -> Record | None:
    """The record of a finished future. None if the row had no turn: the pool broke, or its fork server died."""
    from pebble import ProcessExpired

    # exception() returns even a worker's SystemExit; result() would raise it in this process.
    try:
        error = future.exception()
    except CancelledError:
        return None
    if error is None:
        return future.result()
    status: Status
    if had_no_turn(error):
        return None
    if isinstance(error, TimeoutError):
        status, sentence = (
            "timed_out",
            f"no verdict within {settings.timeout_s:g} host seconds: it hung, or its process left with status 0",
        )
    elif isinstance(error, ProcessExpired):
        status, sentence = "crashed", f"the worker process died {manner_of_death(error.exitcode)}"
    else:
        status, sentence = "error", f"the worker returned no record: {type(error).__name__}: {error}"
    return _record(row, status, sentence, settings)


def _record(row: Row, status: Status, sentence: str, settings: RunSettings) -> Record:
    return record_of(settings.run, row, status, sentence, specs=settings.specs)


def _judge_row(row: Row, settings: RunSettings) -> Record:
    from megamoe.judge.arena import give_device_memory_back
    from megamoe.judge.judge import judge

    folders = {"failures": settings.failures, "outputs": settings.outputs, "programs": settings.programs}
    try:
        return judge(row, settings.run, specs=settings.specs, bench=_bench(settings), **folders)
    finally:
        give_memory_back()
        give_device_memory_back()


@cache
def _bench(settings: RunSettings) -> Bench:
    return bench_of(settings)


def bench_of(settings: RunSettings) -> Bench:
    """The bench that a process uses from its first row to its last, with its own runners."""
    from megamoe.judge.audit import Audits
    from megamoe.judge.figures import Assemblies
    from megamoe.judge.isolated import Processes, hidden_folders
    from megamoe.judge.judge import Bench

    hidden = hidden_folders(settings.failures, settings.outputs, settings.programs, *settings.hidden)
    runners = Processes(hidden, share_of_memory(settings.jobs))
    return Bench(runners, settings.timeout_s, Audits(settings.audited), Assemblies(settings.programs))
