"""Undefined values: where they come from, and the fault where one decides something.

Definedness travels with the bytes, as in Valgrind's memcheck: copying, packing or storing an undefined value is no
fault. It becomes one where the value decides an address, a branch, a predicate that matters or an output, or where an
instruction that does more than compute needs it. Memories track it by byte, tensor memory and registers by bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault

Mask = npt.NDArray[np.bool_]
NEVER, DEFINED, HIDDEN = 0, 1, 2
"""The state of a byte: never written, defined, or overwritten with an undefined value."""
MAX_SOURCES: Final = 1 << 18
"""Limit on the places of one memory whose undefined values have a recorded origin."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an undefined value comes from.

    `rule`: the slug of the fault. `what`: the register or byte that was never written, as a clause. `read`: the PTX
    line that read it first, 0 if not read yet. `stored`: the PTX line that stored the value last, by the warp or unit
    `by`.
    """

    rule: str
    what: str
    read: int = 0
    stored: int = 0
    by: str = ""

    def read_at(self, line: int) -> Origin:
        """This origin for a value that PTX `line` reads."""
        return self if self.read else replace(self, read=line)

    def stored_at(self, line: int, by: str) -> Origin:
        """This origin for a value that PTX `line` of `by` stores."""
        return self if (self.stored, self.by) == (line, by) else replace(self, stored=line, by=by)

    def fault(self, decides: str, *, lane: int | None = None, address: int | None = None) -> Fault:
        """The fault of a value that decides something: `decides` is a clause such as "`%r1` decides the address"."""
        read = f"; PTX line {self.read} reads it" if self.read else ""
        stored = f"; PTX line {self.stored} stored the value" if self.stored else ""
        return Fault(self.rule, f"{decides}, but its value is undefined. It comes from {self.what}{read}{stored}",
                     lane=lane, address=address)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Missing:
    """The undefined bytes of an access: bool [n, size], and the origin of the first."""

    bytes_: Mask
    origin: Origin


def lost_in_reduction(source: Missing | None, under: Missing | None, element_bytes: int) -> Missing | None:
    """The undefined bytes, in whole elements, after a reduction of `source` into `under`."""
    first = source or under
    if first is None:
        return None
    lost = first.bytes_ if under is None else first.bytes_ | under.bytes_
    whole = lost.reshape(-1, element_bytes).any(axis=1)
    return Missing(np.repeat(whole, element_bytes).reshape(lost.shape), first.origin)


@dataclass(frozen=True, slots=True)
class Lost:
    """The rows of a matrix with an undefined element, bool [rows], and the origin of the first."""

    rows: Mask
    origin: Origin


@dataclass(slots=True)
class Sources:
    """The origins of the undefined values stored in a memory, by 4-byte granule (tensor memory: by column).

    An undefined unit without an entry was never written.
    """

    by_unit: dict[int, Origin] = field(default_factory=dict[int, Origin])

    def note(self, units: npt.NDArray[np.integer], origin: Origin) -> None:
        """Record that undefined values of `origin` were stored in `units`."""
        left = MAX_SOURCES - len(self.by_unit)
        if left > 0 and units.size:
            first = np.append(True, units[1:] != units[:-1])
            self.by_unit.update(dict.fromkeys(units[first][:left].tolist(), origin))
