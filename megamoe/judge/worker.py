"""Worker processes: forked from a server that holds torch, quiet at their start, ended with their parent.

A worker that imports torch by itself is ready after 2.6 s; one that is forked with it, after 0.02 s (two cores). The
server holds besides the specs and what reads records (PRELOADED), nothing that runs a kernel or knows an output. It has
never initialised CUDA and has one thread, so that a fork of it is as clean as a fresh interpreter.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING, Final

from megamoe.contract.scratch import keep_temporary_files_together
from megamoe.runner.child import spare_shared_pages
from megamoe.runner.process import PRELOADED, environment_of_servers, keeper_of_worker

if TYPE_CHECKING:
    from pebble import ProcessPool

LOOKS_EVERY_S: Final = 0.01
"""How often a pool looks whether a worker has ended or it shall end itself: it ends that much later than its last
row."""
_ONE_THREAD = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)


def worker_pool(workers: int, module: str) -> ProcessPool:
    """A pool of that many workers, none of them started yet. Schedule its tasks within `interrupts_held_back`.

    Each worker imports `module` before its first task, so that no task pays for that with its time limit.
    """
    # It is not imported where nothing is run.
    from pebble import CONSTS, ProcessPool

    CONSTS.sleep_unit = LOOKS_EVERY_S
    context = multiprocessing.get_context("forkserver")
    # What each worker begins with, too.
    context.set_forkserver_preload([*PRELOADED, "pebble", __name__, "megamoe.judge.quiet_start"])
    with interrupts_held_back(), _environment({**environment_of_servers(), **_ONE_THREAD}):
        keep_temporary_files_together()
        forkserver.ensure_running()
    # Starts the first worker of a server, and so waits for the import of torch, where Ctrl-C still works.
    ready = context.Process(target=_nothing)
    ready.start()
    ready.join()
    return ProcessPool(workers, initializer=start_worker, initargs=(dict(os.environ), module), context=context)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Blocks SIGINT. Processes and threads started within inherit the mask, so that Ctrl-C reaches this process alone.

    A worker that is interrupted while it starts would print a traceback of its own.
    """
    # Starting the tracker lifts the mask, so start it first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(environment: Mapping[str, str], module: str) -> None:
    """Runs first in each worker. `environment`: that of the parent, since the server may be older than its changes.

    One BLAS thread a worker: as many workers as cores would fight over more. `module` as in `worker_pool`.
    """
    sys.excepthook = sys.__excepthook__
    _replace_environment({**environment, **_ONE_THREAD})
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    # Before anything of ours is imported, and before there is a second thread.
    keeper_of_worker()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import_module(module)
    spare_shared_pages()


@contextmanager
def _environment(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    _replace_environment(environment)
    try:
        yield
    finally:
        _replace_environment(before)


def _replace_environment(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _nothing() -> None:
    pass


def _end_with_parent() -> None:
    """Ends a worker in the middle of a row, which would outlive a killed run for as long as the row takes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
