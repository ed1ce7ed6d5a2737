"""Many rows in isolated worker processes: one that crashes or hangs costs that row its status and nothing else."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path

from pebble import ProcessExpired, ProcessPool

from megamoe.record import Record, Row, Status, record_of

DEFAULT_TIMEOUT_S = 300.0
_POLL_S = 0.5
_BLAS_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How to run rows. `timeout_s`: host seconds that one row may take; `specs`: folder of the specs, None for ours.

    `failures`: the folder that takes the bundles of failures, `outputs` the one for all outputs; None writes none.
    """

    run: str
    jobs: int = 1
    timeout_s: float = DEFAULT_TIMEOUT_S
    specs: Path | None = None
    failures: Path | None = None
    outputs: Path | None = None


def judged(rows: Sequence[Row], settings: RunSettings) -> Generator[Record, None, None]:
    """Yields one record for each of `rows`, as they finish. Closing the iterator, or Ctrl-C, ends the workers.

    Each backend has workers of its own, one backend after the other: code of one must not reach the verdicts of
    another. Rows of a backend start in the order given. Should the pool itself break (a worker that dies while it
    starts, say), the rows that are left go to a fresh pool; when a fresh pool finishes no row at all, they are recorded
    as crashed.
    """
    for backend in dict.fromkeys(row.backend for row in rows):
        yield from _judged_of_one_backend([row for row in rows if row.backend == backend], settings)


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
    pool = ProcessPool(
        max_workers=max(1, min(settings.jobs, len(rows))),
        initializer=_start_worker,
        context=multiprocessing.get_context("spawn"),
    )
    finished: queue.SimpleQueue[tuple[Row, Future[Record]]] = queue.SimpleQueue()
    try:
        with _interrupts_held_back():
            for row in rows:
                future: Future[Record] = pool.schedule(_judge_row, args=(row, settings), timeout=settings.timeout_s)
                future.add_done_callback(partial(_hand_over, finished, row))
        for _ in rows:
            row, future = _next(finished)
            record = _record_of_future(row, future, settings)
            if record is not None:
                yield record
        pool.close()
    finally:
        # Idle workers end on close; stop() ends those that an interrupt or an early exit left busy.
        pool.stop()
        pool.join()


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Workers, and the pool's threads that replace them, inherit the mask: Ctrl-C is this process's to act upon.

    A worker that is interrupted while its interpreter starts would print a traceback of its own.
    """
    # Started here because starting it later would lift the mask.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hand_over(finished: queue.SimpleQueue[tuple[Row, Future[Record]]], row: Row, future: Future[Record]) -> None:
    finished.put((row, future))


def _next(finished: queue.SimpleQueue[tuple[Row, Future[Record]]]) -> tuple[Row, Future[Record]]:
    # A get() with no time limit would keep Ctrl-C waiting on some platforms.
    while True:
        try:
            return finished.get(timeout=_POLL_S)
        except queue.Empty:
            continue


def _record_of_future(row: Row, future: Future[Record], settings: RunSettings) -> Record | None:
    """The record of a finished future; None if the pool broke before the row had its turn."""
    # exception() hands over even a SystemExit of the worker's, which result() would raise in this process.
    try:
        error = future.exception()
    except CancelledError:
        return None
    if error is None:
        return future.result()
    status: Status
    if isinstance(error, BrokenProcessPool):
        return None
    if isinstance(error, TimeoutError):
        status, sentence = (
            "timed_out",
            f"no verdict within {settings.timeout_s:g} host seconds: it hung, or its process left with status 0",
        )
    elif isinstance(error, ProcessExpired):
        status, sentence = "crashed", f"the worker process died {_manner_of_death(error.exitcode)}"
    else:
        status, sentence = "error", f"the worker returned no record: {type(error).__name__}: {error}"
    return _record(row, status, sentence, settings)


def _record(row: Row, status: Status, sentence: str, settings: RunSettings) -> Record:
    return record_of(settings.run, row, status, sentence, specs=settings.specs)


def _manner_of_death(exit_code: int | None) -> str:
    if exit_code is None:
        return "without an exit status"
    if exit_code >= 0:
        return f"with exit status {exit_code}"
    try:
        return f"of {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"of signal {-exit_code}"


def _start_worker() -> None:
    """Runs in each new worker. One BLAS thread a worker: as many workers as cores would fight over them otherwise."""
    for variable in _BLAS_THREAD_VARIABLES:
        os.environ[variable] = "1"
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """A worker in the middle of a row would outlive a killed run for as long as the row takes, or for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _judge_row(row: Row, settings: RunSettings) -> Record:
    from megamoe.judge import judge

    return judge(row, settings.run, specs=settings.specs, failures=settings.failures, outputs=settings.outputs)
