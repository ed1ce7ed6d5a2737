"""The device side of one case, as the judge sees it: its buffers, and the runners that run and time programs
(megamoe.runner.timed).

All programs that are data share one runner, the machine, which has imported no backend. A Python call stays in the
process that built it. All runners map the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from pydantic import TypeAdapter, ValidationError

from megamoe.contract import DeviceFacts, Flush, HostProgram, Program, Temperature
from megamoe.contract.counted import counted
from megamoe.judge.arena import Arena, Lent, block_bytes, is_cuda, layouts_of, lent_block
from megamoe.judge.guarded import Built
from megamoe.runner import timed
from megamoe.runner.process import Runner, RunnerDiedError, RunnerFaultError
from megamoe.runner.wire import Frame, encoded

if TYPE_CHECKING:
    from megamoe.contract import Case
    from megamoe.spec.spec import Spec

_SAMPLES: TypeAdapter[list[float]] = TypeAdapter(list[float])


@dataclass(slots=True)
class BoundCall:
    """A program of `backend`, bound to the buffers in `runner`, with its stopwatch (megamoe.contract.Stopwatch).

    `left_s`: returns how long the runner may still take.
    """

    runner: Runner
    backend: str
    left_s: Callable[[], float]
    method: Literal["graph", "events"] = "graph"
    flush: Flush = "clean"

    def launch(self) -> None:
        """Runs the program once and waits for its results."""
        self._ask(timed.LAUNCH)

    def collect(self) -> None:
        """Copies the results of the last launch into the output tensors."""
        self._ask(timed.COLLECT)

    def capture(self) -> None:
        """Makes the stopwatch."""
        told = self._ask(timed.STOPWATCH)
        if told.get("method") not in ("graph", "events") or told.get("flush") not in ("clean", "dirty"):
            raise RunnerFaultError(f"the stopwatch answered nonsense: {dict(told)!r:.200}")
        self.method, self.flush = told["method"], told["flush"]

    def sample(self, temperature: Temperature, launches: int) -> float:
        """See Stopwatch."""
        return self._samples(temperature, launches, 0)[0]

    def samples(self, temperature: Temperature, launches: int, count: int) -> Sequence[float]:
        """See Stopwatch."""
        return self._samples(temperature, launches, count)

    def _samples(self, temperature: Temperature, launches: int, count: int) -> Sequence[float]:
        told = self._ask(timed.SAMPLES, temperature=temperature, launches=launches, count=count)
        try:
            taken = _SAMPLES.validate_python(told.get("samples_us"))
        except ValidationError:
            taken = []
        if len(taken) != max(1, count):
            raise RunnerFaultError(f"the stopwatch answered {counted(len(taken), 'sample')}, not {max(1, count)}")
        return taken

    def _ask(self, call: str, **told: object) -> Mapping[str, Any]:
        return self.runner.ask(call, {"name": self.backend, **told}, self.left_s()).told


@dataclass(slots=True)
class Buffers:
    """The memory of one case on `device`, in an arena, and the runners that have mapped it. Close it after use."""

    executor: str
    device: str
    left_s: Callable[[], float]
    arena: Arena = field(init=False)
    lent: Lent = field(init=False)
    open_in: dict[int, Runner] = field(default_factory=dict[int, Runner])
    memory: ExitStack = field(default_factory=ExitStack)

    def lay_out(self, spec: Spec, case: Case, inputs: Mapping[str, torch.Tensor]) -> Arena:
        """Copies the inputs there, once for all programs."""
        self.lent = self.memory.enter_context(lent_block(block_bytes(layouts_of(spec, case)), self.device))
        self.arena = Arena(spec, case, inputs, self.device, shared=self.lent.block)
        return self.arena

    def bind(self, runner: Runner, backend: str, built: Built) -> BoundCall:
        """Binds `built` in `runner`, which first maps the buffers if needed. Raises what Runner.ask raises."""
        self.synchronise()
        if runner.number not in self.open_in:
            told = {"executor": self.executor, "tensors": self.arena.told, "handle": self.lent.handle}
            runner.ask(timed.OPEN, told, self.left_s(), memory=self.lent.descriptor)
            self.open_in[runner.number] = runner
        if built.call is None:
            sent = encoded(cast("Program | HostProgram", built.program))
        else:
            sent = Frame({"number": built.call})
        asked = {**sent.told, "name": backend, "outputs": self.arena.outputs}
        runner.ask(timed.BIND, asked, self.left_s(), sent.parts)
        return BoundCall(runner, backend, self.left_s)

    def synchronise(self) -> None:
        """Waits for this process's enqueued work, because a runner reads the memory from another process."""
        if is_cuda(self.device):
            torch.cuda.synchronize()

    def close(self) -> None:
        """Makes all runners unmap the memory. Raises what Runner.ask raises; if runners died, the first such error."""
        died: RunnerDiedError | None = None
        with self.memory:
            for runner in self.open_in.values():
                try:
                    runner.ask(timed.CLOSE, {}, self.left_s())
                except RunnerDiedError as error:
                    died = died or error
            if died is not None:
                self.lent.give_up()
                raise died


def facts_of(machine: Runner, executor: str, limit_s: float) -> DeviceFacts:
    """The device of `executor`. Raises what Runner.ask raises."""
    told = machine.ask(timed.FACTS, {"executor": executor}, limit_s).told
    try:
        return DeviceFacts.model_validate(told.get("facts"))
    except ValidationError as error:
        raise RunnerFaultError(f"the executor describes no device: {error.errors()[0]['msg']}") from None


def throttled_since(machine: Runner, executor: str, limit_s: float) -> str | None:
    """Why the device slowed down since the last call; None if it did not."""
    why = machine.ask(timed.THROTTLED, {"executor": executor}, limit_s).told.get("why")
    return None if why is None else str(why)


def bare_read_of(machine: Runner, executor: str, size: int, limit_s: float) -> float | None:
    """Microseconds of a kernel that only reads `size` bytes; None if the device cannot say."""
    us = machine.ask(timed.BARE_READ, {"executor": executor, "size": size}, limit_s).told.get("us")
    return us if isinstance(us, float) and us > 0 else None
