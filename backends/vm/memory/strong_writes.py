"""Strong accesses by scope: which of them are not morally strong with a write before, because a scope leaves a thread
out.

Atomics are atomic to each other only if the scope of each includes the other's thread; where it does not, two of them
in a data race may lose an update, and a load may go on returning an older value (PTX ISA 8.7.1, 8.10.3). A memory notes
the scope of last strong writes once one of them does not reach the whole device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from backends.vm.faults import UNORDERED, Fault, OtherAccess, at_line, report

Scopes = npt.NDArray[np.int8]
"""By cell: how far the scope of its last strong write falls short, as Strong.short."""
STRONG: Final = frozenset({"relaxed", "acquire", "release", "volatile"})
"""Words that make a load or a store strong (PTX ISA 8.4)."""
_SHORT: Final = {"cta": 2, "cluster": 1}
_NAMES: Final = {2: "scope .cta", 1: "scope .cluster", 0: "a wider scope"}
_KINDS: Final = {"store": ("a store", "sys"), "load": ("a load", "sys"), "atomic": ("an atomic", "gpu"),
                 "comparison": ("a failed compare-and-swap", "gpu")}  # fmt: skip
"""By kind: its name in reports, and the scope that it has if none is named."""
_DANGERS: Final = {
    "load": ("read", "the load may not see it"),
    "comparison": ("read", "an older value may be compared"),
}
_NEEDED: Final = {1: ".cluster", 2: ".gpu"}
"""By distance of the threads: the least scope that includes both."""


@dataclass(frozen=True, slots=True)
class Strong:
    """A strong access of `scope`; with none named it is volatile or an atomic, which reach the device.

    A compare-and-swap that finds another value is a `comparison`. Atomics are writes only "if they result in a write"
    (PTX ISA 8.4, table of operation types). All others do, also where the value stays the same, as in `add` of 0: they
    store their result, "overwriting the original value" (9.7.13.5, 9.7.13.6).
    """

    scope: str = ""
    kind: Literal["store", "load", "atomic", "comparison"] = "store"

    @property
    def atomic(self) -> bool:
        """Whether it reads and writes in one step."""
        return self.kind == "atomic"

    @property
    def short(self) -> int:
        """0 if the scope reaches the device, 1 if only the cluster, 2 if only the CTA."""
        return _SHORT.get(self.scope, 0)

    @property
    def name(self) -> str:
        """The access in reports."""
        what, default = _KINDS[self.kind]
        return f"{what} of scope .{self.scope or default}"


PLAIN_ATOMIC: Final = Strong(kind="atomic")
"""A reduction by the copy engine, of scope gpu."""


def left_out(mine: Strong, theirs: Scopes | int, distance: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Where a strong access or a strong write before it does not include the other's thread.

    `distance`: 0 within a CTA, 1 within a cluster, 2 between clusters.
    """
    return np.maximum(mine.short, theirs) > 2 - distance


def report_narrow(
    place: str, mine: Strong, theirs: int, distance: int, other: OtherAccess, *, lane: int | None, address: int | None
) -> None:
    """Report that `mine` and a strong write by `other`, which falls short by `theirs`, leave a thread out."""
    did, danger = _DANGERS.get(mine.kind, ("written", "an update may be lost"))
    report(Fault("scope-too-narrow", f"{place} is {did} by {mine.name} after {other.who} wrote it by a strong "
                 f"access of {_NAMES[theirs]}{at_line(other.line)}, {UNORDERED}: the scope of each must "
                 f"include the other's thread, {_NEEDED[distance]} or wider, or {danger}",
                 lane=lane, address=address, other=other))  # fmt: skip
