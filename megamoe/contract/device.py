"""The contract of an executor that can time: a device, its stopwatch, and programs bound to tensors on it.

The executor of backends/gpu fulfils it; tests fulfil it with a simulated device, whose noise is known.
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
    """Device time of one prepared call. Everything that is not timed (capture, warm-up) is done when it is made."""

    method: Literal["graph", "events"]

    def sample(self, temperature: Temperature, launches: int) -> float:
        """Microseconds of device time a launch: the mean of `launches` in a row if hot, of one after a flush if cold.

        Every launch is a replay of the same work on the same tensors. DeviceError if the device reports a fault.
        """
        ...

    def samples(self, temperature: Temperature, launches: int, count: int) -> Sequence[float]:
        """`count` samples in a row, handed over together so that the device is never idle between them."""
        ...


@runtime_checkable
class TimedExecutor(Executor, Protocol):
    """An executor whose device keeps a clock of its own."""

    device: str

    def bind(
        self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions
    ) -> AbstractContextManager[PreparedCall]:
        """`program` on `tensors` (in the memory of `device`), loaded and ready; leaving the context frees what it took.

        UnsupportedError for a program that the device cannot run, DeviceError for one that its driver refuses.
        """
        ...

    def stopwatch(self, call: PreparedCall) -> AbstractContextManager[Stopwatch]:
        """A stopwatch for `call`."""
        ...

    def facts(self) -> DeviceFacts:
        """The device as its driver describes it, with ceilings and the proof of the flush; measured once a process."""
        ...

    def throttled(self) -> str | None:
        """Why the device has slowed down its clocks since the last question, None if it has not."""
        ...
