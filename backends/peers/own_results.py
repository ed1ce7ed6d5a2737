"""Results that a kernel leaves in its own memory, copied to the case's tensors after the launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Results = Sequence["torch.Tensor"]


class OwnResults:
    """A call whose kernel allocates its results: `launch` returns them, `place` copies them to the case's tensors.

    A graph replays into the memory that its capture was given, so each graph has a set of results, and launches outside
    a graph have one. `collect` cannot know which of them ran last. It overwrites all sets with NaN when it is done and
    takes, next time, the youngest that holds anything else. If none does, it places NaN: a replay that computes nothing
    is noticed. Making the object launches once, so that the kernel compiles or plans then.
    """

    def __init__(self, launch: Callable[[], Results], place: Callable[[Results], None]) -> None:
        self._launch, self._place = launch, place
        self._sets: dict[int, Results] = {}
        self.enqueue()
        self._spoil()

    def enqueue(self) -> None:
        """Launches on torch's current stream; memory comes from torch's allocator, which graphs know."""
        capture = current_capture()
        # Free the last set first, so that all launches of a graph write the same memory, as other launches do.
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
