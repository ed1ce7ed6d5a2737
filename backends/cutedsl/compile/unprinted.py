"""Stop CuTeDSL from printing the whole module at every kernel, for a log that is off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

ENTER: Final = "_enter_gpu_module"
"""The method that begins a kernel (cutlass_dsl/cutlass.py). In CuTeDSL 4.8.1 it formats the module, with all kernels
already in it, before it checks whether the log is on."""


class _Entering(Protocol):
    """The part of a CuTeDSL DSL object that we use."""

    gpu_module: object


class _Unprinted:
    """A module with empty text; all other attributes are the module's own."""

    def __init__(self, module: object) -> None:
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)

    def __str__(self) -> str:
        return ""


@contextmanager
def modules_unprinted(dsl: type) -> Iterator[None]:
    """Within, objects of `dsl`, a class of CuTeDSL, do not format their module when a kernel begins.

    A class without that method, perhaps of another version, is left alone.
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
