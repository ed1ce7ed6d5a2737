"""One worker process that judges what is measured: killed when it takes too long, replaced when it dies or loses trust.

Kernels run in the worker's own runners, which it kills itself. It writes its current stage to a file, for the process
that must explain why the worker died or hangs.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from megamoe.contract import Status
from megamoe.judge.worker import end_pool, worker_pool
from megamoe.runner.forks import interrupts_held_back
from megamoe.runner.process import manner_of_death

_BYTES = 4096
_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class WorkerStage:
    """What a worker is doing. `backend`: whose code runs, None for the harness. `limit_s`: seconds it may take.

    `number` counts the stages of a worker, so that two similar stages differ.
    """

    number: int
    backend: str | None
    doing: str
    limit_s: float


class Progress:
    """Writes the stage to a file, in place: one small write, cheap enough between two turns. `limit_s` is the stage's
    limit, `left_s` what remains of it."""

    def __init__(self, path: Path, patience: float = 1.0) -> None:
        """`patience`: factor on all limits."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._patience = patience
        self._number = 0
        self.limit_s = self._until = math.inf

    @property
    def left_s(self) -> float:
        """Seconds left in the stage. Always above 0, so that a late runner is blamed and not the worker."""
        return max(0.01, self._until - time.monotonic())

    def enter(self, backend: str | None, doing: str, limit_s: float) -> None:
        """Enters a stage: `backend` is `doing` something (a participle) for at most `limit_s` seconds."""
        self._number += 1
        self.limit_s = limit_s * self._patience
        self._until = time.monotonic() + self.limit_s
        # The grace period lets the worker kill a late runner itself.
        stage = json.dumps([self._number, backend, doing, self.limit_s + _GRACE_S])
        os.pwrite(self._descriptor, stage.encode().ljust(_BYTES), 0)

    def close(self) -> None:
        """Closes the file; the last stage stays in it."""
        os.close(self._descriptor)


def read_stage(path: Path) -> WorkerStage | None:
    """The last stage entered. None if there is none, or if it is just being written."""
    try:
        return WorkerStage(*json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


_POLL_S = 0.2
# Before its first stage a worker starts up, and the first worker of a process waits for the import of torch.
_START_S = 120.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Death:
    """How the worker ended without a result, and in which stage (None: before the first)."""

    status: Status
    sentence: str
    stage: WorkerStage | None


class BenchWorker:
    """Runs one function after another in its own process, which lives as long as nothing goes wrong.

    Close it after use. Functions write their stages to the file at `progress`. A function that exceeds a stage's limit
    is killed.
    """

    def __init__(self, progress: Path) -> None:
        self._progress = progress
        self._pool: ProcessPool | None = None

    def call(self, function: Callable[..., T], *args: Any) -> T | Death:
        """What `function(*args)` returns in the worker, or how the worker died."""
        self._progress.unlink(missing_ok=True)
        pool = self._pool or self._start()
        with interrupts_held_back():
            future: Future[T] = pool.schedule(function, args=args)
        last, since = None, time.monotonic()
        while True:
            try:
                return future.result(timeout=_POLL_S)
            except NotYet as error:
                # The function may have raised this itself, or have ended since.
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
        """Kills the process. The next call starts another."""
        if self._pool is not None:
            end_pool(self._pool)
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
