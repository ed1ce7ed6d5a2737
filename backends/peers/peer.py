"""A peer: where it runs, what it needs and refuses, how its calls are prepared, and what happens to its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Protocol

from megamoe.contract import PreparedCall, PythonProgram, Target, UnsupportedError

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Case

Tensors = Mapping[str, "torch.Tensor"]


class Limits(Protocol):
    """The part of an op that a peer supports."""

    def refusal(self, case: Case) -> str | None:
        """Why the peer refuses `case`; None if it takes it."""
        ...

    def serves(self) -> str:
        """What the peer supports, for a table."""
        ...

    def refuses(self) -> Sequence[str]:
        """Every reason that `refusal` may give."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """A backend that calls a third-party kernel.

    `packages`: distributions that must be installed, as pip names them. `prepare(case, tensors)` imports them and does
    all the work that is not timed. `recipe`: a sentence about how it is called. `libraries()`: name and version of
    other libraries that run but are not distributions. `prepares`: as in PythonProgram.
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
    prepares: tuple[str, ...] = ()

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
        return PythonProgram(target, partial(self.prepare, case), self.software(), self.prepares)

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


Results = Sequence["torch.Tensor"]


class OwnResults:
    """A call whose kernel allocates its results: `launch` returns them, `place` copies them to the case's tensors.

    A graph replays into the memory of its capture, so each graph has a set of results, and launches outside a graph
    share one. `collect` cannot know which of them ran last. It fills all sets with NaN when it is done, and next time
    takes the youngest set that holds anything else. If none does, it copies NaN, so a replay that computes nothing is
    noticed. The constructor launches once, so that the kernel compiles or plans then.
    """

    def __init__(self, launch: Callable[[], Results], place: Callable[[Results], None]) -> None:
        self._launch, self._place = launch, place
        self._sets: dict[int, Results] = {}
        self.enqueue()
        self._spoil()

    def enqueue(self) -> None:
        """Launches on torch's current stream; memory comes from torch's allocator, which graphs know."""
        capture = current_capture()
        # Free the previous set first, so that all launches of a graph write the same memory, as those outside do.
        self._sets.pop(capture, None)
        self._sets[capture] = self._launch()

    def collect(self) -> None:
        """Copies the results to the case's tensors and spoils them."""
        self._place(self._youngest_written())
        self._spoil()

    def _youngest_written(self) -> Results:
        youngest, *older = reversed(self._sets.values())
        return next((results for results in (youngest, *older) if older and _written(results)), youngest)

    def _spoil(self) -> None:
        for results in self._sets.values():
            for result in results:
                result.fill_(float("nan"))


def _written(results: Results) -> bool:
    return not all(bool(result.isnan().all()) for result in results)


def current_capture() -> int:
    """The id of the capture that torch's current stream is in, unique in this process; 0 outside a capture."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        return 0
    driver = import_module("cuda.bindings.driver")
    # (status, id, ...): cuda-bindings 12 and 13 give different numbers of results.
    return int(driver.cuStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)[2])
