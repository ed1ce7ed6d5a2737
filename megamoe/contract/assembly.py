"""What an assembler says of a program. Assemblers are entry points, so that megamoe needs to know none of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Protocol, cast

from megamoe.contract.errors import UnsupportedError
from megamoe.contract.program import Target

GROUP = "megamoe.assemblers"


class Assembly(Protocol):
    """Registers a thread; `stack`, `spill_stores`, `spill_loads`, `static_smem` and `code_size` in bytes.

    Of a module with several entries: the most of any of them, and all code. `kernels` has these of each entry by name,
    under the names that megamoe.records.lines.Figures gives them.
    """

    @property
    def cubin(self) -> bytes: ...
    @property
    def kernels(self) -> Mapping[str, Mapping[str, int]]: ...
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
    """What came of it: numbers of the module by name and of each kernel, or a sentence that says why there are none."""

    assembler: str
    numbers: tuple[tuple[str, int], ...] = ()
    sentence: str | None = None
    kernels: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    cubin_sha256: str | None = None


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
        numbers = tuple((label, int(getattr(result, attribute))) for label, attribute in _NAMES.items())
        return Assembled(name, numbers, None, result.kernels, hashlib.sha256(result.cubin).hexdigest())
    except UnsupportedError as error:
        return Assembled(name, sentence=str(error))
    except Exception as error:
        return Assembled(name, sentence=f"{type(error).__name__}: {error}")
