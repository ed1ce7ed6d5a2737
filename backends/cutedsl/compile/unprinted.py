"""CuTeDSL without the text that it makes of a module at every kernel, for a log that nobody reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

ENTER: Final = "_enter_gpu_module"
"""The method that begins a kernel (cutlass_dsl/cutlass.py). In CuTeDSL 4.8.1 it writes the text of the module, with all
kernels that are in it already, before it asks whether the log is on."""


class _Entering(Protocol):
    """What we use of a DSL of CuTeDSL."""

    gpu_module: object


class _Unprinted:
    """A module whose text is empty; in all else the module itself."""

    def __init__(self, module: object) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)

    def __str__(self) -> str:
        return ""


@contextmanager
def modules_unprinted(dsl: type) -> Iterator[None]:
    """Within, no object of `dsl`, a class of CuTeDSL, makes text of its module where a kernel begins.

    A class that has no such method, as one of another version may, is left as it is.
    """
    enter: Callable[[_Entering], object] | None = vars(dsl).get(ENTER)
    if enter is None:
        yield
        return

    def entered(self: _Entering) -> object:
        module = self.gpu_module
        self.gpu_module = _Unprinted(module)
        try:
            return enter(self)
        finally:
            self.gpu_module = module

    setattr(dsl, ENTER, entered)
    try:
        yield
    finally:
        setattr(dsl, ENTER, enter)
