"""Calls of the CUDA driver (cuda.bindings.driver). Every return code is checked and becomes a sentence."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from megamoe.contract import DeviceError, DeviceLostError

SUCCESS = 0
# CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED to _WRONG_THREAD: no faults; waiting is refused while a graph is captured.
CAPTURE_ERRORS = range(900, 909)


def driver() -> Any:
    """The module cuda.bindings.driver, imported when the first call needs it."""
    return import_module("cuda.bindings.driver")


@cache
def driver_library() -> ctypes.CDLL:
    """The driver's own library, for the one call that the bindings cannot make (see arguments.encoded_map)."""
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: object, doing: str) -> Any:
    """The results of driver function `name`: None, one value, or a tuple.

    DeviceError with the code, its meaning and `doing`; DeviceLostError if the device answers no more calls.
    """
    code, *results = getattr(driver(), name)(*arguments)
    if int(code) != SUCCESS:
        raise failure(name, code, doing)
    return (results or [None])[0] if len(results) < 2 else tuple(results)


def failure(name: str, code: Any, doing: str) -> DeviceError:
    """The exception for the `code` that `name` returned while `doing`."""
    sentence = f"{name} returned {described(code)} while {doing}"
    return DeviceError(sentence) if lost_to() is None else DeviceLostError(sentence)


def lost_to() -> str | None:
    """The fault that killed the context, None while it lives. A dead context answers every wait with its fault."""
    code = driver().cuCtxSynchronize()[0]
    return None if int(code) == SUCCESS or int(code) in CAPTURE_ERRORS else described(code)


@contextmanager
def faults_of_others(doing: str) -> Iterator[None]:
    """Turns a device fault that other people's code meets (torch, a peer's kernel) into a DeviceLostError."""
    try:
        yield
    except DeviceError:
        raise
    except Exception as error:
        fault = lost_to()
        if fault is None:
            raise
        raise DeviceLostError(f"the device reports {fault} while {doing}") from error


def described(code: Any) -> str:
    """CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)."""
    name, meaning = (_text(function, code) for function in ("cuGetErrorName", "cuGetErrorString"))
    return f"{name or f'the unknown code {int(code)}'} ({meaning or 'without a description'})"


def _text(function: str, code: Any) -> str:
    asked, text = getattr(driver(), function)(code)
    return text.decode(errors="replace") if int(asked) == SUCCESS and text else ""
