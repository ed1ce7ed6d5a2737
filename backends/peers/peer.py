"""What every peer has in common: where it runs, what it needs, what it refuses, and how a call of it is prepared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Protocol

from megamoe.backend import PreparedCall, PythonProgram, Target, UnsupportedError

if TYPE_CHECKING:
    import torch

    from megamoe.case import Case

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


class OwnResults:
    """A call whose kernel leaves its results in memory of its own.

    `launch` returns them; a graph that captures it replays into those of the last capture. `place` copies them into the
    case's tensors. Results are then overwritten with NaN, so that a replay that computes nothing is noticed; hence one
    `enqueue`, or replay of it, before each `collect`. Making the object launches once: what compiles or plans on first
    use does it here.
    """

    def __init__(
        self, launch: Callable[[], Sequence[torch.Tensor]], place: Callable[[Sequence[torch.Tensor]], None]
    ) -> None:
        self._launch, self._place = launch, place
        self._results = launch()
        self._spoil()

    def enqueue(self) -> None:
        """Launches on torch's current stream; memory comes from torch's allocator, which graphs know."""
        self._results = self._launch()

    def collect(self) -> None:
        """Copies the results into the case's tensors and spoils them."""
        self._place(self._results)
        self._spoil()

    def _spoil(self) -> None:
        for result in self._results:
            result.fill_(float("nan"))
