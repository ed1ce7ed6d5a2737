"""Let go of a compilation: CuTeDSL's caches of values keep the MLIR context of each, about 3 MB."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, cast

CACHE: Final = "lru_cache_ir"
"""The decorator of these caches. Their keys hold a context, and an entry goes only when 128 others have come. A module
that decorates has the name."""


@contextmanager
def contexts_forgotten() -> Iterator[None]:
    """At the end, clears CuTeDSL's caches of values. Their entries are of use in one compilation only."""
    try:
        yield
    finally:
        for clear in _clears():
            clear()


def _clears() -> Iterator[Callable[[], None]]:
    """What clears each cache of a module, or of a class in it. Another version of CuTeDSL may have none."""
    named = [module for name, module in tuple(sys.modules.items()) if name.startswith("cutlass.")]
    modules = [vars(module) for module in named if CACHE in vars(module)]
    classes = [vars(value) for names in modules for value in names.values() if isinstance(value, type)]
    for value in (value for names in (*modules, *classes) for value in names.values()):
        clear = getattr(value.fget if isinstance(value, property) else value, "cache_clear", None)
        if callable(clear):
            yield cast(Callable[[], None], clear)
