"""Results that a kernel leaves in memory of its own, and how they come into the case's tensors afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Results = Sequence["torch.Tensor"]


class OwnResults:
    """A call whose kernel allocates its results: `launch` returns them, `place` copies them into the case's tensors.

    A graph replays into the memory that its capture was given, so that there is a set of results for each graph and one
    for what is launched at once. `collect` cannot know which of them ran last. So it overwrites all sets with NaN when
    it is done, and next time takes the youngest that holds anything else; if none does, it places NaN: a replay that
    computes nothing is noticed. Making the object launches once: what compiles or plans on first use does it then.
    """

    def __init__(self, launch: Callable[[], Results], place: Callable[[Results], None]) -> None:
        self._launch, self._place = launch, place
        self._sets: dict[int, Results] = {}
        self.enqueue()
        self._spoil()

    def enqueue(self) -> None:
        """Launches on torch's current stream; memory comes from torch's allocator, which graphs know."""
        capture = current_capture()
        # Given back first, so that all launches of a graph write the same memory, as launches at once do.
        self._sets.pop(capture, None)
        self._sets[capture] = self._launch()

    def collect(self) -> None:
        """Copies the results into the case's tensors and spoils them."""
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
    """The id of the capture that torch's current stream is in, unique in this process; 0 if it is in none."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        return 0
    driver = import_module("cuda.bindings.driver")
    # Status, id and more, of which cuda-bindings 12 and 13 give a different number.
    return int(driver.cuStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream)[2])
