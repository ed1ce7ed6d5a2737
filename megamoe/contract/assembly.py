"""What assemblers say about a program. Assemblers are entry points: megamoe knows none of them by name."""

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
    """What an assembler made of a module. `stack`, `spill_*` and `static_smem` are in bytes, `registers` is per thread;
    each is the maximum over the entries. `code_size` is the code of all entries in bytes.

    `kernels` maps each entry, sorted by name, to its registers, spill_bytes (stores and loads), stack_bytes, smem_bytes
    (static) and code_bytes. megamoe.records.lines.Figures uses the same names.
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
"""An assembler. It raises UnsupportedError where it is not installed, and anything else if it refuses the PTX."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """One assembler's result: numbers of the module by label and numbers of each kernel, or a sentence that says why
    there are none."""

    assembler: str
    numbers: tuple[tuple[str, int], ...] = ()
    sentence: str | None = None
    kernels: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    cubin_sha256: str | None = None
    refused: bool = False
    """The assembler is installed and rejects the program."""


_LABELS = {
    "registers a thread": "registers",
    "spill stores, bytes": "spill_stores",
    "spill loads, bytes": "spill_loads",
    "stack, bytes": "stack",
    "static shared memory, bytes": "static_smem",
    "code, bytes": "code_size",
}


def assemblers() -> dict[str, Callable[[], Assemble]]:
    """The registered assemblers by name, sorted. Calling one of the values imports it."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return {point.name: cast("Callable[[], Assemble]", point.load) for point in points}


def assembled(ptx: str, target: Target) -> list[Assembled]:
    """Runs every registered assembler on `ptx`. Never raises: a failure becomes a sentence."""
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
    """Joins the lines of an assembler's message into one."""
    return "; ".join(line.strip() for line in said.splitlines() if line.strip())
