"""A peer: where it runs, what it needs, what it refuses, and how a call of it is prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Protocol

from megamoe.contract import PreparedCall, PythonProgram, Target, UnsupportedError

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Case

Tensors = Mapping[str, "torch.Tensor"]


class Limits(Protocol):
    """The part of an op that a peer has."""

    def refusal(self, case: Case) -> str | None:
        """Why the peer refuses `case`; None if it takes it."""
        ...

    def serves(self) -> str:
        """What the peer has, for a table."""
        ...

    def refuses(self) -> Sequence[str]:
        """Every reason that `refusal` may give."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """A backend that calls somebody else's kernel.

    `packages`: distributions that must be installed, as pip names them. `prepare(case, tensors)` imports them and does
    all that is not timed. `recipe`: a sentence about how it is called. `libraries()`: name and version of other
    libraries that run and are no distribution.
    """

    name: str
    op: str
    on: tuple[Target, ...]
    packages: tuple[str, ...]
    limits: Limits
    prepare: Callable[[Case, Tensors], PreparedCall]
    recipe: str
    libraries: Callable[[], Mapping[str, str]] = dict
    executors: tuple[str, ...] = ("gpu",)

    def targets(self, op: str) -> tuple[Target, ...]:
        """The targets of the peer's kernel, if `op` is its op."""
        return self.on if op == self.op else ()

    def build(self, case: Case, target: Target) -> PythonProgram:
        """The program of `case`. Raises UnsupportedError if the peer refuses it or is not installed."""
        if target not in self.targets(case.op):
            raise UnsupportedError(f"{case.id}: {self.name} has {self.op} for {', '.join(self.on)}, not for {target}")
        reason = self.limits.refusal(case)
        if reason:
            raise UnsupportedError(f"{case.id}: {self.name} does not do it: {reason}")
        return PythonProgram(target, partial(self.prepare, case), self.software())

    def software(self) -> dict[str, str]:
        """Name and version of what runs. Raises UnsupportedError for a package that is not installed."""
        missing = self.missing()
        if missing:
            raise UnsupportedError(missing)
        return {**{name: version(name) for name in self.packages}, **self.libraries()}

    def missing(self) -> str | None:
        """A sentence about packages that are not installed here; None if all are."""
        absent = [name for name in self.packages if not _installed(name)]
        if not absent:
            return None
        return f"{self.name} needs {' and '.join(absent)}, not installed here: pip install {' '.join(absent)}"


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
