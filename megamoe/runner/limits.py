"""Limits this process's memory and time within a block of code."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import monotonic
from typing import Final

MIN_MEMORY: Final = 4 << 30
MAX_JOBS: Final = 1024
"""Most worker processes that a command starts."""


def share_of_memory(jobs: int) -> int:
    """Bytes that one of `jobs` may take beyond what it starts with: an even share of the machine's memory, at least
    MIN_MEMORY."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(MIN_MEMORY, whole // max(jobs, 1))


def address_space() -> int:
    """Bytes of this process's address space; 8 GiB if the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 8 << 30


@contextmanager
def memory_at_most(beyond: int) -> Iterator[None]:
    """Within the context, allocations of more than `beyond` bytes of new address space raise MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [address_space() + beyond, *(one for one in (soft, hard) if one != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def seconds_at_most(seconds: float, over: Callable[[], BaseException]) -> Iterator[None]:
    """Raises what `over` returns once the context has run for `seconds`. No limit outside of the main thread."""

    def ring(*_: object) -> None:
        raise over()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            # Restore an outer timer, such as pytest-timeout's.
            signal.setitimer(signal.ITIMER_REAL, max(left - (monotonic() - began), 1e-3))


class TimeIsUpError(BaseException):
    """Raised in the middle of any code. A BaseException, so that the code does not handle it as an error of its own."""


def time_at_most(seconds: float, where: Callable[[], str]) -> AbstractContextManager[None]:
    """Raises TimeIsUpError, with the text of `where`, after so many seconds."""

    def up() -> TimeIsUpError:
        found = where()
        return TimeIsUpError(f"no end within {seconds:g} host seconds{f': {found}' if found else ''}")

    return seconds_at_most(seconds, up)
