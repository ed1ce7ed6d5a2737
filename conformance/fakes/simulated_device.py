"""A device with known noise, and backends for it: right, or with one planted fault.

`EXECUTOR` has its own clock, so that no test waits. The backends are `WORKS` and its siblings. Noise is a function of
the device's time and of a random source.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from conformance.fakes.backends import specs
from megamoe.contract import (
    AnyProgram,
    Case,
    DeviceError,
    DeviceFacts,
    Execution,
    Flush,
    Program,
    PythonProgram,
    RunOptions,
    Target,
    Temperature,
    UnsupportedError,
)
from megamoe.judge.arena import is_poison
from megamoe.ops import reference

Tensors = Mapping[str, torch.Tensor]
Noise = Callable[[random.Random, float], float]
# A cold launch takes this many times as long as a hot one.
COLD = 1.25
EARLY = 340
"""Launches that a backend takes for the samples. With the tests' policy the last sample comes at about that launch."""


def quiet(source: random.Random, now_us: float) -> float:
    """Noise of one part in a thousand."""
    return source.gauss(1.0, 0.001)


def rough(source: random.Random, now_us: float) -> float:
    """Noise of a tenth."""
    return max(0.1, source.gauss(1.0, 0.1))


def drifting(source: random.Random, now_us: float) -> float:
    """Clocks that sink by a twentieth within 20 ms of device time and stay there."""
    return source.gauss(1.0, 0.001) * (1.0 + 0.05 * min(1.0, now_us / 20_000.0))


def bimodal(source: random.Random, now_us: float) -> float:
    """Two speeds, a tenth apart, each equally likely."""
    return source.gauss(1.0, 0.001) * (1.1 if source.random() < 0.5 else 1.0)


def outliers(source: random.Random, now_us: float) -> float:
    """Quiet, but one launch in fifty takes ten times as long."""
    return source.gauss(1.0, 0.001) * (10.0 if source.random() < 0.02 else 1.0)


@dataclass
class SimulatedClock:
    """Device time in microseconds. During throttling the device is half as fast."""

    episodes: tuple[tuple[float, float], ...] = ()
    now_us: float = 0.0
    asked_us: float = 0.0

    def slow(self) -> bool:
        """Whether the device is throttled now."""
        return any(start <= self.now_us < end for start, end in self.episodes)

    def throttled(self) -> str | None:
        """See TimedExecutor.throttled."""
        before, self.asked_us = self.asked_us, self.now_us
        overlapped = any(start < self.now_us and end > before for start, end in self.episodes)
        return "thermal slowdown" if overlapped else None


@dataclass
class SimulatedStopwatch:
    """A kernel of `hot_us` on a device with noise. `work`: called at each launch.

    `share`: the share of `hot_us` that the last launch takes.
    """

    hot_us: float
    noise: Noise = quiet
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    work: Callable[[], None] = lambda: None
    share: Callable[[], float] = lambda: 1.0
    seed: int = 0
    method: Literal["graph", "events"] = "graph"
    flush: Flush = "clean"
    taken: list[tuple[Temperature, int]] = field(default_factory=list[tuple[Temperature, int]])
    source: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.source = random.Random(self.seed)

    def sample(self, temperature: Temperature, launches: int) -> float:
        """See Stopwatch.sample."""
        self.taken.append((temperature, launches))
        spent = sum(self._launch(temperature) for _ in range(launches))
        return spent / launches

    def samples(self, temperature: Temperature, launches: int, count: int) -> list[float]:
        """See Stopwatch.samples."""
        return [self.sample(temperature, launches) for _ in range(count)]

    def _launch(self, temperature: Temperature) -> float:
        self.work()
        us = (
            self.share()
            * self.hot_us
            * (COLD if temperature == "cold" else 1.0)
            * self.noise(self.source, self.clock.now_us)
        )
        us *= 2.0 if self.clock.slow() else 1.0
        self.clock.now_us += us
        return us


@dataclass
class StoppedStopwatch(SimulatedStopwatch):
    """A stopwatch whose clock stands still."""

    def sample(self, temperature: Temperature, launches: int) -> float:
        """See Stopwatch.sample."""
        super().sample(temperature, launches)
        return 0.0


@dataclass
class DeafStopwatch(SimulatedStopwatch):
    """Measures the same for any number of launches, as if the clock were read around nothing."""

    def sample(self, temperature: Temperature, launches: int) -> float:
        """See Stopwatch.sample."""
        return super().sample(temperature, 1) / launches


@dataclass(frozen=True)
class SimulatedBackend:
    """Names a behaviour of `SimulatedCall`, and a time."""

    behaviour: str
    hot_us: float = 10.0

    call: bool = False
    prepares: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.behaviour

    def targets(self, op: str) -> tuple[Target, ...]:
        return ("sm_90a",)

    def build(self, case: Case, target: Target) -> AnyProgram:
        if self.behaviour == "declines":
            raise UnsupportedError("hd=64 needs a tile that this backend does not have")
        if self.behaviour == "patches_the_judge":
            from megamoe.bench import case as judging

            judging.complaints = lambda *_: ""
        if self.behaviour == "patches_the_clock":
            SimulatedStopwatch.sample = lambda self, temperature, launches: 1.0
        if self.behaviour == "cannot_build":
            raise RuntimeError("the tile of 96 does not divide 128")
        text = f"{self.behaviour}\n{case.id}\n{self.hot_us}"
        if self.call:
            return PythonProgram(target, partial(SimulatedCall, text, attend=_attended), {}, self.prepares)
        return Program(target, text, ())


def _attended(case: Case, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Attention of one head in plain torch: a Python call runs where it cannot use the reference."""
    q, k, v = (tensors[name].double() for name in "qkv")
    s = q @ k.mT / case.int("hd") ** 0.5
    return {"o": (s.softmax(-1) @ v).bfloat16(), "lse": s.logsumexp(-1).float()}


def _simulated(case: Case, tensors: Tensors) -> dict[str, torch.Tensor]:
    return dict(reference(case.op).simulated(case, tensors))


class SimulatedCall:
    """Writes the simulated reference into the outputs; misbehaves from some launch on."""

    def __init__(
        self,
        ptx: str,
        tensors: Tensors,
        attend: Callable[[Case, Tensors], dict[str, torch.Tensor]] = _simulated,
    ) -> None:
        self.attend = attend
        self.behaviour, case_id, hot_us = ptx.split("\n")
        self.hot_us, self.tensors, self.launched = float(hot_us), tensors, 0
        self.case = specs()[case_id.partition(":")[0]].parse_case(case_id)
        self.recalled = False
        self.compute()
        # One output stays with the first inputs; the others follow the inputs.
        self.kept = {"lse": self.outputs["lse"]} if self.behaviour == "keeps_one_output" else {}

    def compute(self) -> None:
        """Computes the outputs for the current inputs."""
        self.of = {name: self.tensors[name].clone() for name in "qkv"}
        self.outputs = self.attend(self.case, self.tensors)

    def as_before(self) -> bool:
        """Whether the inputs are still those of the stored outputs."""
        return all(torch.equal(kept, self.tensors[name]) for name, kept in self.of.items())

    def share(self) -> float:
        """The share of the full time that the last launch took: small if it recalled results for known inputs."""
        known = {"recalls": 0.2, "recalls_a_part": 0.8, "stops_recalling": 0.2 if self.launched <= EARLY else 1.0}
        if self.behaviour == "guesses":
            return 0.2 if self.launched <= EARLY else 1.0
        return known.get(self.behaviour, 1.0) if self.recalled else 1.0

    def collect(self) -> None:
        """Does nothing: the outputs are in place."""

    def enqueue(self) -> None:
        """One launch."""
        self.launched += 1
        if self.behaviour == "idle_in_replays" and self.launched > 1:
            return
        if self.behaviour == "leaves_what_is_there" and not is_poison(self.tensors["o"]).any():
            return
        same = self.as_before()
        self.recalled = self.launched > 1 and same
        if self.behaviour == "guesses" and self.launched <= EARLY and not same:
            for name, value in self.outputs.items():
                self.tensors[name].copy_(0.7 * value)
            return
        if self.behaviour == "forgets_on_new_inputs" and not same:
            for name in self.outputs:
                self.tensors[name].fill_(torch.nan)
            return
        if self.behaviour != "keeps_its_outputs" and not same:
            self.compute()
        for name, value in self.outputs.items():
            self.tensors[name].copy_(self.kept.get(name, value))
        self._misbehave()

    def _misbehave(self) -> None:
        o, first, late = self.tensors["o"], self.launched == 1, self.launched > 40
        match self.behaviour:
            case "wrong" | "patches_the_judge":
                o.mul_(0.5)
            case "wrong_from_the_second":
                o.mul_(1.0 if first else 0.5)
            case "wrong_late":
                o.mul_(0.5 if late else 1.0)
            case "changes_an_input" if not first:
                self.tensors["k"].view(-1)[0] += 1
            case "writes_past_the_end" if late:
                ctypes.memset(o.data_ptr() + o.nbytes, 0x41, 1)
            case "crashes" if late:
                os._exit(3)
            case "crashes_at_once":
                os._exit(4)
            case "hangs" if late:
                time.sleep(3600)
            case "faults" if late:
                raise DeviceError("cuGraphLaunch returned CUDA_ERROR_ILLEGAL_ADDRESS, while replaying")
            case "never_the_same":
                o.view(-1)[self.launched % o.numel()] *= 1.0 + 2.0**-7
            case _:
                pass


@dataclass(frozen=True)
class SimulatedExecutor:
    """A TimedExecutor in host memory."""

    name: str = "simulated"
    device: str = "cpu"
    reason: str | None = None
    copy_bytes_per_s: float = 4e12

    def unavailable(self, target: Target) -> str | None:
        return self.reason

    def run(self, program: AnyProgram, tensors: Tensors, options: RunOptions) -> Execution:
        with self.bind(program, tensors, options) as call:
            call.enqueue()
        return Execution()

    @contextmanager
    def bind(self, program: AnyProgram, tensors: Tensors, options: RunOptions) -> Iterator[SimulatedCall]:
        if str(program.ptx).startswith("cannot_load"):
            raise DeviceError("cuModuleLoadData returned CUDA_ERROR_INVALID_PTX, while loading the program")
        if isinstance(program, PythonProgram):
            call = program.prepare(tensors)
            assert isinstance(call, SimulatedCall), "the clock is that of a simulated kernel"
            yield call
        else:
            yield SimulatedCall(str(program.ptx), tensors)

    @contextmanager
    def stopwatch(self, call: SimulatedCall) -> Iterator[SimulatedStopwatch]:
        kind = {"stopped": StoppedStopwatch}.get(call.behaviour, SimulatedStopwatch)
        yield kind(call.hot_us, clock=_CLOCK, work=call.enqueue, share=call.share)

    def bare_read_us(self, size: int) -> float | None:
        return 1e6 * size / self.copy_bytes_per_s + 1.0

    def facts(self) -> DeviceFacts:
        return DeviceFacts(
            name="Simulated H0",
            compute_capability="9.0",
            driver="580.0",
            toolkit="13.0",
            multiprocessors=4,
            memory_bytes=1 << 30,
            l2_bytes=1 << 12,
            sm_clock_mhz=1980,
            copy_bytes_per_s=self.copy_bytes_per_s,
            bf16_flops_per_s=8e14,
        )

    def throttled(self) -> str | None:
        return _CLOCK.throttled()


_CLOCK = SimulatedClock()
EXECUTOR = SimulatedExecutor()
BROKEN_MACHINE = SimulatedExecutor("broken", reason="it has no such tensor cores")
SLOW_MEMORY = SimulatedExecutor("slow_memory", copy_bytes_per_s=1e7)
WORKS = SimulatedBackend("works")
SLOWER = SimulatedBackend("slower", 20.0)
WRONG = SimulatedBackend("wrong")
PATCHES_THE_JUDGE = SimulatedBackend("patches_the_judge")
PATCHES_THE_CLOCK = SimulatedBackend("patches_the_clock")
WRONG_FROM_THE_SECOND = SimulatedBackend("wrong_from_the_second")
WRONG_LATE = SimulatedBackend("wrong_late")
IDLE_IN_REPLAYS = SimulatedBackend("idle_in_replays")
KEEPS_ONE_OUTPUT = SimulatedBackend("keeps_one_output")
FORGETS_ON_NEW_INPUTS = SimulatedBackend("forgets_on_new_inputs")
RECALLS = SimulatedBackend("recalls")
RECALLS_A_PART = SimulatedBackend("recalls_a_part")
STOPS_RECALLING = SimulatedBackend("stops_recalling")
GUESSES = SimulatedBackend("guesses")
CALL = SimulatedBackend("works", call=True)
CALL_KEEPS_ITS_OUTPUTS = SimulatedBackend("keeps_its_outputs", call=True)
CALL_PREPARES_ALL = SimulatedBackend("keeps_its_outputs", call=True, prepares=("q", "k", "v"))
KEEPS_ITS_OUTPUTS = SimulatedBackend("keeps_its_outputs")
LEAVES_WHAT_IS_THERE = SimulatedBackend("leaves_what_is_there")
CHANGES_AN_INPUT = SimulatedBackend("changes_an_input")
WRITES_PAST_THE_END = SimulatedBackend("writes_past_the_end")
CRASHES = SimulatedBackend("crashes")
CRASHES_AT_ONCE = SimulatedBackend("crashes_at_once")
HANGS = SimulatedBackend("hangs")
FAULTS = SimulatedBackend("faults")
STOPPED = SimulatedBackend("stopped")
NEVER_THE_SAME = SimulatedBackend("never_the_same")
DECLINES = SimulatedBackend("declines")
CANNOT_BUILD = SimulatedBackend("cannot_build")
CANNOT_LOAD = SimulatedBackend("cannot_load")
