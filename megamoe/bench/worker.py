"""One worker process that measures: ended when it takes too long, replaced when it dies or is no longer trusted."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from megamoe.bench.progress import Stage, read_stage
from megamoe.contract import Status
from megamoe.judge.worker import interrupts_held_back, manner_of_death, start_worker

_POLL_S = 0.2
# Until a worker enters its first stage it starts an interpreter and imports torch.
_START_S = 120.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Death:
    """Why there is no result: the worker's end, and the stage in which it came (None: before the first)."""

    status: Status
    sentence: str
    stage: Stage | None


class BenchWorker:
    """Runs one function after the other in a process of its own, which lasts as long as nothing goes wrong.

    To be closed. Functions write their stages to the file at `progress`; one that stays in a stage for longer than the
    stage's limit is ended.
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
                # The function itself may have raised this; or it has ended since.
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
        """Ends the process; the next call gets another one."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _start(self) -> ProcessPool:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPool(max_workers=1, initializer=start_worker, context=context)
        return self._pool

    def __enter__(self) -> BenchWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.replace()


def _death(error: BaseException, stage: Stage | None) -> Death:
    if isinstance(error, ProcessExpired):
        return Death("crashed", f"the worker process died {manner_of_death(error.exitcode)}", stage)
    if isinstance(error, BrokenProcessPool | CancelledError):
        return Death("crashed", "no worker process could be started", stage)
    return Death("error", f"the worker returned nothing: {type(error).__name__}: {error}", stage)
