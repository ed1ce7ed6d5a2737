"""What every peer has in common: where it runs, what it needs, what it refuses, and how a call of it is prepared."""

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
    """What a peer does of an op."""

    def refusal(self, case: Case) -> str | None:
        """Why the peer does not do `case`; None if it does."""
        ...

    def serves(self) -> str:
        """What it does, for a table."""
        ...

    def refuses(self) -> Sequence[str]:
        """Every reason that `refusal` may give."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """A backend that calls somebody else's kernel. `packages`: distributions that must be installed, as pip names them.

    `prepare(case, tensors)` imports them and does all that is not timed; `recipe` says in a sentence how it is called;
    `libraries()` names what else runs and is no distribution, with versions.
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
        """The targets that the peer's kernel is made for, if `op` is its op."""
        return self.on if op == self.op else ()

    def build(self, case: Case, target: Target) -> PythonProgram:
        """The program of `case`. Raises UnsupportedError for what the peer does not do, or if it is not installed."""
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
        """A sentence about what is not installed here; None if all is."""
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
