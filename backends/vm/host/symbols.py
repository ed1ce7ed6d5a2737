"""The runtime symbols that a host object may leave undefined: one entry each, bound to one C callback a process.

A callback finds the Runtime of the call in progress on its thread. An exception must not unwind through compiled
frames: it is kept in Runtime.broken, the host function is given an error code, and the caller raises it afterwards.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Concatenate, ParamSpec

from backends.vm.faults import Fault
from backends.vm.host.object_file import PROCESS_SYMBOLS, bind_symbols
from backends.vm.host.runtime import UNKNOWN, Runtime

POINTER, SIZE, INT, UINT, STRING = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p
CType = type[ctypes.c_uint64 | ctypes.c_size_t | ctypes.c_int | ctypes.c_uint | ctypes.c_char_p]
P = ParamSpec("P")
Answer = Callable[Concatenate[Runtime, P], int | None]


@dataclass(frozen=True, slots=True)
class RuntimeSymbol:
    """A C function: result and argument types, and what answers a call (None means success)."""

    name: str
    result: CType | None
    arguments: tuple[CType, ...]
    answer: Callable[..., int | None]


SYMBOLS: dict[str, RuntimeSymbol] = {}
_calls = threading.local()


def answers(name: str, *arguments: CType, result: CType | None = INT) -> Callable[[Answer[P]], Answer[P]]:
    """Register the decorated function(runtime, *arguments) as the meaning of the C symbol `name`."""

    def register(answer: Answer[P]) -> Answer[P]:
        SYMBOLS[name] = RuntimeSymbol(name, result, arguments, answer)
        return answer

    return register


@contextmanager
def answering(runtime: Runtime) -> Iterator[None]:
    """Let `runtime` answer the calls that compiled code makes on this thread."""
    before: Runtime | None = getattr(_calls, "runtime", None)
    _calls.runtime = runtime
    try:
        yield
    finally:
        _calls.runtime = before


@cache
def bind_runtime() -> tuple[object, ...]:
    """Bind every symbol, once a process; the callbacks are kept, for linked code calls them at any time."""
    callbacks = {symbol.name: _callback(symbol) for symbol in SYMBOLS.values()}
    library = ctypes.CDLL(None)
    functions = {**callbacks, **{name: getattr(library, name) for name in sorted(PROCESS_SYMBOLS)}}
    bind_symbols((name, ctypes.cast(call, ctypes.c_void_p).value or 0) for name, call in functions.items())
    return tuple(functions.values())


def _callback(symbol: RuntimeSymbol) -> ctypes._CFunctionType:  # pyright: ignore[reportPrivateUsage]
    failure = None if symbol.result is None else 0 if symbol.result is POINTER else UNKNOWN

    def call(*values: int | bytes | None) -> int | None:
        runtime: Runtime | None = getattr(_calls, "runtime", None)
        if runtime is None or runtime.broken is not None:
            return failure
        try:
            answer = symbol.answer(runtime, *values)
        except BaseException as error:
            if isinstance(error, Fault) and not error.where:
                error.kernel, error.where = error.kernel or symbol.name, "host function"
            runtime.broken = error
            return failure
        return None if symbol.result is None else answer or 0

    return ctypes.CFUNCTYPE(symbol.result, *symbol.arguments)(call)
