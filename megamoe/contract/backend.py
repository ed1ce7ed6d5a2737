"""A Backend turns a Case into a Program; an Executor runs the Program; a TimedExecutor also times it.

KernelMachine, in megamoe.contract.machine, runs kernels for the doors (megamoe.vm, .triton, .cutedsl). All are found by
name: either a registered entry point, or package.module:ATTRIBUTE without registration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, cast, runtime_checkable

from pydantic import BaseModel, ConfigDict

from megamoe.contract.case import Case, Temperature
from megamoe.contract.known_names import nearest
from megamoe.contract.program import AnyProgram, HostProgram, PreparedCall, Program, PythonProgram, Target
from megamoe.contract.trace import Trace

if TYPE_CHECKING:
    import torch

    from megamoe.contract.machine import KernelMachine


class UnsupportedError(Exception):
    """This backend or executor cannot do this case or target. The text says why; the status is `unsupported`."""


class NoProgramError(TypeError):
    """A backend's build() returned something that is not a program."""


class DeviceError(Exception):
    """A driver return code as a sentence: the call, the code, its meaning, and what was being done."""


class DeviceLostError(DeviceError):
    """A kernel fault (an illegal address, a trap) that leaves the device unusable for this process.

    `met` is the first one in this process. Once it is set, give the process no more rows: end it and start another.
    """

    met: ClassVar[str | None] = None

    def __init__(self, sentence: str) -> None:
        super().__init__(f"{sentence}; this process can use the device no more")
        DeviceLostError.met = DeviceLostError.met or str(self)

    def __reduce__(self):
        # Whoever reads the error of another process has lost no device of its own.
        return Exception.__new__, (type(self), *self.args), self.__dict__


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How an executor runs a program.

    `schedule`: the order in which asynchronous work completes: "eager", "lazy", "random:SEED", "late_cta:RANK" or
    "late_warp:INDEX" (VM only).

    `accumulate`: how matrix products are summed: "fast" (float32 BLAS), "exact" (float64) or "hopper" (bit-exact model
    of an H200; VM only). With "ring" all floats are elements of a ring, so every order of a sum gives one answer
    (attention's o and lse on the VM only; see backends.vm.numerics.ring).

    `step_budget`: the VM calls a program hung after this many steps.

    `trace`: record what the agents do. An executor that cannot record leaves Execution.trace None.

    `outputs`: the tensors that the program may write; None allows all. An executor that can detect it refuses writes to
    the others.
    """

    schedule: str = "eager"
    accumulate: str = "fast"
    step_budget: int = 200_000_000
    trace: bool = False
    outputs: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Execution:
    """What an executor observed.

    `counters`: name -> count; every run of a program gives the same counts. `violation`: a sentence if the kernel broke
    a rule of the machine, else None. `trace`: what the agents did, if RunOptions asked for it.
    """

    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    violation: str | None = None
    trace: Trace | None = None


@runtime_checkable
class Backend(Protocol):
    """A source of programs.

    A backend may have an attribute `executors`, a tuple of names: then only rows on these executors are owed for it.
    Without it, rows on all executors are owed.
    """

    name: str

    def targets(self, op: str) -> tuple[Target, ...]:
        """The targets for which this backend implements `op`; empty if none."""
        ...

    def build(self, case: Case, target: Target) -> AnyProgram:
        """The program of `case` for `target`. Raises UnsupportedError, with the reason, for a case it cannot do."""
        ...


@runtime_checkable
class Borrowed(Backend, Protocol):
    """A backend that calls third-party packages, which may not be installed."""

    def missing(self) -> str | None:
        """A sentence that names the packages that are not installed here; None if all are."""
        ...


@runtime_checkable
class Executor(Protocol):
    """A machine that runs programs.

    An executor may have these attributes:

    - `device`: the torch device whose memory holds its tensors; "cpu" by default.
    - `schedules`, a tuple of names: only rows under these schedules are owed on this executor. Without it, all are.
    - `whereabouts`, a function that says where the running program is. When a row exceeds its time, a signal handler
      calls it in the middle of `run`.
    """

    name: str

    def unavailable(self, target: Target) -> str | None:
        """Says why this machine cannot run `target` here and now; None if it can."""
        ...

    def run(self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        """Runs every launch in order on `tensors`, a map from name to contiguous tensor in memory that this executor
        can address.

        If the kernel breaks a rule, Execution.violation says so. Raises UnsupportedError for a kind of program that it
        does not run, DeviceError for what its device refuses.
        """
        ...


class LoadedProgram(Protocol):
    """A program loaded on a device. Each call takes the addresses of the program's tensors and workspaces.

    Both calls enqueue on `stream`, a driver handle. They neither wait nor allocate, so a CUDA graph can capture them.
    They are thread-safe. They raise DeviceError if the driver refuses.
    """

    def prepare(self, addresses: Sequence[int], stream: int) -> None:
        """Enqueues the work that is done once per set of weights. Addresses of tensors other than weights may be 0."""
        ...

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        """Enqueues the work of one call."""
        ...


@runtime_checkable
class LoadingExecutor(Executor, Protocol):
    """An executor that loads a program once and then runs it on different tensors."""

    def load(self, program: AnyProgram, names: Sequence[str]) -> LoadedProgram:
        """Loads `program` on the current device. `names` lists its tensors and workspaces in the order of the
        addresses.

        Raises UnsupportedError for a program that cannot be loaded, DeviceError for one that the driver refuses.
        """
        ...


class DeviceFacts(BaseModel):
    """The accelerator on which rows ran, as its driver describes it. Clocks in MHz, as found when the run began.

    `copy_bytes_per_s` (bytes read plus bytes written) and `bf16_flops_per_s` were measured in the same session; floors
    are made from them. `flushed_l2_ratio` proves that the flush between cold samples works: it is the time to read a
    buffer that fits in the L2 after a flush, over the time without one. `empty_kernel_us`: device time of a kernel that
    does nothing, timed as rows are, by the temperature of the L2; no row on the device can be faster.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    compute_capability: str
    driver: str
    toolkit: str
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_limit_w: float | None = None
    copy_bytes_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    flushed_l2_ratio: float | None = None
    empty_kernel_us: Mapping[Temperature, float] | None = None


Flush = Literal["clean", "dirty"]
"""How the L2 is emptied before a cold sample: by reading other data, or by writing it. After a dirty flush, written
lines drain to memory inside the timed region: a read of 64 MiB takes 26.5 us on an H200 after a dirty flush and 19.6 us
after a clean one (results/records/h200-bare-read.json)."""


class Stopwatch(Protocol):
    """Device time of one prepared call. Untimed work (capture, warm-up) happens when the stopwatch is made."""

    method: Literal["graph", "events"]
    flush: Flush

    def sample(self, temperature: Temperature, launches: int) -> float:
        """Microseconds of device time per launch: hot, the mean of `launches` in a row; cold, one after a flush.

        Every launch replays the same work on the same tensors. Raises DeviceError if the device reports a fault.
        """
        ...

    def samples(self, temperature: Temperature, launches: int, count: int) -> Sequence[float]:
        """`count` samples in microseconds, enqueued together so that the device does not idle between them."""
        ...


@runtime_checkable
class TimedExecutor(Executor, Protocol):
    """An executor whose device has its own clock."""

    device: str

    def bind(
        self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions
    ) -> AbstractContextManager[PreparedCall]:
        """Loads `program` and binds it to `tensors`, which lie in the memory of `device`. Leaving the context frees it.

        Raises UnsupportedError for a program that the device cannot run, DeviceError for one that its driver refuses.
        """
        ...

    def stopwatch(self, call: PreparedCall) -> AbstractContextManager[Stopwatch]:
        """A stopwatch for `call`."""
        ...

    def bare_read_us(self, size: int) -> float | None:
        """Median microseconds, cold, of a kernel that only reads `size` bytes; None if the device cannot say."""
        ...

    def facts(self) -> DeviceFacts:
        """The device as its driver describes it, its ceilings and the proof of the flush. Measured once per process."""
        ...

    def throttled(self) -> str | None:
        """Says why the device lowered its clocks since the last call of this method; None if it did not."""
        ...


def backend_names() -> tuple[str, ...]:
    """Names of all registered backends, sorted. One line of pyproject.toml registers one."""
    return tuple(sorted(_points("megamoe.backends")))


def executor_names() -> tuple[str, ...]:
    """Names of all registered executors, sorted."""
    return tuple(sorted(_points("megamoe.executors")))


# Cached: each row of a matrix looks names up, and a look-up reads the metadata of every installed package.
@cache
def _points(group: str) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _load(group: str, kind: str, name: str) -> object:
    points = _points(group)
    if ":" in name:
        return _load_attribute(group, kind, name)
    if name not in points:
        known = ", ".join(sorted(points)) or "none"
        raise UnsupportedError(
            f"there is no {kind} named {name!r}; registered in pyproject.toml: {known}; "
            f"one of your own is named package.module:ATTRIBUTE"
        )
    return points[name].load()


def _load_attribute(group: str, kind: str, name: str) -> object:
    try:
        return EntryPoint(name, name, group).load()
    except (ModuleNotFoundError, AttributeError) as error:
        module, _, attribute = name.partition(":")
        known = dir(sys.modules[module]) if isinstance(error, AttributeError) and module in sys.modules else []
        guess = nearest(attribute, known) if attribute not in known else ""
        raise UnsupportedError(f"the {kind} {name!r} cannot be loaded: {error}{guess}") from error


def load_backend(name: str) -> Backend:
    """The backend registered under `name`, or the unregistered object at "package.module:ATTRIBUTE".

    Raises UnsupportedError if there is none. An exception raised by the module itself passes through.
    """
    loaded = _load("megamoe.backends", "backend", name)
    if not isinstance(loaded, Backend):
        raise UnsupportedError(
            f"the backend {name!r} is of type {type(loaded).__name__}, without name, targets() and build()"
        )
    return loaded


def as_program(built: object, backend: str) -> AnyProgram:
    """Returns `built`, the result of a backend's build(). Raises NoProgramError if it is not a program."""
    if isinstance(built, Program | HostProgram | PythonProgram):
        return built
    what = "None" if built is None else f"a {type(built).__name__}"
    raise NoProgramError(
        f"build() of the backend {backend!r} returned {what}; it must return a megamoe.contract.Program, HostProgram "
        "or PythonProgram, or raise megamoe.contract.UnsupportedError for a case that it cannot do"
    )


def load_executor(name: str) -> Executor:
    """The executor registered under `name` or the object at "package.module:ATTRIBUTE". Raises as load_backend does."""
    loaded = _load("megamoe.executors", "executor", name)
    if not isinstance(loaded, Executor):
        raise UnsupportedError(
            f"the executor {name!r} is of type {type(loaded).__name__}, without name, unavailable() and run()"
        )
    return loaded


def device_of(executor: Executor) -> str:
    """The torch device on which `executor` runs programs; "cpu" unless the executor names another."""
    return str(getattr(executor, "device", "cpu"))


def open_machine(name: str, target: str, **options: object) -> KernelMachine:
    """Opens a machine for the doors with the function registered under `name`. Raises as load_backend does.

    `options`: schedule, accumulate and step_budget, as in RunOptions.
    """
    loaded = _load("megamoe.machines", "machine", name)
    if not callable(loaded):
        raise UnsupportedError(f"the machine {name!r} is of type {type(loaded).__name__}, which cannot be called")
    return cast("Callable[..., KernelMachine]", loaded)(target, **options)
