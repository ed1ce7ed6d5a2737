"""What an assembler says of a program. Assemblers are entry points, so that megamoe needs to know none of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, cast

from megamoe.backend import Target, UnsupportedError

GROUP = "megamoe.assemblers"


class Assembly(Protocol):
    """Registers a thread; `stack`, `spill_stores`, `spill_loads`, `static_smem` and `code_size` in bytes."""

    @property
    def registers(self) -> int: ...
    @property
    def stack(self) -> int: ...
    @property
    def spill_stores(self) -> int: ...
    @property
    def spill_loads(self) -> int: ...
    @property
    def static_smem(self) -> int: ...
    @property
    def code_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Assembled:
    """What came of it: numbers by name, or a sentence that says why there are none."""

    assembler: str
    numbers: tuple[tuple[str, int], ...] = ()
    sentence: str | None = None


_NAMES = {
    "registers a thread": "registers",
    "spill stores, bytes": "spill_stores",
    "spill loads, bytes": "spill_loads",
    "stack, bytes": "stack",
    "static shared memory, bytes": "static_smem",
    "code, bytes": "code_size",
}


def assembled(ptx: str, target: Target) -> list[Assembled]:
    """What every registered assembler makes of `ptx`. Never raises: what goes wrong is a sentence."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    if not points:
        return [Assembled("none", sentence=f"no assembler is registered (entry points {GROUP}): reinstall megamoe")]
    return [_one(point.name, point.load, ptx, target) for point in points]


def _one(name: str, load: Callable[[], object], ptx: str, target: Target) -> Assembled:
    try:
        assemble = cast("Callable[[str, Target], Assembly]", load())
        result = assemble(ptx, target)
        return Assembled(name, tuple((label, int(getattr(result, field))) for label, field in _NAMES.items()))
    except UnsupportedError as error:
        return Assembled(name, sentence=str(error))
    except Exception as error:
        return Assembled(name, sentence=f"{type(error).__name__}: {error}")
