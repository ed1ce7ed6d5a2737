"""The fork server: a process with torch loaded, from which the judge's workers and the keepers of runners are forked.

A process that imports torch itself is ready after 2.6 s; a fork of the server after 0.02 s (two cores). The server also
preloads the specs and the record readers (PRELOADED), but nothing that runs a kernel or knows an output. It has never
initialised CUDA and has one thread, so a fork of it is as clean as a fresh interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Final

from megamoe.contract.scratch import keep_temporary_files_together
from megamoe.runner.process import PRELOADED, environment_of_servers, keep

# Modules that most forks import first.
_BEGUN_WITH: Final = ("pebble", "megamoe.judge.worker", "megamoe.runner.forks")
ONE_THREAD: Final = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
"""One BLAS thread per process: with as many processes as cores, more threads would compete."""
_READY: Final = set[int]()
"""The ids of this process's servers that have forked once. A fork of theirs takes 0.05 s of two cores."""


def server_of_forks() -> ForkServerContext:
    """This process's fork server, with torch loaded. Start its forks within `interrupts_held_back`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megamoe.runner.quiet_start", *PRELOADED, *_BEGUN_WITH])
    with interrupts_held_back(), _environment({**environment_of_servers(), **ONE_THREAD}):
        keep_temporary_files_together()
        forkserver.ensure_running()
    server = forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]
    if server not in _READY:
        # The first fork waits for the import of torch, while Ctrl-C still works.
        first = context.Process(target=_nothing)
        with _main_left_out():
            first.start()
        first.join()
        _READY.add(server)
    return context


def forked_keeper(control: socket.socket) -> BaseProcess:
    """A keeper for the process at the other end of `control`, forked from the server, so that torch is already
    loaded."""
    context = server_of_forks()
    with interrupts_held_back(), _main_left_out():
        keeper = context.Process(target=_keep_in_a_session_of_its_own, args=(control,), daemon=True)
        keeper.start()
    return keeper


def _keep_in_a_session_of_its_own(control: socket.socket) -> None:
    # As in start_worker: quiet_start's hook was only for the start.
    sys.excepthook = sys.__excepthook__
    os.setsid()
    keep(control)


@contextmanager
def _main_left_out() -> Iterator[None]:
    """Within the context, a fork does not run the main file again.

    multiprocessing would do that, to make functions in it known. The main file is other people's code, and a keeper
    must never have run any.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Holds SIGINT back until the end. Processes and threads started within the context inherit the mask, so that
    Ctrl-C reaches only this process.

    A worker that is interrupted while it starts would print its own traceback. The mask is not enough: the system then
    gives the signal to another thread, and Python still raises KeyboardInterrupt in the main thread. So the main thread
    only notes an interrupt, too.
    """
    # Starting the tracker lifts the mask, so start it first.
    resource_tracker.ensure_running()
    # pthread_sigmask sets the mask and then runs the handlers of earlier signals. If one raised, the mask would stay.
    with _interrupts_noted():
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)


@contextmanager
def _interrupts_noted() -> Iterator[None]:
    """Within the context, the main thread only notes an interrupt. At the end the process sends it to itself."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    noted: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if noted:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Within the context, this process has that environment."""
    before = dict(os.environ)
    replace_environment(environment)
    try:
        yield
    finally:
        replace_environment(before)


def replace_environment(environment: Mapping[str, str]) -> None:
    """Gives this process that environment."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _nothing() -> None:
    pass
