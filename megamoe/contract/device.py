"""The contract of an executor that can time: a device, its stopwatch, and programs bound to tensors on it.

backends/gpu has one; tests have a simulated device whose noise is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from megamoe.contract.backend import Executor, RunOptions
from megamoe.contract.program import AnyProgram, PreparedCall

if TYPE_CHECKING:
    import torch

    from megamoe.contract.row import DeviceFacts, Temperature


class Stopwatch(Protocol):
    """Device time of one prepared call. What is not timed (capture, warm-up) happens when the stopwatch is made."""

    method: Literal["graph", "events"]

    def sample(self, temperature: Temperature, launches: int) -> float:
        """Microseconds of device time a launch: if hot, the mean of `launches` in a row; if cold, one after a flush.

        Every launch replays the same work on the same tensors. Raises DeviceError if the device reports a fault.
        """
        ...

    def samples(self, temperature: Temperature, launches: int, count: int) -> Sequence[float]:
        """`count` samples in a row, enqueued together so that the device does not idle between them. Microseconds."""
        ...


@runtime_checkable
class TimedExecutor(Executor, Protocol):
    """An executor whose device keeps a clock of its own."""

    device: str

    def bind(
        self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions
    ) -> AbstractContextManager[PreparedCall]:
        """`program` loaded and ready on `tensors`, which lie in the memory of `device`. Leaving the context frees it.

        Raises UnsupportedError for a program that the device cannot run, DeviceError for one that its driver refuses.
        """
        ...

    def stopwatch(self, call: PreparedCall) -> AbstractContextManager[Stopwatch]:
        """A stopwatch for `call`."""
        ...

    def facts(self) -> DeviceFacts:
        """The device as its driver describes it, with ceilings and the proof of the flush; measured once a process."""
        ...

    def throttled(self) -> str | None:
        """Why the device has lowered its clocks since the last call of this; None if it has not."""
        ...
