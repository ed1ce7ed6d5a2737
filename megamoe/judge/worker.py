"""Worker processes: forked from a server that has torch loaded (megamoe.runner.forks), ended with their parent."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from typing import TYPE_CHECKING, Final

from megamoe.runner.child import spare_shared_pages
from megamoe.runner.forks import ONE_THREAD, interrupts_held_back, replace_environment, server_of_forks
from megamoe.runner.process import keeper_of_worker

if TYPE_CHECKING:
    from pebble import ProcessPool

LOOKS_EVERY_S: Final = 0.01
"""How often a pool polls whether a worker has ended or the pool must stop. Stopping lags the last row by up to this."""

UNKNOWN_EXIT: Final = 255
"""The exit code that multiprocessing reports when the fork server has died. It says nothing about the task."""


def worker_pool(workers: int, module: str) -> ProcessPool:
    """A pool of that many workers, none of them started yet. Schedule its tasks within `interrupts_held_back`.

    Each worker imports `module` before its first task, so that no task spends its timeout on the import.
    """
    # Imported here because not every process runs rows.
    from pebble import CONSTS, ProcessPool

    CONSTS.sleep_unit = LOOKS_EVERY_S
    return ProcessPool(
        workers, initializer=start_worker, initargs=(dict(os.environ), module), context=server_of_forks()
    )


def had_no_turn(error: BaseException) -> bool:
    """Whether a task that ended with `error` never ran: its pool broke, or its fork server died."""
    from pebble import ProcessExpired

    return isinstance(error, BrokenProcessPool | CancelledError) or (
        isinstance(error, ProcessExpired) and error.exitcode == UNKNOWN_EXIT
    )


def end_pool(pool: ProcessPool) -> None:
    """Ends the workers of a pool, busy ones too.

    An interrupt here would leave a worker waiting for tasks, and this process would wait for that worker at exit.
    """
    with interrupts_held_back():
        pool.stop()
        pool.join()


def start_worker(environment: Mapping[str, str], module: str) -> None:
    """Runs first in each worker. `environment`: the parent's, because the fork server may predate its changes.

    Each worker gets one BLAS thread: with as many workers as cores, more threads would compete. `module` as in
    `worker_pool`.
    """
    sys.excepthook = sys.__excepthook__
    replace_environment({**environment, **ONE_THREAD})
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    # Must precede imports of our modules and the start of a second thread.
    keeper_of_worker()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import_module(module)
    spare_shared_pages()


def _end_with_parent() -> None:
    """Ends the worker even in the middle of a row. Otherwise it would outlive a killed run until its row ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
