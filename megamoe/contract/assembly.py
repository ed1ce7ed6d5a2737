"""What an assembler says of a program. Assemblers are entry points: megamoe knows none of them by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import cast

from megamoe.contract.backend import UnsupportedError
from megamoe.contract.program import Target

GROUP = "megamoe.assemblers"


@dataclass(frozen=True, slots=True)
class Assembly:
    """What an assembler made of a module. `registers` a thread; `spill_*`, `stack` and `static_smem` in bytes: the most
    of any entry. `code_size`: bytes of all code.

    `kernels`: entry -> registers, spill_bytes (stores and loads), stack_bytes, smem_bytes (static) and code_bytes,
    sorted by name. These names are those of megamoe.records.lines.Figures.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int
    code_size: int
    cubin: bytes
    kernels: Mapping[str, Mapping[str, int]]


Assemble = Callable[[str, Target], Assembly]
"""An assembler: raises UnsupportedError where it is not installed, anything else where it refuses the PTX."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """What one assembler says: numbers of the module by label and of each kernel, or a sentence that says why there
    are none."""

    assembler: str
    numbers: tuple[tuple[str, int], ...] = ()
    sentence: str | None = None
    kernels: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    cubin_sha256: str | None = None
    refused: bool = False
    """Whether it is there and does not take the program."""


_LABELS = {
    "registers a thread": "registers",
    "spill stores, bytes": "spill_stores",
    "spill loads, bytes": "spill_loads",
    "stack, bytes": "stack",
    "static shared memory, bytes": "static_smem",
    "code, bytes": "code_size",
}


def assemblers() -> dict[str, Callable[[], Assemble]]:
    """The registered assemblers by name, in order of their names; each is imported when it is called."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return {point.name: cast("Callable[[], Assemble]", point.load) for point in points}


def assembled(ptx: str, target: Target) -> list[Assembled]:
    """What every registered assembler makes of `ptx`. Never raises: a failure is a sentence."""
    known = assemblers()
    if not known:
        return [Assembled("none", sentence=f"no assembler is registered (entry points {GROUP}): reinstall megamoe")]
    return [_one(name, load, ptx, target) for name, load in known.items()]


def _one(name: str, load: Callable[[], Assemble], ptx: str, target: Target) -> Assembled:
    try:
        result = load()(ptx, target)
        numbers = tuple((label, int(getattr(result, attribute))) for label, attribute in _LABELS.items())
        return Assembled(name, numbers, None, result.kernels, hashlib.sha256(result.cubin).hexdigest())
    except UnsupportedError as error:
        return Assembled(name, sentence=_sentence(str(error)))
    except Exception as error:
        return Assembled(name, sentence=_sentence(f"{type(error).__name__}: {error}"), refused=True)


def _sentence(said: str) -> str:
    """The lines of an assembler in one."""
    return "; ".join(line.strip() for line in said.splitlines() if line.strip())
