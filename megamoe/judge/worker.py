"""What every worker process needs: a quiet start, an end with its parent, and words for how it died."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

_BLAS_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@contextmanager
def interrupts_held_back() -> Iterator[None]:
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


def manner_of_death(exit_code: int | None) -> str:
    """How a process ended, in words that follow "died"."""
    if exit_code is None:
        return "without an exit status"
    if exit_code >= 0:
        return f"with exit status {exit_code}"
    try:
        return f"of {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"of signal {-exit_code}"


def start_worker() -> None:
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
