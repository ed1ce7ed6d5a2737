"""Runs a call of other people's code in the process of a pool, for a limited time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import TimeoutError as OverTime
from typing import TypeVar

from pebble import ProcessExpired, ProcessPool

T = TypeVar("T")
LIMIT_SECONDS = 600


class LostError(Exception):
    """A call without a result; the text says why. `over_time`: it did not end, rather than ending its process."""

    def __init__(self, why: str, *, over_time: bool) -> None:
        super().__init__(why)
        self.over_time = over_time


def result_of(pool: ProcessPool, call: Callable[..., T], *given: object) -> T:
    """The result of `call(*given)` in a process of `pool`. LostError after LIMIT_SECONDS, or if the process ends."""
    try:
        return pool.schedule(call, args=given, timeout=LIMIT_SECONDS).result()
    except OverTime:
        raise LostError(f"it did not end in {LIMIT_SECONDS} s", over_time=True) from None
    except ProcessExpired as gone:
        raise LostError(f"its process ended with exit code {gone.exitcode}", over_time=False) from None
