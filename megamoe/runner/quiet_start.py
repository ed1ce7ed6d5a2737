"""Preloaded first by the fork server: imports make few cycles, so they are collected seldom, and a worker whose pool
ends while it starts prints nothing.

Such a worker cannot read its task, because the pool's semaphores or the pipe to its parent are gone. multiprocessing
would print a traceback of that to the terminal of an interrupted run. start_worker restores Python's hook.
"""

from __future__ import annotations

import sys
from types import TracebackType

from megamoe.runner.child import collect_seldom


def _unless_the_pool_has_ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, FileNotFoundError | EOFError | ConnectionError):
        sys.__excepthook__(kind, error, trace)


collect_seldom()
sys.excepthook = _unless_the_pool_has_ended
