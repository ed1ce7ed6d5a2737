"""Strong writes by scope: which of them are not morally strong with another, because a scope leaves a thread out.

Atomics are atomic to each other only if the scope of each includes the other's thread; where it does not, two of them
in a data race may lose an update (PTX ISA 8.7.1, 8.10.3). A memory notes the scope of last strong writes once one of
them does not reach the whole device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault, OtherAccess, at_line, report

Scopes = npt.NDArray[np.int8]
"""By cell: how far the scope of its last strong write falls short, as Strong.short."""
_SHORT: Final = {"cta": 2, "cluster": 1}
_NAMES: Final = {2: "scope .cta", 1: "scope .cluster", 0: "a wider scope"}
_NEEDED: Final = {1: ".cluster", 2: ".gpu"}
"""By distance of the threads: the least scope that includes both."""


@dataclass(frozen=True, slots=True)
class Strong:
    """A strong write of `scope`; with none named it is a volatile store or an atomic, which reach the device.

    `atomic`: it reads and writes in one step.
    """

    scope: str = ""
    atomic: bool = False

    @property
    def short(self) -> int:
        """0 if the scope reaches the device, 1 if only the cluster, 2 if only the CTA."""
        return _SHORT.get(self.scope, 0)

    @property
    def name(self) -> str:
        """The write in reports."""
        what, default = ("an atomic", "gpu") if self.atomic else ("a store", "sys")
        return f"{what} of scope .{self.scope or default}"


PLAIN_ATOMIC: Final = Strong(atomic=True)
"""A reduction by the copy engine, of scope gpu."""


def left_out(mine: Strong, theirs: Scopes | int, distance: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Where one of two strong writes does not include the other's thread.

    `distance`: 0 within a CTA, 1 within a cluster, 2 between clusters.
    """
    return np.maximum(mine.short, theirs) > 2 - distance


def report_narrow(
    place: str, mine: Strong, theirs: int, distance: int, other: OtherAccess, *, lane: int | None, address: int | None
) -> None:
    """Report that `mine` and a strong write by `other`, which falls short by `theirs`, leave a thread out."""
    report(Fault("scope-too-narrow", f"{place} is written by {mine.name}, but nothing orders that after {other.who} "
                 f"wrote it by a strong access of {_NAMES[theirs]}{at_line(other.line)}: the scope of each must "
                 f"include the other's thread, {_NEEDED[distance]} or wider, or an update may be lost",
                 lane=lane, address=address, other=other))  # fmt: skip
