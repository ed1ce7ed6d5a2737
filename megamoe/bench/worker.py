"""One worker process that measures: ended when it takes too long, replaced when it dies or loses trust."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from megamoe.bench.progress import WorkerStage, read_stage
from megamoe.contract import Status
from megamoe.judge.worker import interrupts_held_back, manner_of_death, worker_pool

_POLL_S = 0.2
# Before its first stage a worker starts, and the first one of a process waits for the import of torch.
_START_S = 120.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Death:
    """How the worker ended without a result, and in which stage (None: before the first)."""

    status: Status
    sentence: str
    stage: WorkerStage | None


class BenchWorker:
    """Runs one function after another in its own process, which lasts as long as nothing goes wrong.

    Close it after use. Functions write their stages to the file at `progress`. A function that exceeds the limit of a
    stage is ended.
    """

    def __init__(self, progress: Path) -> None:
        self._progress = progress
        self._pool: ProcessPool | None = None

    def call(self, function: Callable[..., T], *args: Any) -> T | Death:
        """What `function(*args)` returns in the worker, or how the worker died of it."""
        self._progress.unlink(missing_ok=True)
        pool = self._pool or self._start()
        with interrupts_held_back():
            future: Future[T] = pool.schedule(function, args=args)
        last, since = None, time.monotonic()
        while True:
            try:
                return future.result(timeout=_POLL_S)
            except NotYet as error:
                # The function may have raised this itself, or ended since.
                if future.done() and isinstance(future.exception(), NotYet):
                    return _death(error, read_stage(self._progress))
                stage = read_stage(self._progress)
                if stage != last:
                    last, since = stage, time.monotonic()
                limit = _START_S if last is None else last.limit_s
                if time.monotonic() - since > limit:
                    self.replace()
                    return Death("timed_out", f"it hung: not done within {limit:g} host seconds", last)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                self.replace()
                return _death(error, read_stage(self._progress))

    def replace(self) -> None:
        """Ends the process. The next call starts another."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _start(self) -> ProcessPool:
        self._pool = worker_pool(1, "megamoe.bench.case")
        return self._pool

    def __enter__(self) -> BenchWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.replace()


def _death(error: BaseException, stage: WorkerStage | None) -> Death:
    if isinstance(error, ProcessExpired):
        return Death("crashed", f"the worker process died {manner_of_death(error.exitcode)}", stage)
    if isinstance(error, BrokenProcessPool | CancelledError):
        return Death("crashed", "no worker process could be started", stage)
    return Death("error", f"the worker returned nothing: {type(error).__name__}: {error}", stage)
