"""Preloaded by the server of forks: a worker whose pool ends while it starts says nothing.

It cannot read what it was to run, as the semaphores of the pool or the pipe to its parent are gone, and multiprocessing
prints the traceback of that into the terminal of a run that was interrupted. start_worker puts Python's hook back.
"""

from __future__ import annotations

import sys
from types import TracebackType


def _unless_the_pool_has_ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, FileNotFoundError | EOFError | ConnectionError):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _unless_the_pool_has_ended
